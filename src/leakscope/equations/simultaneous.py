"""Simultaneous diagonalisation: vectors x_i from symmetric matrices M_s = sum_i c_si x_i x_i'; float64.

Slices of a symmetric tensor of order three, pairs of slices of one of order four, and second moments with different
weights are all of this form. Jennrich's method (Harshman 1970; Leurgans, Ross, Abel 1993): the eigenvectors of M(u)
M(v)^-1 for two random combinations are the x_i. The best of several draws by the residual that the adversary sees, then
alternating least squares on all matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Pairs of random combinations tried, and passes of least squares on the best.
DRAWS, POLISH_PASSES = 30, 100


def diagonalising_vectors(matrices: Tensor, generator: torch.Generator) -> tuple[Tensor, float]:
    """Unit rows x_i (n, n), up to sign and order, and the relative residual of all ``matrices`` (s, n, n).

    >>> draws = torch.Generator().manual_seed(0)
    >>> x = torch.nn.functional.normalize(torch.randn((3, 3), generator=draws).double(), dim=1)
    >>> slices = torch.einsum("i,ia,ib,ic->cab", torch.tensor([1.0, -2.0, 3.0]).double(), x, x, x)
    >>> vectors, residual = diagonalising_vectors(slices, draws)
    >>> residual < 1e-10, bool(((vectors @ x.T).abs().amax(0) > 1 - 1e-12).all())
    (True, True)
    """
    matrices = (matrices + matrices.transpose(1, 2)) / 2
    count = matrices.shape[1]
    if count == 1:
        return torch.ones((1, 1), dtype=matrices.dtype), 0.0
    best, least = torch.linalg.eigh(matrices.square().sum(0))[1].T, torch.inf
    for _ in range(DRAWS):
        mixed = torch.randn((2, len(matrices)), generator=generator, dtype=matrices.dtype)
        first, second = torch.einsum("ps,sab->pab", mixed, matrices)
        try:
            columns = torch.linalg.eig(torch.linalg.solve(second, first, left=False))[1]
        except RuntimeError:  # LAPACK gives up on a pair that is singular
            continue
        vectors = torch.nn.functional.normalize(columns.real.T, dim=1)
        residual = _residual(matrices, vectors)
        if bool(torch.isfinite(vectors).all()) and residual < least:
            best, least = vectors, residual
    polished = _polished(matrices, best)
    reached = _residual(matrices, polished)
    return (polished, reached) if reached <= least else (best, least)


def _loadings(matrices: Tensor, vectors: Tensor) -> Tensor:
    """The coefficients c (s, n) that explain the matrices best."""
    products = (vectors[:, :, None] * vectors[:, None, :]).flatten(1)
    solution: Tensor = torch.linalg.lstsq(products.T, matrices.flatten(1).T, driver="gelsd").solution.T
    return solution


def _residual(matrices: Tensor, vectors: Tensor) -> float:
    if not bool(torch.isfinite(vectors).all()):
        return torch.inf
    fitted = torch.einsum("si,ia,ib->sab", _loadings(matrices, vectors), vectors, vectors)
    return float((matrices - fitted).norm() / matrices.norm().clamp_min(1e-300))


def _polished(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Alternating least squares for the left factor with the right one held, both made equal again in between."""
    best, least = vectors, _residual(matrices, vectors)
    unfolded = matrices.transpose(0, 1).flatten(1)
    for _ in range(POLISH_PASSES):
        loadings = _loadings(matrices, vectors)
        rows = (loadings.T[:, :, None] * vectors[:, None, :]).flatten(1)
        left = torch.linalg.lstsq(rows.T, unfolded.T, driver="gelsd").solution
        left = torch.nn.functional.normalize(left, dim=1)
        left = left * torch.sign((left * vectors).sum(1, keepdim=True))
        vectors = torch.nn.functional.normalize(left + vectors, dim=1)
        residual = _residual(matrices, vectors)
        if not residual < least * (1 - 1e-12):
            break
        best, least = vectors, residual
    return best
