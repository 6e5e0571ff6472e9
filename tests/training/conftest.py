"""A chain of two random tiny models, for tests of the training side."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import save_flux, save_wan
from workflow_rl.card import ModelCard
from workflow_rl.models import build_flux_t2i_card, build_wan_i2v_card
from workflow_rl.request import DiffusionParams
from workflow_rl.training.methods.workflow_rl import WorkflowRLMethod, build_workflow_rl

PROMPTS = ["a red circle moving left", "a blue square moving up"]


@pytest.fixture(scope="session")
def cards(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelCard, ModelCard]:
    folder: Path = tmp_path_factory.mktemp("chain")
    save_flux(folder / "flux", guidance_embeds=False, dynamic_shift=False)
    save_wan(folder / "wan", image_encoder=False)
    return build_flux_t2i_card(folder / "flux"), build_wan_i2v_card(folder / "wan")


@pytest.fixture
def make_method(cards: tuple[ModelCard, ModelCard]) -> Callable[..., WorkflowRLMethod]:
    def make(**options: Any) -> WorkflowRLMethod:
        defaults: dict[str, Any] = {
            "num_samples_per_prompt": 2,
            "num_videos_per_image": 2,
            "rollout_steps": 3,
            "sde_kind": "cps",
            "i2v_params": DiffusionParams(num_frames=5),
            "t2i_lr": 1e-3,
            "i2v_lr": 1e-3,
            "rollout_batch_size": 4,
        }
        return build_workflow_rl(*cards, **(defaults | options))

    return make
