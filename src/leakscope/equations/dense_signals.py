"""From nearly right inputs of a dense layer to the exact ones: each example's signals follow from its own Jacobian.

The weight gradient of a dense layer is G = D'X. What comes back to the layer for example i is D_i = J_i'd_i: J_i holds
the derivatives of the K outputs by the layer's outputs at x_i, and d_i is the derivative of the loss by the outputs. So
with V a basis of the rows of G, A = G V' and X = R V, column q_i of R^-1 solves A q_i = J_i'd_i, one equation a unit in
n + K unknowns. In a ReLU network J_i depends on which units are active only, and that is right for nearly every unit
already where x_i is not: an inactive unit says A_j q_i = 0, as in SPEAR (Dimitrov et al., 2024), and every active one
counts too. Units that are guessed wrongly are outliers, so that absolute values are minimised, by reweighted least
squares, and inputs and Jacobians are found in turn.

The residual is a certificate that needs no truth: far more units than unknowns obey their equations or do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.equations.unmixing import row_space

#: From inputs (n, d) the derivatives (n, units, K) of each example's outputs by the layer's outputs.
Jacobian = Callable[[Tensor], Tensor]
ROUNDS, PASSES = 12, 30
#: Units whose gradient is below this share of the largest are dead: rounding is all that they tell.
DEAD = 1e-6
#: An equation is obeyed where it is off by less than this share of the largest signal, and than so many times the noise.
OBEYED, NOISES = 1e-4, 6.0
#: The share of obeyed equations from which a solution is taken to be near, and that of a solution.
NEAR, SETTLED = 0.8, 0.995
#: Solutions with a larger cosine are one and the same.
SAME = 0.9999
#: So many equations beyond the unknowns must be obeyed: as many as unknowns always are.
SPARE = 8


@dataclass(frozen=True, eq=False)
class Separated:
    """``inputs`` (n, d) and ``signals`` (n, units) of each example with its ``output_gradients`` (n, K).

    ``obeyed`` (n,): the share of units whose equation holds. ``residual``: what D'X leaves of the gradient, relative,
    with D_i = J_i'd_i of the inputs found: the certificate. ``rounds``: how often inputs and Jacobians were found.
    """

    inputs: Tensor
    signals: Tensor
    output_gradients: Tensor
    obeyed: Tensor
    residual: float
    rounds: int


def separate(
    gradient: Tensor,
    bias_gradient: Tensor | None,
    inputs: Tensor,
    jacobian: Jacobian,
    *,
    peak: float = 1.0,
    rounds: int = ROUNDS,
) -> Separated:
    """The inputs of a dense layer from its ``gradient`` (units, d) and ``inputs`` (n, d) that are nearly right.

    Without a bias gradient a row has no scale of its own: it gets a positive sum and ``peak`` as its largest value.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight, head = (torch.randn(s, generator=draws).double() for s in ((40, 6), (2, 40)))
    >>> x, back = torch.rand((3, 6), generator=draws).double(), torch.randn((3, 2), generator=draws).double()
    >>> jacobian = lambda rows: (rows @ weight.T > 0).double()[:, :, None] * head.T
    >>> signals = torch.einsum("nmk,nk->nm", jacobian(x), back)
    >>> near = x + 0.03 * torch.randn((3, 6), generator=draws)
    >>> found = separate(signals.T @ x, signals.sum(0), near, jacobian)
    >>> bool((found.inputs - x).norm() < 1e-9), found.residual < 1e-9
    (True, True)
    """
    observed = gradient.detach().double().cpu()
    sums = None if bias_gradient is None else bias_gradient.detach().double().cpu()
    problem = _Problem.of(observed, sums, len(inputs), peak)
    mixing = problem.columns(inputs.double().cpu() @ problem.basis.T)
    obeyed = torch.zeros(len(inputs), dtype=torch.float64)
    number = 0
    for number in range(1, rounds + 1):
        rows = problem.rows(mixing)
        found, share = problem.solve(jacobian(rows @ problem.basis), mixing)
        better = (share >= torch.where(obeyed < NEAR, obeyed, NEAR)) & _first_of_its_kind(found, mixing)
        mixing = torch.where(better[:, None], found, mixing)
        obeyed = torch.where(better, share, obeyed)
        if bool((share >= SETTLED).all()):
            break
    return problem.result(mixing, obeyed, jacobian, number)


@dataclass(frozen=True, eq=False)
class _Problem:
    """The equations of all examples; solutions q_i are held as rows in the coordinates ``to_white`` @ q_i."""

    observed: Tensor
    sums: Tensor | None
    basis: Tensor
    white: Tensor  # (units, n): A = white @ to_white, with orthonormal columns
    to_white: Tensor
    live: Tensor
    noise: float
    peak: float

    @staticmethod
    def of(observed: Tensor, sums: Tensor | None, count: int, peak: float) -> _Problem:
        basis, _, residual = row_space(observed, count)
        white, sizes, turn = torch.linalg.svd(observed @ basis.T, full_matrices=False)
        lengths = observed.norm(dim=1)
        units, width = observed.shape
        # What is left outside of the rows is noise, the same in every entry; inside there is as much an entry.
        outside = residual * float(observed.norm()) / max(1.0, ((units - count) * (width - count)) ** 0.5)
        live = lengths > max(DEAD * float(lengths.max()), 3 * outside * width**0.5)
        return _Problem(observed, sums, basis, white, sizes[:, None] * turn, live, outside, peak)

    def columns(self, rows: Tensor) -> Tensor:
        """Solutions of rows R, as rows in white coordinates."""
        return (self.to_white @ torch.linalg.pinv(rows)).T

    def rows(self, mixing: Tensor) -> Tensor:
        """R of solutions whose lengths are arbitrary, with the scale that the bias gives, or the peak."""
        if self.sums is not None:
            scale = torch.linalg.lstsq(self.white @ mixing.T, self.sums[:, None]).solution[:, 0]
            return torch.linalg.pinv(torch.linalg.solve(self.to_white, (mixing * scale[:, None]).T))
        rows = torch.linalg.pinv(torch.linalg.solve(self.to_white, mixing.T))
        values = rows @ self.basis
        values = values * torch.where(values.sum(1, keepdim=True) < 0, -1.0, 1.0)
        return self.peak * (values / values.amax(1, keepdim=True).clamp_min(1e-300)) @ self.basis.T

    def solve(self, jacobian: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor]:
        """Each example's solution beside the others' present ones, and the share of its equations that it obeys."""
        count = len(mixing)
        lengths = self.white[self.live].norm(dim=1, keepdim=True)
        white = (self.white[self.live] / lengths).expand(count, -1, -1)
        own, _ = _orthonormal(jacobian[:, self.live].double() / lengths)
        usable = torch.ones(own.shape[:2], dtype=torch.float64)
        if count + own.shape[2] + SPARE > own.shape[1]:
            # More outputs than equations to spare: inactive units alone, which say that a signal is zero.
            usable = (jacobian[:, self.live] == 0).all(2).double()
            own = own[:, :, :0]
        equations = torch.cat([white, -own], dim=2)
        # One row of R: it is 1 at its own solution and 0 at all others, so no two examples end at the same.
        fixed = torch.linalg.solve(mixing, torch.eye(count, dtype=torch.float64)).T
        fixed = torch.cat([fixed, fixed.new_zeros(count, own.shape[2])], dim=1)
        solution, gaps = _least_absolute(equations, usable, fixed)
        return self._judged(equations, usable, solution, gaps, fixed, lengths)

    def _judged(
        self, equations: Tensor, usable: Tensor, solution: Tensor, gaps: Tensor, fixed: Tensor, lengths: Tensor
    ) -> tuple[Tensor, Tensor]:
        count = len(solution)
        allowed = self._allowed(equations, solution, lengths)
        within = (gaps <= allowed) & (usable > 0)
        enough = within.sum(1) >= equations.shape[2] + SPARE
        final = _solved(equations, within.double(), fixed)
        gaps = torch.einsum("nup,np->nu", equations, final).abs()
        still = ((gaps <= self._allowed(equations, final, lengths)) & (usable > 0)).sum(1) >= within.sum(1)
        solution = torch.where((enough & still)[:, None], final, solution)
        share = within.double().sum(1) / usable.sum(1).clamp_min(1)
        return solution[:, :count], torch.where(enough, share, 0.0)

    def _allowed(self, equations: Tensor, solution: Tensor, lengths: Tensor) -> Tensor:
        count = len(solution)
        signals = torch.einsum("nup,np->nu", equations[:, :, :count], solution[:, :count]).abs()
        sizes = torch.linalg.solve(self.to_white, solution[:, :count].T).norm(dim=0)
        return OBEYED * signals.amax(1, keepdim=True) + NOISES * self.noise * sizes[:, None] / lengths.T

    def result(self, mixing: Tensor, obeyed: Tensor, jacobian: Jacobian, rounds: int) -> Separated:
        rows = self.rows(mixing)
        inputs = rows @ self.basis
        signals = torch.linalg.pinv(rows).T @ (self.observed @ self.basis.T).T
        own = jacobian(inputs).double()
        back = torch.linalg.lstsq(own, signals[:, :, None], driver="gelsd").solution
        explained = (own @ back)[:, :, 0]
        gap = self.observed - explained.T @ inputs
        residual = float(gap.norm() / self.observed.norm().clamp_min(1e-300))
        return Separated(inputs, explained, back[:, :, 0], obeyed, residual, rounds)


def _first_of_its_kind(found: Tensor, before: Tensor) -> Tensor:
    """Whether no other example ended at the same solution from nearer by."""
    found, before = (torch.nn.functional.normalize(rows, dim=1) for rows in (found, before))
    movement = 1 - (found * before).sum(1).abs()
    same = (found @ found.T).abs() > SAME
    return ~(same & (movement[None] < movement[:, None])).any(1)


def _least_absolute(equations: Tensor, usable: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """The solution of least absolute gaps with <fixed, solution> = 1, for each example, and its gaps."""
    weights = usable
    solution = fixed
    gaps = usable
    for number in range(PASSES):
        solution = _solved(equations, weights, fixed)
        gaps = torch.einsum("nup,np->nu", equations, solution).abs()
        floor = gaps.amax(1, keepdim=True) * max(1e-9, 0.1 * 0.5**number)
        weights = usable / (gaps + floor.clamp_min(1e-300))
    return solution, gaps


def _solved(equations: Tensor, weights: Tensor, fixed: Tensor) -> Tensor:
    """Weighted least squares of equations (n, units, p) that should be zero, with <fixed, solution> = 1."""
    normal = (equations * weights[:, :, None]).transpose(1, 2) @ equations
    ridge = 1e-14 * normal.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-300)
    normal = normal + ridge[:, None, None] * torch.eye(normal.shape[1], dtype=normal.dtype)
    solution = torch.linalg.solve(normal, fixed[:, :, None])[:, :, 0]
    return solution / (solution * fixed).sum(1, keepdim=True)


def _orthonormal(jacobian: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis (n, units, K) of each example's signals, zero where there are fewer, and their sizes."""
    left, sizes, _ = torch.linalg.svd(jacobian, full_matrices=False)
    kept = sizes > 1e-6 * sizes[:, :1]
    return left * kept[:, None, :], sizes
