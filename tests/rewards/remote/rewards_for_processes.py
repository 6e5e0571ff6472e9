"""Rewards that a process of its own imports by name, some of which end it."""

import os
import signal
import sys
import time

from torch import Tensor

from workflow_rl.errors import UserError


def moody(media: Tensor, prompts: list[str], sample_ids: list[str]) -> list[object]:
    """Score by the mean of each sample's values, but do what a prompt says that says anything."""
    sys.stdout.write(f"scoring {len(media)}\n")  # as libraries do
    if "raise" in prompts:
        raise RuntimeError("no face found")
    if "die" in prompts:
        os.kill(os.getpid(), signal.SIGSEGV)
    if "hang" in prompts:
        time.sleep(600)
    means = media.flatten(1).double().mean(1).tolist()
    said = {
        "nan": float("nan"),
        "text": "0.5",
        "none": None,
        "environment": float(os.environ.get("REWARD_TEST", "0")),
    }
    return [said.get(prompt, mean) for prompt, mean in zip(prompts, means, strict=True)]


def picky(media: Tensor, prompts: list[str], sample_ids: list[str]) -> list[float]:
    """Score as ``moody`` does, but raise where the first sample of the red circle is."""
    if any("red circle" in sample and "/0.0 " in sample for sample in sample_ids):
        raise RuntimeError("no face found")
    return media.flatten(1).mean(1).tolist()


def mean(media: Tensor, prompts: list[str], sample_ids: list[str]) -> list[float]:
    """Score as the server of the tests does."""
    return media.flatten(1).double().mean(1).float().tolist()


def noted(media: Tensor, prompts: list[str], sample_ids: list[str]) -> list[float]:
    """Score the middle of each sample, and note the call in a file where one is named."""
    if "REWARD_NOTES" in os.environ:
        with open(os.environ["REWARD_NOTES"], "a") as notes:
            notes.write("called\n")
    return media.flatten(1).double().median(1).values.float().tolist()


if os.environ.get("REWARD_TEST") == "unready":
    raise UserError("there is no licence for this reward")
