"""Whether a stage's guidance fits its model, from JSON alone: before a weight is read."""

from collections.abc import Sequence

from workflow_rl.config.stage import StageConfig
from workflow_rl.enums import GuidanceMode
from workflow_rl.errors import UserError


def guidance_mode(
    stage: StageConfig, modes: Sequence[GuidanceMode], cfg_above: float
) -> GuidanceMode:
    """Return the mode that a stage asks for; where it names none, the one that its scale means."""
    if stage.guidance is not None:
        return stage.guidance
    if GuidanceMode.EMBEDDED in modes:
        return GuidanceMode.EMBEDDED
    if stage.guidance_scale is not None and stage.guidance_scale > cfg_above:
        return GuidanceMode.CFG
    return GuidanceMode.NONE


def check_stage_guidance(
    where: str,
    stage: StageConfig,
    modes: Sequence[GuidanceMode],
    cfg_above: float,
    *,
    has_experts: bool,
    shapes_cfg: bool,
) -> None:
    """Refuse guidance that the model lacks, that contradicts itself, or that would be ignored.

    Parameters
    ----------
    where
        Configuration key of the stage, for messages: ``stages.t2i``.
    modes
        What the folder's model has.
    cfg_above
        Classifier-free guidance is active for scales above this.
    has_experts
        Two transformers share the denoising.
    shapes_cfg
        The family takes ``cfg_normalization`` and ``cfg_truncation``.

    Raises
    ------
    UserError
        At the first fault.
    """
    mode = guidance_mode(stage, modes, cfg_above)
    asked = stage.guidance_scale
    if mode not in modes:
        raise UserError(
            f"{where} asks for {mode} guidance (guidance_scale {asked}), but this model has only "
            f"{', '.join(modes)}; leave guidance and guidance_scale out, or use another checkpoint"
        )
    guides = asked is not None and asked > cfg_above
    if mode != GuidanceMode.EMBEDDED and (mode == GuidanceMode.CFG) != guides:
        raise UserError(
            f"{where}.guidance is {mode}, but guidance_scale is {asked}, and this model guides "
            f"above {cfg_above:g}; change one of the two"
        )
    if stage.negative_prompt and mode != GuidanceMode.CFG:
        mend = "leave it out"
        if GuidanceMode.CFG in modes:
            mend = f"set guidance_scale > {cfg_above:g} or leave it out"
        raise UserError(f"{where}.negative_prompt would be ignored: guidance is {mode}; {mend}")
    if stage.guidance_scale_2 is not None and (not has_experts or mode != GuidanceMode.CFG):
        raise UserError(
            f"{where}.guidance_scale_2 needs a model of two experts and classifier-free guidance; "
            "leave it out"
        )
    if not (shapes_cfg and mode == GuidanceMode.CFG):
        _refuse_shaping(where, stage)


def _refuse_shaping(where: str, stage: StageConfig) -> None:
    given = {
        "cfg_normalization": stage.cfg_normalization,
        "cfg_truncation": stage.cfg_truncation,
    }
    for name, value in given.items():
        if value is not None:
            raise UserError(
                f"{where}.{name} needs a Z-Image model and classifier-free guidance; leave it out"
            )
