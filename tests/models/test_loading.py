"""A folder loads whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tiny_models import save_flux
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
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


def _weights_sum(instance: ModelInstance, component: str) -> float:
    tensors = instance.component(component).state_dict().values()
    return sum(float(tensor.double().abs().sum()) for tensor in tensors)


def _edit(path: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_a_truncated_file_is_one_line(folder: Path, component: str) -> None:
    path = _weights(folder / component)
    path.write_bytes(path.read_bytes()[:-100])
    assert f"{path} has" in _message(folder)


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
    assert f"{component} lacks 1 tensor: {name} of a" in message


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder", "text_encoder_2"])
def test_a_tensor_too_many_is_named(folder: Path, component: str) -> None:
    _edit(_weights(folder / component), lambda tensors: tensors.update(extra=torch.ones(2)))
    message = _message(folder)
    assert f"{component} has 1 tensor: extra, which a" in message


def test_a_buffer_that_the_class_itself_ignores_is_not_too_many(folder: Path) -> None:
    """CLIP files written by older libraries hold ``position_ids``."""
    name = "embeddings.position_ids"
    _edit(_weights(folder / "text_encoder"), lambda tensors: tensors.update({name: torch.ones(2)}))
    load_card(build_flux_t2i_card(folder))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(
    ("component", "name"),
    [
        ("transformer", "context_embedder.bias"),
        ("text_encoder_2", "encoder.block.0.layer.0.SelfAttention.k.weight"),
    ],
)
def test_a_weight_that_is_not_finite_is_named(
    folder: Path, component: str, name: str, value: float
) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name].view(-1)[-1] = value

    _edit(_weights(folder / component), spoil)
    message = _message(folder)
    assert f"{component}: the weight {name} holds NaN or infinity" in message


def test_a_file_that_is_written_again_does_not_change_a_resident_model(folder: Path) -> None:
    """In place, as a second download or ``save_pretrained`` into the same folder writes it."""
    names = ["transformer", "vae", "text_encoder", "text_encoder_2"]
    instance = load_card(build_flux_t2i_card(folder))
    before = {name: _weights_sum(instance, name) for name in names}
    for name in names:
        path = _weights(folder / name)
        with path.open("r+b") as file:
            file.seek(-2048, os.SEEK_END)
            file.write(bytes(2048))
    assert {name: _weights_sum(instance, name) for name in names} == before


def test_a_variant_loads_its_own_files(folder: Path) -> None:
    """Half-precision files beside the plain ones; a component without them gives its plain ones."""
    plain = _weights(folder / "transformer")
    half = plain.with_name("diffusion_pytorch_model.fp16.safetensors")
    tensors = {name: tensor.half() + 1 for name, tensor in load_file(plain).items()}
    save_file(tensors, half, metadata={"format": "pt"})
    card = replace(build_flux_t2i_card(folder), variant="fp16")
    loaded = load_card(card).component("transformer").state_dict()
    assert all(torch.equal(loaded[name], t.float()) for name, t in tensors.items())
    with pytest.raises(UserError, match=r"variant is 'fp8'.*; set variant to fp16"):
        load_card(replace(card, variant="fp8"))


def test_a_component_without_weights_is_named(folder: Path) -> None:
    _weights(folder / "vae").unlink()
    assert "vae holds no weights in safetensors" in _message(folder)


@pytest.mark.parametrize(
    ("component", "name"),
    [
        ("transformer", "context_embedder.bias"),
        ("text_encoder_2", "encoder.block.0.layer.0.SelfAttention.k.weight"),
    ],
)
def test_a_tensor_of_another_shape_is_named(folder: Path, component: str, name: str) -> None:
    _edit(_weights(folder / component), lambda tensors: tensors.update({name: torch.ones(2, 7)}))
    message = _message(folder)
    assert f"{component} has 1 tensor of other shapes" in message
    assert f"{name}: (2, 7), expected (" in message
    assert "\n" not in message


def test_tied_weights_and_shards_are_whole(folder: Path) -> None:
    """T5's token embedding is stored once under two names; a model may lie in several files."""
    from transformers import T5EncoderModel

    source = folder / "text_encoder_2"
    model = T5EncoderModel.from_pretrained(source)
    _weights(source).unlink()
    model.save_pretrained(source, max_shard_size="3KB")
    shards = sorted(source.glob("*.safetensors"))
    assert len(shards) > 1
    assert "encoder.embed_tokens.weight" in model.state_dict()
    loaded = load_card(build_flux_t2i_card(folder)).component("text_encoder_2")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name])
    shards[1].unlink()
    assert f"text_encoder_2 lacks {shards[1].name}, 1 of the {len(shards)} files" in _message(
        folder
    )
