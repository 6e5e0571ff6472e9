"""Reads the first frames of a chain that begins with an image-to-video stage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workflow_rl.config import PromptRecord
from workflow_rl.config.first_frames import open_first_frames
from workflow_rl.errors import UserError
from workflow_rl.request import DiffusionParams
from workflow_rl.workflow.workflow import TAKES_IMAGE, WorkflowStage


def load_first_frames(
    stage: WorkflowStage, params: DiffusionParams, prompts: Sequence[PromptRecord]
) -> list[torch.Tensor | None]:
    """Return each prompt's first frame, float32 [3, H, W] in [0, 1]; None where none is taken.

    Prompts with the same frame get the same tensor object, so that it is encoded once.

    Parameters
    ----------
    stage, params
        First stage of the chain; its height and width, if it has any, are what frames are cut to.

    Raises
    ------
    UserError
        If a frame is missing, is given to a stage that takes none, is not a whole image, or
        differs from another in size where the stage has no size of its own.
    """
    takes_image = stage.task in TAKES_IMAGE
    for prompt in prompts:
        if takes_image and prompt.first_frame is None:
            raise UserError(
                f"stage {stage.name!r} starts from an image, but {prompt.prompt!r} has no first "
                "frame; give each prompt one"
            )
        if not takes_image and prompt.first_frame is not None:
            raise UserError(
                f"{prompt.prompt!r} has the first frame {prompt.first_frame.path}, but stage "
                f"{stage.name!r} ({stage.task}) takes none; leave it out"
            )
    frames = [prompt.first_frame for prompt in prompts if prompt.first_frame is not None]
    if not frames:
        return [None] * len(prompts)
    distinct = list(dict.fromkeys(frames))
    height, width = params.height, params.width
    size = None if height is None or width is None else (width, height)
    loaded = {
        frame: torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() / 255
        for frame, image in zip(distinct, open_first_frames(distinct, size), strict=True)
    }
    return [loaded[frame] for frame in frames]
