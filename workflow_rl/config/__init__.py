"""What a run is told: typed configuration and prompt files. Reads without PyTorch."""

from workflow_rl.config.loader import load_config
from workflow_rl.config.prompts import PromptRecord, check_first_frames, load_prompts
from workflow_rl.config.run import RewardConfig, RunConfig
from workflow_rl.config.stage import StageConfig

__all__ = [
    "PromptRecord",
    "RewardConfig",
    "RunConfig",
    "StageConfig",
    "check_first_frames",
    "load_config",
    "load_prompts",
]
