"""How long a run's texts are, where a family gives each its own length instead of padding it.

The stock pipelines' own text encoding is run, with the folder's tokenizer, around an encoder that
computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from workflow_rl.errors import UserError
from workflow_rl.planning.architecture import INDEX, Architecture

TOKENIZER = "tokenizer"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json")
"""Either holds a tokenizer's words: without them transformers makes an empty one."""


def _qwen_image(pipeline: Any, text: str, limit: int) -> torch.Tensor:
    embeds: torch.Tensor = pipeline.encode_prompt(text, max_sequence_length=limit)[0][0]
    return embeds


def _z_image(pipeline: Any, text: str, limit: int) -> torch.Tensor:
    embeds: torch.Tensor = pipeline.encode_prompt(
        [text], do_classifier_free_guidance=False, max_sequence_length=limit
    )[0][0]
    return embeds


OWN_LENGTH: Mapping[str, Callable[[Any, str, int], torch.Tensor]] = {
    "QwenImagePipeline": _qwen_image,
    "ZImagePipeline": _z_image,
}
"""Pipelines that give each text its own length, and how they make a text's embeddings [tokens, C].

All others pad every text to one length.
"""


@dataclass(frozen=True)
class TextLengths:
    """Tokens of a run's texts in a stage.

    Parameters
    ----------
    prompts
        Tokens that the transformer gets of each prompt, in order.
    negative
        Those of the negative prompt.
    encoded
        Tokens that the text encoder reads of a prompt, on average.
    """

    prompts: tuple[int, ...]
    negative: int
    encoded: int

    @property
    def longest(self) -> int:
        """Tokens of the longest text."""
        return max(*self.prompts, self.negative)

    def usual(self, together: int) -> int:
        """Return the mean length of a batch of ``together`` prompts, padded to the longest of it.

        Neighbours in the prompt file stand for those that are drawn together.
        """
        count = len(self.prompts)
        together = min(together, count)
        padded = [
            max(self.prompts[(start + i) % count] for i in range(together))
            for start in range(count)
        ]
        return -(-sum(padded) // count)


class _EmptyEncoder(nn.Module):
    """A text encoder of one channel that computes nothing, and notes how many tokens it reads."""

    dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.tokens = input_ids.shape[1]
        hidden = torch.zeros(*input_ids.shape, 1)
        return SimpleNamespace(hidden_states=(hidden, hidden))


def text_lengths(
    architecture: Architecture, prompts: Sequence[str], negative: str, limit: int
) -> TextLengths | None:
    """Return the lengths of a run's texts.

    None where the family pads every text to one length, there is no prompt yet, or the folder lacks
    its tokenizer.

    Parameters
    ----------
    limit
        Longer texts are cut to as many tokens, as in training.
    """
    embed = OWN_LENGTH.get(architecture.pipeline)
    tokenizer = None if embed is None or not prompts else _tokenizer(architecture)
    if embed is None or tokenizer is None:
        return None
    import diffusers

    none = dict.fromkeys(("scheduler", "vae", "text_encoder", TOKENIZER, "transformer"))
    pipeline = getattr(diffusers, architecture.pipeline)(**none)
    encoder = _EmptyEncoder()
    pipeline.text_encoder, pipeline.tokenizer = encoder, tokenizer
    lengths, encoded = [], 0
    for text in prompts:
        lengths.append(len(embed(pipeline, text, limit)))
        encoded += encoder.tokens
    return TextLengths(
        tuple(lengths), len(embed(pipeline, negative, limit)), -(-encoded // len(prompts))
    )


def _tokenizer(architecture: Architecture) -> Any | None:
    """Return the folder's tokenizer; None: there is no folder, or it has none.

    Raises
    ------
    UserError
        If its files can't be read.
    """
    entry = architecture.read(INDEX).get(TOKENIZER)
    if architecture.folder is None or not isinstance(entry, list):
        return None
    import transformers

    files = architecture.folder / TOKENIZER
    tokenizer_class = getattr(transformers, str(entry[1]), None)
    if tokenizer_class is None or not any((files / name).is_file() for name in TOKENIZER_FILES):
        return None
    try:
        return tokenizer_class.from_pretrained(files, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"cannot read {files}: {reason}; download the model again") from error
