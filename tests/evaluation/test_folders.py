"""Which file is which prompt and seed: by name, by manifest, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from workflow_rl.config import PromptRecord
from workflow_rl.enums import MediaKind
from workflow_rl.errors import UserError
from workflow_rl.evaluation.folders import MANIFEST_FILE, Files, file_stem, match_files

PROMPTS = Path("prompts.txt")
FOX, OWL = "A fox, in snow!", "an owl"


def _match(
    folder: Path,
    *prompts: str,
    seeds: range = range(2),
    kind: MediaKind | None = None,
) -> Files:
    records = [PromptRecord(prompt) for prompt in prompts or (FOX, OWL)]
    return match_files(folder, PROMPTS, records, seeds, kind)[0]


def _names(files: Files) -> dict[tuple[str, int], str]:
    return {key: path.name for key, path in files.items()}


def _touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).touch()


def test_names_say_prompt_and_seed(tmp_path: Path) -> None:
    """The stage's name, which `generate` adds, and other kinds of file do not confuse it."""
    _touch(tmp_path, "a_fox_in_snow_seed0_i2v.mp4", "a_fox_in_snow_seed0_t2i.png", "notes.txt")
    _touch(tmp_path, "a_fox_in_snow_seed1.mp4", "a_fox_in_snow_seed11.mp4", "an_owl_seed1.mp4")
    assert _names(_match(tmp_path)) == {
        (FOX, 0): "a_fox_in_snow_seed0_i2v.mp4",
        (FOX, 1): "a_fox_in_snow_seed1.mp4",
        (OWL, 1): "an_owl_seed1.mp4",
    }
    images = _match(tmp_path, kind=MediaKind.IMAGE)
    assert _names(images) == {(FOX, 0): "a_fox_in_snow_seed0_t2i.png"}


def test_of_several_the_plain_name_is_taken(tmp_path: Path) -> None:
    _touch(tmp_path, "an_owl_seed0_shot1.mp4", "an_owl_seed0_shot2.mp4")
    with pytest.raises(UserError, match=r"an_owl_seed0_shot1.mp4 and an_owl_seed0_shot2.mp4"):
        _match(tmp_path)
    _touch(tmp_path, "an_owl_seed0.mp4")
    assert _names(_match(tmp_path)) == {(OWL, 0): "an_owl_seed0.mp4"}


def test_a_manifest_goes_before_names(tmp_path: Path) -> None:
    _touch(tmp_path, "1.mp4", "2.mp4", "an_owl_seed1.mp4")
    lines = [{"file": "1.mp4", "prompt": FOX}, {"file": "2.mp4", "prompt": OWL, "seed": 1}]
    lines.append({"file": "2.mp4", "prompt": "a prompt of another file"})
    (tmp_path / MANIFEST_FILE).write_text("\n".join(map(json.dumps, lines)))
    assert _names(_match(tmp_path)) == {(FOX, 0): "1.mp4", (OWL, 1): "2.mp4"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1 is not"),
        ('{"file": "1.mp4", "promt": "x"}', "line 1 is not"),
        ('{"file": "1.mp4", "prompt": "x", "seed": "0"}', "seed a whole number"),
        ('{"file": "2.mp4", "prompt": "x"}', "no file"),
        ('{"file": "1.mp4", "prompt": "x"}\n{"file": "1.mp4", "prompt": "x"}', "there twice"),
    ],
)
def test_a_wrong_manifest_is_told_with_its_line(tmp_path: Path, text: str, says: str) -> None:
    _touch(tmp_path, "1.mp4")
    (tmp_path / MANIFEST_FILE).write_text(text)
    with pytest.raises(UserError, match=says):
        _match(tmp_path)


def test_a_folder_of_other_prompts_is_refused(tmp_path: Path) -> None:
    _touch(tmp_path, "a_dog_seed0.mp4")
    with pytest.raises(UserError, match=r"name them like a_fox_in_snow_seed0.mp4"):
        _match(tmp_path)


def test_prompts_that_names_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    _touch(tmp_path, "an_owl_seed0.mp4")
    with pytest.raises(UserError, match="could be of 'an owl' or of 'An owl!'"):
        _match(tmp_path, OWL, "An owl!")
    with pytest.raises(UserError, match="there twice"):
        _match(tmp_path, OWL, OWL)


def test_images_are_not_compared_with_videos(tmp_path: Path) -> None:
    _touch(tmp_path, "an_owl_seed0.png")
    with pytest.raises(UserError, match="compare like with like"):
        _match(tmp_path, kind=MediaKind.VIDEO)
    assert _names(_match(tmp_path)) == {(OWL, 0): "an_owl_seed0.png"}


def test_a_webp_is_what_it_holds(tmp_path: Path) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "an_owl_seed0.webp", save_all=True, append_images=frames[1:])
    frames[0].save(tmp_path / "an_owl_seed1.webp")
    assert list(_match(tmp_path, kind=MediaKind.VIDEO)) == [(OWL, 0)]
    assert list(_match(tmp_path, kind=MediaKind.IMAGE)) == [(OWL, 1)]
    (tmp_path / "an_owl_seed0.webp").write_bytes(b"no image")
    with pytest.raises(UserError, match="no whole image"):
        _match(tmp_path)


def test_long_prompts_have_names_of_bounded_length() -> None:
    assert len(file_stem("word " * 100, 3)) == 60 + len("_seed3")
    assert file_stem("???", 0) == "sample_seed0"
