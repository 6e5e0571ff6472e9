"""Faults of real model folders through `train`: one line, exit code 2, nothing written."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Invoke
from tests.tiny_models import save_flux

WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
NAME = "context_embedder.bias"
SIZE = ("stages.t2i.height=32", "stages.t2i.width=32")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "flux"
    return save_flux(folder, guidance_embeds=False, dynamic_shift=False)


@pytest.fixture
def model(workspace: Path, whole: Path) -> Path:
    """A copy to damage, in the place of the model that ``run.yaml`` names."""
    shutil.rmtree(workspace / "flux")
    return shutil.copytree(whole, workspace / "flux")


def _files(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_size for path in folder.rglob("*")}


def _refusal(invoke: Invoke, *overrides: str) -> str:
    before = _files(Path())
    message = invoke("train", "run.yaml", "stages.i2v.model=null", *overrides).one_line_error()
    assert _files(Path()) == before
    return message


def _spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME][0] = float("nan")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda tensors: tensors.pop(NAME), f"transformer lacks 1 tensor: {NAME}"),
        (lambda tensors: tensors.update(x=torch.ones(2)), "transformer has 1 tensor: x, which a"),
        (_spoil, f"the weight {NAME} holds NaN or infinity"),
        (lambda tensors: tensors.update({NAME: torch.ones(3)}), f"{NAME}: (3,), expected (32,)"),
    ],
)
def test_weights_that_do_not_fit(
    invoke: Invoke, model: Path, edit: Callable[[dict[str, torch.Tensor]], object], says: str
) -> None:
    """Found in loading, after the run directory was made: it goes again."""
    tensors = load_file(model / WEIGHTS)
    edit(tensors)
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})
    assert says in _refusal(invoke)


def test_a_missing_shard(invoke: Invoke, model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    (model / WEIGHTS).unlink()
    shards = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where = {name: shards[index % 2] for index, name in enumerate(tensors)}
    (model / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": where}))
    save_file({n: t for n, t in tensors.items() if where[n] == shards[0]}, model / "x.safetensors")
    (model / "x.safetensors").rename(model / "transformer" / shards[0])
    assert f"transformer lacks {shards[1]}, 1 of the 2 files" in _refusal(invoke)


@pytest.mark.parametrize("component", ["tokenizer", "tokenizer_2", "scheduler", "text_encoder"])
def test_a_missing_component(invoke: Invoke, model: Path, component: str) -> None:
    """The library would make an empty tokenizer, and the run would train on texts all alike."""
    shutil.rmtree(model / component)
    message = _refusal(invoke)
    assert re.search(rf"flux/{component}[ /]", message)
    assert "download" in message


def test_a_variant_that_is_not_there(invoke: Invoke, model: Path) -> None:
    shutil.copyfile(model / WEIGHTS, (model / WEIGHTS).with_suffix(".bf16.safetensors"))
    message = _refusal(invoke, "stages.t2i.variant=fp16")
    assert "; set stages.t2i.variant to bf16 or leave it out" in message


def test_a_component_of_an_unknown_library(invoke: Invoke, model: Path) -> None:
    index = json.loads((model / "model_index.json").read_text())
    index["vae"] = ["my_models", "MyVAE"]
    (model / "model_index.json").write_text(json.dumps(index))
    says = "stages.t2i.model: flux names a MyVAE of the library 'my_models' for its vae in model_"
    assert says in _refusal(invoke)


def test_quantised_weights(invoke: Invoke, model: Path) -> None:
    """The libraries would ask for packages, in a traceback; one is enough to refuse the folder."""
    config = json.loads((model / "text_encoder_2/config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (model / "text_encoder_2/config.json").write_text(json.dumps(config))
    message = _refusal(invoke)
    assert "stages.t2i.model: flux has a quantised text_encoder_2 (bitsandbytes)" in message
    assert "use the model with plain weights" in message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            ("stages.t2i.freeze=true", "stages.t2i.num_inference_steps=1"),
            "error: stages.t2i.num_inference_steps is 1, but this model's scheduler stretches",
        ),
        (
            ("evaluation.num_inference_steps=1",),
            "error: evaluation.num_inference_steps is 1 for every stage: stages.t2i.num_inference_",
        ),
    ],
)
def test_one_step_of_a_stretched_schedule(
    invoke: Invoke, model: Path, override: tuple[str, ...], says: str
) -> None:
    """The stock scheduler divides 0 by 0: Qwen-Image and LTX-Video are published with it."""
    file = model / "scheduler/scheduler_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"shift_terminal": 0.02}))
    assert says in _refusal(invoke, *override)


def test_a_lora_of_another_architecture(invoke: Invoke, model: Path) -> None:
    lora = {f"transformer.blocks.0.attn1.to_q.lora_{part}.weight" for part in "AB"}
    save_file({name: torch.ones(4, 4) for name in lora}, "wan.safetensors")
    message = _refusal(invoke, "stages.t2i.lora={rank: 4, init: wan.safetensors}")
    assert "stages.t2i.lora.init: wan.safetensors is a LoRA for another model" in message


@pytest.mark.parametrize(
    ("override", "says"),
    [
        (
            "stages.t2i.variant=fp16",
            "stages.t2i.variant is 'fp16', but flux has no files of it; leave stages.t2i.variant",
        ),
        ("stages.t2i.lora={targets: [to_x]}", "'to_x' names no linear layer of the transformer"),
        ("stages.t2i.lora={targets: all_linear}", "'stages.t2i.lora.targets' is \"all_linear\""),
        ("stages.t2i.guidance=embedded", "has only none, cfg; leave guidance"),
        ("stages.t2i.height=30", "height is 30, but this model makes multiples of 8; use 32"),
        ("stages.t2i.height=40", "from stage 't2i' are 32 x 40 pixels and stage 'i2v' has no size"),
        ("stages.i2v.num_frames=8", "num_frames is 8, but this model makes 4·n + 1 frames; use 9"),
    ],
)
def test_what_the_model_lacks(invoke: Invoke, model: Path, override: str, says: str) -> None:
    assert says in _refusal(invoke, *SIZE, override)
