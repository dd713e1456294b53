"""What every rule of this room demands of the gradient it is given."""

from __future__ import annotations

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError


def weight_rows(weight_gradient: Tensor) -> Tensor:
    """The head's weight gradient in double precision, one row a class, or a clear error."""
    if weight_gradient.dim() != 2 or weight_gradient.numel() == 0:
        raise UserError(
            "weight_gradient: expected a matrix of shape (classes, features), got shape "
            f"{tuple(weight_gradient.shape)}. Pass the gradient of the layer that produces the logits."
        )
    return _finite(weight_gradient, "weight_gradient")


def bias_entries(bias_gradient: Tensor) -> Tensor:
    """The head's bias gradient in double precision, one entry a class, or a clear error."""
    if bias_gradient.dim() != 1 or bias_gradient.numel() == 0:
        raise UserError(
            f"bias_gradient: expected shape (classes,), got {tuple(bias_gradient.shape)}. "
            "Pass the bias gradient of the layer that produces the logits."
        )
    return _finite(bias_gradient, "bias_gradient")


def positive_count(num_examples: int) -> int:
    if num_examples < 1:
        raise UserError(f"num_examples: expected at least 1, got {num_examples}")
    return int(num_examples)


def _finite(value: Tensor, name: str) -> Tensor:
    if not bool(torch.isfinite(value).all()):
        raise UserError(f"{name}: holds NaN or infinite entries, so no label can be read from it")
    return value.detach().to(torch.float64)
