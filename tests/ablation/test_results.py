"""What finished runs show: levels, comparisons, checks; and what a damaged one does not hide."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ablation.made_up import GAIN, PROMPTS, TENSORS, finish, make_config, write_lines
from workflow_rl.ablation import tables
from workflow_rl.ablation.check_file import CHECK_FILE, WeightsCheck
from workflow_rl.ablation.jobs import Job, make_jobs, prepare
from workflow_rl.ablation.levels import first_reached, mean_score
from workflow_rl.ablation.results import AblationResult, collect, curve
from workflow_rl.ablation.variants import build_variants
from workflow_rl.cli.ablate import is_sound


def collected(
    folder: Path, jobs: list[Job], failures: dict[str, str] | None = None
) -> AblationResult:
    variants = build_variants(make_config(folder))
    return collect(
        jobs,
        [variant.name for variant in variants.variants],
        {variant.name: variant.what for variant in variants.variants},
        failures or {},
        left_out=variants.left_out,
        reference=variants.reference,
    )


@pytest.fixture
def jobs(tmp_path: Path) -> list[Job]:
    """Return the runs of two seeds, all finished."""
    jobs = make_jobs(build_variants(make_config(tmp_path)), [0, 1], tmp_path / "out")
    for job in jobs:
        finish(job)
    return jobs


def test_what_a_run_made_is_what_it_counted(tmp_path: Path, jobs: list[Job]) -> None:
    result = collected(tmp_path, jobs)
    images, videos = 4 * 2 * 3, 4 * 2 * 3 * 2
    assert {run.videos for run in result.runs} == {videos}
    assert {run.denoising_steps for run in result.runs} == {images * 4 + videos * 5}
    assert {run.videos_at for run in result.runs} == {(0, 12, 24, 36, 48)}
    assert result.equal


def test_runs_that_made_different_numbers_are_not_equal(tmp_path: Path, jobs: list[Job]) -> None:
    metrics = jobs[1].run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    lines[-1]["samples/i2v"] -= 1
    write_lines(metrics, lines)
    assert not collected(tmp_path, jobs).equal


def test_the_means_over_seeds_are_compared(tmp_path: Path, jobs: list[Job]) -> None:
    by_name = {variant.name: variant for variant in collected(tmp_path, jobs).variants}
    for name in ("nested", "shared", "only_t2i"):
        change = by_name[name].change
        assert change is not None
        assert change.difference.mean == pytest.approx(GAIN[name])
        assert change.difference.low < change.difference.mean < change.difference.high
        assert by_name[name].measures["start"].difference.mean == pytest.approx(-GAIN[name])
    shared = by_name["shared"]
    assert shared.against is not None
    assert shared.against.difference.mean == pytest.approx(-0.11)
    assert (shared.ahead, shared.compared) == (0, 2)
    assert by_name["nested"].against is None
    assert by_name["constant"].change is None


def test_videos_until_the_shared_run_s_best_level(tmp_path: Path, jobs: list[Job]) -> None:
    to_shared = collected(tmp_path, jobs).to_shared
    assert {name: to_shared[name, 0] for name in ("nested", "shared", "only_t2i")} == {
        "nested": 24,  # more than twice the rise in each step
        "shared": 48,
        "only_t2i": None,
    }
    assert ("constant", 0) not in to_shared


def test_the_curve_has_the_evaluations_of_all_seeds(tmp_path: Path, jobs: list[Job]) -> None:
    nested = collected(tmp_path, jobs).variants[0]
    videos, intervals = curve(nested.runs, 0.95)
    assert videos == [0, 12, 24, 36, 48]
    assert [i.mean for i in intervals] == sorted(i.mean for i in intervals)
    assert all(i.low <= i.mean <= i.high for i in intervals)


def test_weights_that_moved_under_a_constant_reward_are_told(tmp_path: Path) -> None:
    jobs = make_jobs(build_variants(make_config(tmp_path)), [0, 1], tmp_path / "out")
    still, moved = [job for job in jobs if job.variant == "constant"]
    finish(still)
    finish(moved, check=WeightsCheck(TENSORS, 2, "i2v/weights/a"))
    result = collected(tmp_path, jobs)
    assert result.moved == ["constant/seed1"]
    assert result.checks["constant/seed0"] == WeightsCheck(TENSORS, 0, None)


def _no_samples(run_dir: Path) -> None:
    write_lines(run_dir / "metrics.jsonl", [{"iteration": i, "reward_mean": 0.1} for i in range(4)])


def _no_evaluations(run_dir: Path) -> None:
    (run_dir / "evaluations.jsonl").unlink()


def _damaged(run_dir: Path) -> None:
    (run_dir / "evaluations.jsonl").write_text('{"iterat\n{"iteration": 4}\n')


def _other_prompts(run_dir: Path) -> None:
    path = run_dir / "evaluations.jsonl"
    path.write_text(path.read_text().replace(PROMPTS[0], "a purple square"))


def _no_text(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").write_bytes(b'{"iteration": 0}\n\xff\xfe\n')


def _change_last(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines[-1])
    write_lines(path, lines)


def _a_line_without_samples(run_dir: Path) -> None:
    _change_last(run_dir / "metrics.jsonl", lambda line: line.pop("samples/i2v"))


def _fewer_prompts_after_a_stop(run_dir: Path) -> None:
    def halve(line: dict[str, Any]) -> None:
        line |= {name: line[name][:4] for name in ("prompts", "seeds", "scores")}
        for measures in (line["components"], line.get("extra", {})):
            measures |= {name: values[:4] for name, values in measures.items()}

    _change_last(run_dir / "evaluations.jsonl", halve)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (_no_samples, r"has no samples/t2i in metrics\.jsonl.*delete it to train it anew"),
        (_no_evaluations, r"has no evaluations\.jsonl.*delete it"),
        (_damaged, r"line 1 is no JSON"),
        (_no_text, r"metrics\.jsonl line 2 is no JSON: remove that line"),
        (_a_line_without_samples, r"iteration 4 in metrics\.jsonl has no samples/i2v.*delete"),
        (_fewer_prompts_after_a_stop, r"on other prompts before a stop than after it; delete"),
        (_other_prompts, r"was evaluated on other prompts than nested/seed0; delete"),
    ],
)
def test_a_run_that_cannot_be_used_does_not_hide_the_others(
    tmp_path: Path, jobs: list[Job], damage: Callable[[Path], None], reason: str
) -> None:
    job = next(job for job in jobs if job.name == "shared/seed1")
    damage(job.run_dir)
    result = collected(tmp_path, jobs)
    assert len(result.runs) == len(jobs) - 1
    (fault,) = result.unfinished
    assert fault.name == "shared/seed1"
    assert re.search(reason, fault.reason)
    assert "\n" not in fault.reason


def test_a_damaged_check_is_a_fault_of_its_run_alone(tmp_path: Path, jobs: list[Job]) -> None:
    job = next(job for job in jobs if job.name == "constant/seed0")
    (job.run_dir / CHECK_FILE).write_text("{}")
    result = collected(tmp_path, jobs)
    assert [fault.name for fault in result.unfinished] == ["constant/seed0"]
    assert list(result.checks) == ["constant/seed1"]


def test_runs_that_are_missing_are_told_with_how_far_they_are(tmp_path: Path) -> None:
    jobs = make_jobs(build_variants(make_config(tmp_path)), [0], tmp_path / "out")
    finish(jobs[1])
    prepare(jobs[0])
    write_lines(jobs[0].run_dir / "metrics.jsonl", [{"iteration": 0}, {"iteration": 1}])
    result = collected(tmp_path, jobs, {"only_t2i/seed0": "out of memory"})
    told = {u.name: (u.done, u.iterations, u.reason) for u in result.unfinished}
    assert told["nested/seed0"] == (2, 4, "")
    assert told["only_t2i/seed0"] == (0, 4, "out of memory")
    assert [variant.name for variant in result.variants] == ["shared"]
    assert result.variants[0].against is None


def test_a_run_that_fails_after_its_last_iteration_is_told(tmp_path: Path, jobs: list[Job]) -> None:
    assert is_sound(collected(tmp_path, jobs))
    result = collected(tmp_path, jobs, {"nested/seed0": "no sample had a score"})
    assert (len(result.runs), result.unfinished) == (len(jobs), ())
    told = "FAILED: nested/seed0 after all of its iterations: no sample had a score"
    assert told in tables.facts(result)
    assert not is_sound(result)


def test_a_guard_that_stops_a_run_after_its_last_iteration_takes_nothing_from_it(
    tmp_path: Path, jobs: list[Job]
) -> None:
    alarm = {"guard": "motion/i2v", "value": 0.0, "deviations": 9.0, "action": "stop"}
    for job, iteration in ((jobs[0], 3), (jobs[1], 2)):
        write_lines(job.run_dir / "guard_alarms.jsonl", [{"iteration": iteration, **alarm}])
    for failures, end in ({"nested/seed0": "it drifted"}, ": it drifted"), ({}, "."):
        result = collected(tmp_path, jobs, failures)
        (told,) = [fact for fact in tables.facts(result) if fact.startswith("Stopped by a guard")]
        assert "nested/seed0 after its last iteration, by motion/i2v" in told
        assert told.endswith(f"counts{end}")
        assert is_sound(result)


def test_a_failed_score_is_left_out_of_the_mean() -> None:
    assert mean_score([0.2, math.nan, 0.4]) == pytest.approx(0.3)
    assert math.isnan(mean_score([math.nan]))


def test_the_first_evaluation_at_a_level_counts_in_any_order() -> None:
    levels = {20: 0.5, 0: 0.1, 10: 0.4, 30: 0.3}
    assert [first_reached(level, levels) for level in (0.1, 0.4, 0.45, 0.6)] == [0, 10, 20, None]
    assert first_reached(math.nan, levels) is None
