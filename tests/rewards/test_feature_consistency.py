"""Frames are compared by the features of real DINO classes, with tiny random weights."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTModel

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import Reward, RewardBatch, RewardScores, score_safely
from workflow_rl.rewards.feature_consistency import (
    Features,
    FirstFrameConsistency,
    SubjectConsistency,
    imagenet_pixels,
)

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}


@pytest.fixture(scope="module", params=["vit", "dinov2"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    path: Path = tmp_path_factory.mktemp(request.param)
    if request.param == "vit":  # DINO's checkpoints have no pooler
        model = ViTModel(ViTConfig(**SHAPE, intermediate_size=16), add_pooling_layer=False)
    else:
        model = Dinov2Model(Dinov2Config(**SHAPE, mlp_ratio=1))
    model.save_pretrained(path)
    return str(path)


def clips() -> torch.Tensor:
    """A still clip and one of four different frames, wider than they are high."""
    videos = torch.rand(2, 3, 4, 24, 40, generator=torch.Generator().manual_seed(0))
    videos[0] = videos[0, :, :1]
    return videos


def score(reward: Reward, videos: torch.Tensor) -> RewardScores:
    names = [str(row) for row in range(len(videos))]
    return score_safely(reward, RewardBatch(names, names, videos, "video"))


def test_subject_consistency_is_vbenchs_formula(folder: str) -> None:
    reward = SubjectConsistency(folder, size=32)
    still, changing = score(reward, clips()).scores.tolist()
    f = Features(folder, 32, "cpu", "float32", 2)(clips()[1])
    terms = [max(0.0, float(f[t] @ f[t - 1])) + max(0.0, float(f[t] @ f[0])) for t in (1, 2, 3)]
    assert still == pytest.approx(1)
    assert changing == pytest.approx(sum(terms) / 6, abs=1e-5)
    assert changing < 1


def test_first_frame_consistency_is_the_mean_or_the_least_similarity(folder: str) -> None:
    f = Features(folder, 32, "cpu", "float32", 8)(clips()[1])
    similarities = [float(f[t] @ f[0]) for t in (1, 2, 3)]
    for reduce, expected in (("mean", sum(similarities) / 3), ("min", min(similarities))):
        scores = score(FirstFrameConsistency(reduce, folder, size=32), clips()).scores  # type: ignore[arg-type]
        assert scores.tolist() == pytest.approx([1, expected], abs=1e-5)


def test_features_are_the_models_cls_vector(folder: str) -> None:
    features = Features(folder, 32, "cpu", "float32", 8)
    square = torch.rand(3, 1, 32, 32)
    hidden = features.model.get()(imagenet_pixels(square.movedim(1, 0), 32)).last_hidden_state
    torch.testing.assert_close(features(square), F.normalize(hidden[:, 0], dim=-1))


def test_pixels_are_resized_by_the_shorter_side_and_normalised() -> None:
    pixels = imagenet_pixels(torch.full((1, 3, 48, 83), 0.5), 24)
    assert pixels.shape == (1, 3, 24, 41)
    expected = (128 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor(
        [0.229, 0.224, 0.225]
    )
    torch.testing.assert_close(pixels[0, :, 5, 5], expected)


def test_one_frame_fails_and_other_choices_are_refused(folder: str) -> None:
    one_frame = clips()[:, :, :1]
    assert score(SubjectConsistency(folder), one_frame).scores.isnan().all()
    with pytest.raises(UserError, match="mean or min"):
        FirstFrameConsistency("max")  # type: ignore[arg-type]


def test_weights_that_are_not_there_end_the_run() -> None:
    with pytest.raises(UserError, match="cannot load no/such"):
        score(SubjectConsistency("no/such"), clips())
