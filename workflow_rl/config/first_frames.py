"""First frames: image files with which the videos of a chain begin that has no image stage."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workflow_rl.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass(frozen=True)
class FirstFrame:
    """An image file, and who it is.

    ``digest`` is 48 bits of BLAKE2b of the file's bytes: the same wherever the file lies.
    """

    path: Path
    digest: int


def find_first_frame(path: Path, where: str) -> FirstFrame:
    """Return the image file at ``path``; it is not decoded yet.

    Parameters
    ----------
    where
        What names the file, for the message.

    Raises
    ------
    UserError
        If there is no such file.
    """
    if not path.is_file():
        raise UserError(f"{where}: no image {path}; check the path")
    digest = hashlib.blake2b(path.read_bytes(), digest_size=6).digest()
    return FirstFrame(path, int.from_bytes(digest, "big"))


def open_first_frames(
    frames: Sequence[FirstFrame], size: tuple[int, int] | None
) -> Iterator[Image]:
    """Decode image files, one at a time, as RGB images of one size.

    Parameters
    ----------
    size
        Width and height in pixels: an image is scaled until it covers them, and what stands out on
        two sides is cut off evenly. None: images are used as they are.

    Raises
    ------
    UserError
        If a file is no whole image, or without a ``size`` an image differs from the first in size.
    """
    first: tuple[int, int] | None = None
    for frame in frames:
        image = _decode(frame.path, size)
        first = first or image.size
        if image.size != first:
            raise UserError(
                f"{frame.path} is {_pixels(image.size)}, but {frames[0].path} is {_pixels(first)}; "
                "give the stage a height and width, or images of one size"
            )
        yield image


def _pixels(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]} pixels"


def _decode(path: Path, size: tuple[int, int] | None) -> Image:
    from PIL import Image, ImageOps

    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened).convert("RGB")
    except FileNotFoundError:
        raise UserError(f"{path}: no such image any more; put it back") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(
            f"{path} is not a whole image ({type(error).__name__}); give a PNG or JPEG"
        ) from None
    return image if size is None else ImageOps.fit(image, size, Image.Resampling.LANCZOS)
