"""Folders of media made elsewhere: which file is which prompt and seed.

Either the folder holds a manifest ``prompts.jsonl``, one object a line,
``{"file": "fox.mp4", "prompt": "a fox in snow", "seed": 3}`` (``seed`` is 0 where it is left out),
or the names tell it, as `workflow-rl generate` writes them: the prompt in lower case with ``_`` for
whatever is no letter or digit, 60 characters at most, then ``_seed`` and the seed, then anything
after another ``_``: ``a_fox_in_snow_seed3.mp4``, ``a_fox_in_snow_seed3_i2v.mp4``.

Nothing here imports PyTorch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from workflow_rl.config import PromptRecord
from workflow_rl.enums import MediaKind
from workflow_rl.errors import UserError

MANIFEST_FILE = "prompts.jsonl"
MEDIA_SUFFIXES = (".mp4", ".png", ".webp")
MAX_STEM = 60
MANIFEST_KEYS = ("file", "prompt", "seed")

Files = Mapping[tuple[str, int], Path]


def prompt_stem(prompt: str) -> str:
    """Return how the names of a prompt's files begin."""
    return re.sub(r"[^a-z0-9]+", "_", prompt.lower()).strip("_")[:MAX_STEM] or "sample"


def file_stem(prompt: str, seed: int) -> str:
    """Return the name, without what comes after it, of the file of a prompt and seed."""
    return f"{prompt_stem(prompt)}_seed{seed}"


def media_kind(path: Path) -> MediaKind:
    """Return what a file holds; a WebP of several frames is a video.

    Raises
    ------
    UserError
        A WebP that is none.
    """
    if path.suffix.lower() != ".webp":
        return MediaKind.VIDEO if path.suffix.lower() == ".mp4" else MediaKind.IMAGE
    from PIL import Image

    try:
        with Image.open(path) as image:
            frames = getattr(image, "n_frames", 1)
    except OSError as error:
        raise UserError(f"{path} is no whole image; replace or remove it") from error
    return MediaKind.VIDEO if frames > 1 else MediaKind.IMAGE


def match_files(
    folder: Path,
    prompts_file: Path,
    records: Sequence[PromptRecord],
    seeds: Sequence[int],
    kind: MediaKind | None,
) -> tuple[Files, MediaKind]:
    """Find the files of prompts and seeds in a folder.

    Parameters
    ----------
    prompts_file
        Where the prompts come from, for messages.
    kind
        What to look for; None: videos, or images where the folder has no video of these prompts.

    Returns
    -------
    (mapping of (prompt, seed) to Path, MediaKind)
        Only what is there.

    Raises
    ------
    UserError
        No file of these prompts, two files for one prompt and seed, prompts that names cannot
        tell apart, files of another kind than ``kind``, or a manifest that is wrong.
    """
    prompts = [record.prompt for record in records]
    for prompt in prompts:
        if prompts.count(prompt) > 1:
            raise UserError(
                f"{prompts_file}: {prompt!r} is there twice, so the files in {folder} could be of "
                "either; keep one"
            )
    wanted = [(prompt, seed) for prompt in prompts for seed in seeds]
    manifest = folder / MANIFEST_FILE
    found = _from_manifest(manifest) if manifest.is_file() else _from_names(folder, wanted)
    found = {key: paths for key in wanted if (paths := found.get(key))}
    if not found:
        raise UserError(
            f"no file in {folder} is of a prompt in {prompts_file} with seed {seeds[0]} to "
            f"{seeds[-1]}; name them like {file_stem(prompts[0], seeds[0])}.mp4, or list them in "
            f"{manifest}"
        )
    by_kind = {each: _of_kind(found, each) for each in (MediaKind.VIDEO, MediaKind.IMAGE)}
    if kind is None:
        kind = MediaKind.VIDEO if by_kind[MediaKind.VIDEO] else MediaKind.IMAGE
    if not by_kind[kind]:
        other = MediaKind.IMAGE if kind is MediaKind.VIDEO else MediaKind.VIDEO
        raise UserError(
            f"{folder} holds {other.value}s of these prompts, but what it is compared with are "
            f"{kind.value}s; compare like with like"
        )
    return {key: _only(paths, key) for key, paths in by_kind[kind].items()}, kind


def _of_kind(
    found: Mapping[tuple[str, int], list[Path]], kind: MediaKind
) -> dict[tuple[str, int], list[Path]]:
    of_kind = {key: [p for p in paths if media_kind(p) is kind] for key, paths in found.items()}
    return {key: paths for key, paths in of_kind.items() if paths}


def _only(paths: list[Path], key: tuple[str, int]) -> Path:
    """Return the one file; of several, the one whose name says no more than prompt and seed."""
    plain = [path for path in paths if path.stem == file_stem(*key)]
    if len(plain) == 1:
        return plain[0]
    if len(paths) > 1:
        names = " and ".join(path.name for path in sorted(paths)[:2])
        raise UserError(
            f"{names} in {paths[0].parent} are both of {key[0]!r} with seed {key[1]}; remove one, "
            f"or list the files to take in {MANIFEST_FILE}"
        )
    return paths[0]


def _from_names(
    folder: Path, wanted: Sequence[tuple[str, int]]
) -> dict[tuple[str, int], list[Path]]:
    files: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix.lower() in MEDIA_SUFFIXES:
            named = re.fullmatch(r"(.+_seed\d+)(_.*)?", path.stem)
            if named is not None:
                files.setdefault(named[1], []).append(path)
    found: dict[tuple[str, int], list[Path]] = {}
    of_stem: dict[str, str] = {}
    for prompt, seed in wanted:
        stem = file_stem(prompt, seed)
        if stem not in files:
            continue
        if of_stem.setdefault(stem, prompt) != prompt:
            raise UserError(
                f"{files[stem][0]} could be of {of_stem[stem]!r} or of {prompt!r}; list the files "
                f"in {folder / MANIFEST_FILE}"
            )
        found[prompt, seed] = files[stem]
    return found


def _from_manifest(path: Path) -> dict[tuple[str, int], list[Path]]:
    found: dict[tuple[str, int], list[Path]] = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8; save it as UTF-8") from None
    for number, text in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            line = None
        if not isinstance(line, dict) or not line.keys() <= set(MANIFEST_KEYS):
            raise UserError(
                f'{where} is not {{"file": "NAME", "prompt": "...", "seed": 0}}; write it so'
            )
        key = _key(line, where)
        file = path.parent / str(line.get("file"))
        if file.suffix.lower() not in MEDIA_SUFFIXES or not file.is_file():
            raise UserError(
                f"{where}: no file {file}, or none that ends in {', '.join(MEDIA_SUFFIXES)}; "
                "mend the name"
            )
        if key in found:
            raise UserError(f"{where}: {key[0]!r} with seed {key[1]} is there twice; keep one")
        found[key] = [file]
    return found


def _key(line: Mapping[str, object], where: str) -> tuple[str, int]:
    prompt, seed = line.get("prompt"), line.get("seed", 0)
    if not isinstance(prompt, str) or not isinstance(seed, int) or isinstance(seed, bool):
        raise UserError(f"{where}: prompt must be a text and seed a whole number; mend them")
    return prompt.strip(), seed
