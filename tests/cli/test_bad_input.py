"""Bad input: one line that names the fault and the mend, exit code 2, nothing written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file

from tests.cli.conftest import Invoke
from workflow_rl.config import load_config
from workflow_rl.config.run_dir import create_run_dir, locked_run_dir

WEIGHTS = "diffusion_pytorch_model.safetensors"


def _listing(folder: Path) -> list[tuple[str, bytes]]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path), path.read_bytes()) for path in files]


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages.t2i.smples=4", "did you mean 'stages.t2i.samples'?"),
        ("stages.t2i.samples=x", "expected a valid integer"),
        ("stages.i2v.samples=1", "credit.rule 'nested'"),
        ("stages.t2i.model=nowhere", "stages.t2i.model: no folder nowhere"),
        ("stages.t2i.model=.", "has no model_index.json"),
        ("stages.t2i.model=wan", "whose task is i2v, but the stage's is t2i"),
        ("stages.i2v.num_frames=10", "use 9"),
        ("stages.i2v={task: i2v, model: wan, height: 30, width: 32}", "multiples of 16"),
        ("stages.i2v.negative_prompt=blurry", "set guidance_scale > 1 or leave it out"),
        ("stages.t2i.guidance=embedded", "has only none, cfg; leave guidance"),
        ("stages.t2i.kernel=torch_eagre", "did you mean 'torch_eager'?"),
        ("data.prompts=none.txt", "no such prompt file"),
        ("data.prompts_per_iteration=2", "prompts.txt has 1 prompts; lower it"),
        ("data.eval_prompts=none.txt", "no such prompt file"),
        ("rewards.0.name=constnt", "did you mean 'constant'?"),
        ("rewards=[{callable: 'no_such_module:f'}]", "cannot be imported"),
        ("rewards=[{name: constant, args: {valeu: 1}}]", "it takes"),
        ("rewards.0.weight=0", "none has a weight other than 0"),
        ("training.device=cuda:99", "training.device is 'cuda:99', which this machine lacks; it"),
        ("training.device=gpu", "cpu: use one of these, or null for the first"),
        (
            "stages.i2v.memory.attention_backend=flesh",
            "stages.i2v.memory.attention_backend 'flesh'",
        ),
        ("stages.t2i.memory={attention_backend: sage}", "does not work here on"),
    ],
)
def test_train(invoke: Invoke, workspace: Path, override: str, says: str) -> None:
    before = _listing(workspace)
    for options in ([], ["--dry-run"]):
        assert says in invoke("train", "run.yaml", override, *options).one_line_error()
        assert _listing(workspace) == before


def _give_weights(folder: Path) -> None:
    """Give a model a transformer of two shards, with one linear layer."""
    index = json.loads((folder / "model_index.json").read_text())
    index["transformer"] = ["diffusers", "T"]
    (folder / "model_index.json").write_text(json.dumps(index))
    shards = {"to_q.weight": "a.safetensors", "norm.weight": "b.safetensors"}
    for shape, (key, name) in zip([(4, 4), (4,)], shards.items(), strict=True):
        save_file({key: np.zeros(shape, np.float32)}, folder / "transformer" / name)
    (folder / "transformer" / f"{WEIGHTS}.index.json").write_text(
        json.dumps({"weight_map": shards})
    )


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages.t2i.variant=fp16", "fp16"),
        ("stages.t2i.lora={targets: [to_x]}", "stages.t2i.lora.targets: 'to_x' names no linear"),
        ("stages.t2i.lora={targets: [to_q], init: x}", "targets and init are both given"),
        ("stages.t2i.lora={rank: 2, init: other.safetensors}", "LoRA for another model"),
        ("stages.t2i.lora={rank: 2, init: none.safetensors}", "none.safetensors"),
        ("stages.i2v.model=broken", "b.safetensors"),
        ("stages.t2i.train_modules=[to_q, to_x]", "train_modules names 'to_x', which is no part"),
    ],
)
def test_weights_and_adapters(invoke: Invoke, workspace: Path, override: str, says: str) -> None:
    """Found in file names and headers: no weight is read."""
    _give_weights(workspace / "flux")
    shutil.copytree(workspace / "wan", workspace / "broken")
    _give_weights(workspace / "broken")
    (workspace / "broken" / "transformer" / "b.safetensors").unlink()
    other = {f"transformer.qkv.lora_{part}.weight": np.zeros((2, 2)) for part in "AB"}
    save_file(other, workspace / "other.safetensors")
    before = _listing(workspace)
    assert says in invoke("train", "run.yaml", override).one_line_error()
    assert _listing(workspace) == before
    assert (
        invoke("train", "run.yaml", "stages.t2i.train_modules=[to_q]", "--dry-run").exit_code == 0
    )
    good = "stages.t2i.lora={rank: 2, targets: [to_q]}"
    assert invoke("train", "run.yaml", good, "--dry-run").exit_code == 0


FROM_FRAMES = "stages={i2v: {task: i2v, model: wan}}"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([FROM_FRAMES], "'a red circle moving left' has no image, but the first stage 'i2v'"),
        (["data.prompts=frames"], "but the first stage 't2i' (t2i) takes none"),
        ([FROM_FRAMES, "data.prompts=none.jsonl"], "line 1: no image none.png; check the path"),
        ([FROM_FRAMES, "data.prompts=broken.jsonl"], "run.yaml is not a whole image"),
        ([FROM_FRAMES, "data.prompts=two.jsonl"], "odd.png is 30 x 32 pixels, but"),
        ([FROM_FRAMES, "data.prompts=odd.jsonl"], "this model makes multiples of 16; use 32"),
        ([FROM_FRAMES, "data.prompts=frames", "data.eval_prompts=prompts.txt"], "has no image"),
    ],
)
def test_first_frames(invoke: Invoke, workspace: Path, overrides: list[str], says: str) -> None:
    (workspace / "frames").mkdir()
    Image.new("RGB", (32, 32)).save(workspace / "frames" / "fox.png")
    (workspace / "frames" / "fox.txt").write_text("a fox\n")
    Image.new("RGB", (30, 32)).save(workspace / "odd.png")
    for name, images in (
        ("none", ["none.png"]),
        ("broken", ["run.yaml"]),
        ("two", ["frames/fox.png", "odd.png"]),
        ("odd", ["odd.png"]),
    ):
        lines = [json.dumps({"prompt": "a fox", "image": image}) for image in images]
        (workspace / f"{name}.jsonl").write_text("\n".join(lines))
    before = _listing(workspace)
    assert says in invoke("train", "run.yaml", *overrides).one_line_error()
    assert _listing(workspace) == before
    ready = [FROM_FRAMES, "data.prompts=frames"]
    assert invoke("train", "run.yaml", *ready, "--dry-run").exit_code == 0


def test_logger_that_is_not_installed(
    invoke: Invoke, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workflow_rl.cli.preflight.find_spec", lambda name: None)
    message = invoke("train", "run.yaml", "logging.wandb={project: p}").one_line_error()
    assert "pip install 'workflow-rl[wandb]'" in message


def test_unsupported_family(invoke: Invoke, workspace: Path) -> None:
    (workspace / "flux" / "model_index.json").write_text('{"_class_name": "FooPipeline"}')
    message = invoke("train", "run.yaml").one_line_error()
    assert "FooPipeline, which is not supported" in message


def test_blank_prompt_line(invoke: Invoke, workspace: Path) -> None:
    (workspace / "prompts.txt").write_text("a\n\nb\n")
    assert "line 2 is blank" in invoke("train", "run.yaml").one_line_error()


def test_run_directory_of_another_configuration(invoke: Invoke, workspace: Path) -> None:
    create_run_dir(load_config("run.yaml"))
    before = _listing(workspace)
    assert "already holds this run" in invoke("train", "run.yaml").one_line_error()
    assert "another configuration" in invoke("train", "run.yaml", "seed=3").one_line_error()
    with locked_run_dir(Path("run")):
        assert "is in use" in invoke("train", "run.yaml", "--overwrite").one_line_error()
    (workspace / "run" / ".lock").unlink()
    assert _listing(workspace) == before


@pytest.mark.parametrize("command", ["resume", "evaluate", "report"])
def test_directory_without_a_run(invoke: Invoke, workspace: Path, command: str) -> None:
    assert "holds no run" in invoke(command, "flux").one_line_error()


def test_generate(invoke: Invoke, workspace: Path) -> None:
    ask = ("generate", "--t2i", "flux", "--i2v", "wan", "--prompt")
    assert "--prompt is blank" in invoke(*ask, " ").one_line_error()
    assert "not known here" in invoke(*ask, "x", "--workflow", "foo").one_line_error()
    assert "leave out --t2i" in invoke(*ask, "x", "--run", "run").one_line_error()
    assert "leave out --image" in invoke(*ask, "x", "--image", "a.png").one_line_error()
    message = invoke(*ask, "x", "--i2v", "flux").one_line_error()
    assert "stages.i2v.model: flux holds a FluxPipeline" in message
    assert not (workspace / "outputs").exists()


def test_pretrain_tiny_keeps_what_is_there(invoke: Invoke, workspace: Path) -> None:
    assert "is not empty" in invoke("pretrain-tiny", "--output", "flux").one_line_error()


def test_pretrain_tiny_goes_on_where_it_was_stopped(
    invoke: Invoke, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def fake(output: Path, *, seed: int, log: object) -> tuple[Path, Path]:
        calls.append((output, seed))
        return output / "tiny-flux-t2i", output / "tiny-wan-i2v"

    monkeypatch.setattr("workflow_rl.embedded.pretrain.pretrain", fake)
    (workspace / "made" / "stages").mkdir(parents=True)
    (workspace / "made" / "stages" / "recipe.json").write_text("{}")
    result = invoke("pretrain-tiny", "--output", "made", "--seed", "4")
    assert result.stdout == "made/tiny-flux-t2i\nmade/tiny-wan-i2v\n"
    assert calls == [(Path("made"), 4)]


def test_dry_run_says_what_would_happen_and_writes_nothing(invoke: Invoke, workspace: Path) -> None:
    before = _listing(workspace)
    result = invoke("train", "run.yaml", "stages.t2i.samples=3", "--dry-run")
    assert result.exit_code == 0
    assert "t2i: flux, 1 × 3 = 3 samples per iteration" in result.stdout
    assert "i2v: wan, 3 × 4 = 12 samples per iteration" in result.stdout
    assert load_config("run.yaml", ["stages.t2i.samples=3"]).fingerprint() in result.stdout
    assert _listing(workspace) == before


def test_a_folder_in_place_of_a_configuration(invoke: Invoke, workspace: Path) -> None:
    assert "flux: is a folder; give the path of a" in invoke("train", "flux").one_line_error()


def test_evaluation_of_a_folder_without_videos_says_what_it_takes(
    invoke: Invoke, workspace: Path
) -> None:
    message = invoke("evaluate", "flux").one_line_error()
    assert "flux holds no run, nor videos or images; give" in message
    assert "in which the files themselves lie" in message
