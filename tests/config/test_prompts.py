"""Prompt files: each stage's text, and one line for each fault."""

from pathlib import Path

import pytest
from PIL import Image

from workflow_rl.config import PromptRecord, StageConfig, check_first_frames, load_prompts
from workflow_rl.config.first_frames import find_first_frame, open_first_frames
from workflow_rl.errors import UserError

STAGES = ("t2i", "i2v")
PROMPTS = Path(__file__).parents[2] / "configs" / "prompts"


def _write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def _picture(path: Path, colour: str = "red") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (4, 4), colour).save(path)


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
        (
            "p.jsonl",
            b'{"prompt": "a", "zz": "b"}\n',
            "unknown key 'zz'; valid: prompt, t2i, i2v, image",
        ),
        ("p.jsonl", b'{"prompt": 3}\n', "line 1: 'prompt' is 3; expected a text"),
        ("p.jsonl", b'{"prompt": "a", "i2v": " "}\n', "line 1: 'i2v' is \" \"; expected a text"),
        ("p.jsonl", b'{"prompt": "a", "image": "none.png"}\n', "line 1: no image"),
        ("p.jsonl", b'{"prompt": "a", "image": 3}\n', "line 1: 'image' is 3; expected a text"),
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


def test_jsonl_gives_a_first_frame_beside_the_file(tmp_path: Path) -> None:
    _picture(tmp_path / "frames" / "fox.png")
    line = '{"prompt": "a fox runs", "image": "frames/fox.png"}\n'
    (record,) = load_prompts(_write(tmp_path, "p.jsonl", line.encode()), ["i2v"])
    assert record.first_frame is not None
    assert record.first_frame.path == tmp_path / "frames" / "fox.png"
    # Where a stage is called image, the key is that stage's text.
    (record,) = load_prompts(tmp_path / "p.jsonl", ["image", "video"])
    assert record.first_frame is None
    assert record.text_for("image") == "frames/fox.png"


def test_folder_pairs_images_with_prompts_by_name(tmp_path: Path) -> None:
    for name, colour in (("b.jpg", "red"), ("a.PNG", "blue")):
        _picture(tmp_path / name, colour)
        _write(tmp_path, name[0] + ".txt", f" a {colour} sky \n".encode())
    _write(tmp_path, "notes.md", b"not read")
    records = load_prompts(tmp_path, ["i2v"])
    assert [record.prompt for record in records] == ["a blue sky", "a red sky"]
    frames = [record.first_frame for record in records if record.first_frame is not None]
    assert [frame.path.name for frame in frames] == ["a.PNG", "b.jpg"]


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no image in this folder"),
        ({"a.png": b""}, "a.png has no prompt; write it into"),
        ({"a.png": b"", "a.txt": b"one\ntwo\n"}, "a.txt has 2 lines"),
        ({"a.png": b"", "a.txt": b""}, "a.txt has 0 lines"),
        ({"a.png": b"", "a.txt": b"  \n"}, "a.txt: line 1 is blank"),
        ({"a.png": b"", "a.txt": b"x", "b.txt": b"y"}, "b.txt has no image; put b.png beside it"),
        ({"a.png": b"", "a.jpg": b"", "a.txt": b"x"}, "two images are called 'a'"),
    ],
)
def test_fault_in_a_folder(tmp_path: Path, files: dict[str, bytes], says: str) -> None:
    for name, content in files.items():
        _write(tmp_path, name, content)
    with pytest.raises(UserError) as caught:
        load_prompts(tmp_path, ["i2v"])
    assert says in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_first_frames_are_where_the_first_stage_needs_them(tmp_path: Path) -> None:
    _picture(tmp_path / "a.png")
    frame = find_first_frame(tmp_path / "a.png", "here")
    bare, given = PromptRecord("a fox"), PromptRecord("a fox", first_frame=frame)
    video, image = StageConfig(task="i2v"), StageConfig(task="t2i")
    check_first_frames(tmp_path, [given], {"shot": video})
    check_first_frames(tmp_path, [bare], {"still": image, "shot": video})
    with pytest.raises(UserError, match="'a fox' has no image, but the first stage 'shot' starts"):
        check_first_frames(tmp_path, [given, bare], {"shot": video, "next": video})
    with pytest.raises(UserError, match=r"a\.png, but the first stage 'still' \(t2i\) takes none"):
        check_first_frames(tmp_path, [bare, given], {"still": image, "shot": video})


def test_shipped_first_frames_fit_the_embedded_model() -> None:
    for name in ("train", "eval"):
        records = load_prompts(PROMPTS.parent / "first_frames" / name, ["i2v"])
        frames = [record.first_frame for record in records if record.first_frame is not None]
        assert {image.size for image in open_first_frames(frames, None)} == {(32, 32)}


def test_shipped_prompts_are_the_split_of_the_embedded_world() -> None:
    from workflow_rl.embedded.world import held_out_captions, train_captions

    for name, captions in (("train", train_captions()), ("eval", held_out_captions())):
        records = load_prompts(PROMPTS / f"embedded_{name}.txt", STAGES)
        assert [record.prompt for record in records] == [str(caption) for caption in captions]
