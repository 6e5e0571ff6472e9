"""What a model refuses of a request, in one line each and before any long work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from workflow_rl.card import ModelCard
from workflow_rl.config.families import Grid
from workflow_rl.enums import GuidanceMode, MediaKind
from workflow_rl.errors import UserError
from workflow_rl.models.guidance import Guidance
from workflow_rl.request import DiffusionParams, Request


def check_text_length(asked: int, largest: int) -> int:
    """Return ``asked`` text tokens, if they are 1 to ``largest``."""
    if not 1 <= asked <= largest:
        raise UserError(f"max_sequence_length is {asked}; give 1 to {largest} text tokens")
    return asked


def check_grid(card: ModelCard, params: DiffusionParams, grid: Grid, kind: MediaKind) -> None:
    """Raise a UserError unless the model can make the size and the frame count."""
    for name, size, step in (
        ("height", params.height, grid.height),
        ("width", params.width, grid.width),
    ):
        if size is None or size <= 0 or size % step:
            raise UserError(
                f"{card.model_id} cannot make {name} {size}: "
                f"give a positive multiple of {step} pixels"
            )
        if grid.largest is not None and size > grid.largest:
            raise UserError(
                f"{card.model_id} cannot make {name} {size}: it has positions for {grid.largest} "
                "pixels; give no more"
            )
    if kind is not MediaKind.VIDEO:
        return
    frames = params.num_frames
    if frames is None or frames < 1 or (frames - 1) % grid.frames:
        raise UserError(
            f"{card.model_id} cannot make {frames} frames: give a multiple of {grid.frames} plus 1"
        )
    if frames < grid.fewest_frames:
        raise UserError(
            f"{card.model_id} cannot make {frames} frame, which would be the image it is given: "
            f"give {grid.fewest_frames} or more"
        )


def check_steps(card: ModelCard, params: DiffusionParams, scheduler: Mapping[str, Any]) -> None:
    """Raise a UserError for one step of a schedule that is stretched to a last sigma.

    The only step begins at sigma 1, which no stretch moves: the stock scheduler divides 0 by 0.
    """
    if params.num_inference_steps == 1 and scheduler.get("shift_terminal"):
        raise UserError(
            f"{card.model_id} cannot sample in 1 step: its scheduler stretches the steps to end at "
            f"shift_terminal {scheduler['shift_terminal']}; give num_inference_steps of 2 or more"
        )


def check_guidance(
    card: ModelCard,
    request: Request,
    params: DiffusionParams,
    guidance: Guidance,
    *,
    cfg_above: float,
    shapes_cfg: bool,
) -> None:
    """Raise a UserError for what guidance would ignore.

    Parameters
    ----------
    cfg_above
        Classifier-free guidance is active for scales above this.
    shapes_cfg
        The model takes ``cfg_normalization`` and ``cfg_truncation``.
    """
    cfg = guidance.mode is GuidanceMode.CFG
    if request.negative_prompt and guidance.mode is GuidanceMode.EMBEDDED:
        raise UserError(
            f"{card.model_id} takes no negative_prompt: its guidance is embedded (distilled); "
            "leave it out, or use a checkpoint without guidance_embeds and guidance_scale > 1"
        )
    if request.negative_prompt and not cfg:
        raise UserError(
            f"{card.model_id} would ignore negative_prompt without classifier-free guidance; "
            f"set guidance_scale > {cfg_above:g} or leave negative_prompt out"
        )
    if params.guidance_scale_2 is not None and (len(card.policies) < 2 or not cfg):
        raise UserError(
            f"{card.model_id} would ignore guidance_scale_2, which needs two experts and "
            "classifier-free guidance; leave it out"
        )
    for name in ("cfg_normalization", "cfg_truncation"):
        value = getattr(params, name)
        if value is not None and not (shapes_cfg and cfg):
            raise UserError(
                f"{card.model_id} would ignore {name}, which needs a Z-Image model and "
                "classifier-free guidance; leave it out"
            )


def check_images(images: Sequence[torch.Tensor]) -> None:
    """Raise a UserError if conditioning images [3, H, W] of one batch differ in size."""
    sizes = sorted({tuple(image.shape[-2:]) for image in images})
    if len(sizes) > 1:
        raise UserError(
            f"the images of one batch differ in size ({sizes}); resize them to one size, or "
            "run them apart"
        )
