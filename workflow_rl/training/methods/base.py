"""What a trainer needs of a training method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from workflow_rl.card import ModelCard
from workflow_rl.instance import ModelInstance, load_card

Batch = Mapping[str, Any]
"""``{"prompts": [P prompts or PromptRecords], "seeds": [P ints]}``."""


class TrainingMethod(ABC):
    """One training step over a batch of prompts, and the state that resume needs."""

    @abstractmethod
    def managed_train_step(
        self, batch: Batch, iteration: int
    ) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        """Generate, score, update and publish; return losses (0-dim tensors) and metrics."""

    @abstractmethod
    def get_grad_clip_targets(self) -> dict[str, nn.Module]:
        """Return the modules whose gradients are clipped, as ``stage.component``."""

    @abstractmethod
    def state_tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor that resume needs; loading them back is exact."""

    @abstractmethod
    def state_values(self) -> dict[str, Any]:
        """Return every other value that resume needs, as JSON types."""

    @abstractmethod
    def load_state(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Put back what ``state_tensors`` and ``state_values`` gave."""


def new_instance(
    card: ModelCard,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> ModelInstance:
    """Load a card into a new instance that shares no weight with any other."""
    return load_card(card, device=device, dtype=dtype)
