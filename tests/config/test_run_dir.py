"""The run directory belongs to one configuration and to one process at a time."""

import errno
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.config.conftest import LoadWith
from workflow_rl.config import load_config
from workflow_rl.config.run_dir import (
    check_new_run_dir,
    create_run_dir,
    load_run_config,
    locked_run_dir,
)
from workflow_rl.errors import UserError


def test_created_run_is_read_back(load_with: LoadWith, tmp_path: Path) -> None:
    config = load_with(f"output_dir={tmp_path / 'run'}", "seed=5")
    create_run_dir(config)
    assert load_run_config(tmp_path / "run") == config


def test_moved_run_knows_where_it_is(load_with: LoadWith, tmp_path: Path) -> None:
    create_run_dir(load_with(f"output_dir={tmp_path / 'run'}"))
    moved = (tmp_path / "run").rename(tmp_path / "moved")
    assert load_run_config(moved).output_dir == moved


def test_same_configuration_is_pointed_to_resume(load_with: LoadWith, tmp_path: Path) -> None:
    config = load_with(f"output_dir={tmp_path / 'run'}")
    create_run_dir(config)
    with pytest.raises(UserError, match="already holds this run; go on with `workflow-rl resume"):
        check_new_run_dir(config)


def test_another_configuration_is_refused(load_with: LoadWith, tmp_path: Path) -> None:
    create_run_dir(load_with(f"output_dir={tmp_path / 'run'}"))
    with pytest.raises(UserError, match="was left by another configuration"):
        create_run_dir(load_with(f"output_dir={tmp_path / 'run'}", "seed=9"))


def test_overwrite_replaces_a_run_whole(load_with: LoadWith, tmp_path: Path) -> None:
    create_run_dir(load_with(f"output_dir={tmp_path / 'run'}"))
    (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    config = load_with(f"output_dir={tmp_path / 'run'}", "seed=9")
    create_run_dir(config, overwrite=True)
    assert load_run_config(tmp_path / "run") == config
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_that_are_no_run_are_never_touched(
    load_with: LoadWith, tmp_path: Path, overwrite: bool
) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="has files that are no run's"):
        create_run_dir(load_with(f"output_dir={tmp_path / 'thesis'}"), overwrite=overwrite)
    assert (tmp_path / "thesis" / "thesis.tex").read_text() == "x"


def test_directory_below_a_file_is_refused(load_with: LoadWith, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("x")
    with pytest.raises(UserError, match=r"lies below the file .*notes; give another"):
        check_new_run_dir(load_with(f"output_dir={tmp_path / 'notes' / 'deep' / 'run'}"))
    with pytest.raises(UserError, match="is a file; give a directory"):
        check_new_run_dir(load_with(f"output_dir={tmp_path / 'notes'}"))


def test_a_directory_that_may_not_be_entered(
    load_with: LoadWith, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    config = load_with(f"output_dir={closed / 'run'}")
    stat = os.stat

    def refuse(path: os.PathLike[str] | str, **options: Any) -> os.stat_result:
        if closed in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied")
        return stat(path, **options)

    monkeypatch.setattr("workflow_rl.config.run_dir.os.stat", refuse)
    monkeypatch.setattr("workflow_rl.config.run_dir.os.access", lambda path, mode: path != closed)
    with pytest.raises(UserError, match=r"no permission for .*closed; give another"):
        check_new_run_dir(config)


def test_a_refusing_system_is_one_line(
    load_with: LoadWith, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_with(f"output_dir={tmp_path / 'run'}")
    with monkeypatch.context() as patch:
        patch.setattr("workflow_rl.config.run_dir.os.access", lambda path, mode: False)
        with pytest.raises(UserError, match=r"no permission for .*; give another"):
            check_new_run_dir(config)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError, match=r"cannot be written \(Read-only file system\)"):
        create_run_dir(config)


@pytest.mark.parametrize("overwrite", [False, True])
def test_directory_in_use_is_refused(load_with: LoadWith, tmp_path: Path, overwrite: bool) -> None:
    config = load_with(f"output_dir={tmp_path / 'run'}")
    create_run_dir(config)
    with locked_run_dir(tmp_path / "run"):
        with pytest.raises(UserError, match="is in use by a run that is still going"):
            check_new_run_dir(config, overwrite=overwrite)
        with pytest.raises(UserError, match="is in use"), locked_run_dir(tmp_path / "run"):
            pass
    with locked_run_dir(tmp_path / "run"):
        pass


def test_changed_configuration_is_noticed(load_with: LoadWith, tmp_path: Path) -> None:
    create_run_dir(load_with(f"output_dir={tmp_path / 'run'}"))
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("seed: 0", "seed: 1"))
    with pytest.raises(UserError, match="is not what the run began with"):
        load_run_config(tmp_path / "run")


def test_run_from_before_a_key_was_added_is_read(load_with: LoadWith, tmp_path: Path) -> None:
    config = load_with(f"output_dir={tmp_path / 'run'}")
    create_run_dir(config)
    path = tmp_path / "run" / "config.yaml"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if line.strip() != "fps: null") + "\n")
    without = load_config(path)
    assert without == config
    before = json.loads((tmp_path / "run" / "run.json").read_text())
    before["fingerprint"] = without.fingerprint(as_written=True)
    assert before["fingerprint"] != config.fingerprint()
    (tmp_path / "run" / "run.json").write_text(json.dumps(before))
    assert load_run_config(tmp_path / "run") == config


SERVER = "rewards.0.server={url: 'http://old:1'}"


def test_a_run_goes_on_with_a_server_that_has_moved(load_with: LoadWith, tmp_path: Path) -> None:
    create_run_dir(load_with(f"output_dir={tmp_path / 'run'}", SERVER))
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("http://old:1", "http://new:2"))
    moved = load_run_config(tmp_path / "run").rewards[0].server
    assert moved is not None
    assert moved.url == "http://new:2"


@pytest.mark.parametrize("key_is_new", [False, True])
def test_run_whose_fingerprint_counts_the_server_is_read(
    load_with: LoadWith, tmp_path: Path, key_is_new: bool
) -> None:
    config = load_with(f"output_dir={tmp_path / 'run'}", SERVER)
    create_run_dir(config)
    path = tmp_path / "run" / "config.yaml"
    if key_is_new:
        lines = path.read_text().splitlines()
        path.write_text("\n".join(line for line in lines if "wait_s" not in line) + "\n")
    content = load_config(path).model_dump(
        mode="json", exclude={"output_dir", "logging", "guards"}, exclude_unset=True
    )
    assert ("wait_s" in content["rewards"][0]["server"]) is not key_is_new
    content["stages"] = list(content["stages"].items())
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    before = hashlib.sha256(canonical.encode()).hexdigest()[:16]
    assert before != config.fingerprint()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"fingerprint": before}))
    assert load_run_config(tmp_path / "run") == config


def test_damaged_or_missing_run(load_with: LoadWith, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no run"):
        load_run_config(tmp_path / "run")
    config = load_with(f"output_dir={tmp_path / 'run'}")
    create_run_dir(config)
    (tmp_path / "run" / "run.json").write_text("{")
    with pytest.raises(UserError, match=r"run.json is damaged"):
        load_run_config(tmp_path / "run")
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UserError, match="is a file"):
        check_new_run_dir(load_with(f"output_dir={file}"))
