"""A resident model: its components, their versions, and the caches that depend on them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

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


class TensorStore(Protocol):
    """Where cached outputs outlive their place in memory, and the process."""

    def load(self, key: CacheKey) -> dict[str, torch.Tensor] | None:
        """Return what was saved under ``key``; None where nothing (whole) is there."""
        ...

    def save(self, key: CacheKey, value: dict[str, torch.Tensor]) -> None:
        """Keep ``value``."""
        ...


class ContentCache:
    """Least-recently-used cache from :class:`CacheKey` to named tensors.

    Attributes
    ----------
    max_bytes
        Bound of what is held in memory; None: none.
    store
        Second level, which is asked before an entry is computed; None: there is none.
    dropped
        Components that can compute nothing any more.
    """

    def __init__(self, max_bytes: int | None = DEFAULT_CACHE_BYTES) -> None:
        self.max_bytes = max_bytes
        self.store: TensorStore | None = None
        self.dropped: frozenset[str] = frozenset()
        self.hits = 0
        self.misses = 0
        self._entries: OrderedDict[CacheKey, dict[str, torch.Tensor]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get_or_compute(
        self, key: CacheKey, compute: Callable[[], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Return the entry of ``key``, computed on a miss. Its tensors are shared: read only.

        Raises
        ------
        UserError
            On a miss, if a component that would compute the entry was dropped.
        """
        if key in self._entries:
            self.hits += 1
            self._entries.move_to_end(key)
            return self._entries[key]
        value = None if self.store is None else self.store.load(key)
        if value is None:
            value = self._computed(key, compute)
        self._entries[key] = value
        self._bytes += _num_bytes(value)
        self._evict()
        return value

    def _computed(
        self, key: CacheKey, compute: Callable[[], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        if gone := self.dropped.intersection(key.components):
            raise UserError(
                f"the text {key.content!r} was not encoded before {key.model_id} dropped its "
                f"{', '.join(sorted(gone))}; add it to the run's prompts, or set "
                "memory.drop_text_encoders: false"
            )
        self.misses += 1
        value = compute()
        if self.store is not None:
            self.store.save(key, value)
        return value

    def _evict(self) -> None:
        while self.max_bytes is not None and self._bytes > self.max_bytes and len(self) > 1:
            _, evicted = self._entries.popitem(last=False)
            self._bytes -= _num_bytes(evicted)

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
            If the card has no such component, it is not a module (a scheduler, a tokenizer), or
            its weights were dropped.
        """
        self._check(name)
        if name in self.caches.dropped:
            raise UserError(
                f"the weights of {name!r} of {self.card.model_id} were dropped to free memory; "
                "load the model again"
            )
        modules = self.adapter.modules
        if name not in modules:
            raise UserError(
                f"component {name!r} of {self.card.model_id} is not a module; "
                f"the modules are {sorted(modules)}"
            )
        module: nn.Module = modules[name]
        return module

    @torch.no_grad()
    def drop_weights(self, components: Collection[str]) -> None:
        """Free the weights of modules that are not needed any more; what they cached stays.

        The emptied modules keep their place, dtype and device, so that the pipeline around them
        goes on working.
        """
        for name in components:
            module = self.component(name)
            for tensor in (*module.parameters(), *module.buffers()):
                tensor.data = tensor.data.new_empty(0)
        self.caches.dropped |= frozenset(components)

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
