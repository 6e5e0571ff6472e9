"""HPSv3 and VideoAlign with tiny networks, saved in the layouts that were published."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AddedToken, Qwen2VLModel

from tests.rewards.tiny_networks import save_tensors
from tests.rewards.tiny_qwen import HIDDEN, published, reward_model, tokenizer
from workflow_rl.rewards import videoalign
from workflow_rl.rewards.base import RewardBatch
from workflow_rl.rewards.hpsv3 import HPSv3, PreferenceHead
from workflow_rl.rewards.qwen_vl import CHAT, to_patches
from workflow_rl.rewards.videoalign import VideoAlign

IMAGE_TEMPLATE = "Rate {text_prompt}: <|Reward|> END"
VIDEO_TEMPLATE = "Rate <|VQ_reward|> and <|MQ_reward|> of {text_prompt} <|TA_reward|>"


def hidden_states(
    model: Qwen2VLModel, tokens: tuple[str, ...], kind: str, frames: Tensor, text: str
) -> Tensor:
    """What the published forward pass gives at the special tokens: no 3D positions."""
    words = tokenizer()
    words.add_tokens([AddedToken(token, special=True) for token in tokens])
    patches, grid = to_patches(frames)
    media = f"<|{kind}_pad|>" * (math.prod(grid) // 4)
    ids = words(CHAT.format(media=media, text=text), return_tensors="pt").input_ids
    embeddings = model.get_input_embeddings()(ids)
    seen = model.visual(patches, grid_thw=torch.tensor([grid])).pooler_output
    pad = words.convert_tokens_to_ids(f"<|{kind}_pad|>")
    embeddings = embeddings.masked_scatter((ids == pad)[..., None], seen)
    hidden = model.language_model(inputs_embeds=embeddings).last_hidden_state[0]
    mask = torch.isin(ids[0], torch.tensor(words.convert_tokens_to_ids(list(tokens))))
    assert mask.sum() == len(tokens)
    return hidden[mask].detach()


def save_hps(folder: Path, hps: tuple[Qwen2VLModel, PreferenceHead], drop: str = "") -> HPSv3:
    """The reward with weights in the published layout, less the tensors called ``drop``."""
    model, head = hps
    state = published(model) | {f"rm_head.{k}": v for k, v in head.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if name != drop}
    template = folder / "template.txt"
    template.write_text(IMAGE_TEMPLATE)
    weights = save_tensors(folder / "HPSv3.safetensors", state)
    return HPSv3(weights, str(folder / "base"), str(template))


def clips(fps: float | None = 8.0) -> RewardBatch:
    media = torch.rand(2, 3, 9, 40, 60, generator=torch.Generator().manual_seed(3))
    return RewardBatch(["a cat", "a dog"], ["0", "1"], media, "video", fps)


LORA = {"lora_r": 2, "lora_alpha": 6}


def write_config(folder: Path, **changes: Any) -> None:
    config = {
        "data_config": {"prompt_template_type": "detailed_special"},
        "peft_lora_config": LORA,
    }
    (folder / "model_config.json").write_text(json.dumps(config | changes))


def make_lora(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Update of the query projection, 32×32 with two heads of 16."""
    return (
        torch.randn(2, HIDDEN, generator=generator),
        torch.randn(HIDDEN, 2, generator=generator),
    )


Q = "model.layers.0.self_attn.q_proj"


def save_videoalign(
    folder: Path, model: Qwen2VLModel, head: Tensor, layout: str, **options: Any
) -> tuple[VideoAlign, Qwen2VLModel]:
    """The reward with a checkpoint in one of the two layouts, and the model it must equal."""
    down, up = make_lora(torch.Generator().manual_seed(5))
    state = published(model) | {"rm_head.weight": head}
    step = folder / "checkpoint-12"
    step.mkdir()
    if layout == "full":
        wrapped = {f"base_model.model.{name}": tensor for name, tensor in state.items()}
        prefix = f"base_model.model.{Q}"
        wrapped[f"{prefix}.base_layer.weight"] = wrapped.pop(f"{prefix}.weight")
        wrapped |= {f"{prefix}.lora_A.default.weight": down, f"{prefix}.lora_B.default.weight": up}
        save_tensors(step / "model.safetensors", wrapped)
        expected = reward_model(videoalign.TOKENS)
    else:  # the language model, but for its embedding, is the base's
        kept = {n: t for n, t in state.items() if n.startswith(("visual.", "rm_head"))}
        kept["model.embed_tokens.weight"] = state["model.embed_tokens.weight"]
        wrapped = {f"base_model.model.{name}": tensor for name, tensor in kept.items()}
        save_tensors(step / "non_lora_state_dict.safetensors", wrapped)
        prefix = f"base_model.model.{Q}"
        lora = {f"{prefix}.lora_A.weight": down, f"{prefix}.lora_B.weight": up}
        save_tensors(step / "adapter_model.safetensors", lora)
        (step / "adapter_config.json").write_text(json.dumps({"target_modules": [Q]}))
        expected = reward_model(videoalign.TOKENS)
        for name, tensor in Qwen2VLModel.from_pretrained(folder / "base").state_dict().items():
            if name.startswith("language_model") and "embed_tokens" not in name:
                expected.get_parameter(name).data.copy_(tensor)
    weight = expected.get_parameter("language_model.layers.0.self_attn.q_proj.weight")
    weight.data += 6 / 2 * up @ down
    (folder / "template.txt").write_text(VIDEO_TEMPLATE)
    template = str(folder / "template.txt")
    return VideoAlign(str(folder), template, str(folder / "base"), **options), expected
