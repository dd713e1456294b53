"""How near recovered features are to the true ones, without their order, sign and scale.

The feature error of Liu et al., "Data Reconstruction Attacks and Defenses: A Systematic Evaluation": what a span leaves
of each true feature, relative to it. Zero: the features lie in the span; sqrt(1 - n/d): a random span does as well.
"""

import math

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakscope.contracts.errors import UserError


def feature_errors(truth: Tensor, recovered: Tensor) -> Tensor:
    """|z_i - Q Q' z_i| / |z_i| for each row of ``truth`` (n, d), Q an orthonormal basis of the rows ``recovered``.

    >>> truth = torch.tensor([[3.0, 4.0, 0.0], [0.0, 0.0, 2.0]])
    >>> feature_errors(truth, torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1.0]])).round(decimals=6).tolist()
    [0.8, 0.0]
    """
    if truth.dim() != 2 or recovered.dim() != 2 or truth.shape[1] != recovered.shape[1]:
        got = f"{tuple(truth.shape)} and {tuple(recovered.shape)}"
        raise UserError(f"feature_errors: expected rows of one length, got {got}")
    exact, rows = truth.detach().double().cpu(), recovered.detach().double().cpu()
    _, sizes, basis = torch.linalg.svd(rows, full_matrices=False)
    basis = basis[sizes > 1e-12 * sizes[0]] if len(sizes) and float(sizes[0]) > 0 else basis[:0]
    lengths = exact.norm(dim=1)
    gaps = (exact - exact @ basis.T @ basis).norm(dim=1)
    return torch.where(lengths > 0, gaps / lengths.clamp_min(1e-300), 0.0).clamp(max=1.0)


def feature_error(truth: Tensor, recovered: Tensor) -> float:
    """The mean of :func:`feature_errors`.

    >>> round(feature_error(torch.eye(3)[:2], torch.eye(3)[1:]), 6)
    0.5
    """
    return float(feature_errors(truth, recovered).mean())


def random_span_error(count: int, dimensions: int) -> float:
    """The feature error to be expected of ``count`` random directions: the baseline.

    >>> round(random_span_error(4, 512), 4)
    0.9961
    """
    return math.sqrt(max(0.0, 1 - count / dimensions))


def feature_cosines(truth: Tensor, directions: Tensor) -> Tensor:
    """|cos| of each row of ``truth`` with the row of ``directions`` that the best one-to-one assignment gives it.

    >>> feature_cosines(torch.eye(2), torch.tensor([[0.0, -1.0], [3.0, 4.0]])).round(decimals=6).tolist()
    [0.6, 1.0]
    """
    exact, rows = (torch.nn.functional.normalize(value.detach().double().cpu(), dim=1) for value in (truth, directions))
    cosines = (exact @ rows.T).abs()
    places, chosen = linear_sum_assignment(-cosines.numpy())
    result = torch.zeros(len(exact), dtype=torch.float64)
    result[torch.as_tensor(places)] = cosines[places, chosen]
    return result
