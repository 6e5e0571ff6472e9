"""Prompt files: each stage's text, and one line for each fault."""

from pathlib import Path

import pytest

from workflow_rl.config import load_prompts
from workflow_rl.errors import UserError

STAGES = ("t2i", "i2v")
PROMPTS = Path(__file__).parents[2] / "configs" / "prompts"


def _write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def test_txt_gives_every_stage_the_same_text(tmp_path: Path) -> None:
    path = _write(tmp_path, "p.txt", "  a fox \r\nein Füchslein\n".encode())
    records = load_prompts(path, STAGES)
    assert [record.prompt for record in records] == ["a fox", "ein Füchslein"]
    assert records[0].text_for("t2i") == records[0].text_for("i2v") == "a fox"


def test_jsonl_gives_a_stage_its_own_text(tmp_path: Path) -> None:
    line = '{"prompt": "a fox runs", "t2i": "a fox in snow"}\n'
    (record,) = load_prompts(_write(tmp_path, "p.jsonl", line.encode()), STAGES)
    assert record.text_for("t2i") == "a fox in snow"
    assert record.text_for("i2v") == record.prompt == "a fox runs"


def test_byte_order_mark_is_no_part_of_a_prompt(tmp_path: Path) -> None:
    (record,) = load_prompts(_write(tmp_path, "p.txt", b"\xef\xbb\xbfa fox\n"), STAGES)
    assert record.prompt == "a fox"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.txt", b"", "the prompt file is empty"),
        ("p.txt", b"a\n\nb\n", "line 2 is blank"),
        ("p.txt", b"a\n   \n", "line 2 is blank"),
        ("p.txt", b"a\nb\xff\n", "line 2: byte 2 is not UTF-8"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ("p.jsonl", b'["a"]\n', "line 1: not a JSON object"),
        ("p.jsonl", b'{"t2i": "a"}\n', 'line 1: "prompt" is missing'),
        ("p.jsonl", b'{"promt": "a"}\n', "line 1: unknown key 'promt'; did you mean 'prompt'?"),
        ("p.jsonl", b'{"prompt": "a", "zz": "b"}\n', "unknown key 'zz'; valid: prompt, t2i, i2v"),
        ("p.jsonl", b'{"prompt": 3}\n', "line 1: 'prompt' is 3; expected a text"),
        ("p.jsonl", b'{"prompt": "a", "i2v": " "}\n', "line 1: 'i2v' is \" \"; expected a text"),
        ("p.csv", b"a\n", "ends in .txt"),
    ],
)
def test_fault_names_the_line(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    path = _write(tmp_path, name, content)
    with pytest.raises(UserError) as caught:
        load_prompts(path, STAGES)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such prompt file"):
        load_prompts(tmp_path / "none.txt", STAGES)


def test_shipped_prompts_are_the_split_of_the_embedded_world() -> None:
    from workflow_rl.embedded.world import held_out_captions, train_captions

    for name, captions in (("train", train_captions()), ("eval", held_out_captions())):
        records = load_prompts(PROMPTS / f"embedded_{name}.txt", STAGES)
        assert [record.prompt for record in records] == [str(caption) for caption in captions]
