"""What an alarm says: what moved, how far, where to look, and what to do where it is wanted."""

from __future__ import annotations

from dataclasses import dataclass

from workflow_rl.errors import WorkflowRLError

LOOK_FOR = {
    "brightness": ("samples that turn bright or white", "samples that turn dark"),
    "saturation": ("colours that the prompt does not ask for", "samples that turn grey"),
    "sharpness": ("noise and grids", "blur"),
    "motion": ("a camera that pans, and shapes that jump or dissolve", "videos that stand still"),
    "frame_change": ("flicker and cuts", "videos that stand still"),
    "diversity": ("samples that leave the prompt", "samples that are all the same picture"),
    "kl": ("a learning rate that is too high or a kl_weight that is too low", ""),
}
"""Kind of guard → what to look for where it rose, and where it fell; kl never falls."""


class GuardError(WorkflowRLError):
    """A guard stopped the run."""


@dataclass(frozen=True)
class Alarm:
    """A guard has drifted.

    Attributes
    ----------
    iteration : int
        From 0.
    guard : str
        Such as ``brightness/i2v``.
    value : float
        The window's mean.
    deviations : float
        Its distance from the start, with its sign, in standard deviations.
    threshold : float
        The distance from which it is a drift.
    action : str
        ``warn`` or ``stop``.
    key : str
        Configuration key to raise the threshold with.
    """

    iteration: int
    guard: str
    value: float
    deviations: float
    threshold: float
    action: str
    key: str

    @property
    def kind(self) -> str:
        """What is measured, such as ``brightness``."""
        return self.guard.split("/")[0]

    def __str__(self) -> str:
        """Say in one line what moved."""
        verb = "rose" if self.deviations > 0 else "fell"
        unit = "noise" if self.kind == "kl" else "standard"
        return (
            f"guard {self.guard} {verb} to {self.value:.4g} by iteration {self.iteration + 1}, "
            f"{abs(self.deviations):.2f} {unit} deviations from the start (threshold "
            f"{self.threshold:g}): look for {LOOK_FOR[self.kind][self.deviations < 0]}"
        )

    def warning(self) -> str:
        """Say it in one line, with what to do where it is wanted."""
        return f"{self}; if the reward asks for it, raise {self.key}"
