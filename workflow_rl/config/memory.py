"""What a stage may give up, in time, to need less memory."""

from pathlib import Path

from pydantic import Field

from workflow_rl.config.base import ConfigModel


class MemoryConfig(ConfigModel):
    """Ways to need less memory. None of them changes what the stage learns."""

    gradient_checkpointing: bool = Field(
        False,
        description="Keep the inputs of the transformer's blocks for the backward pass and compute "
        "the rest again: about a third more time in training, the same gradients.",
    )
    vae_slicing: bool = Field(
        False, description="Encode and decode one sample after the other; the result is the same."
    )
    vae_tiling: bool = Field(
        False,
        description="Encode and decode in overlapping tiles that are blended: the same result up "
        "to the VAE's tile size, a close one above it.",
    )
    drop_text_encoders: bool = Field(
        False,
        description="Encode every prompt of the run before it starts, then free the text encoders. "
        "Without embedding_cache all embeddings stay on the device.",
    )
    embedding_cache: bool | Path = Field(
        False,
        description="Keep text embeddings on disk as safetensors, for prompt sets larger than "
        "memory and for later runs: a folder, or true for `embeddings` in the run directory.",
    )
    attention_backend: str | None = Field(
        None,
        description="Attention of the transformer, by its name in diffusers, such as `native`, "
        "`flash` or `_native_efficient`; null is diffusers' choice.",
    )
