"""A server that can be told to fail, and samples."""

from collections.abc import Callable, Iterator

import pytest
import torch

from tests.rewards.remote.faulty_server import FaultyServer
from workflow_rl.rewards.base import RewardBatch

Videos = Callable[..., RewardBatch]


@pytest.fixture
def server() -> Iterator[FaultyServer]:
    made = FaultyServer()
    yield made
    made.close()


@pytest.fixture
def videos() -> Videos:
    """Make a batch of small videos, the same for the same size."""

    def make(size: int = 4, *, fps: float | None = 8.0, groups: int = 0) -> RewardBatch:
        media = torch.rand(size, 3, 3, 8, 8, generator=torch.Generator().manual_seed(size))
        ids = [f"s{i}" for i in range(size)]
        group_ids = [f"g{i % groups}" for i in range(size)] if groups else []
        return RewardBatch([f"prompt {i}" for i in ids], ids, media, "video", fps, group_ids)

    return make
