"""PickScore and CLIPScore: how well an image fits its prompt, by a CLIP network."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.frames import FramesArg
from workflow_rl.rewards.image_network import ImageNetworkReward
from workflow_rl.rewards.pixels import CropRule, clip_pixels
from workflow_rl.rewards.weights import (
    load_pretrained,
    load_processor,
)

CONTEXT = 77
"""Tokens of a prompt that CLIP reads; the rest is cut off."""


def tokenise(tokenizer: Any, prompts: Sequence[str], length: int) -> Any:
    """Token ids and mask of prompts, padded and cut to ``length``."""
    return tokenizer(
        list(prompts),
        padding="max_length",
        truncation=True,
        max_length=length,
        return_tensors="pt",
    )


class ClipReward(ImageNetworkReward):
    """A reward on how near CLIP's embeddings of image and prompt are.

    Parameters
    ----------
    model, tokenizer : str
        Folders or hub names.
    """

    crop: CropRule
    """Of the published code."""

    def __init__(
        self,
        model: str,
        tokenizer: str,
        device: str | None,
        dtype: str,
        batch_size: int,
        frames: FramesArg,
    ) -> None:
        super().__init__(device, dtype, batch_size, frames)
        self.sources = (model, tokenizer)

    def _load(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer, CLIPModel

        model, tokenizer = self.sources
        return (
            load_pretrained(CLIPModel, model).to(self.device, self.dtype),
            load_processor(AutoTokenizer, tokenizer),
        )

    def cosines(self, images: RewardBatch) -> Tensor:
        """Cosine of each image's embedding and its prompt's, float32 ``[B]`` on the CPU."""
        model, tokenizer = self.loaded.get()
        length = min(CONTEXT, model.config.text_config.max_position_embeddings)
        tokens = tokenise(tokenizer, images.prompts, length).to(self.device)
        size = model.config.vision_config.image_size
        pixels_BCHW = clip_pixels(images.media, size, self.crop)
        output = model(
            input_ids=tokens.input_ids,
            attention_mask=tokens.attention_mask,
            pixel_values=pixels_BCHW.to(self.device, self.dtype),
        )
        embeddings = (output.image_embeds.float(), output.text_embeds.float())
        return F.cosine_similarity(*embeddings).cpu()

    def scale(self) -> float:
        """The factor of the cosine that the network was trained with."""
        return float(self.loaded.get()[0].logit_scale.float().exp())


class PickScore(ClipReward):
    """What people would pick for a prompt: 100·cosine, about 19 to 24; higher is better.

    Kirstain et al. 2023 (arXiv 2305.01569). The factor is the checkpoint's ``exp(logit_scale)``.
    Compare images of one prompt only. Under optimisation: too much detail, grid patterns.

    Parameters
    ----------
    model, tokenizer : str
        Folder or hub name of the network, and of the tokenizer.
    device, dtype
        Where the networks run (None: a GPU where there is one), and in which precision.
    batch_size : int
        Images per call.
    frames : str or mapping
        See :class:`~workflow_rl.rewards.frames.FrameReduction`.
    """

    name = "pickscore"
    crop = "transformers"

    def __init__(
        self,
        model: str = "yuvalkirstain/PickScore_v1",
        tokenizer: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 16,
        frames: FramesArg = "mean",
    ) -> None:
        super().__init__(model, tokenizer, device, dtype, batch_size, frames)

    def _score_images(self, images: RewardBatch) -> RewardScores:
        return RewardScores(self.scale() * self.cosines(images))


class ClipScore(ClipReward):
    """How well an image fits its prompt: 2.5·max(cosine, 0), in [0, 2.5]; higher is better.

    Hessel et al. 2021 (arXiv 2104.08718), with the larger ViT-L/14. Good images have a cosine of
    0.25 to 0.33, which is the component ``cosine``. The prompt is read as it is, as other trainers
    do; the paper puts "A photo depicts" before it.

    Parameters
    ----------
    model : str
        Folder or hub name of the network and its tokenizer.
    device, dtype, batch_size, frames
        As for :class:`PickScore`.
    """

    name = "clipscore"
    crop = "torchvision"

    def __init__(
        self,
        model: str = "openai/clip-vit-large-patch14",
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 16,
        frames: FramesArg = "mean",
    ) -> None:
        super().__init__(model, model, device, dtype, batch_size, frames)

    def _score_images(self, images: RewardBatch) -> RewardScores:
        cosine_B = self.cosines(images)
        return RewardScores(2.5 * cosine_B.clamp(min=0), components={"cosine": cosine_B})
