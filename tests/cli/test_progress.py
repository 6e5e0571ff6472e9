"""Progress: the same figures on the console and in the log, with an ETA that makes sense."""

import io
import logging
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from workflow_rl.cli.progress import format_duration, showing
from workflow_rl.config.run_dir import LOG_FILE
from workflow_rl.evaluation.chain import Evaluation
from workflow_rl.runtime.driver import ProgressEvent


def _metrics(reward: float) -> dict[str, float]:
    return {"reward_mean": reward, "time/iteration": 2.0}


def test_lines_where_there_is_no_terminal_and_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(float(second) for second in range(100, 200, 2))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    stream = io.StringIO()
    with showing(tmp_path, Console(file=stream, width=40)) as listener:
        listener.message("a path [/x] stays as it is")
        listener.iteration(11, 71, _metrics(0.25))
        listener.iteration(12, 71, _metrics(0.5))
        logging.getLogger("workflow_rl.training").warning("from elsewhere")
    shown = stream.getvalue().splitlines()
    assert shown[0] == "a path [/x] stays as it is"
    assert shown[1].startswith("iteration 11/71  reward 0.2500  2.0 s  ETA ")
    assert shown[2].startswith("iteration 12/71  reward 0.5000  2.0 s  ETA ")
    logged = (tmp_path / LOG_FILE).read_text().splitlines()
    assert [line.split(" INFO ")[1] for line in logged[:3]] == shown[:3]
    assert logged[3].endswith("WARNING from elsewhere")
    assert shown[3:] == ["warning: from elsewhere"]


def test_eta_is_the_mean_time_so_far_for_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    stream = io.StringIO()
    with showing(tmp_path, Console(file=stream)) as listener:
        listener.iteration(5, 25, _metrics(0.0))  # took 2 s: 20 left are 40 s
        now = 104.0  # 2 iterations in 6 s: 19 left are 57 s
        listener.iteration(6, 25, _metrics(0.0))
    assert [line.split("ETA ")[1] for line in stream.getvalue().splitlines()] == ["0:40", "0:57"]


def test_live_line_on_a_terminal(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with showing(tmp_path, console) as listener:
        listener.iteration(3, 8, _metrics(0.125))
    assert "3/8" in stream.getvalue()
    assert "reward 0.1250" in stream.getvalue()


def test_the_live_line_shows_the_step_beside_the_last_figures(tmp_path: Path) -> None:
    event = ProgressEvent("model", step=2, num_steps=6, batch_size=16)
    stream, plain = io.StringIO(), io.StringIO()
    with showing(tmp_path, Console(file=stream, force_terminal=True, width=120)) as listener:
        listener.progress("t2i", event)
        listener._progress.refresh()
        assert "t2i: step 2/6 of 16 samples" in stream.getvalue()
        listener.iteration(3, 8, _metrics(0.125))
        listener.progress("i2v", event)
    last = [line for line in stream.getvalue().splitlines() if "3/8" in line][-1]
    assert "reward 0.1250" in last
    assert "i2v: step 2/6" in last
    with showing(tmp_path, Console(file=plain)) as listener:
        listener.progress("t2i", event)
    assert plain.getvalue() == ""


def test_evaluation_leaves_failed_samples_out_and_counts_them(tmp_path: Path) -> None:
    evaluation = Evaluation(
        prompts=("a",),
        seeds=(0, 1, 2),
        scores=torch.tensor([0.5, float("nan"), 1.0]),
        components={},
        failures={1: "timeout"},
        outputs=(),
    )
    stream = io.StringIO()
    with showing(tmp_path, Console(file=stream, width=200)) as listener:
        listener.evaluation(20, evaluation)
    assert stream.getvalue() == (
        "evaluation after 20 iterations: reward 0.7500 over 3 samples, 1 failed (timeout)\n"
    )


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (75, "1:15"), (3725, "1:02:05")]
)
def test_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text
