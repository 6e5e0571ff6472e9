"""The plan's peak against that of a real run, both counted tensor by tensor.

Resident memory says the same where freed memory is given back (``benchmarks.plan_vs_measured``),
but depends on the allocator and on what else the process has loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.models.case import FamilyCase
from tests.models.contract import family_cases
from tests.planning.real_run import planned, real
from workflow_rl.cli.plan import with_model_defaults
from workflow_rl.config import RunConfig, load_config, load_prompts
from workflow_rl.embedded.folders import EMBEDDED_FOLDERS
from workflow_rl.planning.architecture import find_architecture
from workflow_rl.planning.measure import Meter
from workflow_rl.planning.memory import CHECKSUM
from workflow_rl.planning.sizes import text_limit
from workflow_rl.planning.texts import text_lengths
from workflow_rl.training.weight_sync import weights_checksum

SMALL = (
    "data.prompts_per_iteration=1",
    "stages.t2i.samples=4",
    "stages.t2i.num_inference_steps=3",
    "stages.i2v.num_inference_steps=3",
    "stages.i2v.sde.window={mode: all}",
    "rewards=[{name: frame_change}]",
    "training.c2_tolerance=1.0",
)
LORA = ("stages.t2i.lora={rank: 4}", "stages.i2v.lora={rank: 4}")
CHECKPOINTED = tuple(f"stages.{n}.memory.gradient_checkpointing=true" for n in EMBEDDED_FOLDERS)
GUIDED = ("stages.t2i.guidance_scale=2.0", "stages.i2v.guidance_scale=2.0")
CASES = family_cases()


def _config(overrides: tuple[str, ...], folder: Path) -> RunConfig:
    fixed = [*SMALL, f"output_dir={folder}", *overrides]
    return with_model_defaults(load_config("configs/quickstart.yaml", fixed))


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        CHECKPOINTED,
        LORA,
        (*GUIDED, "stages.t2i.cfg_batching=batched", "stages.i2v.micro_batch_size=2"),
    ],
    ids=["full", "checkpointed", "lora", "guided"],
)
def test_planned_peak_is_that_of_a_run(overrides: tuple[str, ...], tmp_path: Path) -> None:
    config = _config(overrides, tmp_path)
    prompts = load_prompts(config.data.prompts, list(config.stages))[:1]
    architectures = {name: find_architecture(f, name) for name, f in EMBEDDED_FOLDERS.items()}
    plan, run = planned(config, architectures, 1, {}), real(config, prompts)
    assert plan.peak == pytest.approx(run.peak, rel=0.1)
    assert plan.flops == pytest.approx(run.flops, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_an_iteration_of_every_family_takes_what_is_planned(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    case.save(tmp_path / "model")
    config = _family_config(case, tmp_path)
    prompts = load_prompts(config.data.prompts, list(config.stages))
    architecture = find_architecture(tmp_path / "model", "model")
    limit = text_limit(architecture, config.stages[case.task])
    lengths = text_lengths(architecture, [p.prompt for p in prompts], "", limit)
    assert (lengths is not None) == (name in ("qwen-image", "z-image"))
    texts = {} if lengths is None else {case.task: lengths}
    plan = planned(config, {case.task: architecture}, len(prompts), texts)
    run = real(config, prompts)
    assert plan.peak == pytest.approx(run.peak, rel=0.05)
    assert plan.flops == pytest.approx(run.flops, rel=0.01)


def _family_config(case: FamilyCase, folder: Path) -> RunConfig:
    """Return a chain of this model alone, with two prompts."""
    lines = []
    for number, prompt in enumerate(("a red circle moving left", "a blue square")):
        line = {"prompt": prompt}
        if case.task == "i2v":
            line["image"] = f"{number}.png"
            Image.new("RGB", (case.width, case.height), (90 * number, 40, 200)).save(
                folder / line["image"]
            )
        lines.append(json.dumps(line))
    (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    stage = case.fields() | {
        "task": case.task,
        "model": str(folder / "model"),
        "samples": 2,
        "rollout_batch_size": 4,
        "num_inference_steps": 4,
        "sde": {"window": {"mode": "all"}},
    }
    config = {
        "output_dir": str(folder / "run"),
        "stages": {case.task: stage},
        "data": {"prompts": str(folder / "prompts.jsonl"), "prompts_per_iteration": 2},
        "rewards": [{"name": "frame_change" if case.task == "i2v" else "sharpness"}],
        "training": {"c2_tolerance": 1.0},
    }
    (folder / "chain.yaml").write_text(json.dumps(config))
    return with_model_defaults(load_config(folder / "chain.yaml", []))


def test_the_optimizers_step_as_a_gpu_takes_it() -> None:
    """All tensors at once: beside the gradients a working copy of each."""
    parameters = [torch.nn.Parameter(torch.ones(1000)) for _ in range(8)]
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with Meter() as meter:
        optimizer.step()
    assert meter.peak == pytest.approx(8 * 1000 * 4, rel=0.1)


def test_a_checksum_takes_what_is_planned_for_it() -> None:
    weights = {"a": torch.ones(100), "b": torch.ones(100_000), "c": torch.ones(100)}
    with Meter() as meter:
        weights_checksum(weights)
    assert meter.peak == pytest.approx(CHECKSUM * 100_000, rel=0.1)
