"""What a configuration says of the guards: thresholds, and names that are none."""

from pathlib import Path

import pytest

from tests.config.conftest import LoadWith
from workflow_rl.config import load_config
from workflow_rl.config.guards import GuardsConfig
from workflow_rl.errors import UserError


def test_the_nearest_threshold_counts() -> None:
    """One guard's before its kind's, a kind's before the common one."""
    config = GuardsConfig(thresholds={"motion": 4.0, "motion/a": 5.0, "kl/a": 0.5})
    names = ("motion/a", "motion/b", "brightness/a", "kl/a", "kl/b")
    assert [config.threshold(name) for name in names] == [5.0, 4.0, 2.0, 0.5, 1.0]


def test_thresholds_survive_the_run_directory(load_with: LoadWith, tmp_path: Path) -> None:
    config = load_with("guards.thresholds.motion/i2v=4", "guards.thresholds.brightness=1.0")
    assert config.guards.thresholds == {"motion/i2v": 4.0, "brightness": 1.0}
    path = tmp_path / "dumped.yaml"
    path.write_text(config.dump_yaml(), encoding="utf-8")
    assert load_config(path) == config
    assert config.fingerprint() == load_with().fingerprint()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("guards.thresholds.brightnes=1.0", "'brightnes', .*did you mean 'brightness'"),
        ("guards.thresholds.motion/i2w=1.0", "'motion/i2w', .*did you mean 'motion/i2v'"),
        ("guards.thresholds.motion/t2i=1.0", "'motion/t2i', .*did you mean 'motion/i2v'"),
        ("guards.thresholds.zzz=1.0", "'zzz', .*known: brightness, saturation"),
        ("guards.thresholds.motion=0", r"guards\.thresholds\.motion' is 0; expected greater"),
        ("guards.thresholds.motion=null", r"guards\.thresholds\.motion' is null; .*a valid number"),
        ("guards.watch=[brightnes]", "did you mean 'brightness'"),
        ("guards.stop_on=[motions]", "did you mean 'motion'"),
        ("guards.threshold=1.0", r"did you mean 'guards\.thresholds'"),
    ],
)
def test_a_name_that_is_no_guard_is_fatal(load_with: LoadWith, override: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        load_with(override)
