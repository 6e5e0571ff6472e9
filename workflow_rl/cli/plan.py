"""``workflow-rl plan``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from workflow_rl.cli.arguments import ConfigArgument, OverridesArgument
from workflow_rl.cli.preflight import check_evaluation_steps, read_prompts
from workflow_rl.config import RunConfig, StageConfig, load_config
from workflow_rl.config.families import FAMILIES
from workflow_rl.config.model_folder import check_model_json
from workflow_rl.embedded.folders import EMBEDDED_FOLDERS
from workflow_rl.errors import UserError
from workflow_rl.planning.architecture import Architecture, find_architecture

if TYPE_CHECKING:
    from workflow_rl.planning.advice import Advice
    from workflow_rl.planning.run import RunNumbers
    from workflow_rl.planning.texts import TextLengths

H100_TFLOPS = 989.0
"""Dense bfloat16 peak of an H100 SXM (NVIDIA's data sheet)."""

FILLED_BY_CARDS = ("guidance_scale", "height", "width", "num_frames", "max_sequence_length")
"""Keys of a stage that a plan counts with, and that a model's card may fill."""


def plan(
    config_path: ConfigArgument,
    overrides: OverridesArgument = None,
    gpus: Annotated[int, typer.Option("--gpus", help="GPUs, each with the whole chain.")] = 1,
    gpu_memory: Annotated[
        float, typer.Option("--gpu-memory", help="Memory of a GPU in GB (10⁹ bytes).")
    ] = 80.0,
    peak_tflops: Annotated[
        float,
        typer.Option("--peak-tflops", help="Peak speed of a GPU in the stages' dtype, TFLOPS."),
    ] = H100_TFLOPS,
    utilisation: Annotated[
        float, typer.Option("--utilisation", help="Part of the peak speed that is reached.")
    ] = 0.4,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count what a run needs before any weight is there: parameters, memory, time.

    **Examples**

    ```
    workflow-rl plan configs/flux_wan.yaml --gpus 8 --gpu-memory 80
    workflow-rl plan configs/sd35_wan_ti2v.yaml --gpu-memory 80
    workflow-rl plan my_chain.yaml stages.i2v.num_frames=81 --utilisation 0.3 --json
    ```

    The models are built on PyTorch's meta device, where tensors have shapes and no values, and
    every operation is counted. A model is a diffusers folder (its JSON files are enough), or the
    name of one whose architecture ships with the package. What does not fit comes with the keys to
    change, each counted. Takes up to a minute.
    """
    _check_options(gpus, gpu_memory, peak_tflops, utilisation)
    config = load_config(config_path, overrides or [])
    architectures = {
        name: find_architecture(
            EMBEDDED_FOLDERS[stage.task] if stage.model is None else stage.model,
            f"stages.{name}.model",
        )
        for name, stage in config.stages.items()
    }
    check_evaluation_steps(config, partial(_check_model, architectures))
    num_prompts, num_evaluated, notes = _prompts(config, gpus)
    hardware = (gpus, gpu_memory, peak_tflops, utilisation)
    numbers, advice, more = _count(config, architectures, (num_prompts, num_evaluated), hardware)
    notes += more
    from workflow_rl.cli.plan_view import as_dict, show

    if as_json:
        import json

        typer.echo(json.dumps(as_dict(numbers, advice, notes), indent=1))
    else:
        show(Console(), numbers, advice, notes)


def _check_model(architectures: Mapping[str, Architecture], name: str, stage: StageConfig) -> None:
    architecture = architectures[name]
    if architecture.pipeline in FAMILIES:
        check_model_json(architecture.read, architecture.source, f"stages.{name}.model", stage)


def _check_options(gpus: int, gpu_memory: float, peak_tflops: float, utilisation: float) -> None:
    if gpus < 1:
        raise UserError(f"--gpus is {gpus}; give at least 1")
    for name, value in (("--gpu-memory", gpu_memory), ("--peak-tflops", peak_tflops)):
        if not 0 < value < float("inf"):
            raise UserError(f"{name} is {value:g}; give a number above 0")
    if not 0 < utilisation <= 1:
        raise UserError(f"--utilisation is {utilisation:g}; give a part of 1, such as 0.4")


def _prompts(config: RunConfig, gpus: int) -> tuple[int, int, list[str]]:
    """Return the distinct prompts of the run and of an evaluation, and what to note of them."""
    num_prompts, notes = _count_prompts(config.data.prompts, config)
    num_evaluated = num_prompts
    if config.data.eval_prompts is not None:
        num_evaluated, more = _count_prompts(config.data.eval_prompts, config)
        notes += more
    per_iteration = config.data.prompts_per_iteration
    if gpus > per_iteration:
        notes.append(
            f"data.prompts_per_iteration is {per_iteration}: of {gpus} GPUs the others would wait"
        )
    return num_prompts, num_evaluated, notes


def _count_prompts(path: Path, config: RunConfig) -> tuple[int, list[str]]:
    """Return the distinct prompts of a file; where it is not there yet, those of an iteration."""
    if path.exists():
        return len(read_prompts(path, config.stages)), []
    count = config.data.prompts_per_iteration
    return count, [f"{path} is not there; counted with {count} prompts in the run"]


def with_model_defaults(config: RunConfig) -> RunConfig:
    """Return the configuration with what the embedded models' cards fill in training."""
    from workflow_rl.models import build_card
    from workflow_rl.request import TaskType
    from workflow_rl.training.build import stage_plan

    stages = dict(config.stages)
    for name, stage in stages.items():
        if stage.model is None:
            defaults = build_card(None, TaskType(stage.task)).defaults
            params = stage_plan(stage).params.filled(defaults)
            stages[name] = stage.model_copy(
                update={key: getattr(params, key) for key in FILLED_BY_CARDS}
            )
    return config.model_copy(update={"stages": stages})


def _count(
    config: RunConfig,
    architectures: dict[str, Architecture],
    prompts: tuple[int, int],
    hardware: tuple[int, float, float, float],
) -> tuple[RunNumbers, Advice | None, list[str]]:
    """Count the run, and where it does not fit, what to change; with notes on its texts."""
    from rich.status import Status

    with Status("loading PyTorch", console=Console(stderr=True)) as status:
        from workflow_rl.planning.advice import advise
        from workflow_rl.planning.run import GIGABYTE, Hardware, Planner

        config = with_model_defaults(config)
        gpus, gpu_memory, peak_tflops, utilisation = hardware
        machine = Hardware(gpus, int(gpu_memory * GIGABYTE), peak_tflops, utilisation)
        status.update("counting the texts' tokens")
        texts, notes = _texts(config, architectures)
        planner = Planner(
            architectures,
            *prompts,
            texts=texts,
            on_stage=lambda name: status.update(f"counting {name}"),
        )
        numbers = planner.count(config, machine)
        if numbers.fits:
            return numbers, None, notes
        status.update("looking for what would fit")
        return numbers, advise(planner, config, machine, numbers), notes


def _texts(
    config: RunConfig, architectures: dict[str, Architecture]
) -> tuple[dict[str, TextLengths], list[str]]:
    """Return the lengths of the texts of stages that do not pad them, and what to note of them."""
    from workflow_rl.planning.sizes import text_limit
    from workflow_rl.planning.texts import OWN_LENGTH, text_lengths

    path = config.data.prompts
    records = read_prompts(path, config.stages) if path.exists() else []
    texts, notes = {}, []
    for name, stage in config.stages.items():
        architecture = architectures[name]
        if architecture.pipeline not in OWN_LENGTH:
            continue
        limit = text_limit(architecture, stage)
        found = text_lengths(
            architecture, [r.text_for(name) for r in records], stage.negative_prompt or "", limit
        )
        if found is None:
            notes.append(
                f"{name} keeps each text's own length; counted at the limit of {limit} tokens: it "
                "takes the prompts and the model's tokenizer to count theirs"
            )
        else:
            texts[name] = found
    return texts, notes
