"""HPS v2.1: what people prefer, by a CLIP network fine-tuned on their choices."""

from typing import Any

import torch
from torch.nn import functional as F

from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.clip_scores import CONTEXT, tokenise
from workflow_rl.rewards.frames import FramesArg
from workflow_rl.rewards.image_network import ImageNetworkReward
from workflow_rl.rewards.open_clip_layout import to_transformers
from workflow_rl.rewards.pixels import CLIP_MEAN, CLIP_STD, normalise, resize_and_pad
from workflow_rl.rewards.weights import (
    load_processor,
    load_strict,
    read_tensors,
    weight_file,
)


class HPSv2(ImageNetworkReward):
    """Cosine of image and prompt after training on preferences, about 0.25 to 0.33; higher better.

    Wu et al. 2023 (arXiv 2306.09341), weights v2.1. Compare images of one prompt only. Under
    optimisation: oily skin, over-saturated, over-bright; CLIPScore beside it helps.

    Parameters
    ----------
    weights : str
        ``HPS_v2.1_compressed.pt`` converted to safetensors, see docs/rewards.md.
    base : str
        Folder or hub name of the CLIP whose configuration and tokenizer it has.
    device, dtype
        Where the network runs (None: a GPU where there is one), and in which precision.
    batch_size : int
        Images per call.
    frames : str or mapping
        See :class:`~workflow_rl.rewards.frames.FrameReduction`.
    """

    name = "hpsv2"

    def __init__(
        self,
        weights: str = "HPS_v2.1.safetensors",
        base: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 16,
        frames: FramesArg = "mean",
    ) -> None:
        self.weights = weights
        self.base = base
        super().__init__(device, dtype, batch_size, frames)

    def _load(self) -> tuple[Any, Any]:
        from transformers import AutoTokenizer, CLIPConfig, CLIPModel

        path = weight_file(self.weights)
        model = CLIPModel(load_processor(CLIPConfig, self.base))
        load_strict(model, to_transformers(read_tensors(path)), path)
        tokenizer = load_processor(AutoTokenizer, self.base)
        return model.eval().requires_grad_(False).to(self.device, self.dtype), tokenizer

    def _score_images(self, images: RewardBatch) -> RewardScores:
        model, tokenizer = self.loaded.get()
        size = model.config.vision_config.image_size
        length = min(CONTEXT, model.config.text_config.max_position_embeddings)
        padded_BCHW = resize_and_pad(images.media, size)
        pixels_BCHW = normalise(padded_BCHW, CLIP_MEAN, CLIP_STD).to(self.device, self.dtype)
        tokens = tokenise(tokenizer, images.prompts, length).to(self.device)
        # open_clip has no padding mask; being causal, CLIP does not see what follows the end.
        output = model(input_ids=tokens.input_ids, pixel_values=pixels_BCHW)
        cosine_B = F.cosine_similarity(output.image_embeds.float(), output.text_embeds.float())
        return RewardScores(cosine_B.to("cpu", torch.float32))
