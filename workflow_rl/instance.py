"""A resident model: its components, their versions, and the caches that depend on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from workflow_rl.card import ModelCard
from workflow_rl.errors import UserError

if TYPE_CHECKING:
    from torch import nn

DEFAULT_CACHE_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class Platform:
    """Where an instance lives and computes."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True)
class CacheKey:
    """Every field that can change a cached output.

    ``components`` and ``versions`` go together; ``options`` holds what else the computation
    depends on (sequence length, image size) as sorted name-value pairs.
    """

    model_id: str
    components: tuple[str, ...]
    versions: tuple[int, ...]
    adapters: tuple[str, ...]
    dtype: str
    content: str
    options: tuple[tuple[str, Any], ...] = ()


def _num_bytes(value: dict[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in value.values())


class ContentCache:
    """Least-recently-used cache from :class:`CacheKey` to named tensors, bounded in bytes."""

    def __init__(self, max_bytes: int = DEFAULT_CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[CacheKey, dict[str, torch.Tensor]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get_or_compute(
        self, key: CacheKey, compute: Callable[[], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Return the entry of ``key``, computed on a miss. Its tensors are shared: read only."""
        if key in self._entries:
            self.hits += 1
            self._entries.move_to_end(key)
            return self._entries[key]
        self.misses += 1
        value = compute()
        self._entries[key] = value
        self._bytes += _num_bytes(value)
        while self._bytes > self.max_bytes and len(self._entries) > 1:
            _, dropped = self._entries.popitem(last=False)
            self._bytes -= _num_bytes(dropped)
        return value

    def drop_component(self, component: str) -> int:
        """Drop every entry that depends on ``component``; return how many."""
        stale = [key for key in self._entries if component in key.components]
        for key in stale:
            self._bytes -= _num_bytes(self._entries.pop(key))
        return len(stale)


class ModelInstance:
    """A loaded card.

    Each component carries its own weights version. Publishing new transformer weights bumps the
    transformer's version and leaves the text encoder's version and cached embeddings alone.
    """

    def __init__(self, card: ModelCard, adapter: Any, platform: Platform) -> None:
        self.card = card
        self.adapter = adapter
        self.platform = platform
        self.caches = ContentCache()
        self._versions = dict.fromkeys(card.components, 0)

    def component(self, name: str) -> nn.Module:
        """Return the resident module ``name``.

        Raises
        ------
        UserError
            If the card has no such component, or it is not a module (a scheduler, a tokenizer).
        """
        self._check(name)
        modules = self.adapter.modules
        if name not in modules:
            raise UserError(
                f"component {name!r} of {self.card.model_id} is not a module; "
                f"the modules are {sorted(modules)}"
            )
        module: nn.Module = modules[name]
        return module

    def version_of(self, name: str) -> int:
        """Return the weights version of component ``name``; 0 is what the checkpoint holds."""
        self._check(name)
        return self._versions[name]

    def versions(self) -> dict[str, int]:
        """Return the version of every component."""
        return dict(self._versions)

    def set_weights_version(self, name: str, version: int) -> None:
        """Declare that component ``name`` now holds weights ``version``; drop its cached outputs.

        Raises
        ------
        UserError
            If the card has no such component.
        """
        self._check(name)
        self._versions[name] = version
        self.caches.drop_component(name)

    def cache_key(self, components: tuple[str, ...], content: str, **options: Any) -> CacheKey:
        """Return the key of an output of ``components`` for ``content``."""
        return CacheKey(
            model_id=self.card.model_id,
            components=components,
            versions=tuple(self.version_of(name) for name in components),
            adapters=tuple(self.adapter.active_adapters(name) for name in components),
            dtype=str(self.platform.dtype),
            content=content,
            options=tuple(sorted(options.items())),
        )

    def _check(self, name: str) -> None:
        if name not in self._versions:
            raise UserError(
                f"{self.card.model_id} has no component {name!r}; it has {sorted(self._versions)}"
            )


def load_card(
    card: ModelCard,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> ModelInstance:
    """Load the weights of ``card`` and return a resident instance, with weights of its own."""
    device = torch.device(device)
    return ModelInstance(card, card.make_adapter(card, device, dtype), Platform(device, dtype))
