"""How sharp an image is, by its second derivatives; needs no network."""

from torch.nn import functional as F

from workflow_rl.rewards.base import AcceptedKind, RewardBatch, RewardScores
from workflow_rl.rewards.frames import FrameReduction, FramesArg, score_frames
from workflow_rl.rewards.pixels import luma, to_uint8


class Sharpness:
    """Variance of the Laplacian of the brightness (0 to 255); higher is sharper, or noisier.

    Pech-Pacheco et al. 2000, "Diatom autofocusing in brightfield microscopy". The outermost pixels
    have no Laplacian. Depends on the resolution: compare images of one size.

    Parameters
    ----------
    frames : str or mapping
        See :class:`~workflow_rl.rewards.frames.FrameReduction`.
    """

    name = "sharpness"
    media_kind: AcceptedKind = "any"

    def __init__(self, frames: FramesArg = "mean") -> None:
        self.frames = FrameReduction.parse(frames)

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score images or videos; smaller than 3×3 fails."""
        return score_frames(batch, self.frames, self._score_images)

    def _score_images(self, images: RewardBatch) -> RewardScores:
        luma_BHW = luma(to_uint8(images.media).float())
        kernel = luma_BHW.new_tensor([[0, 1, 0], [1, -4, 1], [0, 1, 0]])
        laplacian_B1HW = F.conv2d(luma_BHW.unsqueeze(1), kernel[None, None])
        return RewardScores(laplacian_B1HW.flatten(1).var(1, correction=0))
