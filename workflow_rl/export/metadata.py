"""What an exported file says about itself, in its safetensors header."""

from __future__ import annotations

from pathlib import Path

from workflow_rl import __version__
from workflow_rl.config import RunConfig
from workflow_rl.export.trained import TrainedStage

PREFIX = "workflow_rl."
COMPONENT = f"{PREFIX}component"


def base_model_name(folder: Path) -> str:
    """Return the hub id of a folder in the hub's cache, else the folder's name."""
    path = folder.resolve()
    for parent in path.parents:
        if parent.name.startswith("models--"):
            return parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def describe_export(config: RunConfig, stage_name: str, trained: TrainedStage) -> dict[str, str]:
    """Return the header's entries: base model, method, version, run, stage, iteration, weights."""
    stage = config.stages[stage_name]
    what = "LoRA" if stage.lora is not None else "weights"
    entries = {
        "base_model": base_model_name(trained.card.source),
        "family": trained.card.family,
        "method": f"PPO-clip on the {what} of the chain, {config.credit.rule} credit, "
        f"{stage.sde.kind} steps",
        "version": __version__,
        "run": config.output_dir.resolve().name,
        "run_fingerprint": config.fingerprint(),
        "stage": stage_name,
        "iteration": str(trained.iteration),
        "weights": trained.weights,
    }
    # The stock libraries read the format, and nothing else of these.
    return {"format": "pt"} | {f"{PREFIX}{key}": value for key, value in entries.items()}
