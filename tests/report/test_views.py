"""What the sections show: trees of any depth, rewards apart, guards, causes, lost pictures."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.synthetic import Size, make_run
from workflow_rl.config.run import RewardConfig
from workflow_rl.report.build import build_report
from workflow_rl.report.embed import Embedder
from workflow_rl.report.run_data import (
    GuardBaseline,
    RunData,
    SampleNode,
    SavedGroup,
    SavedRollout,
    read_run,
)
from workflow_rl.report.views.evaluation import pairs
from workflow_rl.report.views.failures import failure_causes, failures
from workflow_rl.report.views.gallery import gallery
from workflow_rl.report.views.guards import guard_views
from workflow_rl.report.views.rewards import reward_charts, reward_weights


@pytest.fixture
def run(tmp_path: Path) -> RunData:
    return read_run(make_run(tmp_path / "run"))


def tree(depth: int, advantage: float) -> SampleNode:
    children = [tree(depth - 1, a) for a in (-1.0, 1.0)] if depth > 1 else []
    return SampleNode(f"stage{depth}", None, advantage, advantage, None, children)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_branches_are_sorted_by_credit_and_named_by_their_place(run: RunData, depth: int) -> None:
    group = SavedGroup("p", 0.0, [tree(depth, a) for a in (-1.0, 2.0, 0.5)])
    run = replace(run, rollouts=[SavedRollout(1, [group])])
    found = gallery(run, Embedder(Path("."), 0)).groups[0]
    assert [node.name[-1] for node in found.children] == ["2", "3", "1"]
    assert found.most is not None
    assert found.least is not None
    assert (found.most.advantage, found.least.advantage) == (2.0, -1.0)
    assert found.children[0].shade > found.children[1].shade > 0 > found.children[2].shade
    node, names = found.children[0], [found.children[0].name]
    while node.children:
        node = node.children[0]
        names.append(node.name)
    assert names[-1] == "stage1 " + ".".join(["2", *["2"] * (depth - 1)])


def test_what_has_no_room_is_left_out_and_the_ends_are_kept(run: RunData) -> None:
    group = SavedGroup("p", 0.0, [tree(1, 1.0)] * 10)
    run = replace(run, rollouts=[SavedRollout(i, [group]) for i in range(9)])
    found = gallery(run, Embedder(Path("."), 0), most_samples=30)
    assert found.iterations == [8, 4, 0]
    assert found.left_out == 6


def test_rewards_apart_say_whether_they_are_trained_on(run: RunData) -> None:
    terms = (
        RewardConfig(name="a"),
        RewardConfig(name="a", weight=0.0),
        RewardConfig(callable="m:f", on="t2i"),
    )
    assert reward_weights(terms) == {"a": 1.0, "a#2": 0.0, "m.f@t2i": 1.0}
    config = run.config.model_copy(update={"rewards": terms})
    curve = [0.0] * len(run.iterations)
    metrics = {f"reward/{name}": curve for name in ("a", "a#2", "a/part")}
    notes = {c.title: c.note for c in reward_charts(replace(run, config=config, metrics=metrics))}
    assert notes["a"] == "Trained on, weight 1."
    assert notes["a#2"] == "Not trained on: weight 0."
    assert notes["a/part"] == "Part of a."


def test_guards_causes_and_lost_pictures_are_shown(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", Size(iterations=3))
    lines = [json.loads(t) for t in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {
            "guard/brightness": 0.5 + line["iteration"],
            "reward_failure_causes": {"judge": {"timed out": 2}},
            "media_failed": 1,
            "media_failure_causes": {"No space left on device": 1},
        }
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    guard = {"brightness": {"mean": 0.5, "std": 0.1, "threshold": 4.0}, "still": {"mean": None}}
    (run_dir / "guards.json").write_text(json.dumps({"guards": guard}))
    alarm = {
        "iteration": 2,
        "guard": "brightness",
        "value": 2.5,
        "deviations": 20,
        "action": "stop",
    }
    (run_dir / "guard_alarms.jsonl").write_text(json.dumps(alarm) + "\n")
    path = next((run_dir / "rollouts").glob("*.json"))
    rollout = json.loads(path.read_text())
    rollout["groups"][0]["children"][0]["media"] = None
    path.write_text(json.dumps(rollout))

    run = read_run(run_dir)
    assert [(view.name, view.state) for view in guard_views(run)] == [
        ("brightness", "stopped the run"),
        ("still", "not measured"),
    ]
    svg = guard_views(run)[0].chart.svg
    assert 'class="expected"' in svg
    assert 'class="dot alarm"' in svg
    assert "alarms, 3: 2.50" in svg  # after the third iteration, as the log counts
    assert ("training", "judge: timed out", 6) in failure_causes(run)
    assert ("media of rollouts", "No space left on device", 3) in failure_causes(run)
    assert dict(failures(run))["images and videos of rollouts not written"] == 3
    page = build_report(run_dir).read_text()
    assert "<dt>Guards with an alarm</dt><dd>1 of 1</dd>" in page
    assert "not written" in page
    assert "missing from the run" not in page


@pytest.mark.parametrize("weight", [0.0, 0.01])
def test_a_kl_of_no_weight_is_not_shown_as_the_0_that_older_runs_wrote(
    tmp_path: Path, weight: float
) -> None:
    run_dir = make_run(tmp_path / "run", Size(kl_weight=weight))
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    for line in lines:
        line |= {"kl/i2v": 0.0, "guard/kl/i2v": 0.0, "guard_z/kl/i2v": 0.0}
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    guard = {"kl/i2v": {"mean": 0.0, "std": 1.0, "threshold": 1.0, "quantiles": []}}
    (run_dir / "guards.json").write_text(json.dumps({"guards": guard}))
    page = build_report(run_dir).read_text()
    (view,) = guard_views(read_run(run_dir))
    if weight:
        assert view.row == ("kl/i2v", "quiet", "+0.00", "+0.00", "1", "0", "0")
        assert "Guards with an alarm" in page
        return
    assert view.row == ("kl/i2v", "not measured", *["–"] * 5)
    assert "Guards with an alarm" not in page
    assert page.count(">not measured: kl_weight is 0</text>") == 2  # one for each stage
    assert page.count('<td data-head="State">not measured</td>') == 1


def test_the_drift_of_a_guard_is_that_of_the_run(run: RunData) -> None:
    """A quiet guard that came near an alarm stands before one that did not; a band ends at 0."""
    found = replace(
        run,
        metrics={
            "guard/a/v": [1.0, 1.0, 1.0, 1.0],
            "guard_z/a/v": [math.nan, 0.1, -0.2, 0.1],
            "guard/b/v": [1.0, 2.0, 0.5, 2.0],
            "guard_z/b/v": [math.nan, 1.0, -1.5, 0.5],
            "guard/c/v": [1.0, 1.0, 1.0, 1.0],
        },
        guards={
            "a/v": GuardBaseline(1.0, 1.0, 2.0),
            "b/v": GuardBaseline(1.0, 1.0, 2.0, [0.1, 1.0, 3.0]),
        },
    )
    start = "1.00 (0.100 to 3.00)".replace(" ", "\N{NO-BREAK SPACE}")
    near, far, blind = guard_views(found)
    assert near.row == ("b/v", "quiet", "+0.50", "−1.50", "2", "1.50", start)
    assert (far.name, far.row[-1]) == ("a/v", "1.00")
    assert blind.row == ("c/v", "quiet", *["–"] * 5)
    assert near.chart.expected == (0.0, 3.0)
    assert [list(series.y)[1:] for series in near.chart.series] == [[2, 0.5, 2], [2, -0.5, 1.5]]


def test_stages_before_and_after_are_in_the_order_of_the_chain(run: RunData) -> None:
    """The lines of a run are written with sorted keys."""
    shuffled = [
        replace(e, media=dict(sorted(e.media.items(), reverse=turn)))
        for e, turn in zip(run.evaluations, (True, False, False), strict=True)
    ]
    found = pairs(replace(run, evaluations=shuffled), Embedder(Path("."), 0))
    assert {tuple(s for s, _ in side.media) for p in found for side in p.sides} == {("t2i", "i2v")}
