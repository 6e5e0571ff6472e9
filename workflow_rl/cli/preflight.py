"""What can be found wrong with a run before a model is loaded, in the order of its cost.

Everything but `check_rewards_import` works without PyTorch. Nothing here writes.
"""

from importlib.util import find_spec
from pathlib import Path

import workflow_rl
from workflow_rl.config import RunConfig, StageConfig, load_prompts
from workflow_rl.config.model_folder import check_model_folder
from workflow_rl.errors import UserError
from workflow_rl.platform import FLOW_SDE_STEP, kernels
from workflow_rl.rewards.registry import REWARDS, build_rewards, nearest

EMBEDDED_FOLDERS = {"t2i": "tiny-flux-t2i", "i2v": "tiny-wan-i2v"}
"""Task → folder of the embedded model, below ``workflow_rl/embedded/checkpoints``."""


def check_inputs(config: RunConfig) -> None:
    """Check everything that a configuration names: prompts, models, kernels, rewards, loggers.

    Raises
    ------
    UserError
        At the first fault.
    """
    stages = list(config.stages)
    available = len(load_prompts(config.data.prompts, stages))
    if available < config.data.prompts_per_iteration:
        raise UserError(
            f"data.prompts_per_iteration is {config.data.prompts_per_iteration}, but "
            f"{config.data.prompts} has {available} prompts; lower it or add prompts"
        )
    if config.data.eval_prompts is not None:
        load_prompts(config.data.eval_prompts, stages)
    for name, stage in config.stages.items():
        check_stage_model(name, stage)
        _check_kernel(name, stage)
    _check_reward_names(config)
    for logger, settings in (("wandb", config.logging.wandb), ("trackio", config.logging.trackio)):
        if settings is not None and find_spec(logger) is None:
            raise UserError(
                f"logging.{logger} is set, but {logger} is not installed; "
                f"pip install 'workflow-rl[{logger}]' or set it to null"
            )


def check_stage_model(name: str, stage: StageConfig) -> None:
    """Check a stage's model folder, and its size and frames against it; None is the embedded one.

    Raises
    ------
    UserError
        As `workflow_rl.config.model_folder.check_model_folder`.
    """
    folder = embedded_folder(stage.task) if stage.model is None else stage.model
    check_model_folder(folder, f"stages.{name}.model", stage)


def embedded_folder(task: str) -> Path:
    """Return the folder of the embedded model that does ``task``."""
    package = Path(workflow_rl.__file__).parent
    return package / "embedded" / "checkpoints" / EMBEDDED_FOLDERS[task]


def check_rewards_import(config: RunConfig) -> None:
    """Import the rewards; those that ship with the project and most others import PyTorch.

    Raises
    ------
    UserError
        If a reward can't be imported or does not take its arguments.
    """
    build_rewards([reward.model_dump() for reward in config.rewards])


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
