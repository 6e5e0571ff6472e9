"""Models named by their hub id: what is fetched, from where, and what is said when it can't be."""

import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from tests.config.conftest import LoadWith
from workflow_rl.config import StageConfig, hub
from workflow_rl.config.hub import fetch_model, is_hub_id, model_path, pinned
from workflow_rl.config.run_dir import create_run_dir, load_run_config
from workflow_rl.errors import UserError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "someone/Tiny-Flux"
KEY = "stages.t2i.model"
JSON: dict[str, dict[str, Any]] = {
    "model_index.json": {
        "_class_name": "FluxPipeline",
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "image_encoder": [None, None],
    },
    "vae/config.json": {"block_out_channels": [8, 16, 32]},
    "transformer/config.json": {"guidance_embeds": False},
}
WEIGHTS = (
    "transformer/diffusion_pytorch_model.fp16.safetensors",
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
)
REPO_FILES = (
    *JSON,
    *WEIGHTS,
    "tokenizer/vocab.txt",
    "README.md",
    "tiny-flux.safetensors",
    "transformer/diffusion_pytorch_model.bin",
)


@pytest.fixture(autouse=True)
def nothing_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_fetched", {})


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a hub cache that holds the repository's main branch."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return _write_cache(tmp_path / "hub")


def _write_cache(root: Path) -> Path:
    repo = root / f"models--{REPO.replace('/', '--')}"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    for name, content in JSON.items():
        path = repo / "snapshots" / COMMIT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    return root


def _stage(**fields: Any) -> StageConfig:
    return StageConfig(**{"task": "t2i", "model": Path(REPO)} | fields)


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Stand in for the hub; what is asked for of `REPO_FILES` appears, and is listed."""
    names: list[str] = []

    def snapshot_download(repo: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        assert repo == REPO
        assert revision in (None, COMMIT)
        folder = tmp_path / COMMIT
        for name in REPO_FILES:
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                names.append(name)
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(json.dumps(JSON.get(name)))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return names


def test_only_owner_and_name_are_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert is_hub_id(Path("black-forest-labs/FLUX.1-dev"))
    for path in ("FLUX.1-dev", "models/FLUX.1-dev", "../FLUX.1-dev", "a/b/c", "/a/b", "~/flux"):
        assert not is_hub_id(Path(path)), path
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert not is_hub_id(Path("owner/name")), "a folder that is there is a folder"


def test_what_a_run_reads_is_fetched_and_nothing_else(fetched: list[str]) -> None:
    model = fetch_model(_stage(), KEY)
    assert (model.repo, model.commit) == (REPO, COMMIT)
    assert sorted(fetched) == sorted([*JSON, "tokenizer/vocab.txt", *WEIGHTS[1:]])


def test_a_variant_is_fetched_where_there_is_one(fetched: list[str]) -> None:
    fetch_model(_stage(variant="fp16"), KEY)
    assert [name for name in fetched if "safetensors" in name] == [WEIGHTS[0], WEIGHTS[3]]


def test_weights_are_fetched_once(fetched: list[str]) -> None:
    fetch_model(_stage(), KEY)
    count = len(fetched)
    stage = pinned(_stage(), KEY)
    assert stage.revision == COMMIT
    assert model_path(stage, KEY) == model_path(_stage(), KEY)
    assert len(fetched) == count


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": "i2v"}, "a FluxPipeline, whose task is t2i"),
        ({"height": 63, "width": 64}, "multiples of 8; use 64"),
        ({"variant": "bf16"}, f"^stages.t2i.variant is 'bf16', but {REPO} on the hub has no files"),
    ],
)
def test_a_model_that_does_not_suit_is_told_before_its_weights_are_fetched(
    fetched: list[str], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        fetch_model(_stage(**fields), KEY)
    assert not any("safetensors" in name for name in fetched)


def test_a_component_of_another_library_is_told_before_weights_are_fetched(
    fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    index = JSON["model_index.json"] | {"vae": ["my_models", "MyVAE"]}
    monkeypatch.setitem(JSON, "model_index.json", index)
    with pytest.raises(UserError, match=f"^{KEY}: {REPO} names a MyVAE of the library 'my_models'"):
        fetch_model(_stage(), KEY)
    assert not any("safetensors" in name for name in fetched)


def test_without_a_network_the_cache_serves(cache: Path) -> None:
    folder = model_path(_stage(), KEY)
    assert folder == cache / "models--someone--Tiny-Flux" / "snapshots" / COMMIT
    assert pinned(_stage(), KEY).revision == COMMIT
    assert model_path(_stage(revision=COMMIT), KEY) == folder


def test_the_cache_is_where_hf_home_says(tmp_path: Path) -> None:
    _write_cache(tmp_path / "home" / "hub")
    code = (
        "from pathlib import Path; from workflow_rl.config import StageConfig;"
        "from workflow_rl.config.hub import model_path;"
        f"print(model_path(StageConfig(task='t2i', model=Path({REPO!r})), 'k'))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    assert found.stdout.strip().startswith(str(tmp_path / "home" / "hub"))


def test_what_is_not_in_the_cache_is_one_line(cache: Path) -> None:
    for fields in ({"model": Path("someone/Else")}, {"revision": "v2"}):
        with pytest.raises(UserError, match="is no folder, nor whole in the hub's cache") as caught:
            model_path(_stage(**fields), KEY)
        assert str(cache) in str(caught.value)
        assert "HF_HUB_OFFLINE is set; unset it" in str(caught.value)
        assert "\n" not in str(caught.value)


def _answer(error: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    response: Any = type("Response", (), {"status_code": status, "headers": {}, "request": None})()
    return error("refused\nby the hub", response=response)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (_answer(errors.GatedRepoError, 403), "is gated; accept its terms at https://huggingface"),
        (_answer(errors.RepositoryNotFoundError, 401), "neither a folder here nor a repository"),
        (_answer(errors.RevisionNotFoundError, 404), "someone/Tiny-Flux at v2 has no such revis"),
        (_answer(errors.HfHubHTTPError, 503), r"could not be fetched \(refused by the hub\)"),
        (OSError(28, "No space left on device"), "No space left on device"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def refuse(*args: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(UserError, match=message) as caught:
        model_path(_stage(revision="v2"), KEY)
    assert str(caught.value).startswith(KEY)
    assert "\n" not in str(caught.value)


def test_a_repository_without_a_pipeline_is_one_line(cache: Path) -> None:
    next(cache.rglob("model_index.json")).unlink()
    with pytest.raises(UserError, match="so it holds no diffusers pipeline"):
        model_path(_stage(), KEY)


def test_a_revision_is_for_hub_ids(tmp_path: Path) -> None:
    for model in (tmp_path, None):
        with pytest.raises(UserError, match=r"stages\.t2i\.revision is 'main', but stages\.t2i\."):
            model_path(_stage(model=model, revision="main"), KEY)


def test_a_run_records_the_commit_and_keeps_to_it(
    cache: Path, load_with: LoadWith, tmp_path: Path
) -> None:
    config = load_with(f"output_dir={tmp_path / 'run'}", f"stages.t2i.model={REPO}")
    stage = pinned(config.stages["t2i"], KEY)
    config = config.model_copy(update={"stages": {**config.stages, "t2i": stage}})
    create_run_dir(config)
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["models"]
    assert recorded == {"t2i": {"repo": REPO, "commit": COMMIT}}
    (cache / "models--someone--Tiny-Flux" / "refs" / "main").write_text("f" * 40)
    read = load_run_config(tmp_path / "run").stages["t2i"]
    assert (str(read.model), read.revision) == (REPO, COMMIT)
    assert model_path(read, KEY) == model_path(stage, KEY)
