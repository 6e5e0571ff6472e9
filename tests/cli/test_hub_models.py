"""Commands on models that are named by their hub id, out of a cache that is filled here."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.cli.conftest import Invoke
from workflow_rl.config import hub
from workflow_rl.embedded.folders import EMBEDDED_FOLDERS

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a hub cache that holds ``someone/tiny-flux``, the embedded image model."""
    root = tmp_path / "hub"
    repo = root / "models--someone--tiny-flux"
    for folder in ("refs", "snapshots"):
        (repo / folder).mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots" / COMMIT).symlink_to(EMBEDDED_FOLDERS["t2i"])
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(hub, "_fetched", {})
    return root


def test_a_dry_run_knows_what_is_in_the_cache(invoke: Invoke, workspace: Path, cache: Path) -> None:
    chosen = "stages.t2i.model=someone/tiny-flux"
    result = invoke("train", "run.yaml", "--dry-run", chosen)
    assert result.exit_code == 0, result.stderr
    assert "t2i: someone/tiny-flux" in result.stdout
    message = invoke("train", "run.yaml", "--dry-run", "stages.t2i.model=someone/else")
    assert "stages.t2i.model: someone/else is no folder, nor" in message.one_line_error()


def test_all_that_is_cheap_is_checked_before_a_model_is_fetched(
    invoke: Invoke, workspace: Path, cache: Path
) -> None:
    overrides = ["stages.t2i.model=someone/else", "rewards.0.name=constnt"]
    message = invoke("train", "run.yaml", *overrides).one_line_error()
    assert "rewards.0.name is 'constnt'" in message


def test_generate_serves_a_hub_id(
    invoke: Invoke, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["generate", "--prompt", "a red circle moving left", "--steps", "1", "--frames", "5"]
    from_folder = invoke(*asked, "--output", "folder")
    from_hub = invoke(*asked, "--output", "hub", "--t2i", "someone/tiny-flux")
    assert from_hub.exit_code == 0, from_hub.stderr
    image, ours = (Path(r.stdout.splitlines()[0]) for r in (from_folder, from_hub))
    assert image.read_bytes() == ours.read_bytes()
