"""Derivatives by plain autograd, which costs less a step than ``torch.func`` but works outside its transforms only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def in_transform() -> bool:
    """Whether a transform of ``torch.func`` is at work; plain autograd may not be called inside one.

    >>> in_transform(), torch.func.vmap(lambda x: x + float(in_transform()))(torch.zeros(2)).tolist()
    (False, [1.0, 1.0])
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def recording(tensors: Iterable[Tensor | None]) -> bool:
    """Whether somebody will differentiate through what is computed of these."""
    return torch.is_grad_enabled() and any(value is not None and value.requires_grad for value in tensors)


def gradients(value: Tensor, wanted: Sequence[Tensor], again: bool = False) -> tuple[Tensor, ...]:
    """The derivatives of one number; zeros where it does not depend on a tensor, as ``torch.func.grad`` has it.

    ``again``: they will be differentiated themselves.

    >>> x, y = torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> [found.tolist() for found in gradients((x * x).sum(), [x, y])]
    [[2.0, 2.0], [0.0]]
    """
    if not value.requires_grad:
        return tuple(torch.zeros_like(tensor) for tensor in wanted)
    return torch.autograd.grad(value, wanted, create_graph=again, materialize_grads=True)


def pull_back(value: Tensor, of: Tensor, weights: Tensor, again: bool = False) -> Tensor:
    """The derivative of <weights, value> (two rows) by ``of``; the graph stays for more of them.

    ``again``: it will be differentiated itself.

    >>> x = torch.ones(2, requires_grad=True)
    >>> pull_back(x * x, x, torch.tensor([1.0, 3.0])).tolist()
    [2.0, 6.0]
    """
    if not value.requires_grad:
        return torch.zeros_like(of)
    with torch.enable_grad():
        # The product, for autograd loads a library of symbols before it reads weights that it is given.
        product = value @ weights
    (found,) = torch.autograd.grad(product, of, retain_graph=True, create_graph=again, materialize_grads=True)
    return found
