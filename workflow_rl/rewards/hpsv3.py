"""HPSv3: what people prefer, by Qwen2-VL-7B with a head that gives a mean and its uncertainty."""

import importlib.util
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.frames import FramesArg
from workflow_rl.rewards.image_network import ImageNetworkReward
from workflow_rl.rewards.pixels import to_pil
from workflow_rl.rewards.prompt_template import read_template
from workflow_rl.rewards.qwen_vl import QwenReader, rename, smart_resize
from workflow_rl.rewards.weights import (
    load_strict,
    read_tensors,
    weight_file,
)

TOKENS = ("<|Reward|>",)
TEMPLATE = ("INSTRUCTION", "prompt_with_special_token")
PIXELS = 256 * 28 * 28
"""Every image is resized to about this many."""
IMAGES_PER_BATCH = 16
"""Images cut out of videos at a time; the network reads them one by one."""


class PreferenceHead(nn.Sequential):
    """Mean and uncertainty of a score, from a hidden state."""

    def __init__(self, width: int) -> None:
        super().__init__(
            nn.Linear(width, 1024),
            nn.ReLU(),
            nn.Dropout(0.05),
            nn.Linear(1024, 16),
            nn.ReLU(),
            nn.Linear(16, 2),
        )


def default_template() -> Path:
    """The file with the template in the installed package ``hpsv3``, which is not imported.

    Raises
    ------
    UserError
        It is not installed.
    """
    spec = importlib.util.find_spec("hpsv3")
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "HPSv3 reads the prompt in a text that its package holds: pip install --no-deps hpsv3, "
            "or set template to its file data_collator_qwen.py"
        )
    return Path(spec.submodule_search_locations[0]) / "dataset" / "data_collator_qwen.py"


class HPSv3(ImageNetworkReward):
    """Human preference, about 7 to 11 for good images; higher is better.

    Ma et al. 2025 (arXiv 2508.03789). The score is μ of the head's (μ, σ); σ is the component
    ``uncertainty``. Under optimisation videos stop moving, faces grow alike and messy textures pass
    15: pair it with a reward of motion. LongCat-Video (arXiv 2510.22200) uses it twice: with
    ``prompt: A high-quality image`` and the mean of all frames, and with the caption and the best
    30 % of the frames.

    Parameters
    ----------
    weights : str
        ``HPSv3.safetensors``, a path or on the hub.
    base : str
        Folder or hub name of Qwen2-VL-7B-Instruct, for its configuration and tokenizer.
    template : str or None
        File with the text that the prompt is read in; None: the one in the package ``hpsv3``.
    prompt : str or None
        Stands in for the prompt of every sample.
    device, dtype
        Where the network runs and in which precision; None: a GPU in bfloat16, or the CPU in
        float32. The head is in float32.
    frames : str or mapping
        See :class:`~workflow_rl.rewards.frames.FrameReduction`.
    """

    name = "hpsv3"

    def __init__(
        self,
        weights: str = "MizzenAI/HPSv3/HPSv3.safetensors",
        base: str = "Qwen/Qwen2-VL-7B-Instruct",
        template: str | None = None,
        prompt: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        frames: FramesArg = "mean",
    ) -> None:
        self.weights = weights
        self.base = base
        self.template = template
        self.prompt = prompt
        super().__init__(device, dtype, IMAGES_PER_BATCH, frames)

    def _load(self) -> tuple[QwenReader, PreferenceHead, str]:
        template = read_template(self.template or default_template(), TEMPLATE, TOKENS)
        path = weight_file(self.weights)
        state = rename(read_tensors(path))
        prefix = "rm_head."
        head_state = {
            name.removeprefix(prefix): state.pop(name).float()
            for name in list(state)
            if name.startswith(prefix)
        }
        reader = QwenReader.load(self.base, state, TOKENS, self.device, self.dtype)
        head = PreferenceHead(reader.model.config.text_config.hidden_size)
        load_strict(head, head_state, path)
        return reader, head.eval().requires_grad_(False), template

    def _score_images(self, images: RewardBatch) -> RewardScores:
        reader, head, template = self.loaded.get()
        rows = []
        for image, caption in zip(to_pil(images.media), images.prompts, strict=True):
            prompt = caption if self.prompt is None else self.prompt
            rows.append(head(reader.read(image_frames(image), "image", template, prompt))[0])
        mean_B, sigma_B = torch.stack(rows).unbind(1)
        return RewardScores(mean_B, components={"uncertainty": sigma_B})


def image_frames(image: Image.Image) -> Tensor:
    """An image as Qwen2-VL gets it: on the grid (bicubic), uint8 ``[2, 3, H, W]``."""
    height, width = smart_resize(image.height, image.width, PIXELS, PIXELS)
    resized = image.resize((width, height), Image.Resampling.BICUBIC)
    pixels_CHW = torch.from_numpy(np.asarray(resized).copy()).movedim(2, 0)
    return pixels_CHW.expand(2, -1, -1, -1)
