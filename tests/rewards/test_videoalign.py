"""VideoAlign: three normalised scores, read as published, and what cannot be read is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rewards.qwen_checkpoints import (
    VIDEO_TEMPLATE,
    clips,
    hidden_states,
    save_videoalign,
    write_config,
)
from tests.rewards.tiny_qwen import HIDDEN, reward_model
from workflow_rl.errors import UserError
from workflow_rl.rewards import videoalign
from workflow_rl.rewards.base import score_safely
from workflow_rl.rewards.videoalign import FrameRules, VideoAlign, video_frames

pytestmark = pytest.mark.usefixtures("small_pictures")


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
