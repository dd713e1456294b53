"""Solve for the exact inputs of a dense layer from nearly right ones: signals follow from each example's Jacobian.

The weight gradient of a dense layer is G = D'X. What comes back to the layer for example i is D_i = J_i'd_i: J_i holds
the derivatives of the K outputs by the layer's outputs at x_i, and d_i is the derivative of the loss by the outputs. So
with V a basis of the rows of G, A = G V' and X = R V, column q_i of R^-1 solves A q_i = J_i'd_i, one equation a unit in
n + K unknowns. In a ReLU network J_i depends on which units are active only, and is right for nearly every unit where
x_i is not: an inactive unit says A_j q_i = 0, as in SPEAR (Dimitrov et al., 2024), and every active one counts too.
Units that are guessed wrongly are outliers, so that absolute values are minimised, by reweighted least squares, and
inputs and Jacobians are found in turn. The residual is a certificate: far more units than unknowns obey or do not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.equations.head_system import EXACT, REFUSED
from leakscope.equations.unmixing import AT_REST, MOST_STEPS, ROUNDING, row_space

#: From inputs (n, d) the derivatives (n, units, K) of each example's outputs by the layer's outputs.
Jacobian = Callable[[Tensor], Tensor]
#: So many rounds without a smaller residual are the end of it.
PATIENCE = 5
#: An equation is obeyed where it is off by less than this share of the largest signal and so many times the noise.
#: Solutions whose cosine is as near to one are the same.
OBEYED, NOISES = 1e-4, 6.0
#: Shares of obeyed equations: that of a solution that is near, and that of a solution.
NEAR, SETTLED = 0.8, 0.995
#: Mean shares of obeyed equations that differ by less are alike.
TIE = 0.02
#: Differences of float32 weights are rounded more coarsely; what is above this is noise and no rounding.
MOST_ROUNDING = 100 * EXACT
#: So many equations beyond the unknowns must be obeyed: as many as unknowns always are.
SPARE = 8


@dataclass(frozen=True, eq=False)
class Separated:
    """Hold ``inputs`` (n, d) and ``signals`` (n, units) of each example with its ``output_gradients`` (n, K).

    ``obeyed`` (n,): the share of units whose equation holds, 0 where not more of them do than there are unknowns.
    ``residual``: what D'X leaves of the gradient, and D'1 of the bias gradient, relative, with D_i = J_i'd_i.
    ``outside``: what any n inputs leave of the gradient. ``spare``: equations of an example beyond its unknowns.
    """

    inputs: Tensor
    signals: Tensor
    output_gradients: Tensor
    obeyed: Tensor
    residual: float
    outside: float
    spare: int
    rounds: int

    def better_than(self, other: Separated) -> bool:
        """Prefer more obeyed equations, which count for several local steps too, then less left of the gradient."""
        more = float(self.obeyed.mean() - other.obeyed.mean())
        return more > TIE or (more >= -TIE and self.residual < other.residual)

    @property
    def rounding(self) -> float:
        return max(EXACT, 5 * self.outside if self.outside < MOST_ROUNDING else 0.0)

    @property
    def certified(self) -> bool:
        return self.residual < self.rounding and float(self.obeyed.min()) >= (NEAR if self.spare >= SPARE else SETTLED)


def positive_peak(rows: Tensor) -> Tensor:
    """Scale rows to a positive sum and a largest value of one, all that is known of rows that are never negative.

    >>> positive_peak(torch.tensor([[-2.0, -4.0]])).tolist()
    [[0.5, 1.0]]
    """
    upright = rows * torch.where(rows.sum(1, keepdim=True) < 0, -1.0, 1.0)
    return upright / upright.amax(1, keepdim=True).clamp_min(1e-300)


def separate(
    gradient: Tensor,
    bias_gradient: Tensor | None,
    inputs: Tensor,
    jacobian: Jacobian,
    *,
    rescale: Callable[[Tensor], Tensor] = positive_peak,
) -> Separated:
    """Solve for a dense layer's inputs near ``inputs`` (n, d); without a bias gradient ``rescale`` scales them.

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
    problem = _Problem(observed, sums, len(inputs), rescale)
    mixing = problem.columns(inputs.double().cpu() @ problem.basis.T)
    best = problem.result(mixing, torch.zeros(len(inputs), dtype=torch.float64), jacobian, 0)
    obeyed = best.obeyed
    hopeless = problem.outside > REFUSED or int(problem.live.sum()) < len(inputs) + SPARE
    for number in range(1, 1 if hopeless else MOST_STEPS + 1):
        found, share = mixing.clone(), obeyed.clone()
        open_ones = torch.nonzero(obeyed < SETTLED).flatten()
        derivatives = jacobian((problem.rows(mixing) @ problem.basis)[open_ones])
        found[open_ones], share[open_ones] = problem.nearest(derivatives, mixing, open_ones)
        # Of solutions that are the same, the one that moved least is kept.
        unit, before = (torch.nn.functional.normalize(rows, dim=1) for rows in (found, mixing))
        movement = 1 - (unit * before).sum(1).abs()
        same = (unit @ unit.T).abs() > 1 - OBEYED
        better = ~(same & (movement[None] < movement[:, None])).any(1) & torch.isfinite(found).all(1)
        lost = not bool((share > 0).any())
        if not lost:  # else Jacobians are off everywhere, as where units behind the layer are guessed wrongly
            better = better & (share > 0) & (share >= obeyed.clamp_max(NEAR))
        mixing = torch.where(better[:, None], found, mixing)
        obeyed = torch.where(better, share, obeyed)
        result = problem.result(mixing, obeyed, jacobian, number)
        if result.better_than(best):
            best = result
        elif lost or number - best.rounds >= PATIENCE:
            break
        if bool((share >= SETTLED).all()):
            break
    return best


class _Problem:
    """The equations of all examples; solutions q_i are held as rows in the coordinates ``to_white`` @ q_i."""

    def __init__(self, observed: Tensor, sums: Tensor | None, count: int, rescale: Callable[[Tensor], Tensor]) -> None:
        self.observed, self.sums, self.rescale = observed, sums, rescale
        self.basis, _, self.outside = row_space(observed, count)
        # (units, n): A = white @ to_white, with orthonormal columns
        self.white, sizes, turn = torch.linalg.svd(observed @ self.basis.T, full_matrices=False)
        self.to_white = sizes[:, None] * turn
        lengths = observed.norm(dim=1)
        units, width = observed.shape
        # What is left outside of the rows is noise, the same in every entry; inside there is as much an entry.
        self.noise = self.outside * float(observed.norm()) / max(1.0, ((units - count) * (width - count)) ** 0.5)
        self.live = lengths > max(ROUNDING * float(lengths.max()), 3 * self.noise * width**0.5)

    def columns(self, rows: Tensor) -> Tensor:
        return (self.to_white @ torch.linalg.pinv(rows)).T

    def rows(self, mixing: Tensor) -> Tensor:
        """R of solutions whose lengths are arbitrary, with the scale that the bias gives, or ``rescale``."""
        if self.sums is not None:
            scale = torch.linalg.lstsq(self.white @ mixing.T, self.sums[:, None], driver="gelsd").solution[:, 0]
            return torch.linalg.pinv(torch.linalg.solve(self.to_white, (mixing * scale[:, None]).T))
        rows = torch.linalg.pinv(torch.linalg.solve(self.to_white, mixing.T))
        return self.rescale(rows @ self.basis) @ self.basis.T

    def nearest(self, jacobian: Tensor, mixing: Tensor, examples: Tensor) -> tuple[Tensor, Tensor]:
        """Solve by all units or by inactive ones, which hold where the layers behind are guessed wrongly."""
        live = jacobian[:, self.live].double()
        spare = live.shape[1] - len(mixing) - live.shape[2] >= SPARE
        found, share = self.solve(live, mixing, examples, inactive=not spare)
        if spare and bool((share < NEAR).any()) and bool((live == 0).any()):
            others, other_share = self.solve(live, mixing, examples, inactive=True)
            larger = other_share > share
            found, share = torch.where(larger[:, None], others, found), torch.where(larger, other_share, share)
        return found, share

    def solve(self, jacobian: Tensor, mixing: Tensor, examples: Tensor, *, inactive: bool) -> tuple[Tensor, Tensor]:
        lengths = self.white[self.live].norm(dim=1, keepdim=True)
        white = (self.white[self.live] / lengths).expand(len(examples), -1, -1)
        own = jacobian[:, :, :0]
        if not inactive:
            left, sizes, _ = torch.linalg.svd(jacobian / lengths, full_matrices=False)
            own = left * (sizes > 1e-6 * sizes[:, :1])[:, None, :]
        silent = (jacobian == 0).all(2).double()
        usable = silent if inactive else torch.ones_like(silent)
        equations = torch.cat([white, -own], dim=2)
        # One row of R: it is 1 at its own solution and 0 at all others, so no two examples end at the same.
        fixed = torch.linalg.pinv(mixing).T[examples]
        fixed = torch.cat([fixed, fixed.new_zeros(len(examples), own.shape[2])], dim=1)
        solution, gaps = _least_absolute(equations, usable, fixed)
        within = (gaps <= self._allowed(equations, solution, lengths)) & (usable > 0)
        enough = within.sum(1) >= equations.shape[2] + SPARE
        final = _solved(equations, within.double(), fixed)
        gaps = torch.einsum("nup,np->nu", equations, final).abs()
        still = ((gaps <= self._allowed(equations, final, lengths)) & (usable > 0)).sum(1) >= within.sum(1)
        solution = torch.where((enough & still)[:, None], final, solution)
        share = within.double().sum(1) / usable.sum(1).clamp_min(1)
        return solution[:, : len(self.basis)], torch.where(enough, share, 0.0)

    def _allowed(self, equations: Tensor, solution: Tensor, lengths: Tensor) -> Tensor:
        count = len(self.basis)
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
        if self.sums is not None:
            # An example of zeros is in the bias gradient alone, and would spoil the scale of all others unseen.
            beside = (self.sums - explained.sum(0)).norm() / explained.norm().clamp_min(1e-300)
            residual = max(residual, float(beside))
        spare = int(self.live.sum()) - len(rows) - own.shape[2]
        return Separated(inputs, explained, back[:, :, 0], obeyed, residual, self.outside, spare, rounds)


def _least_absolute(equations: Tensor, usable: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
    """The solution of least absolute gaps with <fixed, solution> = 1, for each example, and its gaps."""
    weights, solution, gaps = usable, fixed, usable
    for number in range(30):
        before, solution = solution, _solved(equations, weights, fixed)
        if float((solution - before).norm()) < AT_REST * float(solution.norm()):
            break
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
