"""What a LoRA adapts and where it starts."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from workflow_rl.config.base import ConfigModel

ALL_LINEAR = "all-linear"


class LoRAConfig(ConfigModel):
    """Low-rank adapters W + (alpha / rank)·B·A beside linear layers (arXiv 2106.09685), no dropout.

    Dropout would make the log-prob recomputed for training differ from the rollout's.
    """

    rank: int = Field(32, ge=1, description="Rank r of A and B; with `init`, that file's rank.")
    alpha: float | None = Field(
        None,
        gt=0,
        description="The adapter is scaled by alpha / rank; null is 2 · rank, or `init`'s own.",
    )
    targets: Literal["all-linear"] | tuple[str, ...] | None = Field(
        None,
        description="Linear layers that get an adapter: a list of name endings such as `to_q` or "
        "`ffn.net.2`, or `all-linear`; null is the family's list, or the layers of `init`.",
    )
    init: Path | None = Field(
        None,
        description="LoRA to start from: a .safetensors file as diffusers' `save_lora_weights` "
        "writes it, or its folder (for two transformers, a folder with one such folder for each, "
        "named `transformer` and `transformer_2`); null starts at the base model.",
    )

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        if self.targets == () or (isinstance(self.targets, tuple) and "" in self.targets):
            raise ValueError(
                f"targets is {list(self.targets)}; name linear layers such as to_q, or use "
                "all-linear, or null for the family's list"
            )
        return self

    @model_validator(mode="after")
    def _check_init(self) -> Self:
        for name, value in (("alpha", self.alpha), ("targets", self.targets)):
            if self.init is not None and value is not None:
                raise ValueError(
                    f"{name} and init are both given, but the file in init has its own {name}; "
                    f"leave {name} out"
                )
        return self
