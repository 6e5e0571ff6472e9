"""What ships can be had without the repository, and runs where it is written."""

import errno
import os
import shutil
from pathlib import Path

import pytest

import workflow_rl
from tests.cli.conftest import Invoke
from workflow_rl.cli.init import shipped_folder

ROOT = Path(__file__).parents[2]


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_all_that_ships_is_written_and_can_be_trained(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke("init", "mine/project")
    assert result.exit_code == 0, result.stderr
    assert "next: cd mine/project && workflow-rl train configs/quickstart.yaml" in result.stdout
    for name in ("configs", "examples"):
        assert _files(Path("mine/project") / name) == _files(ROOT / name)

    monkeypatch.chdir("mine/project")
    for path in ("quickstart", "two_shots", "t2i_only", "hacked_reward", "i2v_from_frames"):
        checked = invoke("train", f"configs/{path}.yaml", "--dry-run")
        assert checked.exit_code == 0, checked.stderr


def test_nothing_is_overwritten(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    assert "examples is there already" in invoke("init").one_line_error()
    assert [path.name for path in tmp_path.iterdir()] == ["examples"]


def test_where_it_cannot_be_written_is_one_line(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert "cannot be written" in invoke("init", "file/below").one_line_error()
    assert "cannot be written" in invoke("init", "file").one_line_error()


def test_a_full_disk_leaves_nothing_behind(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the same command does it once there is room."""
    monkeypatch.chdir(tmp_path)
    copy, room = shutil.copyfile, 40

    def copy_while_there_is_room(source: Path, target: Path) -> Path:
        nonlocal room
        room -= 1
        if room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))
        return copy(source, target)

    with monkeypatch.context() as full:
        full.setattr(shutil, "copyfile", copy_while_there_is_room)
        result = invoke("init", "mine")
    assert room < 0
    assert result.exit_code == 1
    assert result.stderr.startswith("error: cannot write " + str(tmp_path / "mine"))
    assert result.stderr.endswith("make room and run the same command again\n")
    assert list(tmp_path.iterdir()) == []
    assert invoke("init", "mine").exit_code == 0


def test_the_next_command_can_be_pasted(invoke: Invoke, tmp_path: Path) -> None:
    assert f"cd '{tmp_path}/my work' && " in invoke("init", tmp_path / "my work").stdout


def test_a_configuration_that_is_not_there_is_pointed_to_it(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    message = invoke("train", "configs/quickstart.yaml").one_line_error()
    assert "`workflow-rl init` writes some" in message


def test_an_installed_package_carries_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shipped_folder() == ROOT
    (tmp_path / "workflow_rl" / "shipped").mkdir(parents=True)
    monkeypatch.setattr(workflow_rl, "__file__", str(tmp_path / "workflow_rl" / "__init__.py"))
    assert shipped_folder() == tmp_path / "workflow_rl" / "shipped"
