"""VideoAlign's checkpoints of a LoRA: nothing that was trained is missing or of another layer."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rewards.qwen_checkpoints import LORA, save_videoalign, write_config
from tests.rewards.tiny_networks import save_tensors
from tests.rewards.tiny_qwen import HIDDEN, reward_model, tokenizer
from workflow_rl.errors import UserError
from workflow_rl.rewards import videoalign
from workflow_rl.rewards.qwen_vl import merge_lora
from workflow_rl.rewards.videoalign import VideoAlign

pytestmark = pytest.mark.usefixtures("small_pictures")


NON_LORA, ADAPTER = "non_lora_state_dict.safetensors", "adapter_model.safetensors"


def save_adapter(folder: Path, **config: Any) -> tuple[VideoAlign, Path]:
    """A whole checkpoint on top of a base, and the folder of its files.

    The base has as many embeddings as the checkpoint, so that no other check sees them missing.
    """
    write_config(folder, **config)
    model = reward_model(videoalign.TOKENS)
    reward, _ = save_videoalign(folder, model, torch.randn(3, HIDDEN), "adapter")
    (folder / "base").unlink()
    model.save_pretrained(folder / "base")
    tokenizer().save_pretrained(folder / "base")
    return reward, folder / "checkpoint-12"


def drop(path: Path, pattern: str) -> None:
    """Write the file again without the tensors of which the name has ``pattern``."""
    state = load_file(path)
    kept = {name: tensor for name, tensor in state.items() if not re.search(pattern, name)}
    assert len(kept) < len(state)
    save_tensors(path, kept)


@pytest.mark.parametrize(
    ("file", "pattern", "words"),
    [
        (ADAPTER, "lora", r"lacks language_model\.layers\.0\.self_attn\.q_proj\.lora_A\.weight"),
        (ADAPTER, "lora_B", r"lacks language_model\..*q_proj\.lora_B\.weight: download"),
        (NON_LORA, "rm_head", r"lacks rm_head\.weight.*convert"),
        (NON_LORA, r"visual\.", r"lacks visual\.patch_embed\.proj\.weight.*convert"),
        (NON_LORA, r"merger\.mlp\.2\.bias", r"lacks visual\.merger\.mlp\.2\.bias"),
        (NON_LORA, "embed_tokens", r"lacks language_model\.embed_tokens\.weight.*convert"),
    ],
)
def test_nothing_that_was_trained_is_taken_from_the_base(
    folder: Path, file: str, pattern: str, words: str
) -> None:
    reward, step = save_adapter(folder)
    drop(step / file, pattern)
    with pytest.raises(UserError, match=words) as caught:
        reward.load()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["q_proj", "v_proj"], r"lacks language_model\.layers\.0\.self_attn\.v_proj\.lora_A"),
        (r"model\.layers\..*[qk]_proj", r"lacks language_model\..*k_proj\.lora_A"),
        (["q_proj", "attn.qkv"], r"lacks visual\.blocks\.0\.attn\.qkv\.lora_A"),
        (["proj"], r"lacks visual\.blocks\.0\.attn\.proj\.lora_A"),
        (["absent"], "name no layer"),
        ([], "name no layer"),
        (None, "does not say which layers have a LoRA"),
    ],
)
def test_each_target_layer_has_its_lora(folder: Path, targets: Any, words: str) -> None:
    reward, step = save_adapter(folder)
    (step / "adapter_config.json").write_text(json.dumps({"target_modules": targets}))
    with pytest.raises(UserError, match=words):
        reward.load()


def test_a_lora_of_another_layer_or_rank_is_refused(folder: Path) -> None:
    reward, step = save_adapter(folder)
    lora = load_file(step / ADAPTER)
    other = {name.replace("q_proj", "o_proj"): tensor.clone() for name, tensor in lora.items()}
    save_tensors(step / ADAPTER, lora | other)
    with pytest.raises(UserError, match=r"has .*o_proj\.lora_A\.weight, of no layer"):
        reward.load()
    narrow = {name: tensor[:1].clone() for name, tensor in lora.items()}
    save_tensors(step / ADAPTER, narrow)
    with pytest.raises(UserError, match=r"lora_A\.weight has shape \(1, 32\).* needs \(2, 32\)"):
        reward.load()


@pytest.mark.parametrize(
    ("recipe", "pattern"),
    [
        ({"model_config": {"freeze_vision_tower": True, "tune_merger": False}}, r"visual\."),
        ({"model_config": {"freeze_vision_tower": True, "tune_merger": True}}, r"visual\.blocks"),
        ({"peft_lora_config": LORA | {"vision_lora": True}}, r"visual\."),
    ],
)
def test_what_was_frozen_comes_from_the_base(
    folder: Path, recipe: dict[str, Any], pattern: str
) -> None:
    reward, step = save_adapter(folder, **recipe)
    drop(step / NON_LORA, pattern)
    reward.load()


def test_half_a_lora_is_refused() -> None:
    state = {"q.weight": torch.zeros(2, 2), "q.lora_A.weight": torch.ones(1, 2)}
    with pytest.raises(UserError, match="only one half"):
        merge_lora(state, 1.0)
    with pytest.raises(UserError, match="no weight"):
        merge_lora({"q.lora_A.weight": state["q.lora_A.weight"]}, 1.0)
