"""Where a diffusers model's layers lie in the model as its authors published it."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

_BLOCK = re.compile(r"(\w+)\.(\d+)\.(.+)")


class Place(NamedTuple):
    """Where a tensor lies in the original model.

    ``part`` of ``parts`` equal in kind, stacked along the first axis; ``swapped`` if the halves of
    that axis change places.
    """

    name: str
    part: int = 0
    parts: int = 1
    swapped: bool = False


@dataclass(frozen=True)
class Blocks:
    """The repeated blocks of a model.

    Parameters
    ----------
    prefix
        What they are called in the original.
    layers
        Layer in diffusers → layer in the original, both without the block.
    fused
        Layer in the original → the layers of diffusers that are stacked in it.
    swapped_in_last
        Layers of diffusers that, in the last block, give scale and shift in the other order.
    """

    prefix: str
    layers: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    swapped_in_last: tuple[str, ...] = ()

    def place(self, layer: str, is_last: bool) -> Place | None:
        """Return where a block's layer lies; None: it is not mapped."""
        for name, parts in self.fused.items():
            if layer in parts:
                return Place(name, parts.index(layer), len(parts))
        if layer not in self.layers:
            return None
        return Place(self.layers[layer], swapped=is_last and layer in self.swapped_in_last)


@dataclass(frozen=True)
class Layout:
    """A family's layers in the original model.

    Parameters
    ----------
    top
        Layers outside of blocks.
    blocks
        Blocks by their name in diffusers.
    swapped
        Layers outside of blocks that give scale and shift in the other order.
    scales
        Layers in the original whose weight is called ``scale``.
    lora_by_original_name
        How the names of those layers begin in diffusers that ComfyUI knows by their original name
        alone; ``""`` is all layers. It knows the others by the name that diffusers gives them.
    """

    top: Mapping[str, str]
    blocks: Mapping[str, Blocks]
    swapped: tuple[str, ...] = ()
    scales: tuple[str, ...] = ()
    lora_by_original_name: tuple[str, ...] = ()

    def layer(self, layer: str, last: Mapping[str, int]) -> Place | None:
        """Return where a layer lies; None: it is not mapped.

        ``last`` has the index of the last block of each kind, as `last_blocks` gives it.
        """
        match = _BLOCK.fullmatch(layer)
        if match is not None and match[1] in self.blocks:
            blocks = self.blocks[match[1]]
            place = blocks.place(match[3], is_last=int(match[2]) == last[match[1]])
            if place is None:
                return None
            return place._replace(name=f"{blocks.prefix}.{match[2]}.{place.name}")
        if layer not in self.top:
            return None
        return Place(self.top[layer], swapped=layer in self.swapped)

    def tensor(self, name: str, last: Mapping[str, int]) -> Place | None:
        """Return where a tensor lies, such as ``x_embedder.weight``; None: it is not mapped."""
        layer, dot, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            layer, dot, suffix = name, "", ""
        place = self.layer(layer, last)
        if place is None:
            return None
        if suffix == "weight" and place.name.endswith(self.scales) and self.scales:
            suffix = "scale"
        return place._replace(name=f"{place.name}{dot}{suffix}")


def last_blocks(names: Iterable[str]) -> dict[str, int]:
    """Return the largest index of each kind of block that ``names`` of layers or tensors have."""
    last: dict[str, int] = {}
    for name in names:
        match = _BLOCK.fullmatch(name)
        if match is not None:
            last[match[1]] = max(last.get(match[1], 0), int(match[2]))
    return last
