"""One prompt through a chain, to files."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from workflow_rl.config import PromptRecord, StageConfig
from workflow_rl.config.first_frames import find_first_frame
from workflow_rl.config.run_dir import load_run_config
from workflow_rl.enums import ExecutionProfile, MediaKind
from workflow_rl.errors import WorkflowRLError
from workflow_rl.evaluation.finite import finite_samples
from workflow_rl.evaluation.folders import file_stem
from workflow_rl.evaluation.media_files import write_media
from workflow_rl.serving.chain import load_chain, publish_run, served_role
from workflow_rl.workflow import StageOutput, joined_shots, run_chain


def generate(
    workflow_id: str,
    stages: Mapping[str, StageConfig],
    *,
    prompt: str,
    seed: int,
    output_dir: Path,
    image: Path | None = None,
    run_dir: Path | None = None,
    on_message: Callable[[str], None] = lambda text: None,
) -> list[Path]:
    """Sample a chain once and write what each stage made: a PNG, an MP4 (H.264).

    Parameters
    ----------
    image
        First frame, where the chain begins with an i2v stage.
    run_dir
        Serve the newest checkpoint of this run, in the role of its ``evaluation.weights``; None:
        the weights in the folders.

    Returns
    -------
    list of Path
        One file per stage; then, where several stages make videos of one size, these as one.

    Raises
    ------
    WorkflowRLError
        If what a stage made is not finite, or the disk refuses a file; nothing is written then.
    """
    frame = None if image is None else find_first_frame(image, "image")
    chain = load_chain(workflow_id, stages)
    if run_dir is not None:
        publish_run(chain, run_dir, served_role(load_run_config(run_dir)), on_message)
    outputs = run_chain(
        chain.workflow,
        chain.instances,
        {name: replace(plan, samples=1) for name, plan in chain.plans.items()},
        [PromptRecord(prompt, first_frame=frame)],
        [seed],
        profiles=dict.fromkeys(chain.instances, ExecutionProfile.SERVE),
    )
    for output in outputs:
        if not bool(finite_samples(output).all()):
            raise WorkflowRLError(
                f"stage {output.stage.name!r} made values that are not finite; "
                "use dtype float32 or other weights"
            )
    with _appearing_together(output_dir) as folder:
        files = _write(outputs, folder, file_stem(prompt, seed), on_message)
    return [output_dir / path.name for path in files]


@contextmanager
def _appearing_together(folder: Path) -> Iterator[Path]:
    """Give a temporary folder, whose files are then moved into ``folder``: all of them or none.

    Raises
    ------
    WorkflowRLError
        When the disk refuses a file.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder, prefix=".part-") as building:
            yield Path(building)
            made_files = sorted(Path(building).iterdir())
            for target in (folder / path.name for path in made_files):
                if target.is_dir():  # before the first is moved
                    raise IsADirectoryError(errno.EISDIR, f"{target.name} is a directory there")
            for path in made_files:
                path.replace(folder / path.name)
    except OSError as error:  # FFmpeg's of a full disk is one too
        for path in made:  # deepest first
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        raise WorkflowRLError(
            f"cannot write to {folder}: {error.strerror or error}; nothing is written; make room, "
            "or give another folder with --output"
        ) from error


def _write(
    outputs: Sequence[StageOutput], folder: Path, stem: str, on_message: Callable[[str], None]
) -> list[Path]:
    """Write the first sample of each stage, and the videos as one where there are several."""
    files = [
        write_media(
            folder, f"{stem}_{output.stage.name}", output.media[0], output.media_kind, output.fps
        )
        for output in outputs
    ]
    sizes = [o.media.shape[-2:] for o in outputs if o.media_kind is MediaKind.VIDEO]
    if len(set(sizes)) > 1:
        on_message("the videos differ in size: they are not joined")
    elif len(sizes) > 1:
        joined_CTHW = joined_shots(outputs, 0)
        files.append(write_media(folder, stem, joined_CTHW, MediaKind.VIDEO, outputs[-1].fps))
    return files
