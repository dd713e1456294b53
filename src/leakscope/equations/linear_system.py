"""Large sparse linear systems in float64: rank, singular values, and the solution of least length.

Solving is done with the smaller of the two Gram matrices, by a Cholesky decomposition with a tiny ridge whose trace is
removed by repeated correction (iterated Tikhonov): the result is the least-squares solution of least length, in
O(n^3 / 3) instead of the pseudo-inverse's multiple of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg

from leakscope.contracts.errors import UserError

Array: TypeAlias = np.ndarray
Matrix: TypeAlias = scipy.sparse.csr_array

#: Largest side of a dense Gram matrix: 10 000 squared take 0.8 GB. Above, LSMR iterates and ranks are not computed.
MAX_DENSE = 10_000
#: Ranks of layers are computed where the smaller of rows and unknowns is at most this; 6000 take about ten seconds.
MAX_RANKED = 6000
#: Up to this many unknowns or rows singular values come from an exact decomposition of the matrix itself.
MAX_EXACT = 700
#: Relative to the Gram matrix's largest eigenvalue: less would let rounding errors into undetermined directions.
_RIDGE = 1e-10


@dataclass(frozen=True, kw_only=True)
class Solution:
    """``residual`` is |A x - v| / |v|; zero where the target is zero and met."""

    x: Array = field(repr=False)
    residual: float
    method: str


@dataclass(frozen=True)
class Spectrum:
    """``smallest`` is the smallest singular value that is not zero; ``condition`` the largest divided by it."""

    rank: int
    smallest: float
    largest: float
    tolerance: float
    method: str

    @property
    def condition(self) -> float:
        return self.largest / self.smallest if self.rank else math.inf


@dataclass(frozen=True, eq=False)
class LinearSystem:
    """Hold ``matrix`` x = ``target``, its rows in blocks of constraints of one kind (``blocks``: rows of each).

    Blocks differ in scale by orders of magnitude, as output gradients are small where the loss is. Ranks, singular
    values and the solution are therefore those of :meth:`balanced`, which changes no solution of consistent equations.

    >>> system = LinearSystem(scipy.sparse.csr_array([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]]), np.array([2.0, 2.0]))
    >>> np.round(system.solve().x, 6).tolist(), system.rank, system.deficiency
    ([1.0, 1.0, 0.0], 1, -2)
    """

    matrix: Matrix
    target: Array
    blocks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        rows = self.matrix.shape[0]
        if self.target.shape != (rows,):
            raise UserError(f"target: expected one number for each of {rows} rows, got shape {self.target.shape}")
        if self.blocks and sum(self.blocks) != rows:
            raise UserError(f"blocks: expected sizes that add up to {rows} rows, got {self.blocks}")

    @property
    def rows(self) -> int:
        return int(self.matrix.shape[0])

    @property
    def unknowns(self) -> int:
        return int(self.matrix.shape[1])

    @property
    def unseen(self) -> int:
        return self.unknowns - len(np.unique(self.matrix.indices[self.matrix.data != 0]))

    @property
    def rank(self) -> int:
        return self.spectrum.rank

    @property
    def deficiency(self) -> int:
        """Rank minus unknowns: 0 where the input is determined, minus the number of free directions elsewhere."""
        return self.rank - self.unknowns

    @property
    def condition(self) -> float:
        return self.spectrum.condition

    def spectrum_up_to(self, limit: int) -> Spectrum | None:
        small = min(self.rows, self.unknowns) <= min(limit, MAX_DENSE)
        return self.spectrum if small or self.diagonal is not None else None

    @cached_property
    def diagonal(self) -> Array | None:
        """The diagonal of a square matrix that has no other entries and no zero on it, else None."""
        if self.rows != self.unknowns or self.matrix.nnz != self.rows:
            return None
        values = np.asarray(self.matrix.diagonal())
        return values if np.all(values != 0) else None

    @cached_property
    def balanced(self) -> LinearSystem:
        """The same equations, each block scaled to the row length of the first one that is not zero."""
        starts = np.cumsum((0, *self.blocks[:-1])) if self.blocks else np.zeros(1, dtype=int)
        squares = self.matrix.power(2).sum(axis=1)
        lengths = [math.sqrt(float(part.mean())) if len(part) else 0.0 for part in np.split(squares, starts[1:])]
        reference = next((length for length in lengths if length > 0), 1.0)
        factors = [reference / length if length > 0 else 1.0 for length in lengths]
        scale = np.repeat(factors, self.blocks or (self.rows,))
        if np.all(scale == 1.0):
            return self
        scaled = scipy.sparse.csr_array(scipy.sparse.diags_array(scale) @ self.matrix)
        return LinearSystem(scaled, self.target * scale, self.blocks)

    @cached_property
    def spectrum(self) -> Spectrum:
        """Compute the singular values of the balanced system.

        Up to MAX_EXACT on the shorter side by a singular value decomposition: a value counts as zero below max(rows,
        unknowns) x 2.2e-16 of the largest. Above, from the eigenvalues of the smaller Gram matrix: below sqrt(side x
        2.2e-16), about 1e-6, of the largest. A Gram matrix that is safely positive definite has full rank, and then two
        dozen inverse iterations give the smallest value.
        """
        system = self.balanced
        side, longer = sorted((system.rows, system.unknowns))
        eps = float(np.finfo(float).eps)
        if system.diagonal is not None:
            return _spectrum(np.sort(np.abs(system.diagonal)), longer * eps, "diagonal")
        if side <= MAX_EXACT:
            values = np.linalg.svd(system.matrix.toarray(), compute_uv=False)[::-1]
            return _spectrum(values, longer * eps, "singular values")
        if side > MAX_DENSE:
            raise UserError(f"the rank is computed up to {MAX_DENSE} rows or unknowns, got {side}")
        tolerance = math.sqrt(side * eps)
        gram = system._gram
        largest, vector = math.sqrt(system._largest), _start(len(gram))
        for _ in range(24 if largest else 0):
            vector = scipy.linalg.cho_solve(self._factor, vector, check_finite=False)
            vector /= np.linalg.norm(vector)
        smallest = math.sqrt(max(0.0, float(vector @ (gram @ vector))))
        if smallest > 10 * tolerance * largest:
            return Spectrum(side, smallest, largest, tolerance * largest, "Cholesky")
        eigenvalues = np.linalg.eigvalsh(gram)
        return _spectrum(np.sqrt(np.clip(eigenvalues, 0, None)), tolerance, "Gram eigenvalues")

    def solve(self) -> Solution:
        """Return the least-squares solution of least length; singular values below a millionth count as none."""
        system = self.balanced
        matrix, target = system.matrix, system.target
        if not np.any(target):
            return Solution(x=np.zeros(self.unknowns), residual=0.0, method="zero target")
        if system.diagonal is not None:
            return Solution(x=target / system.diagonal, residual=0.0, method="diagonal")
        if min(matrix.shape) > MAX_DENSE:
            x = scipy.sparse.linalg.lsmr(matrix, target, atol=1e-14, btol=1e-14, maxiter=10_000)[0]
            return Solution(x=x, residual=self._residual(x), method="LSMR")
        if matrix.nnz == 0:
            return Solution(x=np.zeros(self.unknowns), residual=1.0, method="zero matrix")
        x, last = np.zeros(self.unknowns), math.inf
        for _ in range(60):
            left = target - matrix @ x
            # (A'A + a)^-1 A' left, which is A' (AA' + a)^-1 left: whichever matrix is smaller.
            if self.rows < self.unknowns:
                step = matrix.T @ scipy.linalg.cho_solve(self._factor, left)
            else:
                step = scipy.linalg.cho_solve(self._factor, matrix.T @ left)
            size = float(np.linalg.norm(step))
            if not size < last:
                break  # what is left is rounding error
            x, last = x + step, size
        return Solution(x=x, residual=self._residual(x), method="Cholesky")

    @cached_property
    def _gram(self) -> Array:
        matrix = self.matrix
        return np.asarray((matrix @ matrix.T if self.rows < self.unknowns else matrix.T @ matrix).toarray())

    @cached_property
    def _largest(self) -> float:
        """Return the largest eigenvalue of the Gram matrix to a few per cent, by forty power iterations."""
        vector, value = _start(len(self._gram)), 0.0
        for _ in range(40):
            vector = self._gram @ vector
            value = float(np.linalg.norm(vector))
            if value == 0:
                return 0.0
            vector /= value
        return value

    @cached_property
    def _factor(self) -> tuple[Array, bool]:
        gram = self.balanced._gram.copy()
        gram[np.diag_indices_from(gram)] += _RIDGE * self.balanced._largest
        return scipy.linalg.cho_factor(gram, lower=True, overwrite_a=True, check_finite=False)

    def _residual(self, x: Array) -> float:
        system = self.balanced
        return float(np.linalg.norm(system.matrix @ x - system.target) / np.linalg.norm(system.target))


def _spectrum(ascending: Array, relative: float, method: str) -> Spectrum:
    largest = float(ascending[-1]) if len(ascending) else 0.0
    nonzero = ascending[ascending > relative * largest]
    smallest = float(nonzero[0]) if len(nonzero) else 0.0
    return Spectrum(len(nonzero), smallest, largest, relative * largest, method)


def _start(size: int) -> Array:
    vector = np.random.default_rng(0).standard_normal(size)
    return np.asarray(vector / np.linalg.norm(vector))
