"""LAION's aesthetic predictor: how beautiful people find an image, whatever the prompt."""

from typing import Any

from torch.nn import functional as F

from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.frames import FramesArg
from workflow_rl.rewards.image_network import ImageNetworkReward
from workflow_rl.rewards.linear_head import LinearHead
from workflow_rl.rewards.pixels import clip_pixels
from workflow_rl.rewards.weights import (
    load_pretrained,
    load_strict,
    read_tensors,
    weight_file,
)


class Aesthetic(ImageNetworkReward):
    """A rating from 1 to 10 (good images: 5 to 6.5) from CLIP's image embedding; higher is better.

    LAION-Aesthetics v2, Schuhmann 2022 (improved-aesthetic-predictor), used as a reward by Black
    et al. 2023 (arXiv 2305.13301). Does not see the prompt. Under optimisation: one centred subject
    before a blurred background, one style for all.

    Parameters
    ----------
    weights : str
        ``sac+logos+ava1-l14-linearMSE.pth`` converted to safetensors, see docs/rewards.md.
    clip : str
        Folder or hub name of the CLIP whose embedding it reads.
    device, dtype
        Where the networks run (None: a GPU where there is one), and in which precision.
    batch_size : int
        Images per call.
    frames : str or mapping
        See :class:`~workflow_rl.rewards.frames.FrameReduction`.
    """

    name = "aesthetic"

    def __init__(
        self,
        weights: str = "sac+logos+ava1-l14-linearMSE.safetensors",
        clip: str = "openai/clip-vit-large-patch14",
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 16,
        frames: FramesArg = "mean",
    ) -> None:
        self.weights = weights
        self.clip = clip
        super().__init__(device, dtype, batch_size, frames)

    def _load(self) -> tuple[Any, LinearHead]:
        from transformers import CLIPVisionModelWithProjection

        path = weight_file(self.weights)
        # The checkpoint holds the text tower too, and the factor of the cosine.
        unused = [r"^text_model\.", r"^text_projection\.", r"^logit_scale$"]
        clip = load_pretrained(CLIPVisionModelWithProjection, self.clip, unused=unused)
        head = LinearHead(clip.config.projection_dim)
        load_strict(head, read_tensors(path), path)
        return clip.to(self.device, self.dtype), head.eval().requires_grad_(False).to(self.device)

    def _score_images(self, images: RewardBatch) -> RewardScores:
        clip, head = self.loaded.get()
        pixels_BCHW = clip_pixels(images.media, clip.config.image_size)
        embeddings_BD = clip(pixel_values=pixels_BCHW.to(self.device, self.dtype)).image_embeds
        return RewardScores(head.layers(F.normalize(embeddings_BD.float(), dim=-1))[:, 0])
