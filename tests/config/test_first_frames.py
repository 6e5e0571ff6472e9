"""First frames: who they are, and how a file becomes an image of the size that is asked for."""

import shutil
from pathlib import Path

import pytest
from PIL import Image

from workflow_rl.config.first_frames import FirstFrame, find_first_frame, open_first_frames
from workflow_rl.errors import UserError


def _frame(path: Path, size: tuple[int, int] = (8, 4), colour: str = "red") -> FirstFrame:
    Image.new("RGB", size, colour).save(path)
    return find_first_frame(path, "test")


def test_a_frame_is_its_bytes_wherever_it_lies(tmp_path: Path) -> None:
    red, blue = (_frame(tmp_path / f"{c}.png", colour=c) for c in ("red", "blue"))
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.copy(red.path, tmp_path / "elsewhere" / "other.png"))
    assert find_first_frame(moved, "test").digest == red.digest
    assert blue.digest != red.digest
    assert 0 <= red.digest < 2**48
    with pytest.raises(UserError, match=r"data: no image .*none\.png; check the path"):
        find_first_frame(tmp_path / "none.png", "data")


def test_without_a_size_images_are_as_they_are(tmp_path: Path) -> None:
    frames = [_frame(tmp_path / f"{c}.png", colour=c) for c in ("red", "blue")]
    images = list(open_first_frames(frames, None))
    assert [image.getpixel((0, 0)) for image in images] == [(255, 0, 0), (0, 0, 255)]
    assert {image.size for image in images} == {(8, 4)}


def test_images_of_two_sizes_need_one(tmp_path: Path) -> None:
    frames = [_frame(tmp_path / "a.png"), _frame(tmp_path / "b.png", size=(4, 8))]
    with pytest.raises(
        UserError, match=r"b\.png is 4 x 8 pixels, but .*a\.png is 8 x 4 pixels; giv"
    ):
        list(open_first_frames(frames, None))
    assert {image.size for image in open_first_frames(frames, (6, 2))} == {(6, 2)}


def test_a_size_is_covered_and_cut_to_its_middle(tmp_path: Path) -> None:
    """Of a wide image the middle stays, undistorted: here its white square."""
    image = Image.new("RGB", (40, 20), "black")
    image.paste("white", (10, 0, 30, 20))
    image.save(tmp_path / "wide.png")
    (cut,) = open_first_frames([find_first_frame(tmp_path / "wide.png", "test")], (10, 10))
    assert cut.size == (10, 10)
    assert min(cut.crop((2, 5, 8, 6)).tobytes()) > 250


def test_a_camera_s_orientation_is_applied(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    Image.new("RGB", (8, 4)).save(tmp_path / "phone.jpg", exif=exif)
    (image,) = open_first_frames([find_first_frame(tmp_path / "phone.jpg", "test")], None)
    assert image.size == (4, 8)


@pytest.mark.parametrize("keep", [0, 20, 60])
def test_what_is_no_whole_image_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "broken.png"
    _frame(path, size=(64, 64))
    path.write_bytes(path.read_bytes()[:keep])
    frame = find_first_frame(path, "test")
    with pytest.raises(UserError, match=r"broken\.png is not a whole image") as caught:
        list(open_first_frames([frame], None))
    assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(UserError, match="no such image any more"):
        list(open_first_frames([frame], None))
