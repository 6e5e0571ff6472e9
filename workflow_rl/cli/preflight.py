"""What can be found wrong with a run before a model is loaded, in the order of its cost.

All but `check_hardware` and `check_rewards_import` work without PyTorch. Nothing here writes.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

from workflow_rl.config import (
    PromptRecord,
    RunConfig,
    StageConfig,
    check_first_frames,
    load_prompts,
)
from workflow_rl.config.first_frames import FirstFrame, open_first_frames
from workflow_rl.config.hub import model_path, pinned
from workflow_rl.config.model_folder import check_model_folder
from workflow_rl.config.reward_checks import credit_fault, media_fault
from workflow_rl.embedded.folders import EMBEDDED_FOLDERS
from workflow_rl.errors import UserError
from workflow_rl.platform import FLOW_SDE_STEP, kernels
from workflow_rl.rewards.media_needs import media_needs
from workflow_rl.rewards.registry import REWARDS, build_rewards, nearest


def check_hardware(config: RunConfig) -> None:
    """Try the device and the attention backends that a configuration names.

    It comes first, since `check_inputs` may fetch models. Where neither is named it takes no time.

    Raises
    ------
    UserError
        If one is unknown or does not work on this machine.
    """
    backends = [stage.memory.attention_backend for stage in config.stages.values()]
    if config.training.device in (None, "cpu") and not any(backends):
        return
    from workflow_rl.training.hardware import check_attention, choose_device

    check_attention(config.stages, choose_device(config.training.device))


def check_inputs(config: RunConfig) -> None:
    """Check everything that a configuration names: prompts, models, kernels, rewards, loggers.

    Raises
    ------
    UserError
        At the first fault.
    """
    prompts = read_prompts(config.data.prompts, config.stages)
    available = len(prompts)
    if available < config.data.prompts_per_iteration:
        raise UserError(
            f"data.prompts_per_iteration is {config.data.prompts_per_iteration}, but "
            f"{config.data.prompts} has {available} prompts; lower it or add prompts"
        )
    held_out = config.data.eval_prompts
    eval_prompts = [] if held_out is None else read_prompts(held_out, config.stages)
    _check_reward_names(config)
    _check_reward_media(config)
    _check_loggers(config)
    check_stages(config.stages)
    check_evaluation_steps(config, check_stage_model)
    for records in (prompts, eval_prompts):
        check_frames(config.stages, [r.first_frame for r in records if r.first_frame is not None])


def check_stages(stages: Mapping[str, StageConfig]) -> None:
    """Check what it takes to make samples: each stage's kernel and model.

    Raises
    ------
    UserError
        At the first fault.
    """
    for name, stage in stages.items():
        _check_kernel(name, stage)
    _check_models(stages)


def with_commits(config: RunConfig) -> RunConfig:
    """Return a checked configuration with the commit that each hub id was fetched at."""
    stages = {name: pinned(s, f"stages.{name}.model") for name, s in config.stages.items()}
    return config.model_copy(update={"stages": stages})


def check_evaluation_steps(config: RunConfig, check: Callable[[str, StageConfig], None]) -> None:
    """Check each stage with the steps of evaluations; ``check`` is that of a stage's model.

    Raises
    ------
    UserError
        If a model can't make so few.
    """
    steps = config.evaluation.num_inference_steps
    if steps is None:
        return
    for name, stage in config.stages.items():
        try:
            check(name, stage.model_copy(update={"num_inference_steps": steps}))
        except UserError as error:
            raise UserError(
                f"evaluation.num_inference_steps is {steps} for every stage: {error}"
            ) from None


def _check_loggers(config: RunConfig) -> None:
    for logger, settings in (("wandb", config.logging.wandb), ("trackio", config.logging.trackio)):
        if settings is not None and find_spec(logger) is None:
            raise UserError(
                f"logging.{logger} is set, but {logger} is not installed; "
                f"pip install 'workflow-rl[{logger}]' or set it to null"
            )


def read_prompts(path: Path, stages: Mapping[str, StageConfig]) -> list[PromptRecord]:
    """Read prompts, and check that they have first frames just where the chain needs them.

    Raises
    ------
    UserError
        As `load_prompts` and `check_first_frames`.
    """
    records = load_prompts(path, list(stages))
    check_first_frames(path, records, stages)
    return records


def check_frames(stages: Mapping[str, StageConfig], frames: list[FirstFrame]) -> None:
    """Decode every first frame, and check that the first stage's model can make their size.

    Raises
    ------
    UserError
        If one is no whole image, they differ in size, or the model cannot make that size.
    """
    name, stage = next(iter(stages.items()))
    if stage.height is not None and stage.width is not None:
        for _ in open_first_frames(frames, (stage.width, stage.height)):
            pass
        return
    sizes = {image.size for image in open_first_frames(frames, None)}
    for size in sizes:
        _check_given_size(name, stage, size, f"the first frames, such as {frames[0].path},")


def _check_models(stages: Mapping[str, StageConfig]) -> None:
    """Check each stage's model; one without a size of its own takes the size of what it is given.

    The size of images that are given, or that a model has by itself, is not known here.
    """
    size, source = None, ""
    for name, stage in stages.items():
        check_stage_model(name, stage)
        if stage.height is not None and stage.width is not None:
            size, source = (stage.width, stage.height), f"the images from stage {name!r}"
        elif stage.task == "t2i":
            size = None
        elif size is not None:
            _check_given_size(name, stage, size, source)


def _check_given_size(name: str, stage: StageConfig, size: tuple[int, int], images: str) -> None:
    width, height = size
    try:
        check_stage_model(name, stage.model_copy(update={"height": height, "width": width}))
    except UserError as error:
        raise UserError(
            f"{images} are {width} x {height} pixels and stage {name!r} has no size of its own: "
            f"{error}"
        ) from None


def check_stage_model(name: str, stage: StageConfig) -> None:
    """Check a stage's model folder, and its size and frames against it; None is the embedded one.

    Raises
    ------
    UserError
        As `workflow_rl.config.model_folder.check_model_folder`.
    """
    check_model_folder(model_folder(name, stage), f"stages.{name}.model", stage)


def model_folder(name: str, stage: StageConfig) -> Path:
    """Return the folder of a stage's model; where it names none, the embedded one of its task.

    Raises
    ------
    UserError
        As `workflow_rl.config.hub.model_path`, which fetches a hub id.
    """
    folder = model_path(stage, f"stages.{name}.model")
    return EMBEDDED_FOLDERS[stage.task] if folder is None else folder


def check_rewards_import(config: RunConfig) -> None:
    """Import the rewards; those that ship with the project and most others import PyTorch.

    Raises
    ------
    UserError
        If a reward can't be imported, does not take its arguments, or has nothing to compare.
    """
    terms = build_rewards([reward.model_dump() for reward in config.rewards]).terms
    samples = {name: stage.samples for name, stage in config.stages.items()}
    fault = credit_fault(terms, samples, (), config.credit.combine)
    if fault is not None:
        raise UserError(fault)


def _check_kernel(name: str, stage: StageConfig) -> None:
    known = kernels.names(FLOW_SDE_STEP)
    if stage.kernel is not None and stage.kernel not in known:
        raise UserError(
            f"stages.{name}.kernel is '{stage.kernel}'; {nearest(stage.kernel, known)} "
            "(see `workflow-rl kernels`)"
        )


def _check_reward_names(config: RunConfig) -> None:
    for index, reward in enumerate(config.rewards):
        if reward.name is not None and reward.name not in REWARDS:
            raise UserError(
                f"rewards.{index}.name is '{reward.name}'; {nearest(reward.name, list(REWARDS))}, "
                "or give a callable: module:function"
            )


def _check_reward_media(config: RunConfig) -> None:
    for index, reward in enumerate(config.rewards):
        if reward.name is None:
            continue
        needs = media_needs(reward.name)
        fault = media_fault(reward.name, needs, reward.on, config.stages)
        if fault is not None:
            raise UserError(f"rewards.{index}{fault}")
