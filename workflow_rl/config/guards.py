"""What is watched for reward hacking, and what happens when it drifts."""

from typing import Literal, get_args

from pydantic import Field

from workflow_rl.config.base import ConfigModel

GuardKind = Literal[
    "brightness", "saturation", "sharpness", "motion", "frame_change", "diversity", "kl"
]
GUARD_KINDS: tuple[GuardKind, ...] = get_args(GuardKind)


class GuardsConfig(ConfigModel):
    """Figures that no reward is trained on and that move when a reward is hacked."""

    watch: tuple[GuardKind, ...] = Field(
        GUARD_KINDS, description="What is measured in every iteration; [] turns the guards off."
    )
    deviations: float = Field(
        2.0,
        gt=0,
        description="Standard deviations of the samples at the start from which a guard has "
        "drifted.",
    )
    kl_deviations: float = Field(
        1.0,
        gt=0,
        description="The same for kl, √(2·KL): how far the steps' means have moved from the "
        "reference's, in standard deviations of the steps' noise.",
    )
    baseline_iterations: int = Field(
        5, ge=1, description="First iterations, whose samples are the start."
    )
    window: int = Field(5, ge=1, description="Iterations whose mean is compared with the start.")
    action: Literal["warn", "stop"] = Field(
        "warn", description="What a drift does: warn, or stop the run after a checkpoint."
    )
    stop_on: tuple[GuardKind, ...] | None = Field(
        None, description="Where action is stop, the guards that do; null: every one."
    )
