"""The Qwen-Image adapter against the stock pipeline."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline, QwenImageTransformer2DModel
from torch import nn

from tests.models.case import PROMPTS, STEPS, PublishedSchedule
from tests.models.contract import FamilyCase, FamilyContract, StockCall
from tests.models.lora_contract import LoRAContract
from tests.tiny_models.qwen_image import save_qwen_image
from workflow_rl.config.families import FAMILIES
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.config.lora_file import lora_layout
from workflow_rl.enums import ExecutionProfile
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models.qwen_image import build_qwen_image_t2i_card
from workflow_rl.request import make_request
from workflow_rl.training.rollout import rollout_loop

LONG = PROMPTS[0]
PUBLISHED_NEGATIVE = " "


def _stock(call: StockCall) -> torch.Tensor:
    given = call.negative_prompt
    image: torch.Tensor = call.pipeline(
        call.prompt,
        negative_prompt=PUBLISHED_NEGATIVE if given is None else given,
        true_cfg_scale=call.params.guidance_scale,
        latents=call.latents[None],
        height=call.params.height,
        width=call.params.width,
        num_inference_steps=call.params.num_inference_steps,
        max_sequence_length=call.params.max_sequence_length,
        output_type="pt",
    ).images[0]
    return image


class TestQwenImage(FamilyContract, LoRAContract):
    """The two prompts of a batch differ in length. Not square: rows and columns differ."""

    case = FamilyCase(
        name="qwen-image",
        task="t2i",
        save=save_qwen_image,
        pipeline_class=QwenImagePipeline,
        stock=_stock,
        width=48,
        guidances=(
            {},
            {"guidance_scale": 4.0},
            {"guidance_scale": 4.0, "negative_prompt": ""},
            {"guidance_scale": 2.0, "negative_prompt": "a cat of no colour and of no shape"},
        ),
        defaults={"height": 1024, "width": 1024, "max_sequence_length": 512},
        # Stretched to its terminal; the tiny VAE's factor is the published 8.
        schedules=(
            PublishedSchedule(
                {"height": 1024, "width": 1024, "num_inference_steps": 50},
                (1.0, 0.98970, 0.97919),
                (0.05848, 0.02, 0.0),
            ),
            PublishedSchedule(
                {"height": 512, "width": 512, "num_inference_steps": 10},
                (1.0, 0.92897, 0.85148),
                (0.18330, 0.02, 0.0),
            ),
        ),
    )
    # Two blocks of 8 projections and two feed-forwards of 2 layers.
    lora_layers = 24
    # They act on the text alone, which the last block drops.
    lora_idle = frozenset(
        f"transformer_blocks.1.{layer}"
        for layer in (
            *("attn.add_q_proj", "attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
        )
    )


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    folder = tmp_path_factory.mktemp("qwen_image") / "qwen-image"
    return load_card(build_qwen_image_t2i_card(save_qwen_image(folder)))


def test_the_instruction_is_dropped_and_a_text_is_cut_at_its_length(
    instance: ModelInstance,
) -> None:
    """What is left is the prompt and the end of the chat."""
    pipe: Any = instance.adapter.pipeline
    start, _, end = pipe.prompt_template_encode.partition("{}")
    assert len(pipe.tokenizer(start).input_ids) == pipe.prompt_template_encode_start_idx == 34
    own = sum(len(pipe.tokenizer(part).input_ids) for part in (LONG, end))
    assert own > 7
    for length, expected in ((None, own), (7, 7)):
        params = instance.adapter.resolve(make_request("t2i", LONG, max_sequence_length=length))
        (row,) = instance.adapter.encode_prompts(instance, [(LONG, None)], params)
        assert len(row["prompt_embeds"]) == len(row["prompt_mask"]) == expected


def test_a_batch_is_the_stock_pipelines_batch(instance: ModelInstance) -> None:
    """It pads a batch's texts before encoding them; here each is encoded alone."""
    latents = torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    fields: dict[str, Any] = {"height": 32, "width": 32, "num_inference_steps": STEPS}
    requests = [
        make_request("t2i", prompt, latents=row, guidance_scale=4.0, **fields)
        for prompt, row in zip(PROMPTS, latents, strict=True)
    ]
    ours, _ = rollout_loop(instance, "denoise", requests, profile=ExecutionProfile.SERVE)
    pipe: Any = instance.adapter.pipeline
    pipe.set_progress_bar_config(disable=True)
    stock = pipe(
        list(PROMPTS),
        negative_prompt=[PUBLISHED_NEGATIVE] * 2,
        true_cfg_scale=4.0,
        latents=latents,
        output_type="pt",
        **fields,
    ).images
    torch.testing.assert_close(ours, stock, atol=1e-5, rtol=0)


def test_the_record_names_the_rule_of_guidance(instance: ModelInstance) -> None:
    fields: dict[str, Any] = {"height": 32, "width": 32, "sde_steps": (0,)}
    for scale, name in ((None, "none"), (4.0, "cfg_norm_rescaled")):
        request = make_request("t2i", LONG, guidance_scale=scale, **fields)
        _, record = rollout_loop(instance, "denoise", request)
        assert record is not None
        assert record.guidance == name


def test_default_lora_of_the_published_model() -> None:
    """Without weights."""
    with torch.device("meta"):
        transformer = QwenImageTransformer2DModel()
    assert sum(p.numel() for p in transformer.parameters()) == 20_430_401_088
    linears = {
        name: tuple(layer.weight.shape)
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear)
    }
    defaults = FAMILIES["QwenImagePipeline"].lora_targets
    layout = lora_layout(LoRAConfig(), linears, defaults, "transformer", ("transformer",), "lora")
    assert (len(layout.modules), len(linears)) == (720, 846)
