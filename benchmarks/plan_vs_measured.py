"""What `workflow-rl plan` counts against what a real run takes: peak memory on the CPU.

Run with ``python -m benchmarks.plan_vs_measured [CASE...]``. Each case runs in a process of its
own: the models are loaded, two training iterations and an evaluation of the averaged weights are
made, and the peak of resident memory is read in the second iteration (by then the optimiser's state
is there) and in the evaluation, each above what the interpreter and its libraries took. The plan's
figure is that of the same phases, of a GPU whose memory is the CPU's: both memories together.

The big cases are the embedded pair's folders with larger transformers of random weights.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workflow_rl.config import RunConfig, load_config
from workflow_rl.embedded.folders import EMBEDDED_FOLDERS
from workflow_rl.models.loading import pipeline_modules
from workflow_rl.planning.architecture import find_architecture
from workflow_rl.planning.run import Hardware, Planner, RunNumbers

CONFIG = "configs/quickstart.yaml"
MEGABYTE = 10**6
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Have glibc give freed tensors back at once: else the peak of its heap is measured."""

BIG: Mapping[str, Mapping[str, Any]] = {
    "t2i": {"num_attention_heads": 12, "attention_head_dim": 32},
    "i2v": {"num_attention_heads": 12, "attention_head_dim": 32, "ffn_dim": 1024},
}
"""What makes the transformers of the big cases."""

COMMON = (
    "training.iterations=2",
    "data.prompts_per_iteration=2",
    "evaluation.batch_size=4",
    "evaluation.seeds_per_prompt=1",
    "data.eval_prompts=null",
    "stages.t2i.samples=2",
    "stages.i2v.samples=2",
    "stages.t2i.num_inference_steps=3",
    "stages.i2v.num_inference_steps=3",
    "stages.i2v.sde.window={mode: all}",
    "rewards=[{name: frame_change}]",
    "stages.t2i.rollout_batch_size=8",
    "stages.i2v.rollout_batch_size=8",
)


def _both(key: str) -> tuple[str, str]:
    return f"stages.t2i.{key}", f"stages.i2v.{key}"


@dataclass(frozen=True)
class Case:
    """A configuration: ``overrides`` of the quickstart's, with big transformers or as it is."""

    overrides: tuple[str, ...] = ()
    big: bool = True
    sizes: Mapping[str, int] = field(default_factory=dict)


LORA = _both("lora={rank: 8}")
CHECKPOINTED = _both("memory.gradient_checkpointing=true")
LARGE = (*_both("height=64"), *_both("width=64"))
CASES: Mapping[str, Case] = {
    "embedded": Case(big=False),
    "embedded-64px": Case(LARGE, big=False),
    "full": Case(),
    "full-checkpointed": Case(CHECKPOINTED),
    "full-64px": Case(LARGE),
    "full-64px-checkpointed": Case((*LARGE, *CHECKPOINTED)),
    "lora": Case(LORA),
    "lora-64px": Case((*LARGE, *LORA)),
    "lora-64px-checkpointed": Case((*LARGE, *LORA, *CHECKPOINTED)),
    "bfloat16-64px": Case((*LARGE, *_both("dtype=bfloat16"), "training.c2_tolerance=1")),
}

PHASES = {
    "iteration": ("encode", "rollout", "decode", "training", "publication"),
    "evaluation": ("evaluation",),
}
"""What is measured → the plan's phases in it.

Not the optimiser's step: it takes all tensors together on a GPU, one after the other on a CPU.
"""


def case_config(case: Case, folder: Path) -> RunConfig:
    """Return the configuration of a case, and save its models in ``folder``."""
    overrides = [*COMMON, f"output_dir={folder / 'run'}", *case.overrides]
    if case.big:
        overrides += [f"stages.{task}.model={save_big(task, folder)}" for task in BIG]
        overrides += ["stages.i2v.num_frames=9"]
    return load_config(CONFIG, overrides)


def save_big(task: str, folder: Path) -> Path:
    """Save the embedded model of ``task`` with a larger transformer of random weights."""
    import diffusers
    import torch

    diffusers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    pipeline: Any = diffusers.DiffusionPipeline.from_pretrained(EMBEDDED_FOLDERS[task])
    found: Any = pipeline_modules(pipeline)["transformer"]
    pipeline.transformer = type(found).from_config({**found.config, **BIG[task]})
    pipeline.save_pretrained(folder / task)
    return folder / task


def planned(config: RunConfig) -> dict[str, int]:
    """Return the plan's peak bytes of each measured part, those in the CPU's memory included."""
    from workflow_rl.cli.plan import with_model_defaults
    from workflow_rl.cli.preflight import model_folder
    from workflow_rl.config import load_prompts

    config = with_model_defaults(config)

    architectures = {
        name: find_architecture(model_folder(name, stage), f"stages.{name}.model")
        for name, stage in config.stages.items()
    }
    prompts = len(load_prompts(config.data.prompts, list(config.stages)))
    machine = Hardware(1, 10**15, 1.0, 1.0)
    numbers: RunNumbers = Planner(architectures, prompts, prompts).count(config, machine)
    host = {
        "iteration": numbers.iteration_host_bytes,
        "evaluation": numbers.evaluation_host_bytes,
    }
    return {
        part: max(b.bytes for b in numbers.bottlenecks(swapped=False) if b.phase in phases)
        + host[part]
        for part, phases in PHASES.items()
    }


def measure(config_file: str) -> dict[str, int]:
    """Run a case here, and return its peaks above the interpreter's memory."""
    import torch

    from workflow_rl.training.trainer import Run, SilentListener

    torch.set_num_threads(1)
    config = load_config(config_file)
    warm_up(config)
    baseline = resident()
    run = Run(config, SilentListener())
    run.prepare_texts()
    peaks = {"loaded": resident() - baseline}
    forget_peak()
    for iteration in range(2):
        forget_peak()
        prompts = run.schedule.at(iteration)
        batch = {"prompts": prompts, "seeds": [0] * len(prompts)}
        run.method.managed_train_step(batch, iteration)
    peaks["iteration"] = peak() - baseline
    forget_peak()
    run.evaluate(2)
    peaks["evaluation"] = peak() - baseline
    return peaks


def warm_up(config: RunConfig) -> None:
    """Make a run of the embedded pair, after which all modules are imported, and free it."""
    import ctypes
    import gc

    from workflow_rl.training.trainer import Run, SilentListener

    run = Run(
        load_config(CONFIG, [*COMMON, f"output_dir={config.output_dir.parent / 'warm_up'}"]),
        SilentListener(),
    )
    run.evaluate(0)
    prompts = run.schedule.at(0)
    run.method.managed_train_step({"prompts": prompts, "seeds": [0] * len(prompts)}, 0)
    del run
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what is free in the heap would be used again, unseen


def resident() -> int:
    """Return the bytes of resident memory."""
    return _status("VmRSS")


def peak() -> int:
    """Return the most bytes of resident memory since `forget_peak`."""
    return _status("VmHWM")


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}")


def forget_peak() -> None:
    """Set the peak to what is resident now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def run_case(name: str) -> None:
    """Measure one case in a new process, and print it beside its plan."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        config = case_config(CASES[name], folder)
        for name_ in ("run", "warm_up"):
            (folder / name_).mkdir()
        file = folder / "config.yaml"
        file.write_text(config.dump_yaml(), encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.plan_vs_measured", "--measure", str(file)],
            env={**os.environ, **ALLOCATOR},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        found = json.loads(done.stdout.splitlines()[-1])
        for part, told in planned(config).items():
            print(
                f"{name:24} {part:12} planned {told / MEGABYTE:8.1f} MB, "
                f"measured {found[part] / MEGABYTE:8.1f} MB, ratio {told / found[part]:.2f}",
                flush=True,
            )


def main() -> None:
    """Measure every case, or those that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cases", nargs="*", help="default: all")
    parser.add_argument("--measure", metavar="CONFIG", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        print(json.dumps(measure(arguments.measure)))
        return
    for name in arguments.cases or CASES:
        run_case(name)


if __name__ == "__main__":
    main()
