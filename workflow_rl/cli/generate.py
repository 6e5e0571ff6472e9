"""``workflow-rl generate``."""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from workflow_rl.cli.preflight import check_frames, check_stage_model
from workflow_rl.cli.progress import show_message
from workflow_rl.config import StageConfig
from workflow_rl.config.first_frames import find_first_frame
from workflow_rl.config.run_dir import load_run_config
from workflow_rl.errors import UserError

WORKFLOW = "image_video.t2i_i2v"


class DType(StrEnum):
    """What ``--dtype`` takes: the values of a stage's ``dtype``."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


PromptOption = Annotated[
    str, typer.Option("--prompt", "-p", help="What to make.", show_default=False)
]
ImageOption = Annotated[
    Path | None,
    typer.Option("--image", help="First frame, for a run whose first stage is i2v."),
]
WorkflowOption = Annotated[
    str | None,
    typer.Option("--workflow", "-w", help=f"Id of the chain; default: the run's, or {WORKFLOW}."),
]
SeedOption = Annotated[
    int, typer.Option("--seed", "-s", min=0, help="Same seed, same picture and video.")
]
T2iOption = Annotated[
    Path | None,
    typer.Option("--t2i", help="Image model (folder or hub id); default: the embedded one."),
]
I2vOption = Annotated[
    Path | None,
    typer.Option("--i2v", help="Video model (folder or hub id); default: the embedded one."),
]
StepsOption = Annotated[
    int | None, typer.Option("--steps", min=1, help="Denoising steps of every stage.")
]
SizeOption = Annotated[
    str | None,
    typer.Option(
        "--size", metavar="WIDTHxHEIGHT", help="Pixels, such as 832x480; default: the model's."
    ),
]
FramesOption = Annotated[int | None, typer.Option("--frames", min=1, help="Frames of every video.")]
DtypeOption = Annotated[DType | None, typer.Option("--dtype", help="What every stage computes in.")]
RunOption = Annotated[
    Path | None,
    typer.Option("--run", help="Serve this run's chain, with its evaluation.weights."),
]
OutputOption = Annotated[
    Path, typer.Option("--output", "-o", help="Folder for the PNG and MP4 files.")
]


def generate(
    prompt: PromptOption,
    image: ImageOption = None,
    workflow: WorkflowOption = None,
    seed: SeedOption = 0,
    t2i: T2iOption = None,
    i2v: I2vOption = None,
    steps: StepsOption = None,
    size: SizeOption = None,
    frames: FramesOption = None,
    dtype: DtypeOption = None,
    run: RunOption = None,
    output: OutputOption = Path("outputs"),
) -> None:
    """Make an image and a video of it, and write a PNG and an MP4 (H.264).

    With --run: what each stage of the run's chain makes. Where that is several videos, each from
    the last frame of the one before, they are also written as one.

    **Examples**

    ```
    workflow-rl generate --prompt "a red circle moving left" --seed 3
    workflow-rl generate --prompt "a red circle moving left" --run runs/quickstart
    workflow-rl generate --prompt "a red circle moving left" --run runs/i2v --image circle.png
    workflow-rl generate --prompt "a fox in snow" --t2i /models/FLUX.1-dev \\
        --i2v /models/Wan2.1-I2V-14B-480P-Diffusers --steps 30 \\
        --size 832x480 --frames 81 --dtype bfloat16
    ```
    """
    if not prompt.strip():
        raise UserError("--prompt is blank; say what to make")
    known, stages = _chain(run, t2i, i2v)
    if workflow not in (None, known):
        raise UserError(f"--workflow {workflow} is not known here; use {known}")
    stages = _with_options(stages, steps=steps, size=size, frames=frames, dtype=dtype)
    for name, stage in stages.items():
        check_stage_model(name, stage)
    _check_image(image, stages)
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file; give a folder")
    from workflow_rl.serving.generate import generate as serve

    files = serve(
        known,
        stages,
        prompt=prompt,
        image=image,
        seed=seed,
        output_dir=output,
        run_dir=run,
        on_message=show_message,
    )
    for path in files:
        typer.echo(path)


def _chain(
    run: Path | None, t2i: Path | None, i2v: Path | None
) -> tuple[str, dict[str, StageConfig]]:
    """Return the id and the stages of the run's chain, or of the two models'."""
    if run is not None:
        if t2i is not None or i2v is not None:
            raise UserError("--run brings its own models; leave out --t2i and --i2v")
        config = load_run_config(run)
        return config.workflow, dict(config.stages)
    return WORKFLOW, {
        "t2i": StageConfig(task="t2i", model=t2i, samples=1),
        "i2v": StageConfig(task="i2v", model=i2v, samples=1),
    }


def _with_options(
    stages: Mapping[str, StageConfig],
    *,
    steps: int | None,
    size: str | None,
    frames: int | None,
    dtype: DType | None,
) -> dict[str, StageConfig]:
    """Return the stages with what the command line asks for in place of their own."""
    asked: dict[str, Any] = {} if steps is None else {"num_inference_steps": steps}
    if size is not None:
        asked["width"], asked["height"] = _width_and_height(size)
    if dtype is not None:
        asked["dtype"] = dtype.value
    videos = {} if frames is None else {"num_frames": frames}
    return {
        name: stage.model_copy(update=asked | (videos if stage.task == "i2v" else {}))
        for name, stage in stages.items()
    }


def _width_and_height(size: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", size.strip().lower())
    if found is None:
        raise UserError(f"--size is {size!r}; give width and height in pixels, such as 832x480")
    return int(found[1]), int(found[2])


def _check_image(image: Path | None, stages: Mapping[str, StageConfig]) -> None:
    """Raise a UserError unless there is a first frame just where the chain starts from one."""
    name, first = next(iter(stages.items()))
    if first.task == "i2v" and image is None:
        raise UserError(f"the first stage {name!r} starts from an image; give it with --image")
    if first.task != "i2v" and image is not None:
        raise UserError(f"the first stage {name!r} makes an image itself; leave out --image")
    if image is not None:
        check_frames(stages, [find_first_frame(image, "--image")])
