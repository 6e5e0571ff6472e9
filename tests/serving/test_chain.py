"""Publishing a run's weights into a chain that serves."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from tests.tiny_models import save_flux, save_wan
from workflow_rl.config import StageConfig
from workflow_rl.errors import UserError
from workflow_rl.serving.chain import ServedChain, load_chain, publish_run
from workflow_rl.training.checkpoint import save_checkpoint
from workflow_rl.training.weight_sync import WeightRole


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StageConfig]:
    folder = tmp_path_factory.mktemp("served")
    save_flux(folder / "flux", guidance_embeds=False, dynamic_shift=False)
    save_wan(folder / "wan", image_encoder=False)
    return {
        "t2i": StageConfig(task="t2i", model=folder / "flux", dtype="bfloat16"),
        "i2v": StageConfig(task="i2v", model=folder / "wan", dtype="bfloat16"),
    }


@pytest.fixture
def chain(stages: dict[str, StageConfig]) -> ServedChain:
    return load_chain("chain", stages)


def _parameters(chain: ServedChain, stage: str) -> dict[str, torch.nn.Parameter]:
    return dict(chain.instances[stage].component("transformer").named_parameters())


def _checkpoint(run: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
    save_checkpoint(run / "checkpoints", 7, tensors, {}, keep=1)
    return run


def test_each_weight_takes_the_dtype_of_its_place(chain: ServedChain, tmp_path: Path) -> None:
    """Wan keeps its modulation tables in float32 in a bfloat16 model; the frozen t2i stays."""
    slots = _parameters(chain, "i2v")
    assert {slot.dtype for slot in slots.values()} == {torch.float32, torch.bfloat16}
    frozen = {name: slot.detach().clone() for name, slot in _parameters(chain, "t2i").items()}
    trained = {name: torch.randn(slot.shape) for name, slot in slots.items()}
    tensors = {f"i2v/weights/transformer.{name}": tensor for name, tensor in trained.items()}
    run = _checkpoint(tmp_path, tensors)
    assert publish_run(chain, run, WeightRole.STUDENT, pytest.fail) == 7
    for name, slot in slots.items():
        assert torch.equal(slot, trained[name].to(slot.dtype))
    assert chain.instances["i2v"].version_of("transformer") == 7
    assert chain.instances["t2i"].version_of("transformer") == 0
    assert all(torch.equal(frozen[n], slot) for n, slot in _parameters(chain, "t2i").items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("i2v/weights/transformer.absent", "absent, which wan lacks"),
        ("other/weights/transformer.absent", "holds no weights of the stages"),
    ],
)
def test_weights_of_another_chain_are_refused(
    chain: ServedChain, tmp_path: Path, name: str, message: str
) -> None:
    run = _checkpoint(tmp_path, {name: torch.zeros(1)})
    with pytest.raises(UserError, match=message):
        publish_run(chain, run, WeightRole.STUDENT, pytest.fail)
