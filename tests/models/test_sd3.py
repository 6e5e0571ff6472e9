"""The SD3 adapter against the stock pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from torch import nn

from tests.models.case import PROMPTS, PublishedSchedule
from tests.models.contract import FamilyCase, FamilyContract, StockCall
from tests.models.lora_contract import LoRAContract
from tests.tiny_models.sd3 import save_sd3
from workflow_rl.config.families import FAMILIES
from workflow_rl.config.lora import LoRAConfig
from workflow_rl.config.lora_file import lora_layout
from workflow_rl.config.model_folder import check_model_folder
from workflow_rl.config.stage import StageConfig
from workflow_rl.errors import UserError
from workflow_rl.instance import ModelInstance, load_card
from workflow_rl.models.sd3 import build_sd3_t2i_card
from workflow_rl.request import DiffusionParams, make_request

PROMPT = PROMPTS[0]
PARAMS = {"max_sequence_length": 12}


def _stock(call: StockCall) -> torch.Tensor:
    image: torch.Tensor = call.pipeline(
        call.prompt,
        negative_prompt=call.negative_prompt,
        latents=call.latents[None],
        height=call.params.height,
        width=call.params.width,
        num_inference_steps=call.params.num_inference_steps,
        guidance_scale=call.params.guidance_scale,
        max_sequence_length=call.params.max_sequence_length,
        output_type="pt",
    ).images[0]
    return image


class TestSD35Medium(FamilyContract, LoRAContract):
    """Not square: rows and columns differ."""

    case = FamilyCase(
        name="sd3.5-medium",
        task="t2i",
        save=save_sd3,
        pipeline_class=StableDiffusion3Pipeline,
        stock=_stock,
        width=48,
        guidances=(
            {},
            {"guidance_scale": 4.5},
            {"guidance_scale": 2.0, "negative_prompt": "a cat"},
        ),
        params=PARAMS,
        defaults={"height": 32, "width": 32, "max_sequence_length": 256},
        # The smallest sigma is shifted twice.
        schedules=(
            PublishedSchedule(
                {"num_inference_steps": 28}, (1.0, 0.98738, 0.97411), (0.11091, 0.00893, 0.0)
            ),
            PublishedSchedule(
                {"num_inference_steps": 10}, (1.0, 0.96013, 0.91335), (0.27805, 0.00893, 0.0)
            ),
        ),
    )
    # A block has 8 projections, the first another 4; the last gives no text, so it has 7.
    lora_layers = 19
    # The text's queries act on the text alone, which the last block drops.
    lora_idle = frozenset({"transformer_blocks.1.attn.add_q_proj"})


class TestSD3WithoutT5(FamilyContract):
    """As people load it who have little memory; of SD3's first shape, with a dynamic shift."""

    case = FamilyCase(
        name="sd3-without-t5",
        task="t2i",
        save=partial(save_sd3, medium=False, t5=False, dynamic_shift=True),
        pipeline_class=SimpleNamespace(
            from_pretrained=partial(
                StableDiffusion3Pipeline.from_pretrained, text_encoder_3=None, tokenizer_3=None
            )
        ),
        stock=_stock,
        guidances=({}, {"guidance_scale": 4.5}),
        params=PARAMS,
    )


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> ModelInstance:
    return load_card(build_sd3_t2i_card(save_sd3(tmp_path_factory.mktemp("sd3") / "sd3")))


def test_an_image_larger_than_its_positions_is_one_line(instance: ModelInstance) -> None:
    """Also to the check of a configuration, which loads nothing."""
    adapter, folder = instance.adapter, instance.card.source
    fits: dict[str, Any] = {"height": 96, "width": 96}
    assert adapter.resolve(make_request("t2i", PROMPT, params=DiffusionParams(**fits))).width == 96
    check_model_folder(folder, "stages.t2i.model", StageConfig(task="t2i", **fits))
    for side in fits:
        size = fits | {side: 104}
        request = make_request("t2i", PROMPT, params=DiffusionParams(**size))
        with pytest.raises(UserError, match=f"cannot make {side} 104: it has positions for 96"):
            adapter.resolve(request)
        with pytest.raises(UserError, match=rf"stages\.t2i\.{side} is 104, but .* for 96 pixels"):
            check_model_folder(folder, "stages.t2i.model", StageConfig(task="t2i", **size))


def test_t5_is_part_of_a_texts_key_where_there_is_one(
    instance: ModelInstance, tmp_path: Path
) -> None:
    plain = load_card(build_sd3_t2i_card(save_sd3(tmp_path / "plain", t5=False)))
    encoders = ("text_encoder", "text_encoder_2", "text_encoder_3")
    assert instance.adapter.text_encoders == encoders
    assert plain.adapter.text_encoders == encoders[:2]
    for each, zeros in ((instance, False), (plain, True)):
        params = each.adapter.resolve(make_request("t2i", PROMPT))
        (row,) = each.adapter.encode_prompts(each, [(PROMPT, None)], params)
        t5_tokens = row["prompt_embeds"][-256:]
        assert bool((t5_tokens == 0).all()) == zeros


def test_default_lora_and_text_length_of_the_published_medium() -> None:
    """Both attentions of the blocks that have two: "attn.*" endings would miss the second."""
    config: dict[str, Any] = {
        "num_layers": 24,
        "num_attention_heads": 24,
        "caption_projection_dim": 1536,
        "pos_embed_max_size": 384,
        "dual_attention_layers": tuple(range(13)),
        "qk_norm": "rms_norm",
    }
    with torch.device("meta"):
        transformer = SD3Transformer2DModel(**config)
    assert sum(p.numel() for p in transformer.parameters()) == 2_243_171_520
    linears = {
        name: tuple(layer.weight.shape)
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear)
    }
    defaults = FAMILIES["StableDiffusion3Pipeline"].lora_targets
    names = lora_layout(
        LoRAConfig(), linears, defaults, "transformer", ("transformer",), "lora"
    ).modules
    assert len(names) == 24 * 8 + 13 * 4 - 1
    assert sum(".attn2." in name for name in names) == 13 * 4
