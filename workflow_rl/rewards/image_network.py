"""What rewards that read images with a network share: where it runs, when it loads, frames."""

from abc import ABC, abstractmethod
from typing import Any

from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores
from workflow_rl.rewards.frames import FrameReduction, FramesArg, score_frames
from workflow_rl.rewards.weights import Lazy, pick_device, pick_dtype


class ImageNetworkReward(ABC):
    """Scores images, and videos by their frames, with a network that loads at its first use.

    Parameters
    ----------
    device, dtype
        Where the network runs (None: a GPU where there is one), and in which precision (None:
        bfloat16 on a GPU, float32 on a CPU).
    batch_size : int
        Images per call.
    frames : str or mapping
        See :class:`~workflow_rl.rewards.frames.FrameReduction`.
    """

    media_kind: AcceptedKind = "any"

    def __init__(
        self, device: str | None, dtype: str | None, batch_size: int, frames: FramesArg
    ) -> None:
        self.device = pick_device(device)
        self.dtype = pick_dtype(dtype, self.device)
        self.batch_size = batch_size
        self.frames = FrameReduction.parse(frames)
        self.loaded: Lazy[Any] = Lazy(self._load)

    def load(self) -> None:
        """Load the network and what it needs."""
        self.loaded.get()

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score images or videos."""
        return score_frames(batch, self.frames, self._score_images, self.batch_size)

    @abstractmethod
    def _load(self) -> Any:
        """Return what ``_score_images`` finds in ``loaded``."""

    @abstractmethod
    def _score_images(self, images: RewardBatch) -> RewardScores:
        """Score a batch of ``images_BCHW``."""
