"""Rules of guidance: their formulas, and one double batch in place of two passes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fake_models import fake_instance
from workflow_rl.errors import UserError
from workflow_rl.models.common import Conditioning
from workflow_rl.models.guidance import (
    CLASSIFIER_FREE,
    EMBEDDED,
    FROM_POSITIVE,
    NO_GUIDANCE,
    NORM_RESCALED,
    Guidance,
    classifier_free,
    from_positive,
    norm_capped,
    norm_capped_guidance,
    norm_rescaled,
)
from workflow_rl.request import TaskType, make_request
from workflow_rl.training.rollout import recompute, rollout_loop

POSITIVE, NEGATIVE = torch.randn(2, 3, 4, 8, generator=torch.Generator().manual_seed(0))


def _conditioning() -> dict[str, torch.Tensor]:
    """Texts of 5 and 3 tokens with their masks, and an image that both passes share."""
    generator = torch.Generator().manual_seed(1)
    rows = {"image": torch.randn(3, 1, 8, generator=generator)}
    for prefix, tokens in (("", 5), ("negative_", 3)):
        rows[f"{prefix}text"] = torch.randn(3, tokens, 8, generator=generator)
        rows[f"{prefix}mask"] = torch.ones(3, tokens, dtype=torch.bool)
    return rows


def _forward(latents: torch.Tensor, conditioning: Conditioning) -> torch.Tensor:
    """A mean over the text's own tokens, so that padding would show."""
    keep = conditioning["mask"][..., None]
    text = (conditioning["text"] * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True)
    return latents * text + conditioning["image"]


@pytest.mark.parametrize(
    "guidance", [CLASSIFIER_FREE, NORM_RESCALED, FROM_POSITIVE, norm_capped_guidance(0.8)]
)
@pytest.mark.parametrize("negative_first", [True, False])
def test_one_double_batch_is_two_passes(guidance: Guidance, negative_first: bool) -> None:
    guidance = replace(guidance, negative_first=negative_first)
    one, two = (
        guidance.velocity(_forward, POSITIVE, _conditioning(), 3.0, batching)
        for batching in ("batched", "sequential")
    )
    torch.testing.assert_close(one, two)
    cond = _conditioning()
    plain = {name: cond[name] for name in ("text", "mask", "image")}
    assert not torch.allclose(two, _forward(POSITIVE, plain))


@pytest.mark.parametrize("guidance", [NO_GUIDANCE, EMBEDDED])
def test_without_a_second_pass_the_forward_is_the_velocity(guidance: Guidance) -> None:
    cond = _conditioning()
    plain = {name: cond[name] for name in ("text", "mask", "image")}
    velocity = guidance.velocity(_forward, POSITIVE, plain, 3.0, "batched")
    assert torch.equal(velocity, _forward(POSITIVE, plain))


def test_neutral_scales() -> None:
    torch.testing.assert_close(classifier_free(POSITIVE, NEGATIVE, 1.0), POSITIVE)
    torch.testing.assert_close(norm_rescaled(POSITIVE, NEGATIVE, 1.0), POSITIVE)
    assert torch.equal(from_positive(POSITIVE, NEGATIVE, 0.0), POSITIVE)
    # A scale g from the prompt's side is 1 + g from the negative prompt's.
    torch.testing.assert_close(
        from_positive(POSITIVE, NEGATIVE, 2.0), classifier_free(POSITIVE, NEGATIVE, 3.0)
    )


def test_the_rescaled_rule_keeps_each_tokens_norm() -> None:
    guided = norm_rescaled(POSITIVE, NEGATIVE, 4.0)
    torch.testing.assert_close(guided.norm(dim=-1), POSITIVE.norm(dim=-1))
    direction = classifier_free(POSITIVE, NEGATIVE, 4.0)
    cosine = torch.cosine_similarity(guided, direction, dim=-1)
    torch.testing.assert_close(cosine, torch.ones_like(cosine))


def test_the_cap_bounds_each_samples_norm_and_nothing_below() -> None:
    free = from_positive(POSITIVE, NEGATIVE, 4.0)
    capped = norm_capped(1.0)(POSITIVE, NEGATIVE, 4.0)
    torch.testing.assert_close(capped.flatten(1).norm(dim=1), POSITIVE.flatten(1).norm(dim=1))
    assert torch.equal(norm_capped(1e3)(POSITIVE, NEGATIVE, 4.0), free)


def test_training_under_another_rule_is_refused() -> None:
    instance = fake_instance(TaskType.T2I)
    request = make_request("t2i", "a cat", num_inference_steps=3, sde_steps=(0,))
    _, record = rollout_loop(instance, "denoise", request)
    assert record is not None
    assert record.guidance == "none"
    with pytest.raises(UserError, match="guided by 'cfg' and training would be by 'none'"):
        list(recompute(instance, replace(record, guidance="cfg")))
