"""Writes run directories as the trainer does, with figures that are known."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from workflow_rl.config.run import RunConfig
from workflow_rl.config.run_dir import create_run_dir
from workflow_rl.media import write_mp4, write_png

STAGES = ("t2i", "i2v")
COLOURS = {"red": (0.92, 0.14, 0.14), "blue": (0.18, 0.34, 0.96), "green": (0.12, 0.8, 0.22)}
PROMPTS = tuple(
    f"a {colour} square moving {direction}"
    for colour in COLOURS
    for direction in ("right", "left", "down", "up")
)


@dataclass(frozen=True)
class Size:
    """How much a synthetic run holds."""

    iterations: int = 4
    every: int = 2
    prompts: tuple[str, ...] = PROMPTS[:2]
    seeds: int = 2
    branches: int = 2
    min_side: int = 32
    kl_weight: float = 0.01


def draw_video(colour: str, start: float, speed: float, frames: int = 9) -> Tensor:
    """A square of ``colour`` that moves right and stops at the edge, ``[3, T, 32, 32]``."""
    video_CTHW = torch.full((3, frames, 32, 32), 0.04)
    for t in range(frames):
        left = max(0, min(22, round(start + speed * t)))
        video_CTHW[:, t, 11:21, left : left + 10] = torch.tensor(COLOURS[colour]).view(3, 1, 1)
    return video_CTHW


def make_config(run_dir: Path, size: Size) -> RunConfig:
    stage = {"samples": size.branches, "kl_weight": size.kl_weight}
    return RunConfig.model_validate(
        {
            "output_dir": str(run_dir),
            "stages": {"t2i": {"task": "t2i", **stage}, "i2v": {"task": "i2v", **stage}},
            "data": {"prompts": "prompts.txt", "prompts_per_iteration": 4},
            "rewards": [{"name": "directed_motion"}],
            "evaluation": {"seeds_per_prompt": size.seeds},
        }
    )


def make_run(run_dir: Path, size: Size | None = None, *, evaluate: bool = True) -> Path:
    """Write a run whose reward rises from about 0.12 to about 0.24."""
    size = size or Size()
    create_run_dir(make_config(run_dir, size))
    generator = np.random.default_rng(0)
    for iteration in range(size.iterations):
        append(run_dir / "metrics.jsonl", metrics_line(iteration, size, generator))
    for done in range(0, size.iterations + 1, size.every) if evaluate else ():
        append(run_dir / "evaluations.jsonl", evaluation_line(run_dir, done, size))
        if done:
            save_rollout(run_dir, done, size, generator)
    return run_dir


def append(path: Path, line: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def metrics_line(iteration: int, size: Size, generator: np.random.Generator) -> dict[str, Any]:
    done = iteration / max(1, size.iterations - 1)
    line: dict[str, Any] = {
        "iteration": iteration,
        "reward_mean": 0.12 + 0.12 * done + 0.02 * generator.normal(),
        "reward_std": 0.06 + 0.01 * generator.normal(),
        "reward_failed": float(iteration % 10 == 3),
        "ppo_ratio_mean": 1.0,
        "time/iteration": 4.1 + 0.2 * generator.random(),
        "variance/total": 0.004,
        "variance/prompt_eta2": 0.3,
        "variance/t2i_F": 2.0 + generator.random(),
        "strange/new_metric": done,
    }
    for index, name in enumerate(STAGES):
        share = 0.3 + 0.2 * done + 0.05 * generator.normal()
        line |= {
            f"loss/{name}": 0.01 * generator.normal(),
            f"kl/{name}": 1e-4 * (1 + index) * done,
            f"grad_norm/{name}": float(generator.lognormal(-1, 0.4)),
            f"clip_fraction/{name}": 0.02 * generator.random(),
            f"c2_max_log_ratio/{name}": 0.0,
            f"ratio_mean/{name}": 1 + 0.001 * generator.normal(),
            f"ratio_min/{name}": 0.98 - 0.01 * generator.random(),
            f"ratio_max/{name}": 1.02 + 0.01 * generator.random(),
            f"lr/{name}": 5e-5 * (1 + 2 * index) * (0.1 + 0.9 * math.cos(math.pi * done / 2) ** 2),
            f"variance/{name}_share": share if index == 0 else 1 - share,
            f"variance/{name}_eta2": 0.35,
        }
    return line


def evaluation_line(run_dir: Path, done: int, size: Size) -> dict[str, Any]:
    prompts = [prompt for prompt in size.prompts for _ in range(size.seeds)]
    progress = done / size.iterations
    noise = np.random.default_rng(1).normal(size=len(prompts))
    gain = np.random.default_rng(2).normal(size=len(prompts))
    scores = [
        0.12 + 0.05 * n + progress * (0.12 + 0.03 * g) for n, g in zip(noise, gain, strict=True)
    ]
    rows = list(range(0, len(prompts), size.seeds))
    folder = f"evaluation/iteration_{done:08d}"
    media: dict[str, list[str]] = {"t2i": [], "i2v": []}
    for row in rows:
        video = draw_video(
            prompts[row].split()[1], 11 - 8 * progress, 0.3 + progress + 0.1 * noise[row]
        )
        media["t2i"].append(f"{folder}/t2i_{row:03d}.png")
        media["i2v"].append(f"{folder}/i2v_{row:03d}.mp4")
        write_png(run_dir / media["t2i"][-1], video[:, 0], min_side=size.min_side)
        write_mp4(run_dir / media["i2v"][-1], video, 8, min_side=size.min_side)
    start = [0.01 * n - 0.12 * progress for n in noise]
    return {
        "iteration": done,
        "prompts": prompts,
        "seeds": list(range(size.seeds)) * len(size.prompts),
        "scores": scores,
        "components": {"directed_motion": scores},
        "extra": {"start_position": start},
        "failures": {},
        "diversity": [0.3 - 0.1 * progress - 0.01 * k for k in range(len(size.prompts))],
        "media_rows": rows,
        "media": media,
    }


def save_rollout(run_dir: Path, done: int, size: Size, generator: np.random.Generator) -> None:
    folder = f"rollouts/iteration_{done:08d}"
    groups = [
        group(run_dir, f"{folder}/{k}", prompt, size, generator)
        for k, prompt in enumerate((size.prompts[0], size.prompts[-1]))
    ]
    text = json.dumps({"iteration": done, "groups": groups})
    (run_dir / f"{folder}.json").write_text(text, encoding="utf-8")


def group(
    run_dir: Path, stem: str, prompt: str, size: Size, generator: np.random.Generator
) -> dict[str, Any]:
    rewards = 0.2 + 0.08 * generator.normal(size=(size.branches, size.branches))
    children = []
    for i in range(size.branches):
        start = 22 * generator.random()
        leaves = []
        for j in range(size.branches):
            video = draw_video(prompt.split()[1], start, 0.3 + 2 * generator.random())
            path = write_mp4(run_dir / f"{stem}_{i}_{j}.mp4", video, 8, min_side=size.min_side)
            advantage = float(rewards[i, j] - rewards[i].mean()) / 0.08
            leaves.append(sample(run_dir, path, "i2v", [i, j], float(rewards[i, j]), advantage))
        path = write_png(run_dir / f"{stem}_{i}.png", video[:, 0], min_side=size.min_side)
        advantage = float(rewards[i].mean() - rewards.mean()) / 0.08
        inner = sample(run_dir, path, "t2i", [i], float(rewards[i].mean()), advantage)
        children.append({**inner, "children": leaves})
    children[0]["children"][0] |= {"reward": None, "advantage": 0.0, "failed": "timed out"}
    return {"prompt": prompt, "reward_mean": float(rewards.mean()), "children": children}


def sample(
    run_dir: Path, path: Path, stage: str, place: Sequence[int], reward: float, advantage: float
) -> dict[str, Any]:
    return {
        "stage": stage,
        "path": list(place),
        "media": str(path.relative_to(run_dir)),
        "reward": reward,
        "advantage": advantage,
        "failed": None,
        "components": {"travel": 2.0, "looks": reward},
    }


def add_guards(run_dir: Path, kinds: Sequence[str]) -> None:
    """Write guards of every stage that drift from 0 to 3.5 deviations, the first with alarms."""
    path = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    names = [f"{kind}/{stage}" for kind in kinds for stage in STAGES]
    start = {"mean": 0.1234, "std": 0.0321, "threshold": 2.5, "quantiles": [-0.0123, 0.1, 0.2345]}
    for line in lines:
        drift = 3.5 * line["iteration"] / max(1, len(lines) - 1)
        for name in names:
            line |= {f"guard/{name}": 0.1234 + 0.0321 * drift, f"guard_z/{name}": drift}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    guards = {"guards": dict.fromkeys(names, start), "baseline_iterations": 1, "window": 1}
    (run_dir / "guards.json").write_text(json.dumps(guards))
    for iteration in range(2):
        alarm = {"guard": names[0], "value": 0.2357, "deviations": 3.5, "action": "warn"}
        append(run_dir / "guard_alarms.jsonl", {"iteration": iteration, **alarm})
