"""What Qwen-VL rewards read: Qwen's own patches and sizes, frames by time, published templates."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2VLImageProcessorPil

from tests.rewards.tiny_networks import images
from workflow_rl.errors import UserError
from workflow_rl.rewards.hpsv3 import image_frames
from workflow_rl.rewards.pixels import to_pil
from workflow_rl.rewards.prompt_template import read_template
from workflow_rl.rewards.qwen_vl import smart_resize, to_patches
from workflow_rl.rewards.videoalign import frame_positions

pytestmark = pytest.mark.usefixtures("small_pictures")


def test_patches_are_those_of_qwens_own_processor() -> None:
    image = to_pil(images(1, 90, 130).media)[0]
    frames = image_frames(image)
    assert frames.shape[2] * frames.shape[3] <= 4 * 28 * 28
    processor = Qwen2VLImageProcessorPil(min_pixels=28 * 28, max_pixels=10**6)
    resized = to_pil(frames[:1].float() / 255)
    expected = processor(resized, return_tensors="pt")
    patches, grid = to_patches(frames)
    assert expected.image_grid_thw.tolist() == [list(grid)]
    torch.testing.assert_close(patches, expected.pixel_values, atol=1e-5, rtol=0)


def test_two_frames_make_one_patch_in_order() -> None:
    frames = torch.stack([torch.full((3, 28, 28), value) for value in (0, 51, 102, 153)])
    patches, grid = to_patches(frames.to(torch.uint8))
    assert grid == (2, 2, 2)
    red = patches.view(2, 4, 3, 2, 196)[:, :, 0]  # patch of time, place, channel, frame, pixel
    expected = (torch.tensor([[0.0, 0.2], [0.4, 0.6]]) - 0.48145466) / 0.26862954
    torch.testing.assert_close(red, expected[:, None, :, None].expand(2, 4, 2, 196))


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        ((480, 832), (200704, 200704), (336, 588)),
        ((512, 512), (200704, 200704), (448, 448)),
        ((100, 100), (200704, 200704), (448, 448)),
        ((480, 832), (100352, 200704), (336, 588)),
        ((300, 400), (100352, 200704), (308, 392)),
    ],
)
def test_sizes_follow_qwens_rule(
    size: tuple[int, int], limits: tuple[int, int], expected: tuple[int, int]
) -> None:
    assert smart_resize(*size, *limits) == expected


@pytest.mark.parametrize(
    ("length", "video_fps", "count"),
    [(81, 16.0, 10), (81, 8.0, 20), (9, 16.0, 4), (3, 8.0, 2), (2, 8.0, 2), (16, 2.0, 16)],
)
def test_frames_are_taken_twice_a_second_evenly(length: int, video_fps: float, count: int) -> None:
    positions = frame_positions(length, video_fps, 2.0)
    assert len(positions) == count
    assert positions[0] == 0
    assert positions[-1] == length - 1


def test_a_template_is_read_from_published_code_without_running_it(tmp_path: Path) -> None:
    file = tmp_path / "published.py"
    file.write_text("raise RuntimeError\nA = 'x {text_prompt} '\nB = '<|R|>'\nC = A + B\n")
    assert read_template(file, ("A", "B"), ("<|R|>",)) == "x {text_prompt} <|R|>"


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("t.py", "X = ''", "no text called"),
        ("t.py", "A = (", "cannot be read"),
        ("t.txt", "{text_prompt}", "once"),
        ("t.txt", "{text_prompt} <|P|> <|P|> <|Q|>", "once"),
        ("t.txt", "<|P|> <|Q|>", "once"),
        ("t.txt", "{text_prompt} <|Q|> <|P|>", "order"),
    ],
)
def test_a_text_that_is_no_template_is_refused(
    tmp_path: Path, name: str, text: str, words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words):
        read_template(tmp_path / name, ("A",), ("<|P|>", "<|Q|>"))
