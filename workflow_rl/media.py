"""Images and videos as files: PNG, H.264 MP4, animated GIF and WebP.

Tensors are floats in [0, 1], images ``CHW`` and videos ``CTHW`` with three channels. A file is
written under a temporary name and renamed when whole. Small media are enlarged by a whole number
of times, each pixel becoming a square, so that a person can see them and a codec does not blur
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from workflow_rl.errors import UserError
from workflow_rl.whole_files import renamed_when_whole

if TYPE_CHECKING:
    from torch import Tensor

MIN_SIDE = 256
"""Media whose shorter side has fewer pixels are enlarged to at least this."""
CRF = 10
"""Constant rate factor of H.264: 0 is lossless, 23 the codec's default; 10 hides no artefact."""
BT709 = 1
"""Code of BT.709 for matrix, primaries and transfer (ITU-T H.273, tables 2 to 4)."""
LIMITED_RANGE = 1
"""FFmpeg's code of the limited range, 16 to 235."""
HALF_LEVEL = 0.5 / 255

Pixels = npt.NDArray[np.uint8]


def write_png(path: Path, image_CHW: Tensor, *, min_side: int = MIN_SIDE) -> Path:
    """Write an image.

    Parameters
    ----------
    path : Path
        Where; its folder is made.
    image_CHW : Tensor
        ``[3, H, W]`` in [0, 1].
    min_side : int
        Enlarge so that the shorter side has at least this many pixels; 1 keeps the size.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    ValueError
        When the tensor has another shape, or values that are not finite or not in [0, 1].
    """
    from PIL import Image

    frame_HWC = _pixels(_checked(image_CHW, 3).unsqueeze(1), min_side)[0]
    with renamed_when_whole(path) as temporary:
        Image.fromarray(frame_HWC).save(temporary, format="PNG")
    return path


def read_png(path: Path) -> Tensor:
    """Read an image file as float32 ``[3, H, W]`` in [0, 1], at the size it was written.

    Raises
    ------
    UserError
        When the file is missing or no whole image.
    """
    import torch
    from PIL import Image

    with _readable(path, "image", "a PNG"), Image.open(path) as image:
        frame_HWC = np.array(image.convert("RGB"))
    return torch.from_numpy(frame_HWC).permute(2, 0, 1).float() / 255


def write_mp4(path: Path, video_CTHW: Tensor, fps: float, *, min_side: int = MIN_SIDE) -> Path:
    """Write a video that browsers play: H.264, yuv420p, the index at the front.

    A side with an odd number of pixels, which yuv420p cannot hold, gets its last row or column
    twice.

    Parameters
    ----------
    path : Path
        Where; its folder is made.
    video_CTHW : Tensor
        ``[3, T, H, W]`` in [0, 1].
    fps : float
        Frames per second.
    min_side : int
        Enlarge so that the shorter side has at least this many pixels; 1 keeps the size.

    Returns
    -------
    Path
        ``path``.

    Raises
    ------
    ValueError
        When the tensor has another shape, or values that are not finite or not in [0, 1].
    """
    import av
    from av.video.reformatter import ColorRange, Colorspace

    frames_THWC = _pixels(_checked(video_CTHW, 4), min_side)
    height, width = frames_THWC.shape[1:3]
    padding = ((0, 0), (0, height % 2), (0, width % 2), (0, 0))
    frames_THWC = np.pad(frames_THWC, padding, mode="edge")
    with (
        renamed_when_whole(path) as temporary,
        av.open(temporary, "w", format="mp4", options={"movflags": "+faststart"}) as container,
    ):
        rate = Fraction(fps).limit_denominator(1001)
        stream = container.add_stream("libx264", rate=rate, options={"crf": str(CRF)})
        stream.height, stream.width = frames_THWC.shape[1:3]
        stream.pix_fmt = "yuv420p"
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = BT709
        context.color_range = LIMITED_RANGE
        for frame_HWC in frames_THWC:
            frame = av.VideoFrame.from_ndarray(frame_HWC, format="rgb24").reformat(
                format="yuv420p",
                dst_colorspace=Colorspace.ITU709,
                dst_color_range=ColorRange.MPEG,
            )
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def read_mp4(path: Path, *, max_values: float = math.inf) -> Tensor:
    """Read a video file as float32 ``[3, T, H, W]`` in [0, 1], at the size it was written.

    Raises
    ------
    UserError
        When the file is missing or no video with a frame, or has more than ``max_values`` numbers
        once decoded: a small file can hold a huge video.
    """
    import av
    import torch

    with _readable(path, "video", "an MP4"):
        # FFmpeg's errors are ValueError or OSError; without a video stream it is an IndexError.
        with av.open(path) as container:
            frames_THWC: list[npt.NDArray[np.uint8]] = []
            values = 0
            for frame in container.decode(video=0):
                values += 3 * frame.width * frame.height
                if values > max_values:
                    raise ValueError(f"it has more than {max_values:g} numbers")
                frames_THWC.append(frame.to_ndarray(format="rgb24"))
        if not frames_THWC:
            raise ValueError("it has no frame")
    return torch.from_numpy(np.stack(frames_THWC)).permute(3, 0, 1, 2).float() / 255


def write_animation(path: Path, video_CTHW: Tensor, fps: float, *, min_side: int = 1) -> Path:
    """Write a video as an endless animated GIF or WebP, for pages that show images only.

    Parameters
    ----------
    path : Path
        Where; ``.gif`` (256 colours per frame, whole hundredths of a second) or ``.webp``
        (lossless).
    video_CTHW : Tensor
        ``[3, T, H, W]`` in [0, 1].
    fps : float
        Frames per second.
    min_side : int
        Enlarge so that the shorter side has at least this many pixels; 1 keeps the size.

    Raises
    ------
    ValueError
        When the tensor has another shape, or values that are not finite or not in [0, 1], or the
        name ends otherwise.
    """
    from PIL import Image

    frames = [Image.fromarray(f) for f in _pixels(_checked(video_CTHW, 4), min_side)]
    milliseconds = round(1000 / fps)
    if path.suffix == ".gif":
        frames = [frame.quantize(256, dither=Image.Dither.NONE) for frame in frames]
        form, options = "GIF", {"optimize": False, "disposal": 1}
    elif path.suffix == ".webp":
        form, options = "WEBP", {"lossless": True}
    else:
        raise ValueError(f"an animation's name ends in .gif or .webp, got {path.name!r}")
    with renamed_when_whole(path) as temporary:
        frames[0].save(
            temporary,
            format=form,
            save_all=True,
            append_images=frames[1:],
            duration=milliseconds,
            loop=0,
            **options,
        )
    return path


def contact_sheet(
    videos: Sequence[Tensor], *, frames: int = 5, columns: int = 2, gap: int = 2
) -> Tensor:
    """Lay out videos as strips of evenly spaced frames, first and last frame included.

    Parameters
    ----------
    videos : Sequence of Tensor
        Each ``[3, T, H, W]`` in [0, 1], all of one height and width.
    frames : int
        Frames per strip; a shorter video shows each of its frames once.
    columns : int
        Strips per row, filled row by row.
    gap : int
        White pixels around each frame; four times as many between strips.

    Returns
    -------
    Tensor
        float32 ``[3, rows, width]``.
    """
    import torch
    from torch.nn.functional import pad

    strips = []
    for video_CTHW in videos:
        length = _checked(video_CTHW, 4).shape[1]
        picks = torch.linspace(0, length - 1, min(frames, length)).round().long()
        framed_CTHW = pad(video_CTHW.float()[:, picks], (gap, gap, gap, gap), value=1.0)
        strip_CHW = framed_CTHW.permute(0, 2, 1, 3).flatten(2)
        strips.append(pad(strip_CHW, (gap, gap, gap, gap), value=1.0))
    width = max(strip.shape[2] for strip in strips)
    strips = [pad(strip, (0, width - strip.shape[2]), value=1.0) for strip in strips]
    strips += [torch.ones_like(strips[0])] * (-len(strips) % columns)
    rows = [torch.cat(strips[i : i + columns], dim=2) for i in range(0, len(strips), columns)]
    return torch.cat(rows, dim=1)


@contextmanager
def _readable(path: Path, kind: str, give: str) -> Iterator[None]:
    """Turn what libraries raise of a file that is missing or no ``kind`` into a UserError."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(f"no {kind} at {path}: check the path") from error
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"{path} is not a whole {kind}: give {give}") from error


def _checked(media: Tensor, dimensions: int) -> Tensor:
    """Return ``media`` detached, or raise when it is no RGB image or video in [0, 1]."""
    axes = "CHW" if dimensions == 3 else "CTHW"
    if media.dim() != dimensions or media.shape[0] != 3 or media.numel() == 0:
        raise ValueError(f"expected RGB media {axes} with C = 3, got {tuple(media.shape)}")
    low, high = media.min().item(), media.max().item()
    if not (math.isfinite(low) and low >= -HALF_LEVEL and high <= 1 + HALF_LEVEL):
        raise ValueError(f"expected finite values in [0, 1], got {low:.4g} to {high:.4g}")
    return media.detach()


def _pixels(video_CTHW: Tensor, min_side: int) -> Pixels:
    """Turn a video into bytes ``[T, H, W, 3]``, enlarged by a whole number of times."""
    levels = (video_CTHW.float() * 255).round().clamp(0, 255)
    frames_THWC = levels.permute(1, 2, 3, 0).cpu().numpy().astype(np.uint8)
    factor = math.ceil(min_side / min(frames_THWC.shape[1:3]))
    return frames_THWC.repeat(factor, axis=1).repeat(factor, axis=2)
