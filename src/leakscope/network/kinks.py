"""Find where a model's derivative jumps: Newton's method and all that is linear locally stops at such places."""

import re
from typing import Any

import torch
from torch import nn

from leakscope.contracts.task import outputs_of
from leakscope.network.recorder import twin_of

#: Operations with a kink, by how autograd calls their derivative.
_KINKS = re.compile(
    r"(Relu|LeakyRelu|Prelu|Rrelu|Threshold|Hardtanh|Hardswish|Hardsigmoid|Hardshrink|Softshrink|Clamp|Abs|"
    r"(?:Adaptive)?MaxPool\dD|Maximum|Minimum|Amax|Amin|Max|Min|Sign)(?:Kernel|WithIndices)?Backward"
)


def kinks(model: nn.Module, input_shape: tuple[int, ...]) -> tuple[str, ...]:
    """Name the operations with a kink that a forward pass executes, in order, read off the graph of autograd.

    >>> kinks(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2), nn.Tanh()), (2,))
    ('Relu',)
    """
    probe = twin_of(model).eval()
    like = next(probe.parameters())
    with torch.enable_grad():
        x = torch.full((1, *input_shape), 0.5, device=like.device, dtype=like.dtype, requires_grad=True)
        output = outputs_of(probe(x))
    kinds: set[str] = set()
    visited: set[Any] = set()
    waiting = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        if match := _KINKS.match(node.name()):
            kinds.add(match.group(1))
        waiting += [following for following, _ in node.next_functions]
    return tuple(sorted(kinds))
