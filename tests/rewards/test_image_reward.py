"""ImageReward: the published network, head and normalisation."""

import string
from pathlib import Path

import pytest
import torch
from transformers import BertTokenizer

from tests.rewards.tiny_networks import by_formula, images, pattern, save_tensors
from workflow_rl.errors import UserError
from workflow_rl.rewards.base import score_safely
from workflow_rl.rewards.image_reward import MEAN, STD, BlipWithHead, ImageReward, to_transformers
from workflow_rl.rewards.linear_head import LinearHead
from workflow_rl.rewards.pixels import clip_pixels
from workflow_rl.rewards.weights import load_strict

VISION, TEXT = 128, 64


def shapes() -> dict[str, list[int]]:
    """Names and shapes of a tiny ``ImageReward.pt``: two layers, 16×16 pixels, 40 words."""
    found: dict[str, list[int]] = {
        "blip.text_encoder.embeddings.position_ids": [1, 35],
        "blip.text_encoder.embeddings.word_embeddings.weight": [40, TEXT],
        "blip.text_encoder.embeddings.position_embeddings.weight": [35, TEXT],
        "blip.visual_encoder.cls_token": [1, 1, VISION],
        "blip.visual_encoder.pos_embed": [1, 5, VISION],
        "blip.visual_encoder.patch_embed.proj.weight": [VISION, 3, 8, 8],
        "blip.visual_encoder.patch_embed.proj.bias": [VISION],
    }
    linear = {"blip.vision_proj": (8, VISION), "blip.text_proj": (8, TEXT)}
    norms = {"blip.visual_encoder.norm": VISION, "blip.text_encoder.embeddings.LayerNorm": TEXT}
    for layer in range(2):
        stem = f"blip.visual_encoder.blocks.{layer}."
        norms |= {f"{stem}norm1": VISION, f"{stem}norm2": VISION}
        linear |= {
            f"{stem}attn.qkv": (3 * VISION, VISION),
            f"{stem}attn.proj": (VISION, VISION),
            f"{stem}mlp.fc1": (2 * VISION, VISION),
            f"{stem}mlp.fc2": (VISION, 2 * VISION),
        }
        stem = f"blip.text_encoder.encoder.layer.{layer}."
        norms |= {f"{stem}output.LayerNorm": TEXT}
        linear |= {f"{stem}intermediate.dense": (96, TEXT), f"{stem}output.dense": (TEXT, 96)}
        for kind, seen in (("attention", TEXT), ("crossattention", VISION)):
            norms |= {f"{stem}{kind}.output.LayerNorm": TEXT}
            linear |= {
                f"{stem}{kind}.self.query": (TEXT, TEXT),
                f"{stem}{kind}.self.key": (TEXT, seen),
                f"{stem}{kind}.self.value": (TEXT, seen),
                f"{stem}{kind}.output.dense": (TEXT, TEXT),
            }
    for name, (out, into) in linear.items():
        found |= {f"{name}.weight": [out, into], f"{name}.bias": [out]}
    for name, width in norms.items():
        found |= {f"{name}.weight": [width], f"{name}.bias": [width]}
    head = LinearHead(TEXT).state_dict()
    return found | {f"mlp.{name}": list(tensor.shape) for name, tensor in head.items()}


def test_scores_are_those_of_the_published_code() -> None:
    state = to_transformers(by_formula(shapes()))
    model = BlipWithHead(state).eval()
    load_strict(model, state, "ImageReward.pt")
    token_ids = torch.tensor([[2, 11, 5, 3, 0, 0], [2, 7, 8, 9, 20, 3]])
    pixels = 4 * pattern("pixels", (2, 3, 16, 16), 99)
    with torch.no_grad():
        scores = (model(pixels, token_ids, (token_ids > 0).long()) - MEAN) / STD
    # Of the package image-reward 1.5 with the same weights and inputs, float32 on a CPU.
    torch.testing.assert_close(scores, torch.tensor([-79.0769, -35.9067]), atol=1e-2, rtol=0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Weights and tokenizer."""
    folder: Path = tmp_path_factory.mktemp("image_reward")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase]
    tokenizer = BertTokenizer(vocab={word: i for i, word in enumerate(words)})
    tokenizer.save_pretrained(folder)
    return save_tensors(folder / "w.safetensors", by_formula(shapes())), str(folder)


def test_the_prompt_and_the_image_are_read_together(files: tuple[str, str]) -> None:
    reward = ImageReward(*files)
    batch = images()
    result = score_safely(reward, batch)
    model, tokenizer = reward.loaded.get()
    for row, prompt in enumerate(batch.prompts):
        tokens = tokenizer(prompt, return_tensors="pt")
        assert tokens.input_ids[0, 0] == tokenizer.cls_token_id
        pixels = clip_pixels(batch.media[row : row + 1], 16)
        raw = model(pixels, tokens.input_ids, tokens.attention_mask)
        assert result.scores[row] == pytest.approx(float((raw - MEAN) / STD), abs=1e-2)
    assert score_safely(reward, images()).scores.tolist() == result.scores.tolist()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("mlp.layers.7.weight", "lacks.*mlp.layers.7.weight"),
        ("blip.visual_encoder.blocks.1.attn.qkv.bias", "lacks.*layers.1.self_attn.qkv.bias"),
        ("blip.visual_encoder.pos_embed", "is not ImageReward"),
    ],
)
def test_what_did_not_load_is_refused(
    files: tuple[str, str], tmp_path: Path, name: str, words: str
) -> None:
    state = by_formula(shapes())
    del state[name]
    weights = save_tensors(tmp_path / "w.safetensors", state)
    with pytest.raises(UserError, match=words):
        ImageReward(weights, files[1]).load()
