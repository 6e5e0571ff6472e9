"""Prompts: a line each (.txt), a JSON object a line (.jsonl), or a folder of first frames."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from workflow_rl.config.first_frames import IMAGE_SUFFIXES, FirstFrame, find_first_frame
from workflow_rl.config.stage import StageConfig
from workflow_rl.errors import UserError

FIRST_FRAME_KEY = "image"
"""Key of a ``.jsonl`` line that names a first frame, unless a stage is called so."""
CHECK_KEYS = "check data.prompts and data.eval_prompts"


@dataclass(frozen=True)
class PromptRecord:
    """One prompt, and the texts of stages that have their own.

    Parameters
    ----------
    prompt
        What the chain is asked for: the reward sees it, and the noise identity holds it.
    stage_prompts
        Stage name → that stage's own text, such as an image prompt and a motion prompt.
    first_frame
        The image that the video begins with, where the chain begins with an i2v stage.
    """

    prompt: str
    stage_prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    first_frame: FirstFrame | None = None

    def text_for(self, stage: str) -> str:
        """Return the text that a stage is given."""
        return self.stage_prompts.get(stage, self.prompt)


def load_prompts(
    path: Path | str, stages: Sequence[str] = ("t2i", "i2v"), *, if_missing: str = CHECK_KEYS
) -> list[PromptRecord]:
    """Read the prompts of a file or folder.

    Parameters
    ----------
    path
        ``.txt``: one prompt a line. ``.jsonl``: one object a line, ``{"prompt": ...}``, with a text
        of its own for any stage, ``{"prompt": ..., "t2i": ..., "i2v": ...}``, and a first frame,
        ``{"prompt": ..., "image": "frames/fox.png"}``, relative to the file. A folder: first
        frames, each ``fox.png`` with its prompt in ``fox.txt``, in the order of their names.
    stages
        Names of the chain's stages: the keys that a ``.jsonl`` line may have beside ``prompt``.
    if_missing
        What to do where there is no such file, for the message.

    Raises
    ------
    UserError
        For a file that is missing, empty or of another kind; a line that is blank, not UTF-8 or
        not JSON; an unknown key; a text that is not a string; an image without a prompt, or a
        prompt in a folder without its image.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(
            f"{path}: prompts are a file that ends in .txt (a prompt a line) or .jsonl (an object "
            "a line), or a folder of images with a .txt for each"
        )
    if not path.is_file():
        where = "" if path.is_absolute() else f" in the working directory {Path.cwd()}"
        raise UserError(f"{path}: no such prompt file{where}; {if_missing}")
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    if not lines:
        raise UserError(f"{path}: the prompt file is empty; write one prompt a line")
    records = []
    for number, content in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        text = _decode(content, where)
        records.append(
            PromptRecord(text)
            if path.suffix == ".txt"
            else _parse(text, stages, path.parent, where)
        )
    return records


def check_first_frames(
    path: Path, records: Sequence[PromptRecord], stages: Mapping[str, StageConfig]
) -> None:
    """Check that the prompts read from ``path`` have what the chain's first stage starts from.

    Raises
    ------
    UserError
        If an i2v stage comes first and a prompt has no first frame, or another stage comes first
        and a prompt has one.
    """
    name, first = next(iter(stages.items()))
    takes_image = first.task == "i2v"
    for record in records:
        if takes_image and record.first_frame is None:
            raise UserError(
                f"{path}: {record.prompt!r} has no image, but the first stage {name!r} starts from "
                'one; write {"prompt": ..., "image": "FILE"} in a .jsonl file, or give a folder of '
                "images with a .txt for each"
            )
        if not takes_image and record.first_frame is not None:
            raise UserError(
                f"{path}: {record.prompt!r} has the image {record.first_frame.path}, but the first "
                f"stage {name!r} ({first.task}) takes none; leave images out, or begin with i2v"
            )


def _read_folder(folder: Path) -> list[PromptRecord]:
    files = sorted(file for file in folder.iterdir() if file.is_file())
    images = [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]
    if not images:
        raise UserError(
            f"{folder}: no image in this folder; put in first frames ({', '.join(IMAGE_SUFFIXES)})"
        )
    stems = [image.stem for image in images]
    for image in images:
        if stems.count(image.stem) > 1:
            raise UserError(f"{folder}: two images are called {image.stem!r}; rename one")
    for text in files:
        if text.suffix == ".txt" and text.stem not in stems:
            raise UserError(f"{text} has no image; put {text.stem}.png beside it or remove it")
    return [
        PromptRecord(_caption_of(image), first_frame=find_first_frame(image, str(folder)))
        for image in images
    ]


def _caption_of(image: Path) -> str:
    path = image.with_suffix(".txt")
    if not path.is_file():
        raise UserError(f"{image} has no prompt; write it into {path}")
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    if len(lines) != 1:
        raise UserError(f"{path} has {len(lines)} lines; write the image's prompt in one")
    return _decode(lines[0], f"{path}: line 1")


def _decode(content: bytes, where: str) -> str:
    try:
        text = content.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: byte {error.start + 1} is not UTF-8; save the file as UTF-8"
        ) from None
    if not text:
        raise UserError(f"{where} is blank; write a prompt there or remove the line")
    return text


def _parse(text: str, stages: Sequence[str], folder: Path, where: str) -> PromptRecord:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f'{where}: not JSON ({error.msg}, column {error.colno}); write {{"prompt": "..."}}'
        ) from None
    if not isinstance(content, dict):
        raise UserError(f'{where}: not a JSON object; write {{"prompt": "..."}}')
    known = list(dict.fromkeys(["prompt", *stages, FIRST_FRAME_KEY]))
    for key, value in content.items():
        if key not in known:
            nearest = difflib.get_close_matches(key, known, 1)
            mend = f"did you mean '{nearest[0]}'?" if nearest else f"valid: {', '.join(known)}"
            raise UserError(f"{where}: unknown key {key!r}; {mend}")
        if not isinstance(value, str) or not value.strip():
            raise UserError(
                f"{where}: {key!r} is {json.dumps(value)}; expected a text that is not blank"
            )
    if "prompt" not in content:
        raise UserError(f'{where}: "prompt" is missing; every line needs it')
    texts = {stage: content[stage].strip() for stage in stages if stage in content}
    frame = None
    if FIRST_FRAME_KEY in content and FIRST_FRAME_KEY not in stages:
        frame = find_first_frame(folder / content[FIRST_FRAME_KEY], where)
    return PromptRecord(content["prompt"].strip(), MappingProxyType(texts), frame)
