"""The first dense layer of a model that reads each example as one row, and what lies behind it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakscope.contracts.task import outputs_of
from leakscope.network.recorder import Call, output_replaced, probe, probe_input


@dataclass(frozen=True, eq=False)
class DenseEntry:
    """The layer ``name`` with its ``weight`` and ``bias`` in the update under ``weight_name`` and ``bias_name``.

    ``reads_input``: its inputs are the examples themselves; else ``shape`` is that of the map which was flattened into
    them, (inputs,) where it cannot be told.
    """

    name: str
    weight_name: str
    bias_name: str | None
    weight: Tensor
    bias: Tensor | None
    reads_input: bool
    shape: tuple[int, ...]


def dense_entry(model: nn.Module, input_shape: tuple[int, ...]) -> DenseEntry | str:
    """The first dense layer that reads each example once, in the order of execution; else why there is none.

    >>> entry = dense_entry(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3)), (1, 4, 4))
    >>> entry.name, entry.shape, entry.reads_input
    ('2', (4, 2, 2), False)
    """
    size = math.prod(input_shape)
    like = probe_input(model, input_shape)
    marked = torch.linspace(0.1, 1.0, 2 * size, dtype=like.dtype, device=like.device).reshape(2, *input_shape)
    calls = probe(model, marked, lambda _name, module: not any(True for _ in module.children())).calls
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for place, call in enumerate(calls):
        layer = call.module
        if not isinstance(layer, nn.Linear) or call.inputs.dim() != 2 or len(call.inputs) != 2:
            continue
        if sum(other.module is layer for other in calls) > 1:
            return f"the first dense layer {call.name!r} runs more than once, so its gradient is a sum over its inputs"
        if id(layer.weight) not in names:
            return f"the weight of {call.name!r} is computed from other parameters, so the update lacks its gradient"
        reads_input = torch.equal(call.inputs.flatten(), marked.flatten())
        shape = tuple(input_shape) if reads_input else _map_shape(calls[:place], call.inputs.shape[1])
        return DenseEntry(
            name=call.name,
            weight_name=names[id(layer.weight)],
            bias_name=None if layer.bias is None else names.get(id(layer.bias)),
            weight=layer.weight.detach(),
            bias=None if layer.bias is None else layer.bias.detach(),
            reads_input=reads_input,
            shape=shape,
        )
    return "no dense layer (nn.Linear) reads each example as one row"


def output_jacobian(
    model: nn.Module, entry: DenseEntry, input_shape: tuple[int, ...], project: Callable[[Tensor], Tensor]
) -> Callable[[Tensor], Tensor]:
    """From inputs (n, d) of the layer the derivatives (n, units, K) of each example's outputs by the layer's outputs.

    ``project``: the nearest inputs that the layer can have.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2, bias=False))
    >>> jacobian = output_jacobian(net, dense_entry(net, (2,)), (2,), lambda rows: rows)
    >>> jacobian(torch.zeros(5, 2)).shape
    torch.Size([5, 3, 2])
    """
    twin = copy.deepcopy(model).eval().requires_grad_(False)
    like = entry.weight
    layer = twin.get_submodule(entry.name)

    def jacobian(rows: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = torch.nn.functional.linear(project(rows.to(like)), entry.weight, entry.bias).requires_grad_()
            with output_replaced(layer, inner):
                outputs = outputs_of(twin(like.new_zeros((len(rows), *input_shape)))).flatten(1)
            columns = [
                torch.autograd.grad(outputs[:, number].sum(), inner, retain_graph=True)[0]
                for number in range(outputs.shape[1])
            ]
        return torch.stack(columns, dim=2).double().cpu()

    return jacobian


def _map_shape(before: tuple[Call, ...], size: int) -> tuple[int, ...]:
    """The shape of the last map of ``size`` numbers an example that a layer gave."""
    for call in reversed(before):
        output = call.output
        if isinstance(output, Tensor) and output.dim() > 2 and math.prod(output.shape[1:]) == size:
            return tuple(output.shape[1:])
    return (size,)
