"""An image reward scores a video by its frames, and a frame that fails fails its video."""

import math

import pytest
import torch

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, RewardScores, score_safely
from workflow_rl.rewards.frames import FrameReduction, FramesArg, score_frames


class Brightness:
    """The mean of an image; fails where it is above 0.9."""

    name = "brightness"
    media_kind = "any"

    def __init__(self, frames: FramesArg, chunk: int = 3) -> None:
        self.frames = FrameReduction.parse(frames)
        self.chunk = chunk
        self.seen: list[str] = []

    def __call__(self, batch: RewardBatch) -> RewardScores:
        return score_frames(batch, self.frames, self.score_images, self.chunk)

    def score_images(self, images: RewardBatch) -> RewardScores:
        assert len(images) <= self.chunk
        self.seen += images.sample_ids
        means = images.media.flatten(1).mean(1)
        failures = dict.fromkeys((means > 0.9).nonzero().flatten().tolist(), "too bright")
        return RewardScores(means, failures, {"double": 2 * means})


def videos(*brightness: list[float]) -> RewardBatch:
    """Videos whose frames have the given brightness."""
    media = torch.tensor(brightness)[:, None, :, None, None].expand(-1, 3, -1, 2, 2)
    names = [f"v{row}" for row in range(len(brightness))]
    return RewardBatch(names, names, media, "video")


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ("mean", [0.3, 0.4]),
        ("min", [0.0, 0.2]),
        ("first", [0.2, 0.2]),
        ("last", [0.4, 0.4]),
        ({"reduce": "top_fraction", "fraction": 0.5}, [0.5, 0.5]),
        ({"reduce": "top_fraction", "fraction": 0.01}, [0.6, 0.6]),
        ({"every": 2}, [0.4, 0.4]),
        ({"reduce": "min", "every": 2}, [0.2, 0.2]),
    ],
)
def test_frames_are_reduced_as_asked(frames: FramesArg, expected: list[float]) -> None:
    batch = videos([0.2, 0.0, 0.6, 0.4], [0.2, 0.4, 0.6, 0.4])
    result = score_safely(Brightness(frames), batch)
    torch.testing.assert_close(result.scores, torch.tensor(expected))
    torch.testing.assert_close(result.components["double"], 2 * torch.tensor(expected))


def test_only_the_frames_that_count_are_scored() -> None:
    reward = Brightness("last")
    reward(videos([0.1, 0.2], [0.3, 0.4]))
    assert reward.seen == ["v0/1", "v1/1"]


def test_an_image_is_scored_as_it_is() -> None:
    images = RewardBatch(["a", "b"], ["0", "1"], torch.full((2, 3, 2, 2), 0.5), "image")
    assert score_safely(Brightness("min"), images).scores.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("how", ["mean", "min", "top_fraction"])
def test_one_frame_that_fails_fails_its_video_and_no_other(how: str) -> None:
    result = score_safely(Brightness(how), videos([0.1, 0.2, 1.0], [0.1, 0.2, 0.3]))
    assert result.scores.isnan().tolist() == [True, False]
    assert result.failures == {0: "frame 2: too bright"}


def test_the_best_fraction_of_a_failed_frame_is_not_a_number() -> None:
    reduction = FrameReduction("top_fraction", 0.5)
    assert reduction(torch.tensor([[1.0, math.nan]])).isnan().all()


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ("median", "mean, min"),
        ({"reduc": "mean"}, "no key 'reduc'"),
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": "half"}, "fraction"),
        ({"every": 0}, "every"),
        ({"every": 1.5}, "every"),
    ],
)
def test_what_cannot_be_done_is_refused(frames: FramesArg, words: str) -> None:
    with pytest.raises(UserError, match=words):
        FrameReduction.parse(frames)
