"""What several tests of rewards need: a folder with a tiny Qwen2-VL, a proxy that is not there."""

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


@pytest.fixture
def absent_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the environment name a proxy, at a port where there is none."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
