"""Guards: what they measure, when they raise alarms, and what a resumed run remembers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_trainer import _config, _CrashAfter, _CrashError, _run, _timeless
from workflow_rl.card import ModelCard
from workflow_rl.config.guards import GuardsConfig
from workflow_rl.training.guards import GuardError, Guards
from workflow_rl.training.guards.statistics import group_diversity, sample_statistics
from workflow_rl.training.trainer import train


def _square(at: int, light: float) -> torch.Tensor:
    frame = torch.zeros(3, 32, 32)
    frame[:, 8:24, at : at + 8] = light
    return frame


def _moving(speed: int, light: float = 0.5) -> torch.Tensor:
    return torch.stack([_square(2 + speed * t, light) for t in range(5)], dim=1)


def test_motion_grows_with_speed_and_not_with_contrast() -> None:
    videos = torch.stack([_moving(0), _moving(1), _moving(1, 0.9), _moving(2)])
    found = sample_statistics(videos)
    still, slow, bright, fast = found["motion"].tolist()
    assert still == 0 < slow < fast
    assert bright == pytest.approx(slow, rel=0.1)
    assert found["frame_change"][2] == pytest.approx(1.8 * float(found["frame_change"][1]))


def test_the_other_statistics_of_known_pictures() -> None:
    grey, red = torch.full((3, 32, 32), 0.5), torch.zeros(3, 32, 32)
    red[0] = 1.0
    noise = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = sample_statistics(torch.stack([grey, red, noise, grey * torch.nan]))
    assert found["brightness"][:2].tolist() == pytest.approx([0.5, 0.299])
    assert found["saturation"][:2].tolist() == [0.0, 1.0]
    assert found["sharpness"][0] == pytest.approx(0, abs=1e-6)
    assert found["sharpness"][2] > 100
    assert all(values[3].isnan() for values in found.values())


def test_diversity_is_the_distance_of_two_samples_of_a_group() -> None:
    media = torch.stack([torch.full((3, 8, 8), value) for value in (0.2, 0.5, 0.4, 0.4, 0.9)])
    found = group_diversity(media, torch.tensor([0, 0, 1, 1, 2]))
    assert found[:2].tolist() == pytest.approx([0.3, 0.0])
    assert found[2].isnan()


def _look(guards: Guards, monkeypatch: pytest.MonkeyPatch, values: list[float]) -> list[Any]:
    """Feed one guard three samples around each value."""
    alarms = []
    for value in values:
        samples = torch.tensor([value - 1.0, value, value + 1.0])
        monkeypatch.setattr(guards, "_measure", lambda *_, s=samples: {"brightness/v": s})
        alarms += guards.look(guards._seen, (), {})[1]
    return alarms


def test_an_alarm_comes_at_the_entry_and_again_when_worse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(GuardsConfig(baseline_iterations=2, window=1), tmp_path)
    alarms = _look(guards, monkeypatch, [0, 0, 1, 3, 3.1, 3, 6, 0, 3])
    assert [alarm.iteration for alarm in alarms] == [3, 6, 8]
    baseline = json.loads((tmp_path / "guards.json").read_text())["guards"]["brightness/v"]
    assert baseline["mean"] == pytest.approx(0)
    assert baseline["std"] == pytest.approx((4 / 5) ** 0.5)
    assert alarms[0].deviations == pytest.approx(3 / (4 / 5) ** 0.5)
    lines = [json.loads(line) for line in (tmp_path / "guard_alarms.jsonl").open()]
    assert set(lines[0]) == {"iteration", "guard", "value", "deviations", "action"}


def test_a_resumed_run_has_the_same_baseline_metrics_and_alarms(
    cards: tuple[ModelCard, ModelCard], tmp_path: Path
) -> None:
    """Killed between two checkpoints; with a threshold so low that there are alarms."""
    options = ["guards.baseline_iterations=1", "guards.window=3", "guards.deviations=0.001"]
    found: list[list[Any]] = []
    for name, crash in (("whole", None), ("killed", 3)):
        (tmp_path / name).mkdir()
        config = _config(tmp_path / name, cards, *options)
        if crash is None:
            _run(config)
        else:
            with pytest.raises(_CrashError):
                _run(config, _CrashAfter(crash))
            train(config, resume=True)
        run = config.output_dir
        found.append(
            [
                _timeless(run / "metrics.jsonl"),
                (run / "guards.json").read_bytes(),
                (run / "guard_alarms.jsonl").read_bytes(),
            ]
        )
    assert found[0] == found[1]
    assert any(line["guard_z/brightness/i2v"] for line in found[0][0])
    assert len({frozenset(line) for line in found[0][0]}) == 1


def test_a_guard_stops_the_run_with_its_checkpoint_written(
    cards: tuple[ModelCard, ModelCard], tmp_path: Path
) -> None:
    config = _config(
        tmp_path,
        cards,
        "guards={baseline_iterations: 1, window: 1, deviations: 0.001, action: stop}",
    )
    with pytest.raises(GuardError, match=r"guard .*/.*deviations from the start; look at"):
        _run(config)
    lines = _timeless(config.output_dir / "metrics.jsonl")
    assert len(lines) == 2
    assert (config.output_dir / "checkpoints" / "iteration_00000002").is_dir()
