"""Guards: what they measure, when they raise alarms, and what a resumed run remembers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.test_trainer import _config, _CrashAfter, _CrashError, _run, _timeless
from workflow_rl.card import ModelCard
from workflow_rl.cli.main import app
from workflow_rl.config.guards import GuardsConfig
from workflow_rl.training import trainer
from workflow_rl.training.guards import Guards
from workflow_rl.training.guards.statistics import group_diversity, sample_statistics
from workflow_rl.training.trainer import train


class _Told(_CrashAfter):
    """Keeps the messages; ends its first run after iteration ``number``."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)

    def iteration(self, number: int, total: int, metrics: dict[str, float]) -> None:
        if number == self.number:
            self.number = -1
            raise _CrashError


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
    assert "rose to 3 by iteration 4" in str(alarms[0])
    assert alarms[0].warning().endswith("raise guards.thresholds.brightness")
    baseline = json.loads((tmp_path / "guards.json").read_text())["guards"]["brightness/v"]
    assert baseline["quantiles"] == pytest.approx([-1, 0, 1])
    assert baseline["mean"] == pytest.approx(0)
    assert baseline["std"] == pytest.approx((4 / 5) ** 0.5)
    assert alarms[0].deviations == pytest.approx(3 / (4 / 5) ** 0.5)
    lines = [json.loads(line) for line in (tmp_path / "guard_alarms.jsonl").open()]
    assert set(lines[0]) == {"iteration", "guard", "value", "deviations", "action"}


def test_a_kl_has_no_start_until_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guards = Guards(GuardsConfig(baseline_iterations=2, window=1), tmp_path)
    written = []
    for kl in (math.nan, math.nan, math.nan, 0.1, math.nan):
        measured = {"brightness/v": torch.tensor([0.0, 1.0]), "kl/v": torch.tensor([kl])}
        monkeypatch.setattr(guards, "_measure", lambda *_, m=measured: m)
        guards.look(guards._seen, (), {})
        if guards.baseline_path.exists():
            written.append(sorted(json.loads(guards.baseline_path.read_text())["guards"]))
    assert written == [["brightness/v"]] * 2 + [["brightness/v", "kl/v"]] * 2


@pytest.mark.parametrize(
    ("thresholds", "said"),
    [
        ({}, [4]),
        ({"brightness": 1.0}, [2, 3, 4]),
        ({"brightness": 1.0, "brightness/v": 2.0}, [3, 4]),
        ({"motion": 1.0, "brightness/w": 1.0}, [4]),
    ],
)
def test_a_threshold_is_that_of_its_guard(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    thresholds: dict[str, float],
    said: list[int],
) -> None:
    """The drifts are 1.1, 3.4 and 6.7 deviations; the common threshold is 5."""
    config = GuardsConfig(baseline_iterations=2, window=1, deviations=5, thresholds=thresholds)
    alarms = _look(Guards(config, tmp_path), monkeypatch, [0, 0, 1, 3, 6])
    assert [alarm.iteration for alarm in alarms] == said
    written = json.loads((tmp_path / "guards.json").read_text())["guards"]["brightness/v"]
    assert written["threshold"] == alarms[0].threshold


@pytest.mark.parametrize("key", ["brightness", "brightness/v"])
def test_an_alarm_names_the_key_that_applies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    thresholds = {"brightness": 1.0, key: 2.0}
    config = GuardsConfig(baseline_iterations=2, window=1, action="stop", thresholds=thresholds)
    guards = Guards(config, tmp_path)
    (alarm,) = _look(guards, monkeypatch, [0, 0, 3])
    assert alarm.warning().endswith(f"raise guards.thresholds.{key}")
    assert f"raise guards.thresholds.{key} in " in str(guards.stop_reason())


def test_a_fall_is_not_told_as_a_rise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = Guards(GuardsConfig(baseline_iterations=2, window=1), tmp_path)
    (alarm,) = _look(guards, monkeypatch, [0, 0, -3])
    assert "fell to -3" in str(alarm)
    assert "samples that turn dark" in str(alarm)


def test_a_resumed_run_has_the_same_baseline_metrics_and_alarms(
    cards: tuple[ModelCard, ModelCard], tmp_path: Path
) -> None:
    """Killed between two checkpoints; with a threshold so low that there are alarms."""
    options = ["guards.baseline_iterations=1", "guards.window=3", "guards.deviations=0.001"]
    options.append(FEW)
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


STOP = "guards={baseline_iterations: 1, window: 1, deviations: 0.001, action: stop}"
FEW = "evaluation.every=0"


def _command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[object, str, str]:
    """Run the real command line; return exit code, output and errors."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        app([str(argument) for argument in arguments])
    shown = capsys.readouterr()
    return ended.value.code, shown.out, shown.err


def test_a_stop_through_the_command_line(
    cards: tuple[ModelCard, ModelCard], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 and a checkpoint; resume stops again until the configuration lets it go on."""
    run = _config(tmp_path, cards).output_dir
    code, _, error = _command(capsys, "train", tmp_path / "config.yaml", STOP, FEW)
    assert code == 1
    assert error.startswith("error: guard ")
    assert error.count("\n") == 1
    assert "the checkpoint is written; to go on all the same" in error
    assert (run / "checkpoints" / "iteration_00000002").is_dir()
    before = (run / "metrics.jsonl").read_bytes()
    assert len(before.splitlines()) == 2

    assert _command(capsys, "resume", run)[::2] == (1, error)
    assert (run / "metrics.jsonl").read_bytes() == before

    config = run / "config.yaml"
    config.write_text(config.read_text().replace("action: stop", "action: warn"))
    code, out, error = _command(capsys, "resume", run)
    assert (code, error) == (0, "")
    assert "had stopped this run; it goes on, as its config.yaml now says" in out
    assert (run / "metrics.jsonl").read_bytes().startswith(before)
    assert len(_timeless(run / "metrics.jsonl")) == 5


def test_a_run_from_before_there_were_guards_goes_on_without(
    cards: tuple[ModelCard, ModelCard], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checkpoint has no state of guards. Killed twice, so that it is resumed twice."""
    config = _config(tmp_path, cards, FEW)
    with monkeypatch.context() as old:
        save = trainer.save_checkpoint
        old.setattr(Guards, "look", lambda *_: ({}, []))
        old.setattr(
            trainer,
            "save_checkpoint",
            lambda root, done, tensors, state, keep: save(
                root, done, tensors, {"method": state["method"]}, keep=keep
            ),
        )
        with pytest.raises(_CrashError):
            _run(config, _CrashAfter(3))
    told = _Told(5)
    with pytest.raises(_CrashError):
        train(config, resume=True, listener=told)
    train(config, resume=True, listener=told)
    assert sum("no guard was watched when this run began" in line for line in told.lines) == 2
    lines = _timeless(config.output_dir / "metrics.jsonl")
    assert len(lines) == 5
    assert not [key for line in lines for key in line if key.startswith("guard")]


def test_an_older_checkpoint_has_no_quantiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GuardsConfig(baseline_iterations=2, window=1)
    guards = Guards(config, tmp_path)
    _look(guards, monkeypatch, [0, 0, 1])
    state = guards.state()
    del state["stopped_by"]
    for values in state["guards"].values():
        del values["samples"], values["quantiles"], values["threshold"]
    del state["baseline_iterations"]
    resumed = Guards(config, tmp_path)
    resumed.restore(state, pytest.fail)
    written = json.loads((tmp_path / "guards.json").read_text())["guards"]["brightness/v"]
    assert written["quantiles"] == []
    assert [alarm.iteration for alarm in _look(resumed, monkeypatch, [3])] == [3]


@pytest.mark.parametrize(
    ("values", "deviations", "stops"),
    [
        ([6, 3], 4.0, False),  # farther away at its alarm than it is now
        ([3, 4], 4.0, True),  # farther away now
        ([3, 4], 5.0, False),
        ([3, 4], 1.0, True),
        ([1], 1.0, False),  # in drift only now: the next iteration has the alarm
    ],
)
def test_another_threshold_judges_what_there_is_now(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    values: list[float],
    deviations: float,
    stops: bool,
) -> None:
    """A brightness of 1 is a drift of 1.1 deviations; the threshold was 2."""
    settings: dict[str, Any] = {"baseline_iterations": 2, "window": 1, "action": "stop"}
    guards = Guards(GuardsConfig(**settings), tmp_path)
    _look(guards, monkeypatch, [0, 0, *values])
    resumed = Guards(GuardsConfig(**settings, deviations=deviations), tmp_path)
    resumed.restore(guards.state(), lambda _: None)
    assert (resumed.stop_reason() is not None) == stops
    if not stops:
        assert len(_look(resumed, monkeypatch, [6])) == 1


@pytest.mark.parametrize("asked", [1, 2, 5])
def test_the_start_is_that_which_the_run_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int
) -> None:
    """Stopped after two of three iterations of the start, and resumed twice."""
    guards = Guards(GuardsConfig(baseline_iterations=3, window=1), tmp_path)
    _look(guards, monkeypatch, [0, 0])
    for values, said in (([0.0], []), ([1.0, 3.0], [4])):
        told: list[str] = []
        resumed = Guards(GuardsConfig(baseline_iterations=asked, window=1), tmp_path)
        resumed.restore(guards.state(), told.append)
        assert [alarm.iteration for alarm in _look(resumed, monkeypatch, values)] == said
        (line,) = told
        assert f"guards.baseline_iterations is {asked}, but this run began with 3" in line
        guards = resumed
    assert json.loads((tmp_path / "guards.json").read_text())["baseline_iterations"] == 3
