"""HPSv3: the published layout loads whole into the real class, and is read right."""

from pathlib import Path

import pytest
import torch
from transformers import Qwen2VLModel

from tests.rewards.qwen_checkpoints import IMAGE_TEMPLATE, hidden_states, save_hps
from tests.rewards.tiny_networks import images
from tests.rewards.tiny_qwen import HIDDEN, reward_model, save_base, tokenizer
from workflow_rl.errors import UserError
from workflow_rl.rewards import hpsv3
from workflow_rl.rewards.base import RewardBatch, score_safely
from workflow_rl.rewards.hpsv3 import HPSv3, PreferenceHead, image_frames
from workflow_rl.rewards.pixels import to_pil

pytestmark = pytest.mark.usefixtures("small_pictures")


@pytest.fixture(scope="module")
def hps() -> tuple[Qwen2VLModel, PreferenceHead]:
    model = reward_model(hpsv3.TOKENS)
    return model, PreferenceHead(HIDDEN).eval()


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


def test_hpsv3_without_its_package_says_what_to_install() -> None:
    with pytest.raises(UserError, match="pip install --no-deps hpsv3"):
        HPSv3().load()
