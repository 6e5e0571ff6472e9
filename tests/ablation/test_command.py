"""What ``workflow-rl ablate`` refuses, goes on with, and tells in its exit code."""

import json
import sys
from pathlib import Path

import pytest

from tests.ablation.fake_worker import SEEN_FILE
from tests.ablation.made_up import TENSORS, finish, metrics_line, write_lines
from tests.cli.conftest import Invoke
from workflow_rl.ablation import runner
from workflow_rl.ablation.check_file import WeightsCheck
from workflow_rl.ablation.jobs import Job, make_jobs
from workflow_rl.ablation.variants import build_variants
from workflow_rl.config import load_config

OUT = Path("runs/x-ablation")
VARIANTS = ["nested", "shared", "only_t2i", "only_i2v", "constant"]


@pytest.fixture(autouse=True)
def _fake_worker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def command(job: Job) -> list[str]:
        return [sys.executable, "-m", "tests.ablation.fake_worker", str(job.run_dir)]

    monkeypatch.setattr("workflow_rl.cli.ablate.worker_command", command)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def _jobs(*overrides: str, out: Path = OUT) -> list[Job]:
    return make_jobs(build_variants(load_config(Path("config.yaml"), list(overrides))), [0], out)


def _seen(variant: str) -> list[str]:
    return (OUT / variant / "seed0" / SEEN_FILE).read_text().splitlines()


def _files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_failures_lose_no_other_run_and_the_same_command_mends_them(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ("ablate", "config.yaml", "--seeds", "1", "--devices", "5,7")
    monkeypatch.setenv("FAULT_nested", "error")
    monkeypatch.setenv("FAULT_only_t2i", "kill")
    first = invoke(*call)
    assert first.exit_code == 1
    assert (
        "FAILED: nested/seed0 after 0 of 6 iterations: the disk is full; make room" in first.stdout
    )
    assert "FAILED: only_t2i/seed0 after 0 of 6 iterations: its process was ended" in first.stdout
    data = json.loads((OUT / "ablation.json").read_text())
    assert list(data["variants"]) == ["shared", "only_i2v", "constant"]
    assert {device for variant in VARIANTS for device in _seen(variant)} == {"5", "7"}

    monkeypatch.delenv("FAULT_nested")
    monkeypatch.delenv("FAULT_only_t2i")
    second = invoke(*call)
    assert second.exit_code == 0, second.stdout + second.stderr
    assert [len(_seen(variant)) for variant in VARIANTS] == [2, 1, 2, 1, 1]
    assert list(json.loads((OUT / "ablation.json").read_text())["variants"]) == VARIANTS

    before = _files(OUT)
    assert invoke(*call).exit_code == 0
    assert _files(OUT) == before


def test_a_fault_after_all_iterations_is_told_until_the_end_went_well(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = ("ablate", "config.yaml", "--seeds", "1", "--only")
    told = "FAILED: nested/seed0 after all of its iterations: the service hung up"
    monkeypatch.setenv("FAULT_nested", "end")
    for variants, tries in (("nested,shared", 1), ("nested,shared", 2), ("shared", 2)):
        result = invoke(*call, variants)
        assert result.exit_code == 1
        assert told in " ".join(result.stdout.split())
        assert told in (OUT / "ablation.md").read_text()
        assert len(_seen("nested")) == tries
        assert _seen("shared") == [""]
    data = json.loads((OUT / "ablation.json").read_text())
    assert list(data["variants"]) == ["nested", "shared"], "it made all its videos and counts"
    plan = invoke(*call, "nested", "--dry-run").stdout
    assert "finished, its end to do again" in plan

    monkeypatch.delenv("FAULT_nested")
    for tries in (3, 3):
        result = invoke(*call, "nested,shared")
        assert result.exit_code == 0
        assert "FAILED" not in result.stdout
        assert len(_seen("nested")) == tries


def test_more_seeds_and_variants_later_keep_what_there_is(invoke: Invoke) -> None:
    call = ("ablate", "config.yaml", "--only")
    assert invoke(*call, "shared", "--seeds", "1").exit_code == 0
    assert invoke(*call, "nested", "--seeds", "1").exit_code == 0
    assert _seen("shared") == [""]
    assert list(json.loads((OUT / "ablation.json").read_text())["variants"]) == ["nested", "shared"]


def test_a_run_of_another_configuration_is_replaced_only_on_demand(invoke: Invoke) -> None:
    call = ("ablate", "config.yaml", "training.iterations=5", "--seeds", "1", "--only", "shared")
    shared = _jobs()[1]
    finish(shared)
    before = _files(OUT)
    error = invoke(*call).one_line_error()
    assert "was left by another configuration" in error
    assert "--overwrite" in error
    assert _files(OUT) == before
    assert invoke(*call, "--overwrite").exit_code == 0
    assert len((shared.run_dir / "metrics.jsonl").read_text().splitlines()) == 5


def test_weights_that_moved_under_a_constant_reward_fail_the_command(invoke: Invoke) -> None:
    for job in _jobs():
        finish(job, check=WeightsCheck(TENSORS, 1, "t2i/weights/a"))
    result = invoke("ablate", "config.yaml", "--seeds", "1")
    assert result.exit_code == 1
    assert "WRONG: weights moved under a constant reward in constant/seed0" in result.stdout


def test_unequal_numbers_of_videos_fail_the_command(invoke: Invoke) -> None:
    for job in _jobs():
        finish(job)
    lines = [metrics_line(job.config, i) for i in range(6)]
    lines[0]["samples/i2v"] += 1
    write_lines(job.run_dir / "metrics.jsonl", lines)
    result = invoke("ablate", "config.yaml", "--seeds", "1")
    assert result.exit_code == 1
    assert "NOT EQUAL: the runs made different numbers of videos" in result.stdout


def test_a_dry_run_tells_the_plan_and_writes_nothing(invoke: Invoke, folder: Path) -> None:
    before = _files(folder)
    result = invoke("ablate", "config.yaml", "--dry-run", "--seeds", "0,3")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    runs = [line.split()[0] for line in lines[:-1]]
    assert runs == [f"{variant}/seed{seed}" for seed in (0, 3) for variant in VARIANTS]
    assert all("24 videos, 6 iterations: to do" in line for line in lines[:-1])
    assert "10 runs, 1 at once, 240 videos in unfinished runs" in lines[-1]
    assert _files(folder) == before
    assert not OUT.exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["seed=1"], "give --seeds instead"),
        (["--seeds", "0"], "that is no run"),
        (["--seeds", "x"], "expected a number of seeds or a list"),
        (["--seeds", "-1"], "expected a number of seeds or a list"),
        (["--seeds", "1,1"], "1 is there twice"),
        (["--only", "nestd"], "no such variant"),
        (["--only", ""], "expected words with commas"),
        (["--only", "nested", "stages.i2v.samples=1", "credit.rule=shared"], "left out here"),
        (["--devices", "0", "training.device=cuda:1"], "set it to null"),
        (["--devices", ","], "expected words with commas"),
        (["training.device=gpu", "--dry-run"], "use one of these, or null for the first"),
        (["--output", "prompts.txt"], "is a file"),
        (["--output", "a_run"], "is the directory of a run"),
        (["--output", "taken"], "files that are no run's"),
        (["data.prompts=none.txt"], "none.txt"),
        (["rewards.0.name=none"], "rewards.0.name is 'none'"),
        (["rewards.0.args={colour: red}"], "directed_motion"),
        (["trainin.iterations=1"], "trainin"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_told_in_one_line_and_nothing_is_written(
    invoke: Invoke, folder: Path, arguments: list[str], told: str
) -> None:
    (folder / "a_run").mkdir()
    (folder / "a_run" / "run.json").write_text("{}")
    (folder / "taken" / "nested" / "seed0").mkdir(parents=True)
    (folder / "taken" / "nested" / "seed0" / "thesis.tex").touch()
    before = _files(folder)
    assert told in invoke("ablate", "config.yaml", *arguments).one_line_error()
    assert _files(folder) == before
    assert not OUT.exists()
