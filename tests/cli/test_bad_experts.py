"""Faults of either expert's weights in an I2V stage: one line, exit code 2, nothing written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.conftest import Invoke
from tests.tiny_models import save_wan

FILE = "diffusion_pytorch_model.safetensors"
NAME = "patch_embedding.bias"
EXPERTS = ("transformer", "transformer_2")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "wan"
    return save_wan(folder, image_encoder=False, boundary_ratio=0.9)


@pytest.fixture
def model(workspace: Path, whole: Path) -> Path:
    """A copy to damage, in the place of the model that ``run.yaml`` names."""
    shutil.rmtree(workspace / "wan")
    return shutil.copytree(whole, workspace / "wan")


def _refusal(invoke: Invoke) -> str:
    before = sorted(Path().rglob("*"))
    overrides = ("stages.t2i.model=null", "stages.i2v.num_frames=5")
    message = invoke("train", "run.yaml", *overrides).one_line_error()
    assert sorted(Path().rglob("*")) == before
    return message


def _spoil(tensors: dict[str, torch.Tensor]) -> None:
    tensors[NAME][0] = float("nan")


@pytest.mark.parametrize("expert", EXPERTS)
@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda tensors: tensors.pop(NAME), f"lacks 1 tensor: {NAME}"),
        (lambda tensors: tensors.update(x=torch.ones(2)), "has 1 tensor: x, which a"),
        (_spoil, f"the weight {NAME} holds NaN or infinity"),
    ],
)
def test_weights_that_do_not_fit(
    invoke: Invoke,
    model: Path,
    edit: Callable[[dict[str, torch.Tensor]], object],
    says: str,
    expert: str,
) -> None:
    tensors = load_file(model / expert / FILE)
    edit(tensors)
    save_file(tensors, model / expert / FILE, metadata={"format": "pt"})
    message = _refusal(invoke)
    assert says in message
    assert any(word.strip(":") == f"wan/{expert}" for word in message.split())


@pytest.mark.parametrize("expert", EXPERTS)
def test_a_missing_shard(invoke: Invoke, model: Path, expert: str) -> None:
    tensors = load_file(model / expert / FILE)
    (model / expert / FILE).unlink()
    shards = [f"diffusion_pytorch_model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where = {name: shards[index % 2] for index, name in enumerate(tensors)}
    index_file = model / expert / f"{FILE}.index.json"
    index_file.write_text(json.dumps({"weight_map": where}))
    kept = {name: tensor for name, tensor in tensors.items() if where[name] == shards[0]}
    save_file(kept, model / expert / shards[0])
    assert f"{expert} lacks {shards[1]}, 1 of the 2 files" in _refusal(invoke)
