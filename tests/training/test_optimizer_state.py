"""Laws of optimiser state in a checkpoint: training goes on as if it had never stopped."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from workflow_rl.errors import UserError, WorkflowRLError
from workflow_rl.training.checkpoint import load_checkpoint, save_checkpoint
from workflow_rl.training.optimizer_state import load_optimizer_tensors, optimizer_tensors


class Net(nn.Module):
    """Two layers, of which `unused` never gets a gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32, width: int = 5) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Linear(width, 4, dtype=dtype)
        self.unused = nn.Linear(2, 2, dtype=dtype)

    @property
    def named(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())

    def adamw(self, amsgrad: bool = False) -> torch.optim.AdamW:
        return torch.optim.AdamW(self.parameters(), lr=0.03, weight_decay=0.1, amsgrad=amsgrad)


def steps(net: Net, optimizer: torch.optim.Optimizer, seeds: range) -> None:
    """Take one optimiser step per seed."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        weight = net.used.weight
        inputs = torch.randn(3, weight.shape[1], generator=generator).to(weight.dtype)
        optimizer.zero_grad()
        net.used(inputs).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_resumed_equals_never_stopped(tmp_path: Path, dtype: torch.dtype, amsgrad: bool) -> None:
    net = Net(dtype)
    optimizer = net.adamw(amsgrad)
    steps(net, optimizer, range(3))
    tensors = {
        **{f"model/{name}": tensor for name, tensor in net.named.items()},
        **optimizer_tensors(optimizer, net.named),
    }
    path = save_checkpoint(tmp_path, 3, tensors, {}, keep=1)
    steps(net, optimizer, range(3, 6))

    loaded = load_checkpoint(path).tensors
    again = Net(dtype)
    again.load_state_dict({name: loaded[f"model/{name}"] for name in again.named})
    other = again.adamw(amsgrad)
    steps(Net(dtype), other, range(1))
    load_optimizer_tensors(other, again.named, loaded)
    steps(again, other, range(3, 6))

    for name, parameter in net.named.items():
        assert torch.equal(parameter, again.named[name]), name
    states = [optimizer_tensors(optimizer, net.named), optimizer_tensors(other, again.named)]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert tensor.dtype == states[1][name].dtype
        assert torch.equal(tensor, states[1][name]), name


def test_names_and_what_was_never_stepped() -> None:
    net = Net()
    optimizer = net.adamw()
    assert optimizer_tensors(optimizer, net.named) == {}
    steps(net, optimizer, range(1))
    assert sorted(optimizer_tensors(optimizer, net.named, prefix="optim/t2i")) == [
        f"optim/t2i/used.{name}/{key}"
        for name in ("bias", "weight")
        for key in ("exp_avg", "exp_avg_sq", "step")
    ]
    load_optimizer_tensors(optimizer, net.named, {"model/used.weight": torch.ones(1)})
    assert optimizer_tensors(optimizer, net.named) == {}


def test_loading_keeps_the_groups_and_the_callers_tensors() -> None:
    net = Net()
    optimizer = net.adamw()
    steps(net, optimizer, range(2))
    saved = {name: t.clone() for name, t in optimizer_tensors(optimizer, net.named).items()}
    optimizer.param_groups[0]["lr"] = 0.5
    before = {name: t.clone() for name, t in saved.items()}
    load_optimizer_tensors(optimizer, net.named, saved)
    steps(net, optimizer, range(2))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert all(torch.equal(saved[name], tensor) for name, tensor in before.items())


def test_what_is_not_a_tensor_or_has_no_name_is_refused() -> None:
    net = Net()
    optimizer = net.adamw()
    steps(net, optimizer, range(1))
    with pytest.raises(WorkflowRLError, match="has no name"):
        optimizer_tensors(optimizer, {"used.weight": net.used.weight})
    optimizer.state[net.used.bias]["note"] = 3
    with pytest.raises(WorkflowRLError, match=r"'note' of used\.bias as int"):
        optimizer_tensors(optimizer, net.named)


def test_state_of_another_model_is_refused() -> None:
    net = Net()
    optimizer = net.adamw()
    steps(net, optimizer, range(1))
    saved = optimizer_tensors(optimizer, net.named)
    wider, lower = Net(width=6), Net(torch.bfloat16)
    with pytest.raises(UserError, match="expected"):
        load_optimizer_tensors(wider.adamw(), wider.named, saved)
    with pytest.raises(UserError, match="bfloat16"):
        load_optimizer_tensors(lower.adamw(), lower.named, saved)
    with pytest.raises(UserError, match=r"used\.bias"):
        load_optimizer_tensors(optimizer, {"used.weight": net.used.weight}, saved)
