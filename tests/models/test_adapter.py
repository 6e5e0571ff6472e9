"""What every family inherits: which guidance is asked for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.tiny_models import save_flux
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models import build_flux_t2i_card
from workflow_rl.models.common import collate
from workflow_rl.request import DiffusionParams, make_request


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    folder = tmp_path_factory.mktemp("adapter") / "flux"
    return load_card(
        build_flux_t2i_card(save_flux(folder, guidance_embeds=False, dynamic_shift=False))
    )


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({}, "none"),
        ({"guidance": "none"}, "none"),
        ({"guidance_scale": 1.0}, "none"),
        ({"guidance_scale": 2.0}, "cfg"),
        ({"guidance": "cfg", "guidance_scale": 2.0}, "cfg"),
    ],
)
def test_the_rule_follows_the_parameters(
    instance: ModelInstance, fields: dict[str, Any], rule: str
) -> None:
    params = instance.adapter.resolve(make_request("t2i", "a cat", **fields))
    assert instance.adapter.guidance(params).name == rule


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"guidance": "none", "guidance_scale": 3.0}, "guidance is none, but guidance_scale is 3"),
        ({"guidance": "cfg"}, "guidance is cfg, but guidance_scale is 1"),
        ({"guidance": "embedded"}, "has no embedded guidance"),
        ({"guidance_scale": 3.0, "guidance_scale_2": 2.0}, "would ignore guidance_scale_2"),
    ],
)
def test_guidance_that_contradicts_itself_is_one_line(
    instance: ModelInstance, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        instance.adapter.resolve(make_request("t2i", "a cat", **fields))
    assert "\n" not in str(caught.value)


def test_the_second_expert_may_have_a_scale_of_its_own(instance: ModelInstance) -> None:
    adapter = instance.adapter
    one = DiffusionParams(guidance_scale=3.0)
    two = DiffusionParams(guidance_scale=3.0, guidance_scale_2=2.0)
    components = ("transformer", "transformer_2")
    assert [adapter.guidance_scale(c, one) for c in components] == [3.0, 3.0]
    assert [adapter.guidance_scale(c, two) for c in components] == [3.0, 2.0]


def test_texts_of_several_lengths_are_padded_beside_their_mask() -> None:
    rows = [
        {"text": torch.ones(tokens, 2), "mask": torch.ones(tokens, dtype=torch.bool)}
        for tokens in (3, 1)
    ]
    batch = collate(rows)
    assert batch["text"].shape == (2, 3, 2)
    assert batch["mask"].tolist() == [[True, True, True], [True, False, False]]
    assert batch["text"].sum() == 8


@pytest.mark.parametrize("name", ["sampler", "cfg_batching"])
def test_an_unknown_choice_names_the_known_ones(name: str) -> None:
    known = {"sampler": "euler, checkpoint", "cfg_batching": "sequential, batched"}[name]
    with pytest.raises(UserError, match=f"{name} is 'heun'; use one of {known}"):
        DiffusionParams(**{name: "heun"})  # type: ignore[arg-type]
