"""Weights that were just loaded: all finite, and in memory of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from workflow_rl.errors import UserError
from workflow_rl.module_weights import check_finite, own_memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_are_checked_in_every_dtype(dtype: torch.dtype) -> None:
    module = nn.Linear(2, 2).to(dtype)
    check_finite(module, Path("vae"))
    with torch.no_grad():
        module.bias[1] = float("nan")
    with pytest.raises(UserError, match="vae: the weight bias holds NaN"):
        check_finite(module, Path("vae"))


def test_a_file_that_is_written_again_changes_nothing(tmp_path: Path) -> None:
    """A parameter and a buffer that are views of the file become copies, with the same values."""
    path = tmp_path / "model.safetensors"
    saved = {"weight": torch.ones(4), "running_mean": torch.full((4,), 2.0)}
    save_file(saved, path)
    module = nn.BatchNorm1d(4)
    module.load_state_dict(load_file(path), strict=False, assign=True)
    own_memory(module)
    with path.open("r+b") as file:
        file.seek(-32, os.SEEK_END)
        file.write(bytes(32))
    assert torch.equal(module.weight, saved["weight"])
    assert torch.equal(module.state_dict()["running_mean"], saved["running_mean"])


def test_tied_weights_stay_tied() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    own_memory(nn.Sequential(first, second))
    with torch.no_grad():
        first.weight.zero_()
    assert not second.weight.any()
