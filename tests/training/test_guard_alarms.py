"""Alarms: the guard of the KL raises them, a run tells them, and ``stop_on`` says which stop it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.training.test_trainer import _config, _run, _StopAfter, _timeless
from workflow_rl.card import ModelCard
from workflow_rl.config.guards import GuardKind, GuardsConfig
from workflow_rl.report.numbers import UNKNOWN
from workflow_rl.report.run_data import read_run
from workflow_rl.report.views.guards import guard_views
from workflow_rl.training.guards import Guards

NEVER = 0


def test_the_guard_of_the_kl_drifts_and_the_listener_is_told_while_training(
    cards: tuple[ModelCard, ModelCard], tmp_path: Path
) -> None:
    """Its figure is √(2·KL), and it is its own threshold that it is held against."""
    guards = "guards={baseline_iterations: 1, window: 1, deviations: 1.0e+9, kl_deviations: 1.0e-6}"
    told = _StopAfter(NEVER)
    config = _config(tmp_path, cards, guards, "evaluation.every=0", "training.iterations=3")
    _run(config, told)
    lines = _timeless(config.output_dir / "metrics.jsonl")
    for stage in ("t2i", "i2v"):
        measured = [line[f"guard/kl/{stage}"] for line in lines]
        assert measured == pytest.approx([(2 * line[f"kl/{stage}"]) ** 0.5 for line in lines])
        assert measured[-1] > 0
        assert lines[-1][f"guard_z/kl/{stage}"] == pytest.approx(measured[-1])
    alarms = [json.loads(line) for line in (config.output_dir / "guard_alarms.jsonl").open()]
    assert {alarm["guard"] for alarm in alarms} == {"kl/t2i", "kl/i2v"}
    warnings = [text for text in told.messages if text.startswith("warning: guard ")]
    assert len(warnings) == len(alarms)
    for text, alarm in zip(warnings, alarms, strict=True):
        assert f"guard {alarm['guard']} rose to" in text
        assert f"by iteration {alarm['iteration'] + 1}," in text


@pytest.mark.parametrize(
    "unmeasured",
    [("stages.t2i.kl_weight=0", "stages.i2v.kl_weight=0"), ("rewards=[{name: constant}]",)],
    ids=["no weight", "no sample trains"],
)
def test_a_kl_that_was_not_measured_is_null_and_no_alarm(
    cards: tuple[ModelCard, ModelCard], tmp_path: Path, unmeasured: tuple[str, ...]
) -> None:
    """Never 0: that would say that the stage had not moved."""
    guards = "guards={baseline_iterations: 1, window: 1, deviations: 1.0e+9, kl_deviations: 1.0e-9}"
    few = ("evaluation.every=0", "training.iterations=3")
    config = _config(tmp_path, cards, guards, *few, *unmeasured)
    _run(config, _StopAfter(NEVER))
    lines = _timeless(config.output_dir / "metrics.jsonl")
    assert len(lines) == 3
    for stage in ("t2i", "i2v"):
        for line in lines:
            assert line[f"kl/{stage}"] is None
            assert line[f"guard/kl/{stage}"] is None
            assert line[f"guard_z/kl/{stage}"] is None
            assert line[f"guard/brightness/{stage}"] > 0
    assert not (config.output_dir / "guard_alarms.jsonl").exists()
    (cells,) = (row for row in _guard_rows(config.output_dir) if row[0] == "kl/t2i")
    assert cells == ("kl/t2i", "not measured", *[UNKNOWN] * 5)


def _guard_rows(run: Path) -> list[tuple[str, ...]]:
    return [view.row for view in guard_views(read_run(run))]


@pytest.mark.parametrize(
    ("stop_on", "stopping"),
    [
        (None, "brightness"),
        (("brightness",), "brightness"),
        (("motion", "kl"), "motion"),
        (("kl",), None),
        ((), None),
    ],
)
def test_only_the_guards_of_stop_on_stop_a_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop_on: tuple[GuardKind, ...] | None,
    stopping: str | None,
) -> None:
    """Brightness and motion drift, brightness the farther; both raise an alarm in any case."""
    config = GuardsConfig(baseline_iterations=1, window=1, action="stop", stop_on=stop_on)
    guards = Guards(config, tmp_path)
    spread = torch.tensor([-1.0, 0.0, 1.0])
    for bright, fast in ((0.0, 0.0), (9.0, 5.0)):
        found = {"brightness/i2v": spread + bright, "motion/i2v": spread + fast}
        monkeypatch.setattr(guards, "_measure", lambda *_, found=found: found)
        _, alarms = guards.look(0, (), {})
    stops = {"brightness", "motion", "kl"} if stop_on is None else set(stop_on)
    assert {alarm.kind: alarm.action for alarm in alarms} == {
        kind: "stop" if kind in stops else "warn" for kind in ("brightness", "motion")
    }
    reason = guards.stop_reason()
    if stopping is None:
        assert reason is None
    else:
        assert reason is not None
        assert reason.startswith(f"guard {stopping}/i2v rose")
    assert [name.split("/")[0] for name in guards.state()["stopped_by"]] == [
        kind for kind in ("brightness", "motion") if kind in stops
    ]
