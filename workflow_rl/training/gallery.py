"""Keeps the best and the worst group of an iteration: media, rewards and advantages as a tree."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch

from workflow_rl.evaluation.media_files import shown, write_media
from workflow_rl.training.methods.chain import Iteration


def save_groups(run_dir: Path, number: int, iteration: Iteration) -> Path | None:
    """Write the groups with the highest and the lowest mean reward below ``rollouts/``.

    Returns the JSON file, or None when no group has a reward.
    """
    means = iteration.rewards.flatten(1).nanmean(1)
    ranked = [p for p in means.argsort(descending=True).tolist() if math.isfinite(means[p])]
    if not ranked:
        return None
    folder = run_dir / "rollouts" / f"iteration_{number:08d}"
    picked = list(dict.fromkeys([ranked[0], ranked[-1]]))
    groups = [_group(run_dir, folder, iteration, prompt) for prompt in picked]
    path = folder.with_suffix(".json")
    text = json.dumps({"iteration": number, "groups": groups}, allow_nan=False)
    path.write_text(text, encoding="utf-8")
    return path


def _group(run_dir: Path, folder: Path, iteration: Iteration, prompt: int) -> dict[str, Any]:
    samples_per_prompt = iteration.rewards.shape[1]
    rows = range(prompt * samples_per_prompt, (prompt + 1) * samples_per_prompt)
    children = [_sample(run_dir, folder, iteration, 0, row) for row in rows]
    return {
        "prompt": iteration.outputs[0].requests[rows[0]].sample.prompt,
        "reward_mean": _number(iteration.rewards[prompt].nanmean()),
        "children": children,
    }


def _sample(
    run_dir: Path, folder: Path, iteration: Iteration, level: int, row: int
) -> dict[str, Any]:
    """Return one sample of a stage, with the samples of the next stage that descend from it."""
    output = iteration.outputs[level]
    sample = output.requests[row].sample
    advantages = iteration.credit.levels[level].advantages.flatten()
    stem = f"{row:04d}_" + "_".join(map(str, sample.path))
    media = write_media(folder, stem, shown(output.media[row]), output.media_kind, output.fps)
    leaves_per_sample = math.prod(iteration.rewards.shape[level + 2 :])
    leaves = iteration.rewards.flatten()[row * leaves_per_sample : (row + 1) * leaves_per_sample]
    node: dict[str, Any] = {
        "stage": output.stage.name,
        "path": list(sample.path),
        "media": str(media.relative_to(run_dir)),
        "advantage": _number(advantages[row]),
        "reward": _number(leaves.nanmean()),
        "failed": None,
    }
    if level + 1 == len(iteration.outputs):
        node["failed"] = iteration.scores.failures.get(row)
        return node
    branch = iteration.rewards.shape[level + 2]
    children = range(row * branch, (row + 1) * branch)
    node["children"] = [_sample(run_dir, folder, iteration, level + 1, child) for child in children]
    return node


def _number(value: torch.Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
