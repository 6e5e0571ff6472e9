"""An ablation goes on with the models that it began with, whatever appears on the hub."""

import json
import sys
from pathlib import Path

import huggingface_hub
import pytest

from tests.ablation.made_up import make_config
from tests.cli.conftest import FOLDERS, Invoke
from workflow_rl.ablation import runner
from workflow_rl.ablation.commits import keep_commits
from workflow_rl.ablation.jobs import is_stale, make_jobs, prepare
from workflow_rl.ablation.variants import build_variants
from workflow_rl.cli.preflight import with_commits
from workflow_rl.config import RunConfig, hub
from workflow_rl.config.run_dir import load_run_config

REPO = "someone/Tiny-Flux"
OLD, NEW = "0" * 40, "f" * 40


def _config(folder: Path, **fields: str) -> RunConfig:
    stage = {"task": "t2i", "samples": 2, "model": REPO, "height": 64, "width": 64, **fields}
    return make_config(folder, stages={"t2i": stage}, rewards=[{"name": "jpeg_size"}])


@pytest.fixture(autouse=True)
def main(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for the hub; return a list whose last entry is main's commit."""
    commits = [OLD]

    def snapshot_download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert repo == REPO
        folder = tmp_path / "hub" / (commits[-1] if revision in (None, "main") else str(revision))
        for name, content in FOLDERS["flux"].items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(hub, "_fetched", {})
    return commits


def test_a_new_commit_on_the_hub_orphans_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: list[str]
) -> None:
    out = tmp_path / "out"

    def job_of(config: RunConfig) -> tuple[str | None, bool]:
        monkeypatch.setattr(hub, "_fetched", {})  # as a process of its own
        config = with_commits(keep_commits(config, out))
        job = make_jobs(build_variants(config), [0], out)[0]
        if not job.run_dir.exists():
            prepare(job)
        return config.stages["t2i"].revision, is_stale(job)

    assert job_of(_config(tmp_path)) == (OLD, False)
    main.append(NEW)
    assert job_of(_config(tmp_path)) == (OLD, False)
    assert job_of(_config(tmp_path, revision="main")) == (NEW, True)


def test_the_command_goes_on_with_the_commit_that_it_began_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, main: list[str], invoke: Invoke
) -> None:
    (tmp_path / "prompts.txt").write_text("a red circle\na blue square\n")
    (tmp_path / "config.yaml").write_text(_config(tmp_path).dump_yaml())
    worker = [sys.executable, "-m", "tests.ablation.fake_worker"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workflow_rl.cli.ablate.worker_command", lambda j: [*worker, j.run_dir])
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    call = ("ablate", "config.yaml", "--output", "out", "--seeds", "1", "--only")

    def commits() -> dict[str, str | None]:
        runs = sorted(Path("out").glob("*/seed0"))
        return {r.parent.name: load_run_config(r).stages["t2i"].revision for r in runs}

    first = invoke(*call, "shared")
    assert first.exit_code == 0, first.stderr
    assert commits() == {"shared": OLD}
    main.append(NEW)
    for _ in range(2):
        monkeypatch.setattr(hub, "_fetched", {})  # as a process of its own
        again = invoke(*call, "shared,constant")
        assert again.exit_code == 0, again.stdout + again.stderr
        assert commits() == {"shared": OLD, "constant": OLD}


@pytest.mark.parametrize(
    "record",
    [
        "{",
        "[]",
        "{}",
        '{"models": []}',
        '{"models": {"t2i": null}}',
        json.dumps({"models": {"t2i": {"repo": "someone/Else", "commit": OLD}}}),
    ],
)
def test_what_records_no_commit_of_this_model_is_passed_over(tmp_path: Path, record: str) -> None:
    path = tmp_path / "out" / "shared" / "seed0" / "run.json"
    path.parent.mkdir(parents=True)
    path.write_text(record)
    assert keep_commits(_config(tmp_path), tmp_path / "out") == _config(tmp_path)
