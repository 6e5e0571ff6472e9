"""Guidance as a policy: how a scale and a second forward pass enter the velocity.

One object serves, rolls out and trains; its name is kept in the behaviour record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from workflow_rl.enums import CFGBatching, GuidanceMode
from workflow_rl.errors import UserError
from workflow_rl.models.common import NEGATIVE, Conditioning, pad_tokens
from workflow_rl.request import DiffusionParams

Forward = Callable[[torch.Tensor, Conditioning], torch.Tensor]
"""One forward pass: latents [B, ...] and batched conditioning to a velocity [B, ...]."""

Combine = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
"""(velocity under the prompt, velocity under the negative prompt, scale) to the guided velocity."""


@dataclass(frozen=True)
class Guidance:
    """One rule of guidance.

    Parameters
    ----------
    name
        What the behaviour record calls it.
    mode
        Which kind of rule it is; ``CFG`` takes two forward passes, the others one.
    combine
        Makes the guided velocity of the two; ``CFG`` only.
    negative_first
        Order of the halves of a batched ``CFG`` forward pass, as the stock pipeline has it.
    """

    name: str
    mode: GuidanceMode
    combine: Combine | None = None
    negative_first: bool = True

    def velocity(
        self,
        forward: Forward,
        latents: torch.Tensor,
        conditioning: Conditioning,
        scale: float | None,
        batching: CFGBatching,
    ) -> torch.Tensor:
        """Return the velocity [B, ...] after guidance.

        Under ``CFG`` entries named ``negative_<name>`` replace ``<name>`` in the second pass;
        ``batched`` makes both passes one, with the batch doubled.
        """
        positive = {k: v for k, v in conditioning.items() if not k.startswith(NEGATIVE)}
        if self.combine is None:
            return forward(latents, positive)
        if scale is None:
            raise ValueError("classifier-free guidance needs a scale")
        negative = positive | {
            k.removeprefix(NEGATIVE): v for k, v in conditioning.items() if k.startswith(NEGATIVE)
        }
        if batching == "sequential":
            return self.combine(forward(latents, positive), forward(latents, negative), scale)
        halves = (negative, positive) if self.negative_first else (positive, negative)
        both = forward(torch.cat([latents, latents]), _join(*halves))
        first, second = both.chunk(2)
        if self.negative_first:
            return self.combine(second, first, scale)
        return self.combine(first, second, scale)


def _join(first: Conditioning, second: Conditioning) -> dict[str, torch.Tensor]:
    """Return both on the batch axis; the shorter token axis is padded with zeros."""
    return {name: torch.cat(pad_tokens([first[name], second[name]], 1)) for name in first}


def classifier_free(positive: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """Return v_neg + g (v_pos - v_neg) (Ho & Salimans 2022, eq. 6)."""
    return negative + scale * (positive - negative)


def norm_rescaled(positive: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """Return classifier-free guidance with each token's norm put back to that of v_pos.

    ``QwenImagePipeline``: c |v_pos| / |c| over the last axis, c the guided velocity.
    """
    guided = classifier_free(positive, negative, scale)
    length = torch.linalg.vector_norm(guided, dim=-1, keepdim=True)
    return guided * (torch.linalg.vector_norm(positive, dim=-1, keepdim=True) / length)


def from_positive(positive: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
    """Return v_pos + g (v_pos - v_neg), in which 0 is no guidance (``ZImagePipeline``)."""
    return positive + scale * (positive - negative)


def norm_capped(cap: float) -> Combine:
    """Return :func:`from_positive` with a sample's norm kept to ``cap`` times that of v_pos.

    ``ZImagePipeline`` with ``cfg_normalization``; the norm is over a whole sample.
    """

    def combine(positive: torch.Tensor, negative: torch.Tensor, scale: float) -> torch.Tensor:
        guided = from_positive(positive, negative, scale)
        rows = (-1, *([1] * (guided.ndim - 1)))
        largest = cap * torch.linalg.vector_norm(positive.flatten(1), dim=1)
        length = torch.linalg.vector_norm(guided.flatten(1), dim=1)
        return guided * (largest / length).clamp(max=1.0).reshape(rows)

    return combine


NO_GUIDANCE = Guidance("none", GuidanceMode.NONE)
EMBEDDED = Guidance("embedded", GuidanceMode.EMBEDDED)
CLASSIFIER_FREE = Guidance("cfg", GuidanceMode.CFG, classifier_free)
NORM_RESCALED = Guidance("cfg_norm_rescaled", GuidanceMode.CFG, norm_rescaled)
FROM_POSITIVE = Guidance("cfg_from_positive", GuidanceMode.CFG, from_positive, negative_first=False)


def norm_capped_guidance(cap: float) -> Guidance:
    """Return Z-Image's capped rule under a name that says the cap."""
    return Guidance(
        f"cfg_from_positive_cap_{cap:g}", GuidanceMode.CFG, norm_capped(cap), negative_first=False
    )


GuidanceTable = Mapping[GuidanceMode, Guidance]
"""The rules a model has, one per mode."""


def guidance_table(*rules: Guidance) -> GuidanceTable:
    """Return the rules by their modes."""
    return {rule.mode: rule for rule in rules}


def choose_guidance(
    rules: GuidanceTable, params: DiffusionParams, cfg_above: float, *, model_id: str
) -> Guidance:
    """Return the rule that a request's parameters ask for, of those that a model has.

    Parameters
    ----------
    cfg_above
        Classifier-free guidance is active for scales above this.
    model_id
        For messages.

    Raises
    ------
    UserError
        If the model lacks the mode, or mode and scale contradict each other.
    """
    mode = params.guidance
    if mode is None:
        scale = params.guidance_scale
        if GuidanceMode.EMBEDDED in rules:
            mode = GuidanceMode.EMBEDDED
        elif scale is not None and scale > cfg_above:
            mode = GuidanceMode.CFG
        else:
            mode = GuidanceMode.NONE
    if mode not in rules:
        raise UserError(
            f"{model_id} has no {mode} guidance (it has {', '.join(rules)});"
            " leave guidance and guidance_scale out, or use another checkpoint"
        )
    scaled = params.guidance_scale is not None and params.guidance_scale > cfg_above
    if mode != GuidanceMode.EMBEDDED and (mode == GuidanceMode.CFG) != scaled:
        raise UserError(
            f"guidance is {mode}, but guidance_scale is {params.guidance_scale}; "
            f"{model_id} guides above {cfg_above:g}: change one of the two"
        )
    return rules[mode]
