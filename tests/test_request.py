"""Requests say what they are, and refuse what cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from workflow_rl.errors import UserError
from workflow_rl.request import DiffusionParams, SampleId, TaskType, make_request


def test_the_identity_defaults_to_seed_and_prompt() -> None:
    request = make_request("t2i", "a cat", seed=5)
    assert request.sample == SampleId(5, "a cat", (0,))
    assert request.stage == "t2i"
    assert request.task is TaskType.T2I
    assert request.sample.child(2).path == (0, 2)


@pytest.mark.parametrize(
    ("task", "fields", "message"),
    [
        ("i2v", {}, "needs an image"),
        ("t2i", {"image": torch.zeros(3, 8, 8)}, "takes no image"),
        ("i2v", {"image": torch.zeros(8, 8)}, r"must be \[3, H, W\]"),
        ("t2i", {"params": DiffusionParams(), "height": 8}, "not both"),
        ("i2i", {}, "no task 'i2i'; use one of t2i, i2v, t2v"),
        ("t2i", {"sde_kind": "flow-sde"}, "sde_kind is 'flow-sde'; use one of flow_sde"),
        ("t2i", {"num_inference_steps": 0}, "at least 1"),
        ("t2i", {"num_inference_steps": 1, "sde_steps": (0,)}, "with 1 step none can be stochas"),
        ("t2i", {"num_inference_steps": 4, "sde_steps": (3,)}, "the last step is deterministic"),
        ("t2i", {"num_inference_steps": 4, "sde_steps": (-1,)}, "choose from 0 to 2"),
    ],
)
def test_what_cannot_be_is_refused(task: str, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_request(task, "a cat", **fields)


def test_defaults_fill_only_what_is_missing() -> None:
    params = DiffusionParams(num_inference_steps=9, height=64)
    filled = params.filled(DiffusionParams(num_inference_steps=3, height=32, num_frames=5))
    assert (filled.num_inference_steps, filled.height, filled.num_frames) == (9, 64, 5)
