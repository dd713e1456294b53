"""Draw the units of a dense layer at random, so that Stein moments of its gradient hold.

The layer's rows become [trained; random N(0, 1)], and the head's weights behind the random units constants. Liu et al.
(the systematic evaluation) take k / v for class k of v random units: an example whose label lies near the mean class is
then heard least, as output gradients of cross-entropy sum to zero. ``"signs"`` takes one size for all, with the sign of
a class times that of a unit. Half of the classes have either sign, so that every example is heard. Units come in pairs
of equal rows and opposite signs, so that the logits are those of the trained units alone: the softmax stays open, and
the constants may be as large as the server likes, which is why noise of a fixed size hides nothing.
"""

import copy
import math
from typing import Literal

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable, UserError
from leakscope.network.dense_path import dense_path
from leakscope.network.layers import find_head, structure

HeadConstants = Literal["signs", "published"]


def with_gaussian_neurons(
    model: nn.Module,
    input_shape: tuple[int, ...],
    *,
    layer: str | None = None,
    trained: int = 0,
    head: HeadConstants = "signs",
    size: float | None = None,
    seed: int = 0,
) -> nn.Module:
    """Return a copy of ``model`` with random units in the dense layer in front of its head; ``trained`` units stay.

    ``size``: of the constants; by default 1 / sqrt(v) for "signs" and 1 / v for "published", v units being random.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    >>> sent = with_gaussian_neurons(net, (4,), trained=2, head="published")
    >>> sent[3].weight[:, 2:].mul(4).round(decimals=4).tolist()
    [[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0], [3.0, 3.0, 3.0, 3.0]]
    >>> bool((sent[1].weight[:2] == net[1].weight[:2]).all()), sent[1].bias[2:].tolist()
    (True, [0.0, 0.0, 0.0, 0.0])
    """
    name, head_name = dense_and_head(model, input_shape, layer)
    sent = copy.deepcopy(model)
    dense, last = sent.get_submodule(name), sent.get_submodule(head_name)
    assert isinstance(dense, nn.Linear)
    assert isinstance(last, nn.Linear)
    count = dense.out_features - trained
    if trained < 0 or count < 1:
        raise UserError(f"trained: expected 0..{dense.out_features - 1} of the units of {name!r}, got {trained}")
    draws = torch.Generator().manual_seed(seed)
    rows = torch.randn((count, dense.in_features), generator=draws)
    if head == "signs":
        rows[1::2] = rows[: 2 * (count // 2) : 2]
    constants = head_constants(last.out_features, count, head, draws, size)
    with torch.no_grad():
        dense.weight[trained:] = rows.to(dense.weight)
        last.weight[:, trained:] = constants.to(last.weight)
        if dense.bias is not None:
            dense.bias[trained:] = 0
    return sent


def head_constants(
    classes: int, units: int, head: HeadConstants, generator: torch.Generator, size: float | None = None
) -> Tensor:
    """The head's weights (classes, units) behind random units.

    >>> signs = head_constants(4, 6, "signs", torch.Generator().manual_seed(0), 1.0)
    >>> signs.abs().unique().tolist(), signs.sum(0).tolist(), int(torch.linalg.matrix_rank(signs))
    ([1.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0], 1)
    """
    if head == "published":
        steps = torch.arange(1, classes + 1, dtype=torch.float64) * (1 / units if size is None else size)
        return steps[:, None].expand(classes, units).clone()
    classwise = 1.0 - 2.0 * (torch.randperm(classes, generator=generator) % 2).double()
    unitwise = 1.0 - 2.0 * (torch.arange(units) % 2).double()
    return torch.outer(classwise, unitwise) * (1 / math.sqrt(units) if size is None else size)


def dense_and_head(model: nn.Module, input_shape: tuple[int, ...], layer: str | None = None) -> tuple[str, str]:
    """The names of the dense layer in front of the head and of the head; NotApplicable where there is none."""
    try:
        head = find_head(model, input_shape, structure(model, input_shape).outputs)
    except ValueError as error:
        raise NotApplicable(str(error)) from error
    path = dense_path(model, head.module_name)
    if not path.steps:
        raise NotApplicable(f"no dense layer with an activation lies in front of the head: {path.reason}")
    name = path.steps[0].name
    if layer not in (None, name):
        raise NotApplicable(f"layer: expected {name!r}, the dense layer in front of the head, got {layer!r}")
    return name, head.module_name
