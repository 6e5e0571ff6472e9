"""What `workflow-rl plan` counts without weights, against models that are there."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, WanImageToVideoPipeline
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from workflow_rl.cli.main import app
from workflow_rl.cli.plan_view import change_table
from workflow_rl.embedded.pretrain import CHECKPOINTS, IMAGE_FOLDER, VIDEO_FOLDER
from workflow_rl.models import build_card
from workflow_rl.planning.advice import Change
from workflow_rl.planning.architecture import find_architecture
from workflow_rl.planning.modules import build_modules
from workflow_rl.request import TaskType

QUICKSTART = "configs/quickstart.yaml"


def plan(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["plan", *arguments, "--json"])
    assert result.exit_code == 0, result.output
    numbers: dict[str, Any] = json.loads(result.stdout)
    return numbers


@pytest.fixture(scope="module")
def quickstart() -> dict[str, Any]:
    stages: dict[str, Any] = plan(QUICKSTART)["stages"]
    return stages


@pytest.mark.parametrize(
    ("stage", "folder", "pipeline_class"),
    [
        ("t2i", IMAGE_FOLDER, FluxPipeline),
        ("i2v", VIDEO_FOLDER, WanImageToVideoPipeline),
    ],
)
def test_parameters_and_bytes_are_those_of_the_loaded_models(
    stage: str, folder: str, pipeline_class: Any, quickstart: dict[str, Any]
) -> None:
    pipeline = pipeline_class.from_pretrained(CHECKPOINTS / folder)
    told = quickstart[stage]
    for name, count in told["parameters"].items():
        module = getattr(pipeline, name)
        assert sum(p.numel() for p in module.parameters()) == count, name
        held = [*module.parameters(), *module.buffers()]
        assert told["bytes"]["weights"][name] == pytest.approx(
            sum(t.numel() * t.element_size() for t in held), rel=0.1
        )


def test_flops_of_a_transformer_are_those_that_a_real_pass_counts(
    quickstart: dict[str, Any],
) -> None:
    pipeline = FluxPipeline.from_pretrained(CHECKPOINTS / IMAGE_FOLDER)
    work = quickstart["t2i"]["work"]
    rows = 2
    embeds, pooled, text_ids = pipeline.encode_prompt(
        ["a red circle moving left"] * rows, None, max_sequence_length=16
    )
    with FlopCounterMode(display=False) as counter:
        pipeline.transformer(
            hidden_states=torch.randn(rows, 16, 16),
            timestep=torch.ones(rows),
            pooled_projections=pooled,
            encoder_hidden_states=embeds,
            txt_ids=text_ids,
            img_ids=pipeline._prepare_latent_image_ids(1, 4, 4, embeds.device, embeds.dtype),
            return_dict=False,
        )[0].sum().backward()
    one = counter.get_total_flops() / rows
    told = quickstart["t2i"]["flops"]["training"] / (work["samples"] * work["trained_steps"])
    assert told == pytest.approx(one, rel=0.1)


@pytest.mark.parametrize(
    ("hub_id", "billions"),
    [("black-forest-labs/FLUX.1-dev", 11.90), ("Wan-AI/Wan2.1-I2V-14B-480P-Diffusers", 16.40)],
)
def test_published_transformers_have_their_published_size(hub_id: str, billions: float) -> None:
    architecture = find_architecture(Path(hub_id), "stages.x.model")
    transformer = build_modules(architecture, torch.bfloat16)["transformer"]
    assert all(p.is_meta for p in transformer.parameters())
    count = sum(p.numel() for p in transformer.parameters())
    assert count / 1e9 == pytest.approx(billions, rel=0.005)


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", QUICKSTART, f"stages.t2i.model={tmp_path}/no"])
    assert result.exit_code == 2
    assert str(tmp_path) in result.output + str(result.exception)


def test_a_size_beyond_a_models_positions_is_one_line() -> None:
    fits = ["configs/sd35_wan_ti2v.yaml", "stages.t2i.width=64"]
    result = CliRunner().invoke(app, ["plan", *fits, "stages.t2i.height=6160"])
    assert result.exit_code == 2
    message = "stages.t2i.height is 6160, but this model has positions for 6144 pixels"
    assert message in result.output + str(result.exception)


def test_a_text_longer_than_training_would_take_is_one_line() -> None:
    asked = "stages.i2v.max_sequence_length=129"
    model = "stages.i2v.model=LTX-Video"
    result = CliRunner().invoke(app, ["plan", QUICKSTART, model, asked])
    assert result.exit_code == 2
    message = "stages.i2v.max_sequence_length is 129, but ltx takes at most 128 text tokens"
    assert message in result.output + str(result.exception)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("stages.t2i.train_modules=[nope]", "stages.t2i.train_modules names 'nope', which is no"),
        (
            "evaluation.num_inference_steps=1",
            "evaluation.num_inference_steps is 1 for every stage: stages.i2v.num_inference_steps",
        ),
    ],
)
def test_what_train_refuses_is_refused_in_the_same_line(override: str, says: str) -> None:
    asked = ["plan", QUICKSTART, "stages.i2v.model=LTX-Video", override]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2
    assert says in result.output


def test_an_override_to_copy_is_whole_in_a_narrow_terminal() -> None:
    change = Change("stages.i2v.memory.gradient_checkpointing", True, "more time " * 9, 10**9)
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(change_table([change]))
    assert " stages.i2v.memory.gradient_checkpointing=true " in console.export_text()


def test_embedded_models_are_counted_at_their_own_defaults(quickstart: dict[str, Any]) -> None:
    """The frames that the card fills in training, not the family's 81."""
    defaults = build_card(None, TaskType.I2V).defaults
    assert quickstart["i2v"]["size"] == f"32 × 32 px × {defaults.num_frames} frames"
