"""ImageReward: what people prefer, by BLIP reading prompt and image together."""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, RewardScores
from workflow_rl.rewards.clip_scores import tokenise
from workflow_rl.rewards.frames import FramesArg
from workflow_rl.rewards.image_network import ImageNetworkReward
from workflow_rl.rewards.linear_head import LinearHead
from workflow_rl.rewards.pixels import clip_pixels
from workflow_rl.rewards.weights import (
    load_processor,
    load_strict,
    read_tensors,
    weight_file,
)

TEXT_TOKENS = 35
MEAN, STD = 0.16717362830052426, 1.0333394966054072
"""Of the head's output over the training data."""

HEAD_WIDTH = 64
"""Of each attention head, in both towers."""

VISION_NAMES = (
    (r"^visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^visual_encoder\.blocks\.", "vision.encoder.layers."),
    (r"\.attn\.proj\.", ".self_attn.projection."),
    (r"\.attn\.", ".self_attn."),
    (r"\.norm([12])\.", r".layer_norm\1."),
    (r"^text_encoder\.", "text."),
)

UNREAD = re.compile(r"position_ids$|^(vision|text)_proj\.")
"""Counters, and what BLIP was trained with before; the score does not depend on them."""


def to_transformers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """ImageReward's tensors under the names of :class:`BlipWithHead`."""
    converted = {}
    for name, tensor in state.items():
        new = name.removeprefix("blip.")
        if UNREAD.search(new):
            continue
        for pattern, replacement in VISION_NAMES:
            if new.startswith(("visual_encoder", "text_encoder", "vision")):
                new = re.sub(pattern, replacement, new)
        converted[new] = tensor
    return converted


class BlipWithHead(nn.Module):
    """BLIP's two towers in the shapes that a checkpoint has, and the head.

    Parameters
    ----------
    state : mapping of str to Tensor
        As :func:`to_transformers` gives it; only shapes are read.

    Raises
    ------
    KeyError
        A tensor that tells a shape is missing.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel

        super().__init__()
        patches, width = state["vision.embeddings.position_embedding"].shape[1:]
        patch = state["vision.embeddings.patch_embedding.weight"].shape[-1]
        self.image_size = patch * round((patches - 1) ** 0.5)
        self.vision = BlipVisionModel(
            BlipVisionConfig(
                hidden_size=width,
                intermediate_size=len(state["vision.encoder.layers.0.mlp.fc1.weight"]),
                num_hidden_layers=_count(state, r"vision\.encoder\.layers\.(\d+)\."),
                num_attention_heads=width // HEAD_WIDTH,
                image_size=self.image_size,
                patch_size=patch,
                layer_norm_eps=1e-6,
                hidden_act="gelu",
            )
        )
        words, text_width = state["text.embeddings.word_embeddings.weight"].shape
        self.text = BlipTextModel(
            BlipTextConfig(
                vocab_size=words,
                hidden_size=text_width,
                encoder_hidden_size=width,
                intermediate_size=len(state["text.encoder.layer.0.intermediate.dense.weight"]),
                num_hidden_layers=_count(state, r"text\.encoder\.layer\.(\d+)\."),
                num_attention_heads=text_width // HEAD_WIDTH,
                max_position_embeddings=len(state["text.embeddings.position_embeddings.weight"]),
                layer_norm_eps=1e-12,
                hidden_act="gelu",
            ),
            add_pooling_layer=False,
        )
        self.mlp = LinearHead(text_width)

    def forward(self, pixels_BCHW: Tensor, token_ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Scores ``[B]`` before they are normalised."""
        image_BPD = self.vision(pixel_values=pixels_BCHW).last_hidden_state
        text_BLD = self.text(
            input_ids=token_ids_BL, attention_mask=mask_BL, encoder_hidden_states=image_BPD
        ).last_hidden_state
        scores: Tensor = self.mlp.layers(text_BLD[:, 0])[:, 0]
        return scores


def _count(state: Mapping[str, Tensor], pattern: str) -> int:
    """Number of layers that the names speak of."""
    return len({match[1] for match in map(re.compile(pattern).match, state) if match})


class ImageReward(ImageNetworkReward):
    """Preference in standard deviations: about −2 to 2, mean 0; higher is better.

    Xu et al. 2023 (arXiv 2304.05977). Reads the first 35 tokens of the prompt. Under optimisation
    images get corrupted: put another reward beside it.

    Parameters
    ----------
    weights : str
        ``ImageReward.pt`` converted to safetensors, see docs/rewards.md.
    tokenizer : str
        Folder or hub name of BERT's tokenizer.
    device, dtype
        Where the networks run (None: a GPU where there is one), and in which precision.
    batch_size : int
        Images per call.
    frames : str or mapping
        See :class:`~workflow_rl.rewards.frames.FrameReduction`.
    """

    name = "imagereward"

    def __init__(
        self,
        weights: str = "ImageReward.safetensors",
        tokenizer: str = "google-bert/bert-base-uncased",
        device: str | None = None,
        dtype: str = "float32",
        batch_size: int = 16,
        frames: FramesArg = "mean",
    ) -> None:
        self.weights = weights
        self.tokenizer = tokenizer
        super().__init__(device, dtype, batch_size, frames)

    def _load(self) -> tuple[BlipWithHead, Any]:
        from transformers import AutoTokenizer

        path = weight_file(self.weights)
        state = to_transformers(read_tensors(path))
        try:
            model = BlipWithHead(state)
        except KeyError as error:
            raise UserError(f"{path} is not ImageReward: it has no {error}") from error
        load_strict(model, state, path)
        model = model.eval().requires_grad_(False).to(self.device, self.dtype)
        return model, load_processor(AutoTokenizer, self.tokenizer)

    def _score_images(self, images: RewardBatch) -> RewardScores:
        model, tokenizer = self.loaded.get()
        pixels_BCHW = clip_pixels(images.media, model.image_size).to(self.device, self.dtype)
        tokens = tokenise(tokenizer, images.prompts, TEXT_TOKENS).to(self.device)
        raw_B = model(pixels_BCHW, tokens.input_ids, tokens.attention_mask).float()
        return RewardScores((raw_B - MEAN) / STD)
