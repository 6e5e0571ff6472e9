"""The variants of a configuration that an ablation trains, and why some are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from workflow_rl.config import RunConfig
from workflow_rl.config.messages import describe
from workflow_rl.errors import UserError
from workflow_rl.rewards.registry import nearest

NESTED, SHARED, CONSTANT = "nested", "shared", "constant"
ONLY = "only_"


@dataclass(frozen=True)
class Variant:
    """One way to train the chain.

    Attributes
    ----------
    name : str
    what : str
        What it is, in a few words.
    config : RunConfig
        The whole configuration; its seed and output_dir are still those of the user's.
    """

    name: str
    what: str
    config: RunConfig


@dataclass(frozen=True)
class Variants:
    """All variants of a configuration.

    ``left_out`` maps the name of a variant that makes no sense for this chain to the reason.
    ``reference`` is the name of the variant that the others are compared with: all stages train,
    with nested credit where the chain allows it.
    """

    variants: tuple[Variant, ...]
    left_out: Mapping[str, str]
    reference: str

    def select(self, names: Sequence[str] | None) -> list[str]:
        """Return the names that were asked for, in the order of training; None asks for all.

        Raises
        ------
        UserError
            A name is unknown or was left out.
        """
        known = [variant.name for variant in self.variants]
        for name in names or ():
            if name in self.left_out:
                raise UserError(f"--only {name}: left out here, {self.left_out[name]}")
            if name not in known:
                raise UserError(f"--only {name}: no such variant; {nearest(name, known)}")
        return [name for name in known if names is None or name in names]


def build_variants(config: RunConfig) -> Variants:
    """Derive the variants of a configuration; each differs from the reference in one thing.

    Nested and shared credit over all stages; each stage alone, the others frozen; and a constant
    reward. The variants beside the first two have the reference's credit rule.
    """
    builder = _Builder(config)
    trained = [name for name, stage in config.stages.items() if not stage.freeze]
    stages = _listed(trained)
    if len(config.stages) == 1:
        builder.left_out[NESTED] = "with one stage it is the same rule as shared"
    else:
        samples = {name: stage.samples for name, stage in config.stages.items()}
        single = [name for name in list(samples)[1:] if samples[name] == 1]
        if single:
            builder.left_out[NESTED] = (
                f"stages.{single[0]}.samples is 1, so that its outputs have no siblings to be "
                "compared with"
            )
        else:
            builder.add(NESTED, f"{stages} train, nested credit", _credit(NESTED))
    builder.add(SHARED, f"{stages} train, shared credit", _credit(SHARED))
    reference = NESTED if any(v.name == NESTED for v in builder.variants) else SHARED
    for name in config.stages:
        only = f"{ONLY}{name}"
        if name not in trained:
            builder.left_out[only] = f"stage {name} is frozen in the configuration"
        elif len(trained) == 1:
            builder.left_out[only] = f"no other stage trains, so {reference} is that already"
        else:
            change = _credit(reference) | {"stages": _frozen_but(config, name)}
            builder.add(only, f"{name} trains, the others frozen", change)
    builder.add(
        CONSTANT,
        "every sample gets the same reward: no weight may move",
        _credit(reference) | {"rewards": [{"name": "constant"}]},
    )
    return Variants(tuple(builder.variants), builder.left_out, reference)


class _Builder:
    """Collects the variants that are valid configurations."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.variants: list[Variant] = []
        self.left_out: dict[str, str] = {}

    def add(
        self, name: str, what: str, changes: Mapping[str, Mapping[str, Any] | list[Any]]
    ) -> None:
        """Add a variant; ``changes`` replaces lists, and keys of mappings."""
        raw = self._config.model_dump(mode="json")
        for key, change in changes.items():
            raw[key] = {**raw[key], **change} if isinstance(change, Mapping) else change
        try:
            self.variants.append(Variant(name, what, RunConfig.model_validate(raw)))
        except ValidationError as error:
            self.left_out[name] = describe(error, raw)


def _credit(rule: str) -> dict[str, Mapping[str, Any] | list[Any]]:
    return {"credit": {"rule": rule}}


def _frozen_but(config: RunConfig, trained: str) -> dict[str, Any]:
    """Return the stages with all but one frozen.

    A frozen stage takes no fresh LoRA: it would do nothing.
    """
    stages = {}
    for name, stage in config.stages.items():
        raw = stage.model_dump(mode="json")
        if name != trained:
            raw["freeze"] = True
            if stage.lora is not None and stage.lora.init is None:
                raw["lora"] = None
        stages[name] = raw
    return stages


def _listed(names: Sequence[str]) -> str:
    """Write names as ``a``, ``a and b`` or ``a, b and c``."""
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
