"""The rewards of the examples give the answers they promise."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from workflow_rl.rewards.base import RewardBatch, score_safely
from workflow_rl.rewards.registry import build_reward

CALLABLE = "examples.image_reward:room_to_move"


def _score(images_BCHW: torch.Tensor, prompts: list[str]) -> list[float]:
    reward = build_reward({"callable": CALLABLE}).reward
    ids = [str(row) for row in range(len(prompts))]
    return score_safely(reward, RewardBatch(prompts, ids, images_BCHW, "image")).scores.tolist()


def test_room_is_what_lies_before_the_shape() -> None:
    images = torch.zeros(6, 3, 9, 9)
    images[:4, 1, 4, 8] = 1.0  # at the right edge, half way down
    images[4, 1, 0, 4] = 1.0  # at the top edge
    prompts = [f"a dot moving {word}" for word in ("left", "right", "up", "down", "down", "up")]
    scores = _score(images, prompts)
    assert scores[:5] == [1.0, 0.0, 0.5, 0.5, 1.0]
    assert scores[5] != scores[5], "an image without light has failed"
    assert _score(images[:1], ["a dot"]) != [1.0]


def _train_chain(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    """Run the script as from a shell."""
    monkeypatch.setattr(sys, "argv", ["train_chain.py", *map(str, arguments)])
    runpy.run_path("examples/train_chain.py", run_name="__main__")


def test_the_chain_of_the_example_trains_and_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    smallest = ("--iterations", "1", "--images", "2", "--videos", "1")
    _train_chain(monkeypatch, *smallest, "--output", tmp_path / "out")
    text = capsys.readouterr().out
    assert "C2 0 0" in text
    assert "grad norm 0 " not in text
    assert "t2i: version 1" in text
    assert "i2v: version 1" in text
    assert (tmp_path / "out/video.mp4").is_file()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--images", "1"), "--images is 1, expected 2 or more; an image is compared with others"),
        (("--videos", "0"), "--videos is 0, expected 1 or more"),
        (("--iterations", "0"), "--iterations is 0, expected 1 or more"),
        (("--output", "README.md"), "--output README.md is a file; give a folder"),
        (("--t2i", "nowhere"), "model folder nowhere does not exist; give"),
        (("--i2v", "configs"), "configs is not a diffusers folder"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stopped:
        _train_chain(monkeypatch, *arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"error: {says}")
    assert said.err.count("\n") == 1
