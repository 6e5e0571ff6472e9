"""From media tensors to what reward networks were trained on: 8-bit pixels, resized, normalised."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


def to_uint8(media: Tensor) -> Tensor:
    """Media in [0, 1] of any shape as uint8 on the CPU, as a file would hold it.

    Raises
    ------
    ValueError
        A value is NaN or infinite: as an integer it would look like a pixel.
    """
    if not media.isfinite().all():
        raise ValueError("pixels are not finite")
    return (media.detach().float() * 255).round().clamp(0, 255).to("cpu", torch.uint8)


def to_pil(images_BCHW: Tensor) -> list[Image.Image]:
    """RGB images in [0, 1] as Pillow images."""
    return [Image.fromarray(image) for image in to_uint8(images_BCHW).movedim(1, 3).numpy()]


def luma(images_BCHW: Tensor) -> Tensor:
    """Brightness ``[B, H, W]`` of RGB images, by the weights of Rec. 601."""
    return torch.einsum("bchw,c->bhw", images_BCHW, images_BCHW.new_tensor([0.299, 0.587, 0.114]))


def normalise(pixels_BCHW: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """(x − mean) / std of pixels in [0, 1], channel by channel; uint8 are divided by 255 first."""
    if pixels_BCHW.dtype == torch.uint8:
        pixels_BCHW = pixels_BCHW.float() / 255
    means, stds = (torch.tensor(values).view(-1, 1, 1) for values in (mean, std))
    return (pixels_BCHW - means) / stds


CropRule = Literal["transformers", "torchvision"]
"""Where the square in the middle begins if an odd number of pixels is left over."""


def resize_and_crop(image: Image.Image, size: int, rule: CropRule) -> Image.Image:
    """Shorter side to ``size`` (bicubic), then the square in the middle.

    Half of what is left over is cut off first: rounded down by ``CLIPImageProcessor`` of
    transformers, to the nearest even number by ``CenterCrop`` of torchvision, which OpenAI's and
    most published code uses. They differ by one pixel where 3, 7, 11, … pixels are left over.
    """
    width, height = image.size
    short = min(width, height)
    new = (int(size * width / short), int(size * height / short))
    left, top = (
        extra // 2 if rule == "transformers" else round(extra / 2)
        for extra in (new[0] - size, new[1] - size)
    )
    resized = image.resize(new, Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + size, top + size))


def clip_pixels(images_BCHW: Tensor, size: int, rule: CropRule = "torchvision") -> Tensor:
    """What CLIP sees: resized, cropped and normalised ``[B, 3, size, size]``."""
    images = [resize_and_crop(image, size, rule) for image in to_pil(images_BCHW)]
    pixels_BHWC = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return normalise(pixels_BHWC.movedim(3, 1), CLIP_MEAN, CLIP_STD).contiguous()


def resize_and_pad(images_BCHW: Tensor, size: int) -> Tensor:
    """Longer side to ``size``, then centred on a black square, in about [0, 1].

    ``ResizeMaxSize`` of HPSv2, which resizes numbers (bicubic with antialiasing), not an image of
    8 bits: what overshoots black and white is kept. Where the longer side is ``size`` already it
    would not pad, and its network then refuses the shape; here it is padded.
    """
    height, width = images_BCHW.shape[2:]
    scale = size / max(height, width)
    rows, columns = round(height * scale), round(width * scale)
    resized_BCHW = F.interpolate(
        to_uint8(images_BCHW).float() / 255,
        (rows, columns),
        mode="bicubic",
        antialias=True,
        align_corners=False,
    )
    above, left = (size - rows) // 2, (size - columns) // 2
    return F.pad(resized_BCHW, (left, size - columns - left, above, size - rows - above))


def resize_uint8(images_BCHW: Tensor, size: tuple[int, int], mode: str, antialias: bool) -> Tensor:
    """8-bit images at another size, rounded to 8 bits again, as torchvision resizes tensors."""
    resized = F.interpolate(
        images_BCHW.float(), size, mode=mode, antialias=antialias, align_corners=False
    )
    return resized.round().clamp(0, 255).to(torch.uint8)
