"""Laws of media files: what is written is what is read, whole and playable, or nothing."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import av
import pytest
import torch
from PIL import Image
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.media import (
    contact_sheet,
    read_mp4,
    read_png,
    write_animation,
    write_mp4,
    write_png,
)

COLOURS = torch.tensor(
    [[0.92, 0.14, 0.14], [0.12, 0.80, 0.22], [0.18, 0.34, 0.96], [1.0, 1.0, 1.0]]
)


def moving_block(height: int = 32, width: int = 32, frames: int = 4) -> Tensor:
    """A block of another saturated colour in each quarter of the first frame, moving right."""
    video_CTHW = torch.full((3, frames, height, width), 0.04)
    for i, colour in enumerate(COLOURS):
        top, left = (i // 2) * height // 2 + 2, (i % 2) * width // 2 + 2
        for t in range(frames):
            video_CTHW[:, t, top : top + 8, left + t : left + t + 8] = colour.view(3, 1, 1)
    return video_CTHW


def shrink(media: Tensor, factor: int) -> Tensor:
    return media.unfold(-2, factor, factor).unfold(-2, factor, factor).mean((-1, -2))


def test_png_gives_back_the_image_to_half_a_level(tmp_path: Path) -> None:
    image_CHW = torch.rand(3, 20, 30, generator=torch.Generator().manual_seed(0))
    read = read_png(write_png(tmp_path / "new" / "a.png", image_CHW, min_side=1))
    assert read.shape == image_CHW.shape
    assert (read - image_CHW).abs().max() <= 0.5 / 255 + 1e-6


@pytest.mark.parametrize(
    ("size", "min_side", "expected"),
    [((32, 32), 256, (256, 256)), ((20, 30), 256, (260, 390)), ((300, 256), 256, (300, 256))],
)
def test_small_media_grow_by_whole_pixels(
    tmp_path: Path, size: tuple[int, int], min_side: int, expected: tuple[int, int]
) -> None:
    image_CHW = torch.rand(3, *size, generator=torch.Generator().manual_seed(0))
    read = read_png(write_png(tmp_path / "a.png", image_CHW, min_side=min_side))
    assert read.shape[1:] == expected
    factor = expected[0] // size[0]
    blocks = image_CHW.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
    assert (read - blocks).abs().max() <= 0.5 / 255 + 1e-6


def test_mp4_gives_back_frames_and_colours(tmp_path: Path) -> None:
    video_CTHW = moving_block()
    read = read_mp4(write_mp4(tmp_path / "a.mp4", video_CTHW, 8))
    assert read.shape == (3, 4, 256, 256)
    assert (shrink(read, 8) - video_CTHW).abs().max() < 0.03


def test_mp4_is_what_browsers_play(tmp_path: Path) -> None:
    path = write_mp4(tmp_path / "a.mp4", moving_block(), 7.5)
    with av.open(path) as container:
        stream = container.streams.video[0]
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert stream.average_rate == Fraction(15, 2)
        assert stream.frames == 4
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")


def test_mp4_of_odd_size_repeats_its_edge(tmp_path: Path) -> None:
    video_CTHW = moving_block(33, 35)
    read = read_mp4(write_mp4(tmp_path / "a.mp4", video_CTHW, 8, min_side=1))
    assert read.shape == (3, 4, 34, 36)
    assert (read[:, :, :33, :35] - video_CTHW).abs().mean() < 0.02


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_animation_has_every_frame_and_loops(tmp_path: Path, suffix: str) -> None:
    path = write_animation(tmp_path / f"a{suffix}", moving_block(), 10, min_side=64)
    with Image.open(path) as image:
        assert (image.n_frames, image.size, image.info["loop"]) == (4, (64, 64), 0)  # type: ignore[attr-defined]
        image.seek(3)
        assert image.convert("RGB").getpixel((2 * (5 + 3), 2 * 5)) == (235, 36, 36)


def test_animation_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"\.gif or \.webp"):
        write_animation(tmp_path / "a.png", moving_block(), 8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.1, 1.1])
def test_bad_values_write_nothing(tmp_path: Path, bad: float) -> None:
    video_CTHW = moving_block()
    video_CTHW[1, 2, 3, 4] = bad
    with pytest.raises(ValueError, match=r"in \[0, 1\]"):
        write_mp4(tmp_path / "a.mp4", video_CTHW, 8)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_png(tmp_path / "a.png", torch.zeros(3, 8, 8))
    before = path.read_bytes()

    def half_written(self: Image.Image, temporary: Path, **_: object) -> None:
        temporary.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(Image.Image, "save", half_written)
    with pytest.raises(OSError, match="no space"):
        write_png(path, torch.ones(3, 8, 8))
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("reader", [read_mp4, read_png])
def test_unreadable_files_are_the_users_fault(tmp_path: Path, reader: object) -> None:
    assert callable(reader)
    with pytest.raises(UserError, match="check the path"):
        reader(tmp_path / "missing")
    text = tmp_path / "text"
    text.write_text("no media", encoding="utf-8")
    with pytest.raises(UserError, match="is not a whole"):
        reader(text)
    with pytest.raises(UserError, match="is not a whole"):
        reader(tmp_path)


def test_half_a_file_is_no_image_and_no_video(tmp_path: Path) -> None:
    noise_CTHW = torch.rand(3, 4, 32, 32, generator=torch.Generator().manual_seed(0))
    png = write_png(tmp_path / "a.png", noise_CTHW[:, 0])
    mp4 = write_mp4(tmp_path / "a.mp4", noise_CTHW, 8)
    for path, reader in ((png, read_png), (mp4, read_mp4)):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 3])
        with pytest.raises(UserError, match=r"is not a whole (image|video): give"):
            reader(path)


def test_contact_sheet_shows_first_and_last_frames() -> None:
    videos = [moving_block(frames=9) * scale for scale in (1.0, 0.5, 0.25)]
    sheet = contact_sheet(videos, frames=3, columns=2, gap=1)
    strip, row = 3 * 34 + 2, 34 + 2
    assert sheet.shape == (3, 2 * row, 2 * strip)
    assert torch.equal(sheet[:, 2:34, 2:34], videos[0][:, 0])
    assert torch.equal(sheet[:, 2:34, strip - 34 : strip - 2], videos[0][:, 8])
    assert torch.equal(sheet[:, row + 2 : row + 34, 2:34], videos[2][:, 0])
    assert torch.equal(sheet[:, row:, strip:], torch.ones(3, row, strip))


@contextmanager
def no_file_longer_than(limit: int) -> Iterator[None]:
    """Let writes past ``limit`` bytes fail as they do on a full disk; one process may do that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_is_full_half_way_leaves_no_file(tmp_path: Path) -> None:
    video_CTHW = torch.rand(3, 9, 64, 64)
    path = tmp_path / "video.mp4"
    whole = write_mp4(path, video_CTHW, 8).stat().st_size
    path.unlink()
    for limit in (1, whole // 2, whole - 1):
        with pytest.raises(OSError, match="File too large"), no_file_longer_than(limit):
            write_mp4(path, video_CTHW, 8)
        assert not list(tmp_path.iterdir())
    with pytest.raises(OSError, match="File too large"), no_file_longer_than(100):
        write_png(path.with_suffix(".png"), video_CTHW[:, 0])
    assert not list(tmp_path.iterdir())
    with no_file_longer_than(whole):
        assert write_mp4(path, video_CTHW, 8).stat().st_size == whole
