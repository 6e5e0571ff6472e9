"""What training changed: every reward and the diversity, the same samples before and after."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.report.synthetic import Size, make_run
from workflow_rl.config.run import RewardConfig
from workflow_rl.evaluation.statistics import paired_bootstrap
from workflow_rl.report.build import build_report
from workflow_rl.report.intervals import Statistics
from workflow_rl.report.pair_cells import pair_cells
from workflow_rl.report.run_data import EvaluationRecord, read_run
from workflow_rl.report.views.effects import Effects, effects

Line = dict[str, Any]


def _effects(
    folder: Path, change: Callable[[Line], None] = lambda line: None, size: Size | None = None
) -> tuple[list[Effects], list[EvaluationRecord]]:
    run = make_run(folder / "run", size)
    path = run / "evaluations.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        change(line)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = read_run(run)
    build_report(run)
    return effects(data, Statistics(data)), data.evaluations


def test_the_last_evaluation_is_paired_with_the_first(tmp_path: Path) -> None:
    (trained, others, diversity), (first, *_, last) = _effects(tmp_path)
    samples = {"clusters": first.prompts, "samples": 2000}
    reward = paired_bootstrap(first.scores, last.scores, **samples)  # type: ignore[arg-type]
    assert trained.rows == [["reward", *pair_cells(reward)]]
    name = "start_position"
    start = paired_bootstrap(first.measures[name], last.measures[name], **samples)  # type: ignore[arg-type]
    assert others.rows == [[name, *pair_cells(start)]]
    assert diversity.rows[0][1:4] == ["0.295", "0.195", "−0.100 [−0.100, −0.100]"]
    assert diversity.rows[0][4:] == ["0 % [0, 0]", "−14", "2"]
    page = (tmp_path / "run" / "report.html").read_text()
    for cell in (*trained.rows[0], *others.rows[0], *diversity.rows[0]):
        assert f">{cell}<" in page


def test_a_reward_of_weight_0_is_told_apart(tmp_path: Path) -> None:
    def component(line: Line) -> None:
        line["components"] = {"directed_motion": [0.5] * 4, "directed_motion/travel": [0.1] * 4}
        line["components"]["sharpness"] = [0.25 * line["iteration"]] * 4

    (trained, others, _), _ = _effects(tmp_path / "with", component)
    assert [row[0] for row in trained.rows] == [
        "reward",
        "directed_motion",
        "directed_motion/travel",
    ]
    assert [row[0] for row in others.rows] == ["sharpness", "start_position"]

    data = read_run(tmp_path / "with" / "run")
    rewards = (
        RewardConfig(name="directed_motion", weight=0.0),
        RewardConfig(name="flicker"),
        RewardConfig(name="sharpness", weight=0.0),
    )
    data = replace(data, config=data.config.model_copy(update={"rewards": rewards}))
    trained, others, _ = effects(data, Statistics(data))
    assert [row[0] for row in trained.rows] == ["reward"]
    assert "directed_motion/travel" in [row[0] for row in others.rows]


@pytest.mark.parametrize(("best", "shown"), [(0, False), (2, True), (4, False)])
def test_the_best_evaluation_has_a_row_where_it_is_not_at_an_end(
    tmp_path: Path, best: int, shown: bool
) -> None:
    def peak(line: Line) -> None:
        line["scores"] = [0.9 if line["iteration"] == best else 0.1 * (1 + line["iteration"])] * 4

    (trained, *_), _ = _effects(tmp_path, peak)
    names = [row[0] for row in trained.rows]
    assert ("reward at its best, iteration 2" in names) == shown
    assert bool(trained.note) == shown
    if shown:
        assert trained.rows[1][2] == "0.900"


def test_a_diversity_that_was_not_measured_is_said_and_is_no_number(tmp_path: Path) -> None:
    """Of a run from before evaluations kept it, of one seed, and where all samples failed."""

    def drop(line: Line) -> None:
        del line["diversity"]

    def fail(line: Line) -> None:
        line["diversity"] = [None, None]

    for change in (drop, fail):
        (*_, diversity), _ = _effects(tmp_path / change.__name__, change)
        assert diversity.rows == []
        assert "workflow-rl evaluate measures it" in diversity.note
    (*_, one), _ = _effects(tmp_path / "one", fail, Size(seeds=1))
    assert one.rows == []
    assert "evaluation.seeds_per_prompt: 2 or more" in one.note


def test_evaluations_of_other_samples_have_no_effects(tmp_path: Path) -> None:
    def rename(line: Line) -> None:
        if line["iteration"] == 0:
            line["prompts"] = ["another"] * 4

    found, _ = _effects(tmp_path, rename)
    assert found == []
    assert 'id="effects"' not in (tmp_path / "run" / "report.html").read_text()
