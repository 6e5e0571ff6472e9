"""Texts encoded up front, text encoders dropped, embeddings on disk: the results stay the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.conftest import PROMPTS
from workflow_rl.config import PromptRecord
from workflow_rl.enums import ExecutionProfile
from workflow_rl.errors import UserError
from workflow_rl.request import DiffusionParams, TaskType, make_request
from workflow_rl.training.methods.workflow_rl import WorkflowRLMethod
from workflow_rl.training.policy import StagePolicy
from workflow_rl.training.rollout import rollout_loop
from workflow_rl.training.texts import RUN_FOLDER, cache_on_disk, encode_and_drop

MakeMethod = Callable[..., WorkflowRLMethod]
RECORDS = [PromptRecord(prompt) for prompt in PROMPTS]
CFG = DiffusionParams(2, guidance_scale=2.0)


@pytest.fixture
def policy(make_method: MakeMethod) -> StagePolicy:
    return make_method(t2i_params=CFG).policies[0]


def _image(policy: StagePolicy, prompt: str, params: DiffusionParams = CFG) -> torch.Tensor:
    request = make_request(TaskType.T2I, prompt, params=params)
    return rollout_loop(policy.student, "denoise", request, profile=ExecutionProfile.SERVE)[0]


def _count_encodings(policy: StagePolicy, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    texts: list[str] = []
    encode = policy.student.adapter.encode_text

    def counted(text: str, length: int) -> Any:
        texts.append(text)
        return encode(text, length)

    monkeypatch.setattr(policy.student.adapter, "encode_text", counted)
    return texts


def test_a_stage_without_text_encoders_makes_the_same(policy: StagePolicy) -> None:
    """With guidance too, whose negative prompt is a text of its own."""
    before = [_image(policy, prompt) for prompt in PROMPTS]
    encode_and_drop(policy, RECORDS)
    after = [_image(policy, prompt) for prompt in PROMPTS]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_text_encoders_take_no_memory_afterwards(policy: StagePolicy) -> None:
    encode_and_drop(policy, RECORDS)
    for name in policy.student.adapter.text_encoders:
        assert sum(p.numel() for p in policy.student.adapter.modules[name].parameters()) == 0
        with pytest.raises(UserError, match="were dropped to free memory"):
            policy.student.component(name)
    assert any(p.numel() for p in policy.student.component("vae").parameters())


def test_another_text_is_one_line(policy: StagePolicy) -> None:
    encode_and_drop(policy, RECORDS[:1])
    with pytest.raises(UserError, match=r"'a blue square moving up' was not encoded before") as e:
        _image(policy, PROMPTS[1])
    assert "memory.drop_text_encoders: false" in str(e.value)


def test_a_stage_encodes_its_own_text_once(
    policy: StagePolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = _count_encodings(policy, monkeypatch)
    own = PromptRecord("a fox", {"t2i": "a fox in snow", "i2v": "it runs"})
    encode_and_drop(policy, [own, *RECORDS, *RECORDS])
    assert sorted(texts) == sorted(["a fox in snow", *PROMPTS, ""])


def test_a_bounded_cache_loses_nothing_that_was_dropped(policy: StagePolicy) -> None:
    policy.student.caches.max_bytes = 1
    encode_and_drop(policy, RECORDS)
    for prompt in PROMPTS:
        _image(policy, prompt)


@pytest.mark.parametrize("where", [True, "shared"])
def test_a_second_run_reads_from_disk_what_the_first_encoded(
    make_method: MakeMethod,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: bool | str,
) -> None:
    """Both runs drop their encoders, and hold no more in memory than one text."""
    folder = where if isinstance(where, bool) else tmp_path / where
    images, encoded = [], []
    for _ in range(2):
        policy = make_method(t2i_params=CFG).policies[0]
        texts = _count_encodings(policy, monkeypatch)
        cache_on_disk(policy.student, folder, tmp_path / "run")
        policy.student.caches.max_bytes = 1
        encode_and_drop(policy, RECORDS)
        images.append(torch.cat([_image(policy, prompt) for prompt in PROMPTS]))
        encoded.append(len(texts))
        assert len(policy.student.caches) == 1
    assert encoded == [3, 0]
    assert torch.equal(*images)
    place = tmp_path / "run" / RUN_FOLDER if where is True else tmp_path / "shared"
    assert len(list(place.glob("*.safetensors"))) == 3
    plain = make_method(t2i_params=CFG).policies[0]
    assert torch.equal(images[0], torch.cat([_image(plain, prompt) for prompt in PROMPTS]))


def test_without_a_cache_nothing_is_written(policy: StagePolicy, tmp_path: Path) -> None:
    cache_on_disk(policy.student, False, tmp_path)
    encode_and_drop(policy, RECORDS)
    assert list(tmp_path.iterdir()) == []


def test_another_text_length_is_another_text(policy: StagePolicy) -> None:
    encode_and_drop(policy, RECORDS)
    with pytest.raises(UserError, match="was not encoded"):
        _image(policy, PROMPTS[0], replace(CFG, max_sequence_length=5))
