"""What a video or image must have for a reward to score it; imports no PyTorch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MediaNeeds:
    """The least that a reward can score. The samples of a stage that makes less would all fail.

    Attributes
    ----------
    video : bool
        It scores videos only.
    frames : int
        Of a video.
    side : int
        Pixels of the shorter side.
    exact : bool
        Both sides are ``side`` pixels, neither more nor less.
    fps : bool
        It must be told the frames per second.
    looks_per_s : float or None
        It looks at so many frames a second of those that there are; None: at all of them.
    """

    video: bool = False
    frames: int = 1
    side: int = 1
    exact: bool = False
    fps: bool = False
    looks_per_s: float | None = None

    def frames_seen(self, frames: int, fps: float | None) -> int:
        """Frames that it looks at, of a video of ``frames``; all where ``fps`` is not known."""
        if self.looks_per_s is None or fps is None:
            return frames
        return len(range(0, frames, max(1, round(fps / self.looks_per_s))))


FLOW_SIDE = 12
"""Optical flow (DIS) compares patches."""

VBENCH_FPS = 8.0
"""Frames a second of which VBench's rule for dynamic videos speaks."""

ANYTHING = MediaNeeds()

MEDIA_NEEDS: dict[str, MediaNeeds] = {
    "directed_motion": MediaNeeds(video=True, frames=2, side=32, exact=True),
    "dynamic_degree": MediaNeeds(
        video=True, frames=2, side=FLOW_SIDE, fps=True, looks_per_s=VBENCH_FPS
    ),
    "first_frame_consistency": MediaNeeds(video=True, frames=2),
    "frame_change": MediaNeeds(video=True, frames=2),
    "motion_amount": MediaNeeds(video=True, frames=2, side=FLOW_SIDE, fps=True),
    "motion_smoothness": MediaNeeds(video=True, frames=3, side=FLOW_SIDE),
    "sharpness": MediaNeeds(side=3),
    "subject_consistency": MediaNeeds(video=True, frames=2),
    "temporal_flickering": MediaNeeds(video=True, frames=2),
    "videoalign": MediaNeeds(video=True, frames=2, fps=True),
}
"""Of the rewards that need more than `ANYTHING`, by their names in the registry."""


def media_needs(name: str) -> MediaNeeds:
    """What the reward of this name needs."""
    return MEDIA_NEEDS.get(name, ANYTHING)
