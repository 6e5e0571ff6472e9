"""A disk that refuses the commands that write what one looks at: a line, and no half of a file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import typer

from tests.cli.conftest import Invoke
from tests.report.synthetic import make_run
from workflow_rl.cli.one_line import errors_in_one_line
from workflow_rl.media import write_mp4
from workflow_rl.serving import evaluate_grid

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")


@pytest.mark.parametrize("full", ["cells", "video"])
def test_side_by_side_videos(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str
) -> None:
    """The earlier comparison stays as it was, whichever of the grid's files finds no room."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("a fox runs\n")
    for folder in ("before", "after"):
        write_mp4(Path(folder, "a_fox_runs_seed0.mp4"), torch.rand(3, 4, 32, 32), 8.0)
    things = ("before", "after", "--prompts", "prompts.txt", "--rewards", "frame_change")
    command = ("evaluate", *things, "--seeds-per-prompt", "1", "-o", "out", "--grid")
    first = invoke(*command)
    assert first.exit_code == 0, first.stderr
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}

    save, write = np.save, evaluate_grid.write_mp4
    if full == "cells":
        monkeypatch.setattr(np, "save", lambda path, values: save(FULL.open("wb"), values))
    else:

        def write_full(path: Path, video: torch.Tensor, fps: float, *, min_side: int) -> Path:
            path.with_name(f".{path.name}.part").symlink_to(FULL)
            return write(path, video, fps, min_side=min_side)

        monkeypatch.setattr(evaluate_grid, "write_mp4", write_full)
    result = invoke(*command)
    assert result.exit_code == 1
    assert "No space left on device; make room" in result.stderr.splitlines()[-1]
    after = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    assert after == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "after",
        "before",
        "out",
        "prompts.txt",
    ]


def test_report(invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    monkeypatch.setattr("workflow_rl.cli.report.load_run_config", lambda run_dir: None)
    assert invoke("report", run).exit_code == 0
    before = (run / "report.html").read_bytes()
    (run / ".report.html.part").symlink_to(FULL)
    result = invoke("report", run)
    assert result.exit_code == 1
    assert "No space left on device; make room" in result.stderr
    assert (run / "report.html").read_bytes() == before
    assert not (run / ".report.html.part").exists()


def test_a_lack_of_access_is_a_fault_of_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    """Such as a report on the run of someone else."""
    with pytest.raises(typer.Exit) as ended, errors_in_one_line("workflow-rl"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "run/.report.html.part")
    assert ended.value.exit_code == 2
    assert capsys.readouterr().err == (
        "error: run/.report.html.part: Permission denied; ask its owner for access, or give a "
        "place of your own\n"
    )


@pytest.mark.parametrize(
    ("number", "mend"),
    [
        (errno.ENOSPC, "make room and run the same command again"),
        (errno.EFBIG, "raise the limit on a file's size"),
        (errno.EROFS, "give a place that is not read-only"),
    ],
)
def test_the_mend_is_that_of_the_fault(
    capsys: pytest.CaptureFixture[str], number: int, mend: str
) -> None:
    with pytest.raises(typer.Exit), errors_in_one_line("workflow-rl"):
        raise OSError(number, os.strerror(number), "report.html")
    line = f"error: cannot write report.html: {os.strerror(number)}; {mend}"
    assert capsys.readouterr().err.startswith(line)
