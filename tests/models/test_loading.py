"""A folder loads whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import save_flux
from workflow_rl.errors import UserError
from workflow_rl.instance import load_card
from workflow_rl.models import build_flux_t2i_card


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loading") / "flux"
    return save_flux(folder, guidance_embeds=False, dynamic_shift=False)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(whole, tmp_path / "flux")


def _message(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        load_card(build_flux_t2i_card(folder))
    return str(caught.value)


def _weights(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def _edit(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_a_truncated_file_is_one_line(folder: Path, component: str) -> None:
    path = _weights(folder / component)
    path.write_bytes(path.read_bytes()[:-100])
    assert "cannot load" in _message(folder)


@pytest.mark.parametrize(
    ("component", "name"),
    [
        ("transformer", "context_embedder.bias"),
        ("vae", "decoder.conv_in.weight"),
        ("text_encoder_2", "encoder.block.0.layer.0.SelfAttention.k.weight"),
    ],
)
def test_a_missing_tensor_is_named(folder: Path, component: str, name: str) -> None:
    _edit(_weights(folder / component), lambda tensors: tensors.pop(name))
    message = _message(folder)
    assert f"{component} lacks 1 tensors" in message
    assert name in message


def test_a_tensor_of_another_shape_is_one_line(folder: Path) -> None:
    name = "encoder.block.0.layer.0.SelfAttention.k.weight"
    _edit(
        _weights(folder / "text_encoder_2"), lambda tensors: tensors.update({name: torch.ones(2)})
    )
    assert "cannot load" in _message(folder)


def test_tied_weights_and_shards_are_whole(folder: Path) -> None:
    """T5's token embedding is stored once under two names; a model may lie in several files."""
    from transformers import T5EncoderModel

    source = folder / "text_encoder_2"
    model = T5EncoderModel.from_pretrained(source)
    _weights(source).unlink()
    model.save_pretrained(source, max_shard_size="3KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    assert "encoder.embed_tokens.weight" in model.state_dict()
    loaded = load_card(build_flux_t2i_card(folder)).component("text_encoder_2")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
