"""Rank and singular values of a matrix with one row an unknown and one column an observed entry."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Up to so many unknowns its singular values are computed directly; above, from its Gram matrix.
MAX_SINGULAR_VALUES = 1500


@dataclass(frozen=True)
class JacobianRank:
    """Hold what the singular values of the Jacobian say; all None, and a reason, where it was not computed.

    Values below ``tolerance`` are lost to rounding: about 1e-12 of the largest for ``method`` "singular values", and
    about 1e-6 for "Gram matrix", which squares them. ``condition`` is infinite where the rank is not full.
    """

    unknowns: int
    rank: int | None = None
    smallest: float | None = None
    largest: float | None = None
    condition: float | None = None
    tolerance: float | None = None
    reason: str | None = None
    method: str | None = None

    @property
    def full(self) -> bool | None:
        return None if self.rank is None else self.rank == self.unknowns


@dataclass(frozen=True, eq=False)
class Decomposition:
    values: Tensor
    vectors: Tensor | None
    tolerance: float
    method: str

    @property
    def rank(self) -> int:
        return int((self.values > self.tolerance).sum())

    @property
    def condition(self) -> float:
        return float(self.values[0] / self.values[-1]) if self.rank == len(self.values) else math.inf

    def summary(self) -> JacobianRank:
        return JacobianRank(
            unknowns=len(self.values),
            rank=self.rank,
            smallest=float(self.values[-1]),
            largest=float(self.values[0]),
            condition=self.condition,
            tolerance=self.tolerance,
            method=self.method,
        )


def decompose(matrix: Tensor, *, removed: Tensor | None = None, vectors: bool = False) -> Decomposition:
    """Return the singular values of a matrix with one row an unknown and one column an observed entry.

    ``removed`` asks for those of J with JJ' = matrix matrix' - removed removed', as a projection of the columns has.
    """
    unknowns, entries = matrix.shape
    exact = torch.finfo(matrix.dtype).eps
    matrix = matrix.double()
    if removed is None and unknowns <= MAX_SINGULAR_VALUES:
        # The triangle of a QR decomposition has the same singular values and is much smaller.
        small = torch.linalg.qr(matrix.T, mode="r").R.T if entries > unknowns else matrix
        if vectors:
            basis, values, _ = torch.linalg.svd(small, full_matrices=entries < unknowns)
        else:
            basis, values = None, torch.linalg.svdvals(small)
        # With fewer entries than unknowns the remaining singular values are zero.
        values = torch.cat([values, values.new_zeros(unknowns - len(values))])
        return Decomposition(values, basis, max(unknowns, entries) * exact * float(values[0]), "singular values")
    gram = matrix @ matrix.T
    if removed is not None:
        gram.addr_(removed.double(), removed.double(), alpha=-1)
    if vectors:
        squares, basis = torch.linalg.eigh(gram)
        basis = basis.flip(1)
    else:
        squares, basis = torch.linalg.eigvalsh(gram), None
    values = squares.flip(0).clamp(min=0).sqrt()
    return Decomposition(values, basis, math.sqrt(unknowns * exact) * float(values[0]), "Gram matrix")


def rank_of(matrix: Tensor) -> JacobianRank:
    """Rank and singular values of a matrix with one row an unknown and one column an observed entry.

    >>> summary = rank_of(torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]]))
    >>> summary.rank, summary.smallest, summary.largest, summary.condition, summary.full
    (2, 0.5, 3.0, 6.0, True)
    """
    return decompose(matrix).summary()
