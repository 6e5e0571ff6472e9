"""Weight files that are missing, cut off or of another variant are found before anything loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from workflow_rl.config.weight_files import check_weight_files
from workflow_rl.errors import UserError

INDEX: dict[str, Any] = {
    "_class_name": "FluxPipeline",
    "transformer": ["diffusers", "FluxTransformer2DModel"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "image_encoder": [None, None],
}
KEY = "stages.t2i.variant"
DATA = b"\0" * 8


def _weights(path: Path) -> Path:
    """Write a safetensors file of one tensor, as the format has it."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + DATA)
    return path


def _sharded(folder: Path, stem: str, middle: str = "") -> list[Path]:
    names = [f"{stem}{middle}-0000{i}-of-00002.safetensors" for i in (1, 2)]
    paths = [_weights(folder / name) for name in names]
    (folder / f"{stem}.safetensors.index{middle}.json").write_text(
        json.dumps({"weight_map": {"a": names[0], "b": names[1]}})
    )
    return paths


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    _weights(tmp_path / "text_encoder" / "model.safetensors")
    _weights(tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")
    (tmp_path / "tokenizer").mkdir()
    return tmp_path


def _refusal(folder: Path, variant: str | None = None) -> str:
    with pytest.raises(UserError) as caught:
        check_weight_files(folder, INDEX, variant, KEY)
    return str(caught.value)


def test_plain_files_and_shards_are_found(folder: Path) -> None:
    found = check_weight_files(folder, INDEX)
    assert {name: len(weights.files) for name, weights in found.items()} == {
        "transformer": 1,
        "text_encoder": 1,
    }
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    shards = _sharded(folder / "transformer", "diffusion_pytorch_model")
    assert check_weight_files(folder, INDEX)["transformer"].files == tuple(shards)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    shards = _sharded(folder / "transformer", "diffusion_pytorch_model")
    shards[1].unlink()
    message = _refusal(folder)
    assert f"lacks {shards[1].name}, 1 of the 2 files" in message
    assert "download the model again" in message


def test_a_variant_gives_its_files_and_plain_ones_elsewhere(folder: Path) -> None:
    path = _weights(folder / "text_encoder" / "model.fp16.safetensors")
    found = check_weight_files(folder, INDEX, "fp16")
    assert found["text_encoder"] == ((path,), "fp16")
    assert found["transformer"].variant is None
    shards = _sharded(folder / "transformer", "diffusion_pytorch_model", ".fp16")
    assert check_weight_files(folder, INDEX, "fp16")["transformer"] == (tuple(shards), "fp16")


def test_a_variant_that_is_not_there_offers_those_that_are(folder: Path) -> None:
    assert _refusal(folder, "fp16").startswith(f"{KEY} is 'fp16', but {folder} has no files of it;")
    assert _refusal(folder, "fp16").endswith(f"; leave {KEY} out")
    _sharded(folder / "transformer", "diffusion_pytorch_model", ".bf16")
    assert _refusal(folder, "fp16").endswith(f"; set {KEY} to bf16 or leave it out")
    (folder / "text_encoder" / "model.safetensors").rename(
        folder / "text_encoder" / "model.fp16.safetensors"
    )
    message = _refusal(folder)
    assert message.endswith(f"text_encoder has weights in variants only; set {KEY} to fp16")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no whole safetensors file (0 bytes)"),
        (b"\xff" * 40, "no whole safetensors file (40 bytes)"),
        (b"version https://git-lfs.github.com/spec/v1\n", "run `git lfs pull`"),
        ((4).to_bytes(8, "little") + b"nope", "its header is no JSON"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, content: bytes, message: str) -> None:
    path = folder / "text_encoder" / "model.safetensors"
    path.write_bytes(content)
    assert str(path) in _refusal(folder)
    assert message in _refusal(folder)


def test_a_truncated_file_is_named_with_both_sizes(folder: Path) -> None:
    path = folder / "text_encoder" / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    message = _refusal(folder)
    assert f"has {len(whole) - 1} bytes, but its header says {len(whole)}" in message


def test_an_index_that_is_none_is_named(folder: Path) -> None:
    (folder / "text_encoder" / "model.safetensors").unlink()
    (folder / "text_encoder" / "model.safetensors.index.json").write_text("[]")
    assert "model.safetensors.index.json is no index" in _refusal(folder)
