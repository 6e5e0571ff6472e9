"""``workflow-rl generate``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from workflow_rl.cli.preflight import check_frames, check_stage_model
from workflow_rl.cli.progress import show_message
from workflow_rl.config import StageConfig
from workflow_rl.config.first_frames import find_first_frame
from workflow_rl.config.run_dir import load_run_config
from workflow_rl.errors import UserError

WORKFLOW = "image_video.t2i_i2v"


def generate(
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="What to make.", show_default=False)
    ],
    image: Annotated[
        Path | None,
        typer.Option("--image", help="First frame, for a run whose first stage is i2v."),
    ] = None,
    workflow: Annotated[
        str | None,
        typer.Option(
            "--workflow", "-w", help=f"Id of the chain; default: the run's, or {WORKFLOW}."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", "-s", min=0, help="Same seed, same picture and video.")
    ] = 0,
    t2i: Annotated[
        Path | None,
        typer.Option("--t2i", help="Image model (diffusers folder); default: the embedded one."),
    ] = None,
    i2v: Annotated[
        Path | None,
        typer.Option("--i2v", help="Video model (diffusers folder); default: the embedded one."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option("--steps", min=1, help="Denoising steps of every stage.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Serve this run's chain, with its evaluation.weights."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder for the PNG and MP4 files.")
    ] = Path("outputs"),
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
        --i2v /models/Wan2.1-I2V-14B-480P-Diffusers --steps 30
    ```
    """
    if not prompt.strip():
        raise UserError("--prompt is blank; say what to make")
    if run is not None:
        if t2i is not None or i2v is not None:
            raise UserError("--run brings its own models; leave out --t2i and --i2v")
        config = load_run_config(run)
        known, stages = config.workflow, dict(config.stages)
    else:
        known = WORKFLOW
        stages = {
            "t2i": StageConfig(task="t2i", model=t2i, samples=1),
            "i2v": StageConfig(task="i2v", model=i2v, samples=1),
        }
    if workflow not in (None, known):
        raise UserError(f"--workflow {workflow} is not known here; use {known}")
    if steps is not None:
        stages = {
            name: stage.model_copy(update={"num_inference_steps": steps})
            for name, stage in stages.items()
        }
    for name, stage in stages.items():
        check_stage_model(name, stage)
    _check_image(image, stages)
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


def _check_image(image: Path | None, stages: Mapping[str, StageConfig]) -> None:
    """Raise a UserError unless there is a first frame just where the chain starts from one."""
    name, first = next(iter(stages.items()))
    if first.task == "i2v" and image is None:
        raise UserError(f"the first stage {name!r} starts from an image; give it with --image")
    if first.task != "i2v" and image is not None:
        raise UserError(f"the first stage {name!r} makes an image itself; leave out --image")
    if image is not None:
        check_frames(stages, [find_first_frame(image, "--image")])
