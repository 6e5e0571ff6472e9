"""What is not finite has failed, and so has what descends from it."""

from __future__ import annotations

import math

import torch

from workflow_rl.enums import MediaKind
from workflow_rl.evaluation.finite import fail_not_finite, finite_rows
from workflow_rl.evaluation.media_files import shown
from workflow_rl.planning.measure import Meter
from workflow_rl.request import TaskType
from workflow_rl.rewards.composite import TreeScores
from workflow_rl.workflow import StageOutput, WorkflowStage


def _output(name: str, parents: list[int], bad: dict[int, float]) -> StageOutput:
    media = torch.zeros(len(parents), 3, 2, 2)
    for row, value in bad.items():
        media[row, 0, 0, 0] = value
    stage = WorkflowStage(name, TaskType.T2I)
    return StageOutput(stage, MediaKind.IMAGE, (), tuple(parents), media, None)


def _scores() -> TreeScores:
    total = torch.tensor([0.0, 1.0, math.nan, 3.0])
    return TreeScores(total, {2: "r: late"}, {"r": total.clone()}, {"r": {2: "late"}})


def test_failures_descend() -> None:
    outputs = [_output("a", [0, 0], {1: math.nan}), _output("b", [0, 0, 1, 1], {0: math.inf})]
    scored = fail_not_finite(outputs, _scores())
    assert scored.failures == {
        0: "stage b: not finite",
        2: "stage a: not finite",
        3: "stage a: not finite",
    }
    for values in (scored.total, scored.components["r"]):
        assert values.isnan().tolist() == [True, False, True, True]
        assert float(values[1]) == 1.0


def test_parents_of_the_first_stage_are_prompts() -> None:
    """Row 1 of prompt 0 is bad; row 0 of prompt 1 has parent 1 and stays."""
    outputs = [_output("a", [0, 0, 1, 1], {1: math.nan})]
    assert list(fail_not_finite(outputs, _scores()).failures) == [1, 2]


def test_finite_scores_are_left_alone() -> None:
    scores = _scores()
    assert fail_not_finite([_output("a", [0] * 4, {})], scores) is scores


def test_failed_media_are_shown_black() -> None:
    media = torch.tensor([0.5, math.nan, math.inf])
    assert shown(media).tolist() == [0.5, 0.0, 0.0]


def test_rows_are_looked_at_without_a_copy() -> None:
    values = torch.zeros(5, 3, 100, 100)
    values[1, 0, 7, 7], values[2, 1, 8, 8], values[3, 2, 9, 9] = math.nan, math.inf, -math.inf
    with Meter() as meter:
        finite_B = finite_rows(values)
    assert finite_B.tolist() == [True, False, False, False, True]
    assert meter.peak < values.numel() * values.element_size() / 100
