"""PickScore, CLIPScore, HPSv2 and the aesthetic score, through the real classes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import CLIPModel

from tests.rewards.tiny_networks import (
    EOS,
    by_formula,
    clip_config,
    clip_words,
    images,
    pattern,
    save_clip,
    save_tensors,
)
from workflow_rl.errors import UserError
from workflow_rl.rewards.aesthetic import Aesthetic
from workflow_rl.rewards.base import Reward, RewardBatch, score_safely
from workflow_rl.rewards.clip_scores import ClipScore, PickScore
from workflow_rl.rewards.hpsv2 import HPSv2
from workflow_rl.rewards.linear_head import LinearHead
from workflow_rl.rewards.open_clip_layout import to_transformers
from workflow_rl.rewards.pixels import clip_pixels
from workflow_rl.rewards.weights import load_strict


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def logits(folder: str) -> Tensor:
    """What ``CLIPModel.forward`` says of :func:`images` and their prompts."""
    batch, tokenizer = images(), clip_words()
    tokens = tokenizer(list(batch.prompts), padding=True, return_tensors="pt")
    pixels = clip_pixels(batch.media, 16)
    with torch.no_grad():
        output = CLIPModel.from_pretrained(folder)(**tokens, pixel_values=pixels)
    return output.logits_per_image.diagonal()


def open_clip_shapes() -> dict[str, list[int]]:
    """Names and shapes of a tiny CLIP as open_clip 3.3.0 has them."""
    shapes: dict[str, list[int]] = {
        "logit_scale": [],
        "positional_embedding": [10, 24],
        "text_projection": [24, 12],
        "token_embedding.weight": [30, 24],
        "visual.class_embedding": [32],
        "visual.conv1.weight": [32, 3, 8, 8],
        "visual.positional_embedding": [5, 32],
        "visual.proj": [32, 12],
    }
    norms = [("ln_final", 24), ("visual.ln_pre", 32), ("visual.ln_post", 32)]
    for prefix, width in (("", 24), ("visual.", 32)):
        for layer in range(2):
            stem = f"{prefix}transformer.resblocks.{layer}."
            norms += [(f"{stem}ln_1", width), (f"{stem}ln_2", width)]
            shapes |= {
                f"{stem}attn.in_proj_weight": [3 * width, width],
                f"{stem}attn.in_proj_bias": [3 * width],
                f"{stem}attn.out_proj.weight": [width, width],
                f"{stem}attn.out_proj.bias": [width],
                f"{stem}mlp.c_fc.weight": [2 * width, width],
                f"{stem}mlp.c_fc.bias": [2 * width],
                f"{stem}mlp.c_proj.weight": [width, 2 * width],
                f"{stem}mlp.c_proj.bias": [width],
            }
    return shapes | {f"{n}.{kind}": [w] for n, w in norms for kind in ("weight", "bias")}


def test_pickscore_and_clipscore_are_the_models_own_logits(folder: str, logits: Tensor) -> None:
    pick = score_safely(PickScore(folder, folder), images())
    torch.testing.assert_close(pick.scores, logits)
    scale = CLIPModel.from_pretrained(folder).logit_scale.exp().detach()
    clip = score_safely(ClipScore(folder), images())
    torch.testing.assert_close(clip.components["cosine"], logits / scale)
    torch.testing.assert_close(clip.scores, 2.5 * (logits / scale).clamp(min=0))


def test_hpsv2_scores_as_open_clip_does() -> None:
    model = CLIPModel(clip_config()).eval()
    load_strict(model, to_transformers(by_formula(open_clip_shapes())), "open_clip")
    token_ids = torch.tensor([[27, 3, 4, EOS, 0, 0, 0, 0, 0, 0], [27, 5, 6, 7, 8, 9, 1, EOS, 0, 0]])
    with torch.no_grad():
        output = model(input_ids=token_ids, pixel_values=4 * pattern("pixels", (2, 3, 16, 16), 99))
    cosines = F.cosine_similarity(output.image_embeds, output.text_embeds)
    # Of open_clip 3.3.0 with the same weights and inputs, float32 on a CPU.
    torch.testing.assert_close(cosines, torch.tensor([0.169878, 0.297927]), atol=1e-5, rtol=0)


def test_hpsv2_is_the_cosine_of_image_and_prompt(folder: str, tmp_path: Path) -> None:
    weights = save_tensors(tmp_path / "hps.safetensors", by_formula(open_clip_shapes()))
    reward = HPSv2(weights, folder)
    batch = images(3, 10, 16)
    result = score_safely(reward, batch)
    model, tokenizer = reward.loaded.get()
    tokens = tokenizer(list(batch.prompts), padding=True, return_tensors="pt")
    padded = F.pad(batch.media, (0, 0, 3, 3))  # of the right width already: never resized
    output = model(**tokens, pixel_values=clip_pixels(padded, 16))
    expected = F.cosine_similarity(output.image_embeds, output.text_embeds)
    torch.testing.assert_close(result.scores, expected)


def head_state() -> dict[str, Tensor]:
    return by_formula({name: list(t.shape) for name, t in LinearHead(12).state_dict().items()})


def test_aesthetic_is_one_linear_map_of_the_embedding_of_length_1(
    folder: str, tmp_path: Path
) -> None:
    head = head_state()
    weights = save_tensors(tmp_path / "head.safetensors", head)
    result = score_safely(Aesthetic(weights, folder), images())
    pixels = clip_pixels(images().media, 16)
    tokens = clip_words()(["a"] * 3, return_tensors="pt")
    values = CLIPModel.from_pretrained(folder)(**tokens, pixel_values=pixels).image_embeds
    for layer in (0, 2, 4, 6, 7):
        values = values @ head[f"layers.{layer}.weight"].T + head[f"layers.{layer}.bias"]
    torch.testing.assert_close(result.scores, values[:, 0].detach(), rtol=1e-3, atol=1e-2)
    assert result.scores.std() > 1e-3


@pytest.mark.parametrize("fault", ["lacks", "too many"])
def test_a_head_or_network_that_did_not_load_is_refused(
    folder: str, tmp_path: Path, fault: str
) -> None:
    def damaged(state: dict[str, Tensor], name: str) -> str:
        changed = dict(state) | {"rm_head.weight": torch.zeros(1)}
        if fault == "lacks":
            changed = {k: v for k, v in state.items() if k != name}
        return save_tensors(tmp_path / f"{name}.safetensors", changed)

    rewards: list[Reward] = [
        HPSv2(damaged(by_formula(open_clip_shapes()), "visual.proj"), folder),
        Aesthetic(damaged(head_state(), "layers.4.bias"), folder),
    ]
    for reward in rewards:
        with pytest.raises(UserError, match=fault):
            score_safely(reward, images())


@pytest.mark.parametrize("make", [lambda f: PickScore(f, f), ClipScore])
def test_a_video_is_scored_by_its_frames_and_long_prompts_are_cut(
    folder: str, make: Callable[[str], Reward]
) -> None:
    frames = images(4).media
    video = RewardBatch(["a " * 50], ["0"], frames.movedim(1, 0)[None], "video")
    reward = make(folder)
    single = score_safely(reward, RewardBatch(["a " * 50] * 4, list("0123"), frames, "image"))
    torch.testing.assert_close(score_safely(reward, video).scores[0], single.scores.mean())
