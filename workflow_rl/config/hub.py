"""Models named by their id on the Hugging Face hub: fetched into its cache, then used as folders.

``HF_HOME``, ``HF_HUB_OFFLINE``, ``HF_TOKEN`` and the cache itself are huggingface_hub's. Of a
repository only what a run reads is fetched: the JSON files first, so that a model that does not
suit the stage is told before its weights are fetched.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from workflow_rl.config.model_folder import check_model_json, json_reader
from workflow_rl.config.model_index import indexed_components
from workflow_rl.config.stage import StageConfig
from workflow_rl.config.weight_files import STEMS
from workflow_rl.errors import UserError

SMALL_FILES = (
    "model_index.json",
    *(f"*/*.{ending}" for ending in ("json", "txt", "model", "jinja")),
)
"""Configurations and tokenizers: all that is no weight."""

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class HubModel(NamedTuple):
    """A repository's files at one commit, in the hub's cache."""

    repo: str
    commit: str
    folder: Path


_fetched: dict[tuple[str, str | None, str | None], HubModel] = {}
"""What this process has fetched, so that a branch is one commit for as long as it runs."""


def is_hub_id(model: Path) -> bool:
    """Say whether ``model`` names a repository on the hub, and no folder, there or mistyped.

    An id is ``owner/name``. Where a folder ``owner`` is there, it is a path.
    """
    if _ID.fullmatch(str(model)) is None:
        return False
    return not model.is_dir() and not model.parent.is_dir()


def model_path(stage: StageConfig, key: str) -> Path | None:
    """Return the folder of a stage's model, fetched where it is a hub id; None: it names none.

    Raises
    ------
    UserError
        As `fetch_model`, or if a revision is given of what is no hub id.
    """
    if stage.model is not None and is_hub_id(stage.model):
        return fetch_model(stage, key).folder
    if stage.revision is not None:
        named = "the embedded model" if stage.model is None else str(stage.model)
        raise UserError(
            f"{key.removesuffix('.model')}.revision is {stage.revision!r}, but {key} is {named}, "
            "which is no hub id; leave it out"
        )
    return stage.model


def fetch_model(stage: StageConfig, key: str) -> HubModel:
    """Return the hub model of a stage, after fetching what of it is not in the cache yet.

    Parameters
    ----------
    stage
        Its ``model`` is a hub id; ``revision`` and ``variant`` choose the files.
    key
        Configuration key that named it, for messages.

    Raises
    ------
    UserError
        If the repository, the revision or the access to it is lacking, it can't be reached and is
        not in the cache, or, before its weights are fetched, if it does not suit the stage.
    """
    repo = str(stage.model)
    wanted = (repo, stage.revision, stage.variant)
    if wanted not in _fetched:
        folder = _snapshot(repo, stage.revision, SMALL_FILES, key)
        if not (folder / "model_index.json").is_file():
            raise UserError(
                f"{key}: {repo} on the hub has no model_index.json, so it holds no diffusers "
                "pipeline; give another id (often the one that ends in -Diffusers)"
            )
        read = json_reader(folder, key)
        check_model_json(read, repo, key, stage)
        index = read("model_index.json")
        _fetch_weights(repo, folder, list(indexed_components(index)), stage, key)
        found = HubModel(repo, folder.name, folder)
        _fetched[wanted] = _fetched[repo, found.commit, stage.variant] = found
    return _fetched[wanted]


def _fetch_weights(
    repo: str, folder: Path, components: list[str], stage: StageConfig, key: str
) -> None:
    """Fetch the variant's weights of each component that has them, the plain ones of the others."""
    if stage.variant is not None:
        _snapshot(repo, folder.name, _weights(components, f".{stage.variant}"), key)
        variant = f"*.{stage.variant}*.safetensors"
        plain = [c for c in components if not any((folder / c).glob(variant))]
        if plain == components:
            where = f"{key.removesuffix('.model')}.variant"
            raise UserError(
                f"{where} is {stage.variant!r}, but {repo} on the hub has no files of it; leave it "
                "out, or give one that the names of its safetensors files have"
            )
        components = plain
    if components:
        _snapshot(repo, folder.name, _weights(components), key)


def _weights(components: Iterable[str], middle: str = "") -> tuple[str, ...]:
    """Return patterns of the weight files of components: one file, or shards."""
    return tuple(
        f"{component}/{stem}{middle}{shard}.safetensors"
        for component in components
        for stem in STEMS
        for shard in ("", "-*-of-*")
    )


def _snapshot(repo: str, revision: str | None, patterns: Iterable[str], key: str) -> Path:
    """Return the folder of a snapshot that has the files of ``patterns``."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    at = "" if revision is None else f" at {revision}"
    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
    except GatedRepoError:
        reason = (
            f"is gated; accept its terms at https://huggingface.co/{repo} and log in with "
            "`hf auth login` or HF_TOKEN"
        )
    except RepositoryNotFoundError:
        reason = (
            "is neither a folder here nor a repository on the hub that you can read; check the "
            "path or the id, and log in if it is private (`hf auth login` or HF_TOKEN)"
        )
    except RevisionNotFoundError:
        reason = "has no such revision; give a branch, a tag or a whole commit of it"
    except LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            why = "HF_HUB_OFFLINE is set; unset it, or give the path of a folder"
        else:
            why = "the hub can't be reached; check the network, or give the path of a folder"
        reason = f"is no folder, nor whole in the hub's cache {constants.HF_HUB_CACHE}, and {why}"
    except HfHubHTTPError as error:
        reason = f"could not be fetched ({' '.join(str(error).split())}); try again"
    except OSError as error:
        reason = f"could not be fetched ({error}); make room in {constants.HF_HUB_CACHE}, or retry"
    raise UserError(f"{key}: {repo}{at} {reason}")


def pinned(stage: StageConfig, key: str) -> StageConfig:
    """Return the stage at the commit that was fetched, so that a run keeps its model."""
    if stage.model is None or not is_hub_id(stage.model):
        return stage
    return stage.model_copy(update={"revision": fetch_model(stage, key).commit})
