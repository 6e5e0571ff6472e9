"""From media tensors to what reward networks were trained on: 8-bit pixels, resized, normalised."""

from collections.abc import Sequence

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


def normalised(
    images: Sequence[Image.Image], mean: Sequence[float], std: Sequence[float]
) -> Tensor:
    """Pillow images of one size as float32 ``[B, 3, H, W]``: (x/255 − mean) / std."""
    pixels_BHWC = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    scaled_BHWC = (pixels_BHWC.float() / 255 - torch.tensor(mean)) / torch.tensor(std)
    return scaled_BHWC.movedim(3, 1).contiguous()


def resize_and_crop(image: Image.Image, size: int) -> Image.Image:
    """Shorter side to ``size`` (bicubic), then the square in the middle, as CLIP was trained."""
    width, height = image.size
    short = min(width, height)
    new = (int(size * width / short), int(size * height / short))
    left, top = (new[0] - size) // 2, (new[1] - size) // 2
    resized = image.resize(new, Image.Resampling.BICUBIC)
    return resized.crop((left, top, left + size, top + size))


def resize_and_pad(image: Image.Image, size: int) -> Image.Image:
    """Longer side to ``size`` (bicubic), centred on a black square, as HPSv2 was trained."""
    width, height = image.size
    scale = size / max(width, height)
    new = (round(width * scale), round(height * scale))
    square = Image.new("RGB", (size, size))
    square.paste(
        image.resize(new, Image.Resampling.BICUBIC), ((size - new[0]) // 2, (size - new[1]) // 2)
    )
    return square


def clip_pixels(images_BCHW: Tensor, size: int) -> Tensor:
    """What CLIP sees: resized, cropped and normalised ``[B, 3, size, size]``."""
    images = [resize_and_crop(image, size) for image in to_pil(images_BCHW)]
    return normalised(images, CLIP_MEAN, CLIP_STD)


def resize_uint8(images_BCHW: Tensor, size: tuple[int, int], mode: str, antialias: bool) -> Tensor:
    """8-bit images at another size, rounded to 8 bits again, as torchvision resizes tensors."""
    resized = F.interpolate(
        images_BCHW.float(), size, mode=mode, antialias=antialias, align_corners=False
    )
    return resized.round().clamp(0, 255).to(torch.uint8)
