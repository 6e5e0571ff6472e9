"""Which runs can go on to another number of iterations, and what that writes."""

import json
from pathlib import Path

import pytest

from tests.config.conftest import LoadWith
from workflow_rl.config.more_iterations import load_run_to_go_on, record_iterations
from workflow_rl.config.run_dir import check_new_run_dir, create_run_dir, load_run_config
from workflow_rl.errors import UserError

MORE = ["training.iterations=9"]


@pytest.fixture
def run(load_with: LoadWith, tmp_path: Path) -> Path:
    create_run_dir(load_with(f"output_dir={tmp_path / 'run'}", "training.iterations=4"))
    return tmp_path / "run"


def test_nothing_is_written_before_the_run_is_loaded(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert load_run_to_go_on(run, [], done=4).training.iterations == 4
    assert load_run_to_go_on(run, MORE, done=4).training.iterations == 9
    assert {path: path.read_bytes() for path in run.iterdir()} == before


def test_it_is_then_that_run(run: Path) -> None:
    config = load_run_to_go_on(run, MORE, done=4)
    line = record_iterations(config, 4)
    assert line == "the run goes on to 9 iterations, no longer 4"
    assert load_run_config(run) == config
    assert record_iterations(config, 4) is None
    assert load_run_to_go_on(run, ["training.iterations=12"], done=9).training.iterations == 12


def test_a_stopped_run_can_end_sooner_but_not_before_what_is_done(run: Path) -> None:
    assert load_run_to_go_on(run, ["training.iterations=3"], done=2).training.iterations == 3
    with pytest.raises(UserError, match=r"is 2, but .*run has done 2 already; give more"):
        load_run_to_go_on(run, ["training.iterations=2"], done=2)


def test_a_process_killed_between_the_two_files_leaves_a_run_to_go_on_with(run: Path) -> None:
    config_text = (run / "config.yaml").read_text()
    record_iterations(load_run_to_go_on(run, MORE, done=4), 4)
    (run / "config.yaml").write_text(config_text)
    with pytest.raises(UserError, match=r"workflow-rl resume .*run training.iterations=N"):
        load_run_config(run)
    config = load_run_to_go_on(run, MORE, done=4)
    assert record_iterations(config, 4) is not None
    assert load_run_config(run) == config


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_a_learning_rate_that_falls_until_the_end_is_refused(
    load_with: LoadWith, tmp_path: Path, schedule: str
) -> None:
    run = tmp_path / "run"
    falls = f"stages.i2v.optimizer={{lr: 1.0e-4, schedule: {schedule}}}"
    create_run_dir(load_with(f"output_dir={run}", falls, "training.iterations=4"))
    assert load_run_to_go_on(run, ["training.iterations=4"], done=2).training.iterations == 4
    with pytest.raises(UserError, match=rf"i2v\.optimizer\.schedule is {schedule} and ends at"):
        load_run_to_go_on(run, MORE, done=4)


def test_the_schedule_of_a_frozen_stage_does_not_matter(
    load_with: LoadWith, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    frozen = ("stages.t2i.freeze=true", "stages.t2i.optimizer={schedule: cosine}")
    create_run_dir(load_with(f"output_dir={run}", *frozen, "training.iterations=4"))
    assert load_run_to_go_on(run, MORE, done=4).training.iterations == 9


@pytest.mark.parametrize("override", ["seed=1", "training={iterations: 9}", "iterations=9"])
def test_no_other_key_can_be_changed(run: Path, override: str) -> None:
    with pytest.raises(UserError, match=r"only training\.iterations can be changed"):
        load_run_to_go_on(run, [*MORE, override], done=4)


def test_a_changed_configuration_is_noticed_as_ever(run: Path) -> None:
    path = run / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(UserError, match="is not what the run began with"):
        load_run_to_go_on(run, MORE, done=4)


def test_train_with_more_iterations_is_pointed_to_resume(load_with: LoadWith, run: Path) -> None:
    with pytest.raises(UserError, match=r"this run with 4 iterations; go on to 9 with `workflow"):
        check_new_run_dir(load_with(f"output_dir={run}", *MORE))
    with pytest.raises(UserError, match="was left by another configuration"):
        check_new_run_dir(load_with(f"output_dir={run}", *MORE, "seed=9"))
    with pytest.raises(UserError, match=r"with 4 iterations; end it sooner, at 2 with `workflow"):
        check_new_run_dir(load_with(f"output_dir={run}", "training.iterations=2"))


@pytest.mark.parametrize("left", ["key_of_another_version: 1\n", "stages: [", None])
def test_train_into_a_run_that_cannot_be_read_tells_of_the_directory(
    load_with: LoadWith, run: Path, left: str | None
) -> None:
    (run / "config.yaml").unlink()
    if left is not None:
        (run / "config.yaml").write_text(left)
    with pytest.raises(UserError, match="was left by another configuration"):
        check_new_run_dir(load_with(f"output_dir={run}", *MORE))


def test_what_was_made_of_the_shorter_run_is_not_taken_for_the_end(run: Path) -> None:
    (run / "report.html").write_text("4")
    (run / "evaluation.json").write_text("4")
    (run / "evaluations" / "run").mkdir(parents=True)
    (run / "export" / "i2v-lora").mkdir(parents=True)
    line = record_iterations(load_run_to_go_on(run, MORE, done=4), 4)
    assert line is not None
    assert "report_after_4.html, evaluation_after_4.json" in line
    names = {path.name for path in run.iterdir()} - {"config.yaml", "run.json"}
    assert names == {
        "report_after_4.html",
        "evaluation_after_4.json",
        "evaluations_after_4",
        "export_after_4",
    }
    assert (run / "export_after_4" / "i2v-lora").is_dir()
    assert json.loads((run / "run.json").read_text())["versions"], "what it began with stays"


def test_what_was_set_aside_before_stays(run: Path) -> None:
    """Lengthened twice with nothing trained in between: evaluations may have taken hours."""
    for iterations in (9, 12, 15):
        (run / "report.html").write_text(str(iterations))
        (run / "evaluations" / str(iterations)).mkdir(parents=True)
        longer = load_run_to_go_on(run, [f"training.iterations={iterations}"], done=4)
        record_iterations(longer, 4)
    for name, iterations in (("after_4", 9), ("after_4_2", 12), ("after_4_3", 15)):
        assert (run / f"report_{name}.html").read_text() == str(iterations)
        assert (run / f"evaluations_{name}" / str(iterations)).is_dir()
