"""How little a video flickers, as VBench measures it; needs no network."""

from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.pixels import to_uint8


class TemporalFlickering:
    """(255 − mean absolute change between consecutive frames) / 255, in [0, 1]; higher is steadier.

    VBench, Huang et al. 2023 (arXiv 2311.17982). A frozen video scores 1: pair it with a reward of
    motion.
    """

    name = "temporal_flickering"
    media_kind = "video"

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score ``videos_BCTHW``; a video of one frame fails."""
        if batch.media.shape[2] < 2:
            raise ValueError("a video of one frame cannot flicker")
        changes_B = [to_uint8(video).float().diff(dim=1).abs().mean() for video in batch.media]
        scores = batch.media.new_tensor([(255 - float(change)) / 255 for change in changes_B])
        return RewardScores(scores)
