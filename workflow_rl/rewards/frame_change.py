"""Amount of motion, for any video: how much its frames differ from one to the next."""

from workflow_rl.rewards.base import RewardBatch, RewardScores


class FrameChange:
    """Mean absolute change between consecutive frames, in [0, 1]; needs no weights.

    A camera pan, flicker and noise count as motion too: a demonstration, or one term among others.
    """

    name = "frame_change"
    media_kind = "video"

    def __call__(self, batch: RewardBatch) -> RewardScores:
        """Score ``videos_BCTHW``; a video of one frame has no change and scores 0."""
        videos_BCTHW = batch.media.float()
        if videos_BCTHW.shape[2] < 2:
            return RewardScores(videos_BCTHW.new_zeros(len(batch)))
        return RewardScores(videos_BCTHW.diff(dim=2).abs().flatten(1).mean(1))
