"""A folder with a tiny Qwen2-VL, for the rewards that are made of one."""

from pathlib import Path

import pytest

from tests.rewards.tiny_qwen import save_base, shrink_pictures


@pytest.fixture
def small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the networks few pixels."""
    shrink_pictures(monkeypatch)


@pytest.fixture(scope="module")
def qwen_base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The base model's folder."""
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def folder(tmp_path: Path, qwen_base: str) -> Path:
    """A folder with the base model in ``base``."""
    (tmp_path / "base").symlink_to(qwen_base)
    return tmp_path
