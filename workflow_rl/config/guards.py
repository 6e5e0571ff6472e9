"""What is watched for reward hacking, and what happens when it drifts."""

import difflib
from collections.abc import Mapping
from typing import Annotated, Literal, get_args

from pydantic import Field

from workflow_rl.config.base import ConfigModel

GuardKind = Literal[
    "brightness", "saturation", "sharpness", "motion", "frame_change", "diversity", "kl"
]
GUARD_KINDS: tuple[GuardKind, ...] = get_args(GuardKind)
VIDEO_KINDS: tuple[GuardKind, ...] = ("motion", "frame_change")
"""What only a stage that makes videos has."""


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
    thresholds: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="The same for single guards, such as `brightness: 1.0`, or for one stage "
        "`motion/i2v: 4.0`; the others keep deviations and kl_deviations.",
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

    def threshold(self, name: str) -> float:
        """Return the deviations from which the guard ``name``, such as ``kl/i2v``, has drifted."""
        kind = name.split("/")[0]
        default = self.kl_deviations if kind == "kl" else self.deviations
        return self.thresholds.get(name, self.thresholds.get(kind, default))

    def threshold_key(self, name: str) -> str:
        """Return the key that gives the guard ``name`` another threshold, whatever is set now."""
        return f"guards.thresholds.{name if name in self.thresholds else name.split('/')[0]}"


def unknown_threshold(config: GuardsConfig, tasks: Mapping[str, str]) -> str | None:
    """Return what is wrong with the names in ``thresholds``, None where nothing is.

    Parameters
    ----------
    tasks
        Name of each stage → its task.
    """
    known = list(GUARD_KINDS) + [
        f"{kind}/{stage}"
        for kind in GUARD_KINDS
        for stage, task in tasks.items()
        if task != "t2i" or kind not in VIDEO_KINDS
    ]
    for name in config.thresholds:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            mend = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
            return f"guards.thresholds has {name!r}, which is no guard of this run; {mend}"
    return None
