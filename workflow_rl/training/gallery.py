"""Keeps groups of an iteration to look at: media, rewards and advantages as a tree."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from workflow_rl.evaluation.media_files import LostMedia, shown
from workflow_rl.training.methods.chain import Iteration
from workflow_rl.whole_files import write_whole


def save_groups(run_dir: Path, number: int, iteration: Iteration, groups: int = 2) -> LostMedia:
    """Write ``groups`` of an iteration below ``rollouts/``: media, and a JSON file that is whole.

    They are the prompts with the highest and the lowest mean reward and others at even distances
    between them; beside those, the first prompt without any reward, where there is one.

    Returns
    -------
    LostMedia
        What the disk refused. Where it refused the JSON file, nothing of the iteration is left.
    """
    lost = LostMedia()
    folder = run_dir / "rollouts" / f"iteration_{number:08d}"
    ranked = _ranked(iteration.rewards.flatten(1).nanmean(1).tolist())
    failed = [p for p in range(len(iteration.rewards)) if p not in ranked]
    picked = [(ranked[rank], rank + 1) for rank in _spread(len(ranked), groups)]
    saved = [
        {**_group(run_dir, folder, iteration, prompt, lost), "rank": rank, "ranked": len(ranked)}
        for prompt, rank in picked
    ]
    if groups:
        saved += [_group(run_dir, folder, iteration, prompt, lost) for prompt in failed[:1]]
    if saved:
        record = {"iteration": number, "groups": saved, **lost.to_json()}
        _write_json(folder, record, lost)
    return lost


def _write_json(folder: Path, record: dict[str, Any], lost: LostMedia) -> None:
    try:
        write_whole(folder.with_suffix(".json"), json.dumps(record, allow_nan=False))
    except OSError as error:
        lost.add(error)
        shutil.rmtree(folder, ignore_errors=True)


def _ranked(means: Sequence[float]) -> list[int]:
    """Return the prompts that have a reward, the best first."""
    known = [p for p, mean in enumerate(means) if math.isfinite(mean)]
    return sorted(known, key=lambda p: -means[p])


def _spread(count: int, most: int) -> list[int]:
    """Return at most ``most`` of ``range(count)``: the first, the last, evenly between."""
    if most <= 1 or count <= 1:
        return list(range(min(count, most)))
    most = min(most, count)
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _group(
    run_dir: Path, folder: Path, iteration: Iteration, prompt: int, lost: LostMedia
) -> dict[str, Any]:
    samples_per_prompt = iteration.rewards.shape[1]
    rows = range(prompt * samples_per_prompt, (prompt + 1) * samples_per_prompt)
    children = [_sample(run_dir, folder, iteration, 0, row, lost) for row in rows]
    return {
        "prompt": iteration.outputs[0].requests[rows[0]].sample.prompt,
        "reward_mean": _number(iteration.rewards[prompt].nanmean()),
        "children": children,
    }


def _sample(
    run_dir: Path, folder: Path, iteration: Iteration, level: int, row: int, lost: LostMedia
) -> dict[str, Any]:
    """Return one sample of a stage, with the samples of the next stage that descend from it."""
    output = iteration.outputs[level]
    sample = output.requests[row].sample
    advantages = iteration.credit.levels[level].advantages.flatten()
    stem = f"{row:04d}_" + "_".join(map(str, sample.path))
    media = lost.write(folder, stem, shown(output.media[row]), output.media_kind, output.fps)
    leaves = math.prod(iteration.rewards.shape[level + 2 :])
    own = slice(row * leaves, (row + 1) * leaves)
    node: dict[str, Any] = {
        "stage": output.stage.name,
        "path": list(sample.path),
        "media": None if media is None else str(media.relative_to(run_dir)),
        "advantage": _number(advantages[row]),
        "reward": _number(iteration.rewards.flatten()[own].nanmean()),
        "components": {
            name: _number(values[own].nanmean())
            for name, values in iteration.scores.components.items()
        },
        "failed": None,
    }
    if level + 1 == len(iteration.outputs):
        node["failed"] = iteration.scores.failures.get(row)
        return node
    branch = iteration.rewards.shape[level + 2]
    children = range(row * branch, (row + 1) * branch)
    node["children"] = [
        _sample(run_dir, folder, iteration, level + 1, child, lost) for child in children
    ]
    return node


def _number(value: torch.Tensor) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
