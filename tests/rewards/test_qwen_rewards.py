"""HPSv3 and VideoAlign: published layouts load whole into the real classes, and are read right."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AddedToken, Qwen2VLModel

from tests.rewards.tiny_networks import images, save_tensors
from tests.rewards.tiny_qwen import (
    HIDDEN,
    published,
    reward_model,
    save_base,
    shrink_pictures,
    tokenizer,
)
from workflow_rl.errors import UserError
from workflow_rl.rewards import hpsv3, videoalign
from workflow_rl.rewards.base import RewardBatch, score_safely
from workflow_rl.rewards.hpsv3 import HPSv3, PreferenceHead, image_frames
from workflow_rl.rewards.pixels import to_pil
from workflow_rl.rewards.qwen_vl import CHAT, merge_lora, to_patches
from workflow_rl.rewards.videoalign import FrameRules, VideoAlign, video_frames

IMAGE_TEMPLATE = "Rate {text_prompt}: <|Reward|> END"
VIDEO_TEMPLATE = "Rate <|VQ_reward|> and <|MQ_reward|> of {text_prompt} <|TA_reward|>"


@pytest.fixture(autouse=True)
def _small_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    shrink_pictures(monkeypatch)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_base(tmp_path_factory.mktemp("base"))


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


# --- HPSv3


@pytest.fixture(scope="module")
def hps() -> tuple[Qwen2VLModel, PreferenceHead]:
    model = reward_model(hpsv3.TOKENS)
    return model, PreferenceHead(HIDDEN).eval()


def save_hps(folder: Path, hps: tuple[Qwen2VLModel, PreferenceHead], drop: str = "") -> HPSv3:
    """The reward with weights in the published layout, less the tensors called ``drop``."""
    model, head = hps
    state = published(model) | {f"rm_head.{k}": v for k, v in head.state_dict().items()}
    state = {name: tensor for name, tensor in state.items() if name != drop}
    template = folder / "template.txt"
    template.write_text(IMAGE_TEMPLATE)
    weights = save_tensors(folder / "HPSv3.safetensors", state)
    return HPSv3(weights, str(folder / "base"), str(template))


@pytest.fixture
def folder(tmp_path: Path, base: str) -> Path:
    (tmp_path / "base").symlink_to(base)
    return tmp_path


def test_hpsv3_is_the_mean_of_the_head_at_its_token(
    folder: Path, hps: tuple[Qwen2VLModel, PreferenceHead]
) -> None:
    reward = save_hps(folder, hps)
    batch = images()
    result = score_safely(reward, batch)
    assert result.failures == {}
    model, head = hps
    for row, (image, prompt) in enumerate(zip(to_pil(batch.media), batch.prompts, strict=True)):
        text = IMAGE_TEMPLATE.replace("{text_prompt}", prompt)
        hidden = hidden_states(model, hpsv3.TOKENS, "image", image_frames(image), text)
        expected = head(hidden)[0].tolist()
        assert result.scores[row].item() == pytest.approx(expected[0], abs=1e-5)
        assert result.components["uncertainty"][row].item() == pytest.approx(expected[1], abs=1e-5)
    assert result.scores.std() > 1e-4


def test_every_published_tensor_is_loaded(
    folder: Path, hps: tuple[Qwen2VLModel, PreferenceHead]
) -> None:
    reward = save_hps(folder, hps)
    reader, head, _ = reward.loaded.get()
    for found, expected in ((reader.model, hps[0]), (head, hps[1])):
        for name, tensor in expected.state_dict().items():
            torch.testing.assert_close(found.state_dict()[name], tensor, msg=name)


def test_hpsv3_may_use_one_prompt_for_all(
    folder: Path, hps: tuple[Qwen2VLModel, PreferenceHead]
) -> None:
    reward = save_hps(folder, hps)
    reward.prompt = "x"
    batch = images()
    same = RewardBatch(["x"] * len(batch), batch.sample_ids, batch.media, "image")
    scores = score_safely(reward, batch).scores
    reward.prompt = None
    torch.testing.assert_close(scores, score_safely(reward, same).scores)


@pytest.mark.parametrize(
    ("drop", "words"),
    [
        ("rm_head.3.weight", "lacks.*3.weight"),
        ("model.layers.0.mlp.up_proj.weight", "lacks.*layers.0.mlp.up_proj"),
        ("visual.patch_embed.proj.weight", "lacks.*visual.patch_embed"),
        ("model.embed_tokens.weight", "no token embeddings"),
    ],
)
def test_a_network_that_did_not_load_whole_is_refused(
    folder: Path, hps: tuple[Qwen2VLModel, PreferenceHead], drop: str, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        score_safely(save_hps(folder, hps, drop), images())


def test_another_base_is_refused(folder: Path, hps: tuple[Qwen2VLModel, PreferenceHead]) -> None:
    other = Path(save_base(folder / "other"))
    (folder / "base").unlink()
    words = tokenizer()
    words.add_tokens(["<|extra|>"])
    words.save_pretrained(other)
    other.rename(folder / "base")
    with pytest.raises(UserError, match=r"264 token embeddings, but the tokenizer of.* has 265"):
        save_hps(folder, hps).load()


def test_a_prompt_with_a_reserved_token_fails_alone(
    folder: Path, hps: tuple[Qwen2VLModel, PreferenceHead]
) -> None:
    reward = save_hps(folder, hps)
    media = images(3).media
    prompts = ["a", "b <|Reward|>", "c <|image_pad|>"]
    result = score_safely(reward, RewardBatch(prompts, list("012"), media, "image"))
    assert result.scores.isnan().tolist() == [False, True, True]


# --- VideoAlign


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


@pytest.mark.parametrize("layout", ["full", "adapter"])
@pytest.mark.parametrize("rows", [1, 3])
def test_videoalign_is_three_normalised_scores_and_their_sum(
    folder: Path, layout: str, rows: int
) -> None:
    head = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(6))
    model = reward_model(videoalign.TOKENS)
    write_config(folder)
    reward, expected_model = save_videoalign(folder, model, head, layout)
    batch = clips()
    result = score_safely(reward, batch)
    assert result.failures == {}
    for row, prompt in enumerate(batch.prompts):
        frames = video_frames(batch.media[row], 8.0, FrameRules(2.0, videoalign.MAX_PIXELS))
        text = VIDEO_TEMPLATE.replace("{text_prompt}", prompt)
        hidden = hidden_states(expected_model, videoalign.TOKENS, "video", frames, text)
        raw = [float(head[i if rows == 3 else 0] @ hidden[i]) for i in range(3)]
        norms = ((3.6757, 2.2476), (1.1646, 1.3811), (2.8105, 2.5121))
        parts = [(value - mean) / std for value, (mean, std) in zip(raw, norms, strict=True)]
        found = [float(result.components[name][row]) for name in ("VQ", "MQ", "TA")]
        assert found == pytest.approx(parts, abs=1e-4)
        assert float(result.scores[row]) == pytest.approx(sum(parts), abs=1e-4)


def test_parts_can_be_weighted_and_a_checkpoint_may_bring_its_norms(folder: Path) -> None:
    head = torch.randn(3, HIDDEN)
    norms = {f"{name}_{what}": 1.0 for name in ("VQ", "MQ", "TA") for what in ("mean", "std")}
    write_config(folder, inference_config=norms | {"MQ_mean": 5.0})
    model = reward_model(videoalign.TOKENS)
    reward, _ = save_videoalign(folder, model, head, "full", weights={"MQ": 2.0})
    result = score_safely(reward, clips())
    torch.testing.assert_close(result.scores, 2 * result.components["MQ"])
    before = result.components["MQ"]
    write_config(folder, inference_config=norms)
    reward = VideoAlign(str(folder), reward.template, reward.base)
    after = score_safely(reward, clips()).components["MQ"]
    torch.testing.assert_close(after - before, torch.full((2,), 4.0), rtol=1e-3, atol=1e-3)


def test_videoalign_without_a_frame_rate_fails(folder: Path) -> None:
    write_config(folder)
    reward, _ = save_videoalign(
        folder, reward_model(videoalign.TOKENS), torch.randn(3, HIDDEN), "full"
    )
    assert score_safely(reward, clips(fps=None)).scores.isnan().all()


def test_videoalign_refuses_what_it_cannot_read(folder: Path) -> None:
    def load(**options: Any) -> None:
        VideoAlign(
            str(folder), str(folder / "template.txt"), str(folder / "base"), **options
        ).load()

    (folder / "template.txt").write_text(VIDEO_TEMPLATE)
    with pytest.raises(UserError, match=r"model_config\.json cannot be read"):
        load()
    write_config(folder, data_config={"prompt_template_type": "simple"})
    with pytest.raises(UserError, match="template 'simple'"):
        load()
    write_config(folder)
    with pytest.raises(UserError, match="no folder checkpoint"):
        load()
    model = reward_model(videoalign.TOKENS)
    save_videoalign(folder, model, torch.randn(2, HIDDEN), "full")
    with pytest.raises(UserError, match="1 or 3 rows"):
        load()
    with pytest.raises(UserError, match="VQ, MQ, TA"):
        load(weights={"Overall": 1.0})
    with pytest.raises(UserError, match="set template to the file"):
        VideoAlign(str(folder)).load()


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


# --- what both share


def test_half_a_lora_is_refused() -> None:
    state = {"q.weight": torch.zeros(2, 2), "q.lora_A.weight": torch.ones(1, 2)}
    with pytest.raises(UserError, match="only one half"):
        merge_lora(state, 1.0)
    with pytest.raises(UserError, match="no weight"):
        merge_lora({"q.lora_A.weight": state["q.lora_A.weight"]}, 1.0)


def test_hpsv3_without_its_package_says_what_to_install() -> None:
    with pytest.raises(UserError, match="pip install --no-deps hpsv3"):
        HPSv3().load()
