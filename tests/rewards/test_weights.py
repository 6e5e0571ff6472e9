"""A network is loaded whole or refused: what is missing never stays random."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, ViTConfig, ViTModel

from workflow_rl.errors import UserError
from workflow_rl.rewards.base import RewardBatch, RewardScores, score_safely
from workflow_rl.rewards.composite import CompositeReward
from workflow_rl.rewards.registry import RewardTerm
from workflow_rl.rewards.weights import (
    Lazy,
    import_extra,
    load_pretrained,
    load_strict,
    pick_dtype,
    read_tensors,
    weight_file,
)

TINY = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}


class NeedsWeights:
    """A reward that loads slowly, or not at all."""

    name = "needs_weights"
    media_kind = "any"

    def __init__(self, load: Callable[[], object]) -> None:
        self.weights = Lazy(load)
        self.scored = 0

    def load(self) -> None:
        self.weights.get()

    def __call__(self, batch: RewardBatch) -> RewardScores:
        self.scored += 1
        return RewardScores(torch.zeros(len(batch)))


def refuse() -> None:
    raise UserError("the head is missing")


def batch() -> RewardBatch:
    return RewardBatch(["p"], ["0"], torch.zeros(1, 3, 2, 2), "image")


@pytest.mark.parametrize("timeout_s", [None, 5.0])
def test_a_reward_that_cannot_load_ends_the_run_rather_than_failing_samples(
    timeout_s: float | None,
) -> None:
    reward = NeedsWeights(refuse)
    with pytest.raises(UserError, match="the head is missing"):
        score_safely(reward, batch(), timeout_s)
    with pytest.raises(UserError, match="the head is missing"):
        CompositeReward([RewardTerm(reward)]).load()
    assert reward.scored == 0


def test_loading_is_not_counted_as_time_to_score() -> None:
    reward = NeedsWeights(lambda: threading.Event().wait(0.3))
    assert score_safely(reward, batch(), timeout_s=0.2).failures == {}


def test_threads_that_ask_at_once_load_once() -> None:
    loaded: list[int] = []
    barrier = threading.Barrier(4)

    def load() -> int:
        threading.Event().wait(0.05)
        loaded.append(1)
        return 7

    lazy = Lazy(load)

    def ask() -> None:
        barrier.wait()
        assert lazy.get() == 7

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert loaded == [1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CLIPVisionModel(CLIPVisionConfig(**TINY)).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a saved model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_a_whole_checkpoint_loads(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"embeddings.position_ids": torch.arange(5)}))
    model = load_pretrained(CLIPVisionModel, str(folder))
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_a_file_that_is_written_again_does_not_change_a_loaded_network(folder: Path) -> None:
    model = load_pretrained(CLIPVisionModel, str(folder))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-2048, os.SEEK_END)
        file.write(bytes(2048))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(next(n for n in t if n.endswith("fc1.weight"))), "lacks.*fc1.weight"),
        (lambda t: t.update({"rm_head.weight": torch.zeros(1)}), "too many.*rm_head"),
        (lambda t: t[next(iter(t))].fill_(torch.nan), "holds NaN or infinity"),
        (lambda t: t.update({k: v[:-1].clone() for k, v in t.items()}), "cannot load"),
    ],
)
def test_a_checkpoint_with_a_fault_is_refused(
    folder: Path, change: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    rewrite(folder, change)
    with pytest.raises(UserError, match=words):
        load_pretrained(CLIPVisionModel, str(folder))


def test_a_tensor_that_the_reward_does_not_read_may_be_missing(tmp_path: Path) -> None:
    ViTModel(ViTConfig(**TINY), add_pooling_layer=False).save_pretrained(tmp_path)
    load_pretrained(ViTModel, str(tmp_path), unused=[r"^pooler\."])
    with pytest.raises(UserError, match="pooler"):
        load_pretrained(ViTModel, str(tmp_path))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"weight": torch.ones(1, 2)}, "lacks.*bias"),
        ({"weight": torch.ones(1, 2), "bias": torch.ones(1), "x": torch.ones(1)}, "too many.*x"),
        ({"weight": torch.ones(2, 2), "bias": torch.ones(1)}, r"shape \(2, 2\)"),
        ({"weight": torch.ones(1, 2), "bias": torch.tensor([torch.inf])}, "holds NaN or infinity"),
    ],
)
def test_a_head_is_loaded_strictly(state: dict[str, Tensor], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_strict(nn.Linear(2, 1), state, "head.safetensors")


def test_weight_files_are_safetensors_and_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pickles are not read.*docs/rewards\.md"):
        weight_file("HPS_v2.1_compressed.pt")
    with pytest.raises(UserError, match="no weight file"):
        weight_file(str(tmp_path / "head.safetensors"))
    with pytest.raises(UserError, match=r"cannot load owner/repo/head\.safetensors"):
        weight_file("owner/repo/head.safetensors")
    (tmp_path / "head.safetensors").write_bytes(b"not one")
    with pytest.raises(UserError, match="cannot load"):
        read_tensors(weight_file(str(tmp_path / "head.safetensors")))


def test_a_missing_folder_package_or_dtype_is_told() -> None:
    with pytest.raises(UserError, match="cannot load no/such/folder"):
        load_pretrained(CLIPVisionModel, "no/such/folder")
    with pytest.raises(UserError, match=r"reward ocr needs no_such.*'workflow-rl\[ocr\]'"):
        import_extra("no_such_package", "ocr", "reward ocr")
    with pytest.raises(UserError, match="float32"):
        pick_dtype("fp8", torch.device("cpu"))
