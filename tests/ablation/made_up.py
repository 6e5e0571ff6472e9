"""Writes what a training leaves, with figures that are known. Imports nothing heavy."""

import json
from pathlib import Path
from typing import Any

from workflow_rl.ablation.check_file import WeightsCheck, write_check
from workflow_rl.ablation.jobs import Job, prepare
from workflow_rl.ablation.variants import CONSTANT
from workflow_rl.config import RunConfig

PROMPTS = [f"a {colour} circle" for colour in ("red", "blue", "green", "white") for _ in range(2)]
GAIN = {"nested": 0.21, "shared": 0.1, "only_t2i": 0.05, "only_i2v": 0.04, CONSTANT: 0.0}
"""Rise of the held-out reward, from 0.1, by variant: in equal steps."""
TENSORS = 7


def make_config(folder: Path, **changes: Any) -> RunConfig:
    """Return a chain of two stages, P=2, K=3, M=2: 12 videos an iteration, 4 iterations."""
    return RunConfig.model_validate(
        {
            "output_dir": str(folder / "run"),
            "stages": {
                "t2i": {"task": "t2i", "samples": 3, "num_inference_steps": 4},
                "i2v": {"task": "i2v", "samples": 2, "num_inference_steps": 5},
            },
            "data": {"prompts": "prompts.txt", "prompts_per_iteration": 2},
            "rewards": [{"name": "directed_motion"}],
            "training": {"iterations": 4},
            **changes,
        }
    )


def finish(job: Job, *, check: WeightsCheck | None = None) -> None:
    """Write the whole run; a constant reward's has moved nothing unless ``check`` says so."""
    prepare(job)
    train(job.run_dir, job.variant, job.config)
    if job.variant == CONSTANT:
        write_check(job.run_dir, check or WeightsCheck(TENSORS, 0, None))


def train(run_dir: Path, variant: str, config: RunConfig) -> None:
    """Write metrics, evaluations and the last checkpoint of all iterations."""
    total = config.training.iterations
    metrics = [metrics_line(config, iteration) for iteration in range(total)]
    write_lines(run_dir / "metrics.jsonl", metrics)
    evaluations = [evaluation_line(variant, config.seed, done, total) for done in range(total + 1)]
    write_lines(run_dir / "evaluations.jsonl", evaluations)
    (run_dir / "checkpoints" / f"iteration_{total:08d}").mkdir(parents=True, exist_ok=True)


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def metrics_line(config: RunConfig, iteration: int) -> dict[str, Any]:
    made, line = config.data.prompts_per_iteration, dict[str, Any]()
    share = 1 / len(config.stages)
    for name, stage in config.stages.items():
        made *= stage.samples
        line |= {f"samples/{name}": made, f"variance/{name}_share": share}
    return {"iteration": iteration, "reward_mean": 0.1 + iteration / 100, **line}


def evaluation_line(variant: str, seed: int, done: int, total: int) -> dict[str, Any]:
    noise = [(row // 2 - 1.5) / 100 for row in range(len(PROMPTS))]  # of a prompt; mean 0
    gain = GAIN[variant] * done / total
    scores = [0.1 + seed / 1000 + n + gain * (1 + 20 * n) for n in noise]
    return {
        "iteration": done,
        "prompts": PROMPTS,
        "seeds": [0, 1] * (len(PROMPTS) // 2),
        "scores": scores,
        "components": {"directed_motion": scores},
        "extra": {"start": [-gain] * len(scores)},
        "failures": {},
    }
