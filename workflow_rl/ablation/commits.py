"""Keeps an ablation to the commits of the hub's models that its first runs began with."""

from __future__ import annotations

import json
from pathlib import Path

from workflow_rl.config import RunConfig
from workflow_rl.config.hub import is_hub_id
from workflow_rl.config.run_dir import RUN_FILE


def keep_commits(config: RunConfig, out: Path) -> RunConfig:
    """Return the configuration at the commits of an earlier run in the ablation's directory.

    Only where a stage names a hub id without a revision; to follow a branch, name it as the
    revision. Otherwise any commit on the hub would make the runs that are there another
    configuration's. A ``run.json`` that cannot be read is passed over.
    """
    stages = dict(config.stages)
    known = _recorded(out)
    for name, stage in stages.items():
        if stage.model is None or stage.revision is not None or not is_hub_id(stage.model):
            continue
        commit = known.get((name, str(stage.model)))
        if commit is not None:
            stages[name] = stage.model_copy(update={"revision": commit})
    return config.model_copy(update={"stages": stages})


def _recorded(out: Path) -> dict[tuple[str, str], str]:
    """Return the commits that the runs recorded, by stage and repository; the first run's goes."""
    found: dict[tuple[str, str], str] = {}
    for path in sorted(out.glob(f"*/seed*/{RUN_FILE}")):
        try:
            models = json.loads(path.read_text(encoding="utf-8"))["models"]
            for stage, model in models.items():
                found.setdefault((stage, model["repo"]), model["commit"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found
