"""Pre-processing as the published code of reward networks does it, written from its description.

Nothing of ``workflow_rl`` is used. Filters that the published code takes from Pillow come from
Pillow; those that it takes from PyTorch through torchvision are weights written out in float64.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Floats = NDArray[np.float64]
Bytes = NDArray[np.uint8]

CLIP = ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def normalised(
    pixels_HWC: NDArray[np.floating], constants: tuple[tuple[float, ...], ...]
) -> Floats:
    """(x − mean) / std of pixels in [0, 1], ``[3, H, W]``."""
    mean, std = (np.array(values) for values in constants)
    return np.asarray((pixels_HWC - mean) / std).transpose(2, 0, 1)


def cubic(x: float) -> float:
    """Keys' kernel with a = −½, that of Pillow and of PyTorch with antialiasing."""
    x = abs(x)
    if x < 1:
        return (1.5 * x - 2.5) * x * x + 1
    return ((-0.5 * x + 2.5) * x - 4) * x + 2 if x < 2 else 0.0


def antialiased(old: int, new: int, kernel: Callable[[float], float], reach: float) -> Floats:
    """Weights ``[new, old]`` of a filter that widens with the reduction."""
    scale = old / new
    wide = max(scale, 1.0)
    rows = np.zeros((new, old))
    for i in range(new):
        centre = (i + 0.5) * scale
        first = max(0, int(centre - reach * wide + 0.5))
        last = min(old, int(centre + reach * wide + 0.5))
        rows[i, first:last] = [kernel((j + 0.5 - centre) / wide) for j in range(first, last)]
    return np.asarray(rows / rows.sum(1, keepdims=True))


def linear(old: int, new: int) -> Floats:
    """Weights ``[new, old]`` between the two nearest pixels, however large the reduction."""
    rows = np.zeros((new, old))
    for i in range(new):
        place = max(0.0, (i + 0.5) * old / new - 0.5)
        low = min(int(place), old - 1)
        rows[i, low] += 1 - (place - low)
        rows[i, min(low + 1, old - 1)] += place - low
    return rows


def resized(pixels_HWC: NDArray[np.generic], down_H: Floats, down_W: Floats) -> Floats:
    """Rows and columns weighted."""
    rows_AWC = np.tensordot(down_H, pixels_HWC.astype(np.float64), 1)
    return np.tensordot(down_W, rows_AWC, (1, 1)).transpose(1, 0, 2)


def openai_clip(image_HWC: Bytes, size: int) -> Floats:
    """``Resize(bicubic), CenterCrop, ToTensor, Normalize`` of torchvision on a Pillow image.

    ``_transform`` in ``clip/clip.py`` of openai/CLIP, which LAION's predictor uses
    (``simple_inference.py``); ``CLIPImageDataset`` in ``clipscore.py`` of jmhessel/clipscore;
    ``_transform`` in ``ImageReward.py`` of THUDM/ImageReward.
    """
    height, width = image_HWC.shape[:2]
    if width <= height:
        new_width, new_height = size, int(size * height / width)
    else:
        new_width, new_height = int(size * width / height), size
    image = Image.fromarray(image_HWC).resize((new_width, new_height), Image.Resampling.BICUBIC)
    top, left = round((new_height - size) / 2.0), round((new_width - size) / 2.0)
    square_HWC = np.asarray(image)[top : top + size, left : left + size]
    return normalised(square_HWC / 255, CLIP)


def hpsv2(image_HWC: Bytes, size: int) -> Floats:
    """``ToTensor, ResizeMaxSize, Normalize`` in ``src/open_clip/transform.py`` of tgxs002/HPSv2.

    The tensor of numbers is resized, bicubic; antialiased, as torchvision does since 0.17.
    """
    height, width = image_HWC.shape[:2]
    scale = size / float(max(height, width))
    new_height, new_width = round(height * scale), round(width * scale)
    numbers_HWC = resized(
        image_HWC / 255,
        antialiased(height, new_height, cubic, 2.0),
        antialiased(width, new_width, cubic, 2.0),
    )
    square_HWC = np.zeros((size, size, 3))
    top, left = (size - new_height) // 2, (size - new_width) // 2
    square_HWC[top : top + new_height, left : left + new_width] = numbers_HWC
    return normalised(square_HWC, CLIP)


def vbench_dino(frame_HWC: Bytes, size: int) -> tuple[Floats, Floats]:
    """``dino_transform`` in ``vbench/utils.py`` of Vchitect/VBench, and the bytes before rounding.

    ``Resize(antialias=False)`` of torchvision on 8-bit tensors: bilinear, rounded to 8 bits.
    """
    height, width = frame_HWC.shape[:2]
    short, long = min(height, width), max(height, width)
    longer = int(size * long / short)
    new_height, new_width = (longer, size) if height > width else (size, longer)
    exact_HWC = resized(frame_HWC, linear(height, new_height), linear(width, new_width))
    return normalised(np.round(exact_HWC) / 255, IMAGENET), exact_HWC


def qwen_size(height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """``smart_resize`` in ``vision_process.py`` of qwen-vl-utils: sides are multiples of 28."""
    if max(height, width) / min(height, width) > 200:
        raise ValueError("too narrow")
    rows, columns = max(28, round(height / 28) * 28), max(28, round(width / 28) * 28)
    if rows * columns > most:
        beta = math.sqrt(height * width / most)
        return math.floor(height / beta / 28) * 28, math.floor(width / beta / 28) * 28
    if rows * columns < least:
        beta = math.sqrt(least / (height * width))
        return math.ceil(height * beta / 28) * 28, math.ceil(width * beta / 28) * 28
    return rows, columns


def videoalign_positions(length: int, video_fps: float, fps: float) -> list[int]:
    """Frames by ``smart_nframes`` as VideoAlign and HPSv3 carry it, evenly from first to last."""
    count: float = min(max(length / video_fps * fps, 4), math.floor(min(768, length) / 2) * 2)
    count = min(round(count / 2) * 2, length)
    return [round(float(t)) for t in np.linspace(0, length - 1, int(count), dtype=np.float32)]


def videoalign_frame(frame_HWC: Bytes, least: int, most: int) -> Floats:
    """A frame by ``fetch_video`` before it is rounded to 8 bits: torchvision's antialiased bicubic.

    ``vision_process.py`` of KwaiVGI/VideoAlign, with ``min_pixels`` 128·28² and the checkpoint's
    ``max_frame_pixels``.
    """
    height, width = frame_HWC.shape[:2]
    rows, columns = qwen_size(height, width, least, most)
    down = (antialiased(height, rows, cubic, 2.0), antialiased(width, columns, cubic, 2.0))
    return resized(frame_HWC, *down).clip(0, 255)


def qwen_patches(frames_TCHW: NDArray[np.floating]) -> Floats:
    """``_preprocess`` of transformers' ``Qwen2VLImageProcessor``, patch by patch, ``[N, 1176]``."""
    length, _, height, width = frames_TCHW.shape
    return np.stack(
        [
            frames_TCHW[t : t + 2, :, y : y + 14, x : x + 14].transpose(1, 0, 2, 3).ravel()
            for t in range(0, length, 2)
            for block_y in range(0, height, 28)
            for block_x in range(0, width, 28)
            for y in (block_y, block_y + 14)
            for x in (block_x, block_x + 14)
        ]
    )
