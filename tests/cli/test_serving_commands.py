"""What `generate` and `evaluate` hand to the serving layer, and what they show of its answer."""

from pathlib import Path
from typing import Any, get_args

import pytest
from PIL import Image

from tests.cli.conftest import Invoke
from workflow_rl.cli.generate import DType
from workflow_rl.config import RunConfig, StageConfig, load_config
from workflow_rl.config.run_dir import create_run_dir


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the serving of a chain; the list gets its calls."""
    calls: list[dict[str, Any]] = []

    def fake(workflow: str, stages: dict[str, StageConfig], **options: Any) -> list[Path]:
        options["on_message"]("a message")
        calls.append({"workflow": workflow, "stages": stages, **options})
        return [Path("a.png"), Path("a.mp4")]

    monkeypatch.setattr("workflow_rl.serving.generate.generate", fake)
    return calls


def test_generate_prints_the_files_alone_on_stdout(
    invoke: Invoke, workspace: Path, served: list[dict[str, Any]]
) -> None:
    ask = ("generate", "--prompt", "a fox", "--seed", "3", "--steps", "9")
    result = invoke(*ask, "--t2i", "flux", "--i2v", "wan", "--output", "made")
    assert result.stdout == "a.png\na.mp4\n"
    assert result.stderr == "a message\n"
    (call,) = served
    assert (call["prompt"], call["seed"], call["run_dir"]) == ("a fox", 3, None)
    assert call["output_dir"] == Path("made")
    assert call["workflow"] == "image_video.t2i_i2v"
    assert [(s.model, s.num_inference_steps) for s in call["stages"].values()] == [
        (Path("flux"), 9),
        (Path("wan"), 9),
    ]


def test_generate_into_a_file_is_refused(
    invoke: Invoke, workspace: Path, served: list[dict[str, Any]]
) -> None:
    ask = ("generate", "-p", "x", "--t2i", "flux", "--i2v", "wan", "--output", "run.yaml")
    assert "--output run.yaml is a file; give a folder" in invoke(*ask).one_line_error()
    assert served == []


def test_generate_serves_the_chain_of_a_run(
    invoke: Invoke, workspace: Path, served: list[dict[str, Any]]
) -> None:
    config = load_config("run.yaml", ["workflow=my.chain", "stages.t2i.num_inference_steps=3"])
    create_run_dir(config)
    other = invoke("generate", "-p", "x", "--run", "run", "--workflow", "image_video.t2i_i2v")
    assert "use my.chain" in other.one_line_error()
    invoke("generate", "-p", "x", "--run", "run", "--workflow", "my.chain")
    invoke("generate", "-p", "x", "--run", "run")
    for call in served:
        assert call["workflow"] == "my.chain"
        assert call["stages"] == dict(config.stages)
        assert call["run_dir"] == Path("run")
        assert call["image"] is None


def test_generate_takes_size_frames_and_dtype(
    invoke: Invoke, workspace: Path, served: list[dict[str, Any]]
) -> None:
    """In place of what the folders, or the run, have; the frames are the video's alone."""
    create_run_dir(load_config("run.yaml", ["stages.i2v.num_frames=5"]))
    asked = ("--size", "48x32", "--frames", "9", "--dtype", "bfloat16", "--steps", "2")
    invoke("generate", "-p", "x", "--t2i", "flux", "--i2v", "wan", *asked)
    invoke("generate", "-p", "x", "--run", "run", *asked)
    assert len(served) == 2
    for call in served:
        for stage, frames in (("t2i", None), ("i2v", 9)):
            config = call["stages"][stage]
            assert (config.width, config.height, config.num_frames) == (48, 32, frames)
            assert (config.dtype, config.num_inference_steps) == ("bfloat16", 2)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--size", "48"), "--size is '48'; give width and height in pixels, such as 832x480"),
        (("--size", "0x32"), "--size is '0x32'"),
        (("--size", "48x30"), "stages.t2i.height is 30, but this model makes multiples of 8"),
        (("--size", "40x32"), "stages.i2v.width is 40, but this model makes multiples of 16"),
        (("--frames", "10"), "stages.i2v.num_frames is 10"),
    ],
)
def test_generate_refuses_what_the_models_cannot_make(
    invoke: Invoke,
    workspace: Path,
    served: list[dict[str, Any]],
    option: tuple[str, str],
    says: str,
) -> None:
    ask = ("generate", "-p", "x", "--t2i", "flux", "--i2v", "wan", *option)
    assert says in invoke(*ask).one_line_error()
    assert served == []


def test_evaluate_names_the_option_whose_prompts_are_missing(
    invoke: Invoke, workspace: Path
) -> None:
    """Before models are looked at, which may have to be fetched."""
    create_run_dir(load_config("run.yaml"))
    Path("flux").rename("elsewhere")
    message = invoke("evaluate", "run", "--prompts", "none.txt").one_line_error()
    assert "none.txt: no such prompt file in the working directory" in message
    assert message.endswith("; check --prompts\n")
    Path("prompts.txt").unlink()
    message = invoke("evaluate", "run").one_line_error()
    assert message.endswith("; go to where the run began, or give --prompts\n")


def test_evaluate_needs_only_what_it_uses_of_a_run(
    invoke: Invoke, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the prompts that it was trained on, where others are given, nor its loggers."""
    create_run_dir(load_config("run.yaml", ["logging.wandb={project: p}"]))
    Path("prompts.txt").rename("others.txt")
    monkeypatch.setattr("workflow_rl.cli.preflight.find_spec", lambda name: None)
    monkeypatch.setattr("workflow_rl.cli.evaluate.check_rewards_import", _reached)
    with pytest.raises(_ReachedError):
        invoke("evaluate", "run", "--prompts", "others.txt")


class _ReachedError(Exception):
    """All checks before it passed."""


def _reached(config: RunConfig) -> None:
    raise _ReachedError


def test_dtypes_are_those_of_a_stage() -> None:
    assert [dtype.value for dtype in DType] == list(
        get_args(StageConfig.model_fields["dtype"].annotation)
    )


def test_generate_takes_a_first_frame_where_the_run_does(
    invoke: Invoke, workspace: Path, served: list[dict[str, Any]]
) -> None:
    Image.new("RGB", (32, 32)).save(workspace / "fox.png")
    Image.new("RGB", (30, 32)).save(workspace / "odd.png")
    create_run_dir(load_config("run.yaml", ["stages={i2v: {task: i2v, model: wan}}"]))
    ask = ("generate", "-p", "x", "--run", "run")
    assert "give it with --image" in invoke(*ask).one_line_error()
    assert "--image: no image none.png" in invoke(*ask, "--image", "none.png").one_line_error()
    assert "not a whole image" in invoke(*ask, "--image", "prompts.txt").one_line_error()
    assert "30 x 32 pixels" in invoke(*ask, "--image", "odd.png").one_line_error()
    invoke(*ask, "--image", "fox.png")
    (call,) = served
    assert call["image"] == Path("fox.png")
