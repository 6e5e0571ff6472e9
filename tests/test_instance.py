"""Versions per component, and caches that hold exactly what is still true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from workflow_rl.card import ModelCard, read_model_index
from workflow_rl.config.model_index import indexed_components
from workflow_rl.errors import UserError
from workflow_rl.instance import CacheKey, ContentCache, ModelInstance, load_card
from workflow_rl.models.common import cached_text_encode, collate
from workflow_rl.request import TaskType


class _Adapter:
    """Stands in for a family: one module, and adapters by name."""

    def __init__(self) -> None:
        self.modules = {"text_encoder": torch.nn.Identity()}
        self.lora = ""

    def active_adapters(self, component: str) -> str:
        return self.lora


def _instance() -> ModelInstance:
    card = ModelCard(
        model_id="model",
        family="none",
        task=TaskType.T2I,
        source=Path("nowhere"),
        components=("text_encoder", "transformer"),
        make_adapter=lambda card, device, dtype: _Adapter(),
    )
    return load_card(card)


class _Encoder:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, text: str) -> dict[str, torch.Tensor]:
        self.calls.append(text)
        return {"embeds": torch.tensor([float(len(text))])}


def _encode(instance: ModelInstance, encoder: _Encoder, texts: list[str], **options: Any) -> None:
    cached_text_encode(instance, ("text_encoder",), texts, encoder, **options)


def test_a_group_encodes_its_text_once() -> None:
    instance, encoder = _instance(), _Encoder()
    rows = cached_text_encode(instance, ("text_encoder",), ["a", "bb", "a"], encoder)
    assert encoder.calls == ["a", "bb"]
    assert rows[0] is rows[2]
    assert collate(rows)["embeds"].tolist() == [[1.0], [2.0], [1.0]]


@pytest.mark.parametrize("change", ["version", "adapters", "options", "text"])
def test_whatever_changes_the_output_misses_the_cache(change: str) -> None:
    instance, encoder = _instance(), _Encoder()
    _encode(instance, encoder, ["a"], max_sequence_length=8)
    text, length = "a", 8
    if change == "version":
        instance.set_weights_version("text_encoder", 1)
    elif change == "adapters":
        instance.adapter.lora = "style"
    elif change == "options":
        length = 9
    else:
        text = "b"
    _encode(instance, encoder, [text], max_sequence_length=length)
    assert len(encoder.calls) == 2


def test_a_key_names_model_component_version_dtype_and_text() -> None:
    key = _instance().cache_key(("text_encoder",), "a red circle", max_sequence_length=16)
    assert (key.model_id, key.components, key.versions) == ("model", ("text_encoder",), (0,))
    assert (key.dtype, key.content) == ("torch.float32", "a red circle")
    assert key.options == (("max_sequence_length", 16),)


def test_a_transformer_version_leaves_text_alone() -> None:
    instance, encoder = _instance(), _Encoder()
    _encode(instance, encoder, ["a"])
    instance.set_weights_version("transformer", 3)
    _encode(instance, encoder, ["a"])
    assert encoder.calls == ["a"]
    assert instance.versions() == {"text_encoder": 0, "transformer": 3}


def test_an_unknown_component_is_named() -> None:
    with pytest.raises(UserError, match=r"no component 'vae'; it has \['text_encoder'"):
        _instance().version_of("vae")


def test_the_cache_is_bounded_and_keeps_what_was_used_last() -> None:
    instance = _instance()
    cache = ContentCache(max_bytes=12)
    keys = [instance.cache_key(("text_encoder",), text) for text in "abcd"]

    def entry() -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(1)}

    for key in (*keys[:3], keys[0], keys[3]):
        cache.get_or_compute(key, entry)
    assert len(cache) == 3
    misses = cache.misses
    cache.get_or_compute(keys[0], entry)
    assert cache.misses == misses
    cache.get_or_compute(keys[1], entry)
    assert cache.misses == misses + 1


class _Store:
    """A disk in memory."""

    def __init__(self) -> None:
        self.kept: dict[CacheKey, dict[str, torch.Tensor]] = {}

    def load(self, key: CacheKey) -> dict[str, torch.Tensor] | None:
        return self.kept.get(key)

    def save(self, key: CacheKey, value: dict[str, torch.Tensor]) -> None:
        self.kept[key] = value


def test_what_memory_lost_comes_from_the_store() -> None:
    instance, encoder = _instance(), _Encoder()
    instance.caches.max_bytes = 4
    instance.caches.store = _Store()
    _encode(instance, encoder, ["a", "bb", "a", "bb"])
    assert encoder.calls == ["a", "bb"]
    assert len(instance.caches) == 1


def test_without_a_bound_nothing_is_lost() -> None:
    instance, encoder = _instance(), _Encoder()
    instance.caches.max_bytes = None
    _encode(instance, encoder, ["a", "bb", "a", "bb"])
    assert encoder.calls == ["a", "bb"]


def test_dropped_weights_are_gone_and_what_they_cached_stays() -> None:
    instance, encoder = _instance(), _Encoder()
    module = torch.nn.Linear(4, 4)
    instance.adapter.modules = {"text_encoder": module}
    _encode(instance, encoder, ["a"])
    instance.drop_weights(["text_encoder"])
    assert sum(parameter.numel() for parameter in module.parameters()) == 0
    assert module.weight.dtype is torch.float32
    _encode(instance, encoder, ["a"])
    with pytest.raises(UserError, match="the text 'new' was not encoded before model dropped its"):
        _encode(instance, encoder, ["new"])
    with pytest.raises(UserError, match="'text_encoder' of model were dropped"):
        instance.component("text_encoder")
    assert encoder.calls == ["a"]


def test_rows_of_different_kinds_do_not_collate() -> None:
    with pytest.raises(ValueError, match="same kinds of conditioning"):
        collate([{"a": torch.zeros(1)}, {"b": torch.zeros(1)}])


def test_model_index_errors(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_model_index(tmp_path / "absent")
    with pytest.raises(UserError, match="not a diffusers folder"):
        read_model_index(tmp_path)
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        read_model_index(tmp_path)


def test_absent_components_are_not_listed() -> None:
    present = {"vae": ["diffusers", "VAE"]}
    absent = {"image_encoder": [None, None], "transformer": [], "is_distilled": True}
    index = {"_class_name": "P", **present, **absent}
    assert indexed_components(index) == {"vae": ("diffusers", "VAE")}


def test_a_component_that_is_no_module_says_so() -> None:
    with pytest.raises(UserError, match=r"'transformer' of model is not a module; .*text_encoder"):
        _instance().component("transformer")
    with pytest.raises(UserError, match="no component 'unet'"):
        _instance().component("unet")
