"""How large an image is as a JPEG file: a reward that needs no network, for trials."""

import io

import torch

from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores
from workflow_rl.rewards.frames import FrameReduction, FramesArg, score_frames
from workflow_rl.rewards.pixels import to_pil


class JpegSize:
    """Size of the JPEG file in kB (1000 bytes); more detail and noise make it larger.

    Black et al. 2023 (arXiv 2305.13301) reward it in both directions: a negative weight rewards
    images that compress well (theirs is −1/500).

    Parameters
    ----------
    quality : int
        Of the JPEG encoder.
    frames : str or mapping
        See :class:`~workflow_rl.rewards.frames.FrameReduction`.
    """

    name = "jpeg_size"
    media_kind: AcceptedKind = "any"

    def __init__(self, quality: int = 95, frames: FramesArg = "mean") -> None:
        self.quality = quality
        self.frames = FrameReduction.parse(frames)

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score images or videos."""
        return score_frames(batch, self.frames, self._score_images)

    def _score_images(self, images: RewardBatch) -> RewardScores:
        sizes = []
        for image in to_pil(images.media):
            file = io.BytesIO()
            image.save(file, format="JPEG", quality=self.quality)
            sizes.append(file.tell() / 1000)
        return RewardScores(torch.tensor(sizes))
