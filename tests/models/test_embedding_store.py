"""Text embeddings on disk: what was written is read, and nothing else."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from workflow_rl.card import ModelCard
from workflow_rl.errors import UserError
from workflow_rl.instance import CacheKey
from workflow_rl.models.embedding_store import EmbeddingStore, checkpoint_identity
from workflow_rl.request import TaskType

CPU = torch.device("cpu")
KEY = CacheKey(
    "model", ("text_encoder",), (0,), ("",), "torch.bfloat16", "a cat", (("max_length", 8),)
)
VALUE = {
    "embeds": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    "mask": torch.tensor([True, False]),
    "view": torch.arange(6.0).reshape(2, 3).T,
}


@pytest.fixture
def card(tmp_path: Path) -> ModelCard:
    for component in ("text_encoder", "transformer"):
        (tmp_path / "model" / component).mkdir(parents=True)
        (tmp_path / "model" / component / "model.safetensors").write_bytes(b"weights")
    return ModelCard(
        model_id="model",
        family="none",
        task=TaskType.T2I,
        source=tmp_path / "model",
        components=("text_encoder", "transformer"),
        make_adapter=lambda card, device, dtype: None,
    )


@pytest.fixture
def store(tmp_path: Path, card: ModelCard) -> EmbeddingStore:
    return EmbeddingStore(tmp_path / "cache", card, CPU)


def _files(store: EmbeddingStore) -> list[Path]:
    return sorted(store.folder.iterdir())


def test_what_is_saved_is_loaded_to_the_bit_by_any_store(
    store: EmbeddingStore, card: ModelCard
) -> None:
    assert store.load(KEY) is None
    store.save(KEY, VALUE)
    found = EmbeddingStore(store.folder, card, CPU).load(KEY)
    assert found is not None
    assert found.keys() == VALUE.keys()
    for name, tensor in VALUE.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)
    assert [path.suffix for path in _files(store)] == [".safetensors"]


@pytest.mark.parametrize(
    "other",
    [
        {"model_id": "another"},
        {"components": ("text_encoder_2",)},
        {"dtype": "torch.float32"},
        {"content": "a dog"},
        {"options": (("max_length", 9),)},
    ],
)
def test_another_key_is_another_file(store: EmbeddingStore, other: dict[str, Any]) -> None:
    store.save(KEY, VALUE)
    assert store.load(replace(KEY, **other)) is None


def test_another_device_is_another_file(store: EmbeddingStore, card: ModelCard) -> None:
    """Devices round differently."""
    assert EmbeddingStore(store.folder, card, torch.device("meta")).path_of(KEY) != store.path_of(
        KEY
    )


@pytest.mark.parametrize("other", [{"versions": (1,)}, {"adapters": ("default",)}])
def test_other_weights_than_the_checkpoints_are_not_kept(
    store: EmbeddingStore, other: dict[str, Any]
) -> None:
    store.save(replace(KEY, **other), VALUE)
    assert _files(store) == []
    store.save(KEY, VALUE)
    assert store.load(replace(KEY, **other)) is None


def test_another_checkpoint_of_the_same_name_is_another(card: ModelCard) -> None:
    """What trains is no part of it: a text embedding does not depend on the transformer."""
    before = checkpoint_identity(card)
    weights = card.source / "transformer" / "model.safetensors"
    os.utime(weights, (1, 1))
    assert checkpoint_identity(card) == before
    encoder = card.source / "text_encoder" / "model.safetensors"
    os.utime(encoder, (1, 1))
    touched = checkpoint_identity(card)
    assert touched != before
    encoder.write_bytes(b"other weights")
    os.utime(encoder, (1, 1))
    assert checkpoint_identity(card) != touched


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_file_is_reported_and_written_again(
    store: EmbeddingStore, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    store.save(KEY, VALUE)
    path = store.path_of(KEY)
    content = path.read_bytes()
    bad = content[:-3] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1])
    path.write_bytes(bad)
    with caplog.at_level(logging.WARNING):
        assert store.load(KEY) is None
    assert "is damaged" in caplog.text
    store.save(KEY, VALUE)
    assert store.load(KEY) is not None


def test_a_file_without_a_checksum_is_damaged(store: EmbeddingStore) -> None:
    store.save(KEY, VALUE)
    save_file(load_file(store.path_of(KEY)), store.path_of(KEY))
    assert store.load(KEY) is None


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, card: ModelCard) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"memory\.embedding_cache .* cannot be made .*; give a"):
        EmbeddingStore(tmp_path / "file" / "cache", card, CPU)


def test_a_disk_that_refuses_is_one_line_and_leaves_nothing(
    store: EmbeddingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(tensors: object, path: Path, metadata: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workflow_rl.models.embedding_store.save_file", full)
    with pytest.raises(UserError, match=r"No space left on device.*; make room"):
        store.save(KEY, VALUE)
    assert _files(store) == []
