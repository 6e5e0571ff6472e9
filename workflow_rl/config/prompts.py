"""Prompt files: one prompt a line (.txt), or one JSON object a line (.jsonl)."""

import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from workflow_rl.errors import UserError


@dataclass(frozen=True)
class PromptRecord:
    """One prompt, and the texts of stages that have their own.

    Parameters
    ----------
    prompt
        What the chain is asked for: the reward sees it, and the noise identity holds it.
    stage_prompts
        Stage name → that stage's own text, such as an image prompt and a motion prompt.
    """

    prompt: str
    stage_prompts: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    def text_for(self, stage: str) -> str:
        """Return the text that a stage is given."""
        return self.stage_prompts.get(stage, self.prompt)


def load_prompts(path: Path | str, stages: Sequence[str] = ("t2i", "i2v")) -> list[PromptRecord]:
    """Read a prompt file.

    Parameters
    ----------
    path
        ``.txt``: one prompt a line. ``.jsonl``: one object a line, ``{"prompt": ...}``, with a text
        of its own for any stage, ``{"prompt": ..., "t2i": ..., "i2v": ...}``.
    stages
        Names of the chain's stages: the keys that a ``.jsonl`` line may have beside ``prompt``.

    Raises
    ------
    UserError
        For a file that is missing, empty or of another kind; a line that is blank, not UTF-8 or
        not JSON; an unknown key; a text that is not a string.
    """
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(
            f"{path}: a prompt file ends in .txt (a prompt a line) or .jsonl (an object a line)"
        )
    if not path.is_file():
        raise UserError(f"{path}: no such prompt file; check data.prompts and data.eval_prompts")
    lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    if not lines:
        raise UserError(f"{path}: the prompt file is empty; write one prompt a line")
    records = []
    for number, content in enumerate(lines, start=1):
        where = f"{path}: line {number}"
        text = _decode(content, where)
        records.append(PromptRecord(text) if path.suffix == ".txt" else _parse(text, stages, where))
    return records


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


def _parse(text: str, stages: Sequence[str], where: str) -> PromptRecord:
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f'{where}: not JSON ({error.msg}, column {error.colno}); write {{"prompt": "..."}}'
        ) from None
    if not isinstance(content, dict):
        raise UserError(f'{where}: not a JSON object; write {{"prompt": "..."}}')
    known = ["prompt", *stages]
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
    return PromptRecord(content["prompt"].strip(), MappingProxyType(texts))
