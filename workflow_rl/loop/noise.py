"""Noise that belongs to a sample: same identity, same noise, whatever the batch or the worker."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workflow_rl.request import SampleId

INIT_STEP = -1
"""Step index of the initial latents; denoising steps count from 0."""


@dataclass(frozen=True)
class NoiseKey:
    """What one draw of noise depends on: the sample, the stage of the chain and the step."""

    sample: SampleId
    stage: str
    step: int

    def seed(self) -> int:
        """Return a 63-bit seed, the same in every process and on every machine."""
        sample = self.sample
        identity = [
            sample.run_seed, sample.prompt, list(sample.path), sample.draw, self.stage, self.step,
        ]  # fmt: skip
        digest = hashlib.blake2b(json.dumps(identity).encode("ascii"), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def generator_for(key: NoiseKey) -> torch.Generator:
    """Return the key's own CPU generator, at its start.

    PyTorch's CPU generator uses 32 of the seed's bits, so two keys in 4 billion share their noise.
    """
    return torch.Generator(device="cpu").manual_seed(key.seed())


def draw_noise(
    shape: Sequence[int], keys: Sequence[NoiseKey], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Draw standard normal noise, one sample at a time.

    Parameters
    ----------
    shape
        Of one sample, without the batch.
    keys
        One per sample.
    dtype
        Of the result. The draw itself is float32, so that the dtype rounds it and changes nothing
        else.

    Returns
    -------
    torch.Tensor
        [len(keys), *shape] on the CPU.
    """
    rows = [torch.randn(tuple(shape), generator=generator_for(key)) for key in keys]
    return torch.stack(rows).to(dtype)
