"""`evaluate` from end to end: checkpoints of a run of the embedded pair, and folders of videos."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from tests.cli.conftest import Invoked
from workflow_rl.cli.main import app
from workflow_rl.config import load_config
from workflow_rl.config.run_dir import create_run_dir
from workflow_rl.evaluation.folders import file_stem
from workflow_rl.media import read_mp4, write_mp4
from workflow_rl.report.build import build_report
from workflow_rl.report.intervals import Statistics
from workflow_rl.report.numbers import number, signed
from workflow_rl.report.other_results import other_results
from workflow_rl.report.pair_cells import pair_cells
from workflow_rl.report.run_data import read_run
from workflow_rl.report.views.effects import effects
from workflow_rl.serving.evaluate import evaluate_run

PROMPTS = ("a red circle moving left", "a blue square moving up")
SEEDS = (0, 1)
STAGE = {
    "samples": 2,
    "num_inference_steps": 2,
    "optimizer": {"lr": 1e-4},
    "sde": {"kind": "cps"},
    "ema": {"decay": 0.5},
}
CONFIG = {
    "stages": {"t2i": {"task": "t2i", **STAGE}, "i2v": {"task": "i2v", **STAGE}},
    "rewards": [{"name": "directed_motion"}],
    "training": {"iterations": 2, "device": "cpu", "threads": 1, "checkpoint": {"every": 1}},
    "evaluation": {
        "every": 1,
        "seeds_per_prompt": len(SEEDS),
        "weights": "ema",
        "bootstrap_samples": 200,
    },
    "logging": {"tensorboard": False},
}


def call(*arguments: str | Path) -> Invoked:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Invoked(result.exit_code, result.stdout, result.stderr)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with ``run``, two iterations of the embedded pair, ``videos`` and prompts."""
    threads = torch.get_num_threads()
    root = tmp_path_factory.mktemp("compared")
    prompts = root / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    data = {"prompts": str(prompts), "prompts_per_iteration": 2}
    config = CONFIG | {"output_dir": str(root / "run"), "data": data}
    (root / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    write_videos(root / "videos")
    trained = call("train", root / "run.yaml")
    assert trained.exit_code == 0, trained.stderr
    yield root
    torch.set_num_threads(threads)


def write_videos(folder: Path, prompts: tuple[str, ...] = PROMPTS, seeds: Any = SEEDS) -> Path:
    """Write a video of noise per prompt and seed, of another size than the run's."""
    folder.mkdir()
    for number_, prompt in enumerate(prompts):
        for seed in seeds:
            generator = torch.Generator().manual_seed(10 * number_ + seed)
            video = torch.rand(3, 5, 16, 24, generator=generator)
            write_mp4(folder / f"{file_stem(prompt, seed)}.mp4", video, 8.0)
    return folder


def read(path: Path) -> dict[str, Any]:
    """Read strict JSON: without NaN or Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    content: dict[str, Any] = json.loads(path.read_text(), parse_constant=refuse)
    return content


def logged(run: Path, iteration: int) -> list[float | None]:
    """Return the scores that the training itself measured after an iteration."""
    lines = map(json.loads, (run / "evaluations.jsonl").read_text().splitlines())
    (scores,) = (line["scores"] for line in lines if line["iteration"] == iteration)
    return list(scores)


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else b""
            for p in sorted(root.rglob("*"))}  # fmt: skip


def spoil(checkpoint: Path) -> None:
    """Change one byte of a checkpoint's weights, as a failing disk does."""
    path = next(checkpoint.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_checkpoints_and_a_folder_the_same_to_the_last_byte(world: Path, tmp_path: Path) -> None:
    run, out = world / "run", tmp_path / "out"
    names = "directed_motion,frame_change"
    command: list[str | Path] = ["evaluate", run, f"{run}@0", world / "videos", "--rewards", names]
    command += ["--baseline", f"{run}@0"]
    first, second = call(*command, "-o", tmp_path / "again"), call(*command, "--grid", "-o", out)
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr
    for name in ("comparison.json", "comparison.md", "comparison.html"):
        assert (out / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    found = read(out / "comparison.json")
    after, start, folder = found["candidates"]
    labels = [candidate["label"] for candidate in found["candidates"]]
    assert labels == ["run@2", "run@0", "videos"]
    assert (found["baseline"], found["left_out"]) == ("run@0", 0)
    assert (found["prompts"], found["seeds"]) == ([p for p in PROMPTS for _ in SEEDS], [0, 1] * 2)
    trained = {c["label"]: [r["trained"] for r in c["rewards"].values()] for c in (after, start)}
    parts = [name for name in after["rewards"] if name != "frame_change"]
    assert trained == {"run@2": [True] * len(parts) + [False], "run@0": [False] * (len(parts) + 1)}
    assert {reward["trained"] for reward in folder["rewards"].values()} == {None}
    assert start["rewards"]["frame_change"]["against_baseline"] is None

    # A checkpoint scores what the training measured; figures are those of the scores.
    scores = {c["label"]: c["rewards"]["directed_motion"]["scores"] for c in found["candidates"]}
    assert scores["run@0"] == logged(run, 0)
    assert scores["run@2"] == logged(run, 2)
    pair = after["rewards"]["directed_motion"]["against_baseline"]
    delta = np.subtract(scores["run@2"], scores["run@0"])
    assert pair["difference"]["mean"] == pytest.approx(delta.mean())
    assert pair["wins"]["mean"] == (0.5 + 0.5 * np.sign(delta)).mean()
    assert folder["rewards"]["frame_change"]["mean"]["mean"] > 0.1  # noise

    assert [c["shapes"] for c in (start, folder)] == [[[9, 32, 32]], [[5, 256, 384]]]
    page = (out / "comparison.md").read_text()
    sections = dict(part.split("\n", 1) for part in page.split("## ")[1:])
    apart = {title: sections[f"run@2 against run@0: {title}"]
             for title in ("rewards trained on", "rewards not trained on")}  # fmt: skip
    assert [name in apart["rewards trained on"] for name in ("motion", "frame")] == [True, False]
    assert [name in apart["rewards not trained on"] for name in ("motion", "frame")] == [
        False,
        True,
    ]
    grids = sorted((out / "grid").iterdir())
    assert [path.name for path in grids] == [
        f"{number_:03d}_{prompt.replace(' ', '_')}.mp4" for number_, prompt in enumerate(PROMPTS)
    ]
    assert read_mp4(grids[0]).shape[1] == 9


def test_a_run_alone_is_compared_with_its_start(world: Path, tmp_path: Path) -> None:
    """The figures are the same in the tables, in ``evaluation.json`` and from Python."""
    run = Path(shutil.copytree(world / "run", tmp_path / "run"))
    result = call("evaluate", run)
    assert result.exit_code == 0, result.stderr
    written = read(run / "evaluation.json")
    assert (written["iteration"], written["seeds_per_prompt"]) == (2, len(SEEDS))
    reward = written["reward"]
    assert reward == written["components"]["directed_motion"]
    for text in (number(reward["before"]), number(reward["after"]), signed(reward["difference"])):
        assert text in result.stdout
    against = evaluate_run(run).against[1]
    assert against is not None
    assert against.total.difference.mean == reward["difference"]
    before = (run / "evaluation.json").read_bytes()
    assert call("evaluate", run, "--rewards", "frame_change").exit_code == 0
    assert (run / "evaluation.json").read_bytes() == before, "the reward trained on is not there"


def test_a_sum_that_the_run_was_not_trained_on_is_told_as_such(world: Path, tmp_path: Path) -> None:
    """A weight of 0 is no part of the sum, though the run was trained on that reward."""
    rewards = tmp_path / "rewards.yaml"
    trained = []
    for weight in (0.0, 1.0):
        terms = [{"name": "frame_change"}, {"name": "directed_motion", "weight": weight}]
        rewards.write_text(yaml.safe_dump({"rewards": terms}))
        result = call("evaluate", world / "run", "--rewards", rewards, "-o", tmp_path / "out")
        assert result.exit_code == 0, result.stderr
        found = read(tmp_path / "out" / "comparison.json")["candidates"][1]["rewards"]
        assert found["directed_motion"]["trained"]
        trained.append(found["weighted sum"]["trained"])
    assert trained == [False, True]


def test_the_report_shows_the_figures_of_evaluate_from_the_runs_own_evaluations(
    world: Path, tmp_path: Path
) -> None:
    """Effects, win rates, intervals and diversity; and what ``evaluate`` wrote, with a link."""
    run = Path(shutil.copytree(world / "run", tmp_path / "run"))
    comparison = evaluate_run(run)
    against = comparison.against[1 - comparison.baseline]
    assert against is not None
    data = read_run(run)
    trained, diversity = effects(data, Statistics(data))
    assert trained.rows[0][0] == "reward"
    shown = {row[0]: row[1:] for row in (*trained.rows, *diversity.rows)}
    assert shown["reward"] == pair_cells(against.total)
    assert shown["directed_motion/travel"] == pair_cells(against.measures["directed_motion/travel"])
    assert shown["diversity"] == pair_cells(against.diversity)
    assert against.diversity.difference.mean != 0

    assert call("evaluate", run, "--output", run / "evaluations" / "a b").exit_code == 0
    (other,) = other_results(run)
    assert (other.title, other.fault) == ("Evaluation a b", "")
    assert other.link == "evaluations/a%20b/comparison.html"
    cells = {row[0]: row[1:] for row in other.rows}
    assert cells["run@2: directed_motion"] == pair_cells(against.measures["directed_motion"])
    assert cells["run@2: diversity"] == pair_cells(against.diversity)
    page = build_report(run).read_text()
    assert '<a href="evaluations/a%20b/comparison.html">Evaluation a b</a>' in page


def test_the_weights_that_are_asked_for_and_the_runs_threads(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    run = world / "run"
    result = call("evaluate", f"{run}@ema", f"{run}@1@student", "-o", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    candidates = read(tmp_path / "out" / "comparison.json")["candidates"]
    assert [c["label"] for c in candidates] == ["run@2@ema", "run@1@student"]
    averaged, student = (c["rewards"]["directed_motion"]["scores"] for c in candidates)
    assert averaged == logged(run, 2)  # the configuration evaluates the average
    assert student != logged(run, 1) != averaged
    assert set(threads) == {1}


def test_of_a_damaged_checkpoint_the_one_before_is_taken(world: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(world / "run", tmp_path / "run"))
    spoil(run / "checkpoints" / "iteration_00000002")
    result = call("evaluate", run)
    assert result.exit_code == 0, result.stderr
    assert "iteration_00000002 is damaged" in result.stderr
    assert "using the one before it" in result.stderr
    assert read(run / "evaluation.json")["iteration"] == 1
    spoil(run / "checkpoints" / "iteration_00000001")
    before = tree(run)
    result = call("evaluate", run)
    assert (result.exit_code, tree(run) == before) == (2, True)
    assert "error: all 2 checkpoints" in result.stderr.splitlines()[-1]


def test_what_all_have_is_compared_where_that_is_asked_for(tmp_path: Path) -> None:
    """A sample more or less, with the noise of its own seed, changes no other."""
    whole, less = write_videos(tmp_path / "whole"), write_videos(tmp_path / "less")
    (less / f"{file_stem(PROMPTS[1], 1)}.mp4").unlink()
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    command: list[str | Path] = [
        "evaluate",
        whole,
        less,
        "--prompts",
        tmp_path / "prompts.txt",
        "--rewards",
    ]
    command += ["frame_change", "--seeds-per-prompt", "2", "-o", tmp_path / "out"]
    assert "compare what all have with --common" in call(*command).one_line_error()
    assert not (tmp_path / "out").exists()
    result = call(*command, "--common")
    assert result.exit_code == 0, result.stderr
    assert "3 samples each: 2 prompts, 2 seeds; 1 left out" in result.stdout
    found = read(tmp_path / "out" / "comparison.json")
    assert (found["left_out"], found["seeds"]) == (1, [0, 1, 0])
    pair = found["candidates"][1]["rewards"]["frame_change"]["against_baseline"]
    assert (pair["difference"]["mean"], pair["difference"]["count"]) == (0, 3)


Prepare = Callable[[Path], list[str | Path]]


def _no_checkpoint(folder: Path) -> list[str | Path]:
    create_run_dir(load_config(str(folder / "run.yaml"), [f"output_dir={folder / 'new'}"]))
    return [folder / "new"]


def _one_damaged(folder: Path) -> list[str | Path]:
    spoil(folder / "run" / "checkpoints" / "iteration_00000001")
    return [folder / "run", f"{folder / 'run'}@1"]


def _empty_prompts(folder: Path) -> list[str | Path]:
    (folder / "empty.txt").write_text("\n")
    return [folder / "run", "--prompts", folder / "empty.txt"]


def _other_videos(folder: Path) -> list[str | Path]:
    return [folder / "run", write_videos(folder / "other", ("a dog",))]


def _fewer_videos(folder: Path) -> list[str | Path]:
    return [folder / "run", write_videos(folder / "fewer", seeds=(0,))]


def _no_video(folder: Path) -> list[str | Path]:
    path = write_videos(folder / "broken") / f"{file_stem(PROMPTS[0], 1)}.mp4"
    path.write_bytes(b"not a video")
    return [folder / "broken", folder / "run"]


FAULTS: list[tuple[Prepare, str]] = [
    (lambda folder: [folder / "nowhere"], "no run or folder at"),
    (_no_checkpoint, "has no checkpoint yet"),
    (lambda folder: [f"{folder / 'run'}@7"], "keeps no checkpoint of iteration 7, only of 1, 2"),
    (_one_damaged, "iteration_00000001 is damaged"),
    (_other_videos, "no file in"),
    (_fewer_videos, "has no video of 'a red circle moving left' with seed 1"),
    (_no_video, "broken/a_red_circle_moving_left_seed1.mp4"),
    (lambda folder: [folder / "run", "--rewards", "sharpnes"], "did you mean 'sharpness'"),
    (_empty_prompts, "empty.txt"),
    (lambda folder: [folder / "run", "--prompts", folder / "none.txt"], "none.txt"),
    (lambda folder: [folder / "run", folder / "run"], "is given twice"),
    (lambda folder: [folder / "videos", "--prompts", folder / "prompts.txt"], "alone has nothing"),
    (lambda folder: [folder / "run", "-o", folder / "videos"], "files that are no evaluation's"),
]


@pytest.mark.parametrize(("prepare", "says"), FAULTS, ids=[says[:24] for _, says in FAULTS])
def test_a_fault_is_one_line_and_leaves_nothing(
    world: Path, tmp_path: Path, prepare: Prepare, says: str
) -> None:
    folder = Path(shutil.copytree(world, tmp_path / "world"))
    arguments = prepare(folder)
    before = tree(folder)
    error = call("evaluate", *arguments).one_line_error()
    assert says in error
    assert tree(folder) == before
