"""Find the layer that produces the logits, by running the model instead of guessing from parameter order."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass(frozen=True)
class Head:
    """Names of the last linear layer and of its parameters, as in ``model.named_parameters()``."""

    weight_name: str
    bias_name: str | None
    module_name: str


def find_head(model: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> Head:
    """The linear layer that produces the logits: the last layer with parameters that a forward pass executes.

    The pass runs on a copy in evaluation mode; the caller's model keeps its mode, its hooks and its
    statistics.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> find_head(net, (1, 2, 2), 3)
    Head(weight_name='3.weight', bias_name='3.bias', module_name='3')
    """
    twin = copy.deepcopy(model).eval()
    executed: list[nn.Module] = []

    def remember(module: nn.Module, args: Any, output: Any) -> None:
        executed.append(module)

    handles = [
        module.register_forward_hook(remember)
        for module in twin.modules()
        if isinstance(module, nn.Linear) or next(module.parameters(recurse=False), None) is not None
    ]
    try:
        run_dummies(twin, zeros_for(twin, input_shape))
    finally:
        for handle in handles:
            handle.remove()

    return _head_of(twin, executed, num_classes)


def zeros_for(model: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """A zero input for the model; two examples where BatchNorm needs a batch to normalise."""
    needs_batch = any(isinstance(m, _BATCH_NORM) and (m.training or m.running_mean is None) for m in model.modules())
    like = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
    return torch.zeros((2 if needs_batch else 1, *input_shape), device=like.device, dtype=like.dtype)


def run_dummies(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's output without gradients; a shape that does not fit becomes a ValueError that names it."""
    try:
        with torch.no_grad():
            output: Tensor = model(inputs)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(
            f"the model cannot read an input of shape {tuple(inputs.shape[1:])}: {error}. "
            "Pass the shape of one example without the batch."
        ) from error
    return output


def _head_of(model: nn.Module, executed: list[nn.Module], num_classes: int) -> Head:
    if not executed:
        raise ValueError("no head: the forward pass executes no layer with parameters, so no linear layer")
    # A module that holds parameters of its own and children (a class token, say) ends after its children
    # have; the head is the last *leaf*.
    leaves = [m for m in executed if isinstance(m, nn.Linear) or next(m.children(), None) is None]
    last = leaves[-1] if leaves else executed[-1]
    name = next(name for name, module in model.named_modules() if module is last)
    if not isinstance(last, nn.Linear):
        raise ValueError(
            f"no linear head: the last layer executed is {name!r} ({type(last).__name__}). Label recovery "
            "reads the linear layer that produces the logits; give the labels, or end the model in nn.Linear."
        )
    if last.out_features != num_classes:
        raise ValueError(
            f"no head for {num_classes} classes: the last layer executed, {name!r}, has {last.out_features} outputs"
        )
    names = {id(parameter): key for key, parameter in model.named_parameters()}
    weight_name = names.get(id(last.weight))
    if weight_name is None:
        raise ValueError(
            f"the weight of {name!r} is computed from other parameters (a parametrisation), so the update "
            "does not hold its gradient; remove the parametrisation or give the labels"
        )
    bias_name = None if last.bias is None else names.get(id(last.bias))
    return Head(weight_name=weight_name, bias_name=bias_name, module_name=name)
