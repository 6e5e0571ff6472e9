"""Qwen2-VL read as a reward: hidden states at special tokens, for HPSv3 and VideoAlign.

The published checkpoints are of a subclass of ``Qwen2VLForConditionalGeneration``. Under
transformers 5 such a subclass does not get the old names of tensors converted, and keeps a random
language model. Here the stock class is loaded from renamed tensors, every one of which must fit.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workflow_rl.errors import UserError
from workflow_rl.module_weights import check_finite, own_memory
from workflow_rl.rewards.pixels import CLIP_MEAN, CLIP_STD, normalise
from workflow_rl.rewards.prompt_template import PLACE
from workflow_rl.rewards.weights import load_processor, refuse_keys

PATCH = 14
MERGE = 2
FRAMES_PER_PATCH = 2
FACTOR = PATCH * MERGE
"""Sides are multiples of it: 2×2 patches make one token."""

EMBEDDING = "language_model.embed_tokens.weight"
CHAT = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n"
    "<|vision_start|>{media}<|vision_end|>{text}<|im_end|>\n<|im_start|>assistant\n"
)
"""Qwen's chat format (ChatML) with its default system message."""

RENAMED = (
    (r"^base_model\.model\.", ""),
    (r"\.base_layer\.", "."),
    (r"^model\.(language_model|visual)\.", r"\1."),
    (r"^model\.", "language_model."),
)
LORA = re.compile(r"(.+)\.lora_([AB])(?:\.default)?\.weight")


def smart_resize(height: int, width: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Height and width on Qwen's grid, of about the same shape and in this range of pixels."""
    size = tuple(max(FACTOR, round(side / FACTOR) * FACTOR) for side in (height, width))
    pixels = size[0] * size[1]
    if pixels > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        size = tuple(math.floor(side / shrink / FACTOR) * FACTOR for side in (height, width))
    elif pixels < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        size = tuple(math.ceil(side * grow / FACTOR) * FACTOR for side in (height, width))
    if not all(size):
        raise ValueError(f"{height}×{width} is too narrow for Qwen2-VL")
    return size[0], size[1]


def to_patches(frames_TCHW: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """Frames, uint8 with sides on the grid, as ``pixel_values`` and the grid (t, h, w).

    Two frames make one patch; an image is two frames of it.
    """
    frames_TCHW = normalise(frames_TCHW, CLIP_MEAN, CLIP_STD)
    length, channels, height, width = frames_TCHW.shape
    grid = (length // FRAMES_PER_PATCH, height // PATCH, width // PATCH)
    blocks = frames_TCHW.reshape(
        *(grid[0], FRAMES_PER_PATCH, channels),
        *(grid[1] // MERGE, MERGE, PATCH),
        *(grid[2] // MERGE, MERGE, PATCH),
    )
    patches = blocks.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return patches.reshape(math.prod(grid), -1), grid


def rename(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under the names of ``Qwen2VLModel``; ``rm_head.*`` as it is, without ``lm_head``."""
    renamed = {}
    for name, tensor in state.items():
        for pattern, replacement in RENAMED:
            name = re.sub(pattern, replacement, name)
        if not name.startswith("lm_head."):
            renamed[name] = tensor
    return renamed


def merge_lora(state: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Weights with their low-rank updates added: W + scale·B·A (Hu et al. 2021, arXiv 2106.09685).

    Raises
    ------
    UserError
        An update of no weight, or half of one.
    """
    merged = {name: tensor for name, tensor in state.items() if not LORA.fullmatch(name)}
    updates: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state.items():
        if match := LORA.fullmatch(name):
            updates.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor
    for name, halves in updates.items():
        if name not in merged or len(halves) != 2:
            raise UserError(f"the LoRA of {name} has no weight to add to, or only one half")
        weight = merged[name]
        update = scale * halves["B"].float() @ halves["A"].float()
        merged[name] = (weight.float() + update).to(weight.dtype)
    return merged


@dataclass(frozen=True)
class QwenReader:
    """Qwen2-VL with its tokenizer and the tokens at which it is read.

    Attributes
    ----------
    model : Qwen2VLModel
    tokenizer : PreTrainedTokenizer
    token_ids : sequence of int
        Of the special tokens, in the order in which a prompt has them.
    """

    model: Any
    tokenizer: Any
    token_ids: Sequence[int]

    @classmethod
    def load(
        cls,
        base: str,
        state: dict[str, Tensor],
        tokens: Sequence[str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> "QwenReader":
        """Load the weights ``state``, named as :func:`rename` does, with the tokenizer of ``base``.

        Raises
        ------
        UserError
            A tensor is missing, too many, or not finite; or tokenizer and embedding do not match.
        """
        from transformers import AddedToken, AutoTokenizer, Qwen2VLConfig, Qwen2VLModel

        tokenizer = load_processor(AutoTokenizer, base)
        tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens])
        config = load_processor(Qwen2VLConfig, base)
        if EMBEDDING not in state or len(state[EMBEDDING]) != len(tokenizer):
            rows = len(state[EMBEDDING]) if EMBEDDING in state else "no"
            raise UserError(
                f"the weights have {rows} token embeddings, but the tokenizer of {base} with "
                f"{', '.join(tokens)} has {len(tokenizer)}: give the base they were made from"
            )
        config.text_config.vocab_size = len(tokenizer)
        model, report = Qwen2VLModel.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
        refuse_keys(report["missing_keys"], report["unexpected_keys"], model, base)
        check_finite(model, base)
        token_ids = tokenizer.convert_tokens_to_ids(list(tokens))
        model = own_memory(model.eval().requires_grad_(False).to(device))
        return cls(model, tokenizer, token_ids)

    def read(self, frames_TCHW: Tensor, kind: str, template: str, prompt: str) -> Tensor:
        """Last hidden states at the special tokens, float32 ``[tokens, D]`` on the CPU.

        One sample at a time: in a batch, padding would change its bfloat16 digits.

        Parameters
        ----------
        frames_TCHW : Tensor
            uint8, an even number, sides on the grid.
        kind : {"image", "video"}

        Raises
        ------
        ValueError
            The prompt itself holds a token that Qwen reserves.
        """
        patches, grid = to_patches(frames_TCHW)
        pad = f"<|{kind}_pad|>"
        count = math.prod(grid) // MERGE**2
        text = template.replace(PLACE, prompt)
        ids = self.tokenizer(
            CHAT.format(media=pad * count, text=text), return_tensors="pt"
        ).input_ids
        places = [(ids[0] == token_id).nonzero().flatten() for token_id in self.token_ids]
        pads = int((ids == self.tokenizer.convert_tokens_to_ids(pad)).sum())
        if pads != count or any(len(place) != 1 for place in places):
            raise ValueError("the prompt holds a token that the network reserves")
        device, dtype = self.model.device, self.model.dtype
        # The published networks were trained with positions 0, 1, 2, … also for the patches.
        positions = torch.arange(ids.shape[1], device=device).expand(3, 1, -1)
        media = {
            f"pixel_values{'_videos' if kind == 'video' else ''}": patches.to(device, dtype),
            f"{kind}_grid_thw": torch.tensor([grid], device=device),
        }
        output = self.model(
            input_ids=ids.to(device), position_ids=positions, use_cache=False, **media
        )
        hidden: Tensor = output.last_hidden_state[0, torch.cat(places).to(device)]
        return hidden.float().cpu()
