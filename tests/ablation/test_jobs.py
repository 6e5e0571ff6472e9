"""Which runs an ablation trains, that they make equally much, and how far each is."""

from pathlib import Path

import pytest

from tests.ablation.made_up import finish, make_config, write_lines
from workflow_rl.ablation.check_file import CHECK_FILE
from workflow_rl.ablation.jobs import (
    check_jobs,
    exists,
    is_finished,
    is_stale,
    iterations_done,
    make_jobs,
    prepare,
)
from workflow_rl.ablation.variants import build_variants
from workflow_rl.config.run_dir import load_run_config, locked_run_dir
from workflow_rl.errors import UserError


def test_every_variant_of_a_seed_comes_before_the_next_seed(tmp_path: Path) -> None:
    jobs = make_jobs(build_variants(make_config(tmp_path)), [4, 1], tmp_path)
    names = ["nested", "shared", "only_t2i", "only_i2v", "constant"]
    assert [job.name for job in jobs] == [f"{n}/seed{s}" for s in (4, 1) for n in names]
    assert [job.run_dir for job in jobs] == [tmp_path / job.name for job in jobs]
    assert [job.config.seed for job in jobs] == [4] * 5 + [1] * 5


def test_every_run_makes_equally_many_videos(tmp_path: Path) -> None:
    jobs = make_jobs(build_variants(make_config(tmp_path)), [0, 1], tmp_path)
    assert {job.planned for job in jobs} == {4 * 2 * 3 * 2}


def test_runs_of_a_service_have_names_of_their_own(tmp_path: Path) -> None:
    config = make_config(tmp_path, logging={"wandb": {"project": "p"}})
    jobs = make_jobs(build_variants(config), [0], tmp_path / "study")
    names = [job.config.logging.wandb.name for job in jobs if job.config.logging.wandb]
    assert names[:2] == ["study/nested/seed0", "study/shared/seed0"]


def test_a_run_is_finished_with_its_last_checkpoint_alone(tmp_path: Path) -> None:
    job = make_jobs(build_variants(make_config(tmp_path)), [0], tmp_path)[0]
    assert not exists(job)
    prepare(job)
    assert (exists(job), is_finished(job), iterations_done(job)) == (True, False, 0)
    finish(job)
    assert (is_finished(job), iterations_done(job)) == (True, 4)
    checkpoint = job.run_dir / "checkpoints" / "iteration_00000004"
    checkpoint.rename(checkpoint.with_name("iteration_00000003"))
    assert not is_finished(job)


def test_a_constant_reward_s_run_is_not_finished_before_its_weights_are_compared(
    tmp_path: Path,
) -> None:
    *_, job = make_jobs(build_variants(make_config(tmp_path)), [0], tmp_path)
    finish(job)
    assert is_finished(job)
    (job.run_dir / CHECK_FILE).unlink()
    assert not is_finished(job)


def test_a_line_that_is_being_written_is_no_iteration(tmp_path: Path) -> None:
    job = make_jobs(build_variants(make_config(tmp_path)), [0], tmp_path)[0]
    prepare(job)
    write_lines(job.run_dir / "metrics.jsonl", [{"iteration": 0}])
    with (job.run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"iterat')
    assert iterations_done(job) == 1


def test_a_run_of_another_configuration_is_kept_unless_it_is_to_be_replaced(tmp_path: Path) -> None:
    old = make_jobs(build_variants(make_config(tmp_path)), [0], tmp_path)[0]
    finish(old)
    changed = make_config(tmp_path, training={"iterations": 5})
    new = make_jobs(build_variants(changed), [0], tmp_path)[0]
    with pytest.raises(UserError, match=r"seed0 was left by another configuration.*--overwrite"):
        check_jobs([new], overwrite=False)
    assert (is_stale(new), is_finished(new), is_finished(old)) == (True, False, True)
    check_jobs([new], overwrite=True)
    prepare(new)
    assert load_run_config(new.run_dir) == new.config
    assert iterations_done(new) == 0


def test_the_same_run_goes_on_whatever_overwrite_says(tmp_path: Path) -> None:
    job = make_jobs(build_variants(make_config(tmp_path)), [0], tmp_path)[0]
    finish(job)
    for overwrite in (False, True):
        check_jobs([job], overwrite=overwrite)
        prepare(job)
    assert iterations_done(job) == 4


def test_a_run_goes_on_with_the_guards_logging_and_patience_of_today(tmp_path: Path) -> None:
    old = make_jobs(build_variants(make_config(tmp_path)), [0], tmp_path)[0]
    prepare(old)
    changed = make_config(
        tmp_path,
        training={"iterations": 4, "max_unscored_iterations": 9},
        guards={"action": "stop"},
        logging={"tensorboard": False},
    )
    new = make_jobs(build_variants(changed), [0], tmp_path)[0]
    assert new.config != old.config
    assert not is_stale(new)
    prepare(new)
    assert load_run_config(new.run_dir) == new.config
    assert not list(new.run_dir.glob(".*.part"))


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_run_is_never_replaced(tmp_path: Path, overwrite: bool) -> None:
    job = make_jobs(build_variants(make_config(tmp_path)), [0], tmp_path)[0]
    job.run_dir.mkdir(parents=True)
    (job.run_dir / "thesis.tex").touch()
    with pytest.raises(UserError, match=r"has files that are no run's"):
        check_jobs([job], overwrite=overwrite)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_that_is_going_is_left_alone(tmp_path: Path, overwrite: bool) -> None:
    job = make_jobs(build_variants(make_config(tmp_path)), [0], tmp_path)[0]
    prepare(job)
    with (
        locked_run_dir(job.run_dir),
        pytest.raises(UserError, match=r"seed0 is in use by a run that is still going"),
    ):
        check_jobs([job], overwrite=overwrite)
    check_jobs([job], overwrite=overwrite)
