"""The state of an optimiser as named tensors, so that a checkpoint can hold it without pickle."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workflow_rl.errors import UserError, WorkflowRLError


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], *, prefix: str = "optim"
) -> dict[str, Tensor]:
    """Return the state of an optimiser as ``<prefix>/<parameter name>/<state name>`` → tensor.

    A parameter that was never stepped has no state and no entry. The groups' settings (learning
    rate and so on) come from the configuration and the schedule and are not part of it.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any whose state is tensors only, such as AdamW.
    parameters : mapping of str to Tensor
        Name → parameter, for at least all that the optimiser has stepped.

    Raises
    ------
    WorkflowRLError
        A parameter has no name, or some state is not a tensor.
    """
    names = {parameter: name for name, parameter in parameters.items()}
    tensors: dict[str, Tensor] = {}
    for parameter, state in optimizer.state.items():
        if parameter not in names:
            raise WorkflowRLError(
                f"{type(optimizer).__name__} steps a parameter of shape {tuple(parameter.shape)} "
                "that has no name; pass every parameter it was given"
            )
        for key, value in state.items():
            if not isinstance(value, Tensor):
                raise WorkflowRLError(
                    f"{type(optimizer).__name__} keeps {key!r} of {names[parameter]} as "
                    f"{type(value).__name__}, but only tensors are checkpointed; use AdamW"
                )
            tensors[f"{prefix}/{names[parameter]}/{key}"] = value.detach()
    return tensors


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    *,
    prefix: str = "optim",
) -> None:
    """Set an optimiser's whole state to what `optimizer_tensors` returned.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Over the same parameters, of any progress; what it held is forgotten. Its state must be
        scalars and tensors of the parameter's shape and dtype, as AdamW's is.
    parameters : mapping of str to Tensor
        Name → parameter, as given to `optimizer_tensors`.
    tensors : mapping of str to Tensor
        May hold more than the entries under `prefix`; those are left alone.

    Raises
    ------
    UserError
        An entry belongs to no parameter of the optimiser, or has another shape or dtype.
    """
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    index_of = {parameter: index for index, parameter in enumerate(order)}
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if not name.startswith(f"{prefix}/"):
            continue
        parameter_name, key = name[len(prefix) + 1 :].rsplit("/", 1)
        parameter = parameters.get(parameter_name)
        if parameter is None or parameter not in index_of:
            raise UserError(
                f"the checkpoint has optimiser state for {parameter_name!r}, which does not "
                "train here; resume with the configuration that the run was started with"
            )
        if tensor.dim() > 0 and (tensor.shape, tensor.dtype) != (parameter.shape, parameter.dtype):
            raise UserError(
                f"the checkpoint's {name} is {tuple(tensor.shape)} {tensor.dtype}, expected "
                f"{tuple(parameter.shape)} {parameter.dtype}; resume with the configuration that "
                "the run was started with"
            )
        # A copy: the optimiser works in place and must not change the caller's tensors.
        state.setdefault(index_of[parameter], {})[key] = tensor.clone()
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
