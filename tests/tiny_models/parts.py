"""What the tiny checkpoints of several families share."""

from __future__ import annotations

import torch

TEXT_DIM = 16
T5_SHAPE = {
    "d_model": TEXT_DIM,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
}


def randomise(module: torch.nn.Module) -> None:
    """Give every weight a value: diffusers starts some output layers at zero, which hides bugs."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.7 / parameter[0].numel() ** 0.5)
