"""Least squares in which some groups of rows, the channels of a wrong mask, disagree with all others."""

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.non_negative import solve_non_negative

#: Share of their mean square that is added to equations that may not have full rank: far below rounding.
RIDGE = 1e-12
#: What a channel leaves, in medians, where its weight is one half.
DOUBTFUL = 4.0
#: Channels of a smaller share of the largest gradient tell nothing: dead units.
DEAD = 1e-7
#: Weight below which an output channel counts as set aside.
SET_ASIDE = 0.3
#: Equations for each unknown that are kept at first where they are scarce: those of the channels in least doubt.
TRIMMED = 0.9
#: Share of the channels whose masks are surely right: what they leave is the measure for the others.
AGREEING = 0.75
#: What weights may still move where equations are scarce.
SETTLED = 0.1
#: How far ratios that agree may be apart.
SAME_RATIO = 1e-3
#: Rounds of weighted least squares for each input.
ROUNDS = 8


def agreement(left: Tensor) -> Tensor:
    """Weigh channels by what they leave: those of a wrong mask leave far more than the others.

    >>> [round(weight, 2) for weight in agreement(torch.tensor([1.0, 1.0, 40.0])).tolist()]
    [0.94, 0.94, 0.01]
    """
    return 1 / (1 + (left / (DOUBTFUL * left.median().clamp_min(1e-300))) ** 2)


def robust_solve(
    matrix: Tensor, wanted: Tensor, groups: Tensor, doubts: Tensor | None = None
) -> tuple[Tensor, Tensor, float]:
    """Solve by least squares with groups of rows that disagree weighted down; return also weights and residual.

    Groups with the most ``doubts`` are left out of the first solve, as far as half of the equations to spare allow.

    >>> rows = torch.eye(3, dtype=torch.float64).repeat(4, 1)
    >>> wanted = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64).repeat(4, 1)
    >>> wanted[:3] += 1
    >>> solution, weights, _ = robust_solve(rows, wanted, torch.arange(4).repeat_interleave(3))
    >>> [round(x, 6) for x in solution[:, 0].tolist()], (weights < SET_ASIDE).tolist()
    ([1.0, 2.0, 3.0], [True, False, False, False])
    """
    count = int(groups.max()) + 1
    weights = matrix.new_ones(count)
    if doubts is not None:
        order = doubts.argsort(descending=True)
        lost = torch.bincount(groups, minlength=count)[order].cumsum(0)
        weights[order[(lost <= (len(matrix) - matrix.shape[1]) / 2) & (doubts[order] > 0)]] = 0
    for _ in range(ROUNDS):
        solution = _weighted(matrix, wanted, weights[groups])
        new = agreement(_left(matrix, wanted, groups, solution))
        moved = float((new - weights).abs().max())
        weights = new
        if moved < 1e-3:
            break
    kept = (weights >= SET_ASIDE)[groups]
    if int(kept.sum()) < matrix.shape[1]:
        kept = torch.ones_like(kept)
    solution = _weighted(matrix, wanted, kept.to(matrix))
    return solution, weights, _share(matrix, wanted, kept, solution)


def scarce_solve(
    matrix: Tensor, wanted: Tensor, groups: Tensor, doubts: Tensor, start: Tensor | None = None
) -> tuple[Tensor, Tensor, float]:
    """Solve for what is not negative where equations are scarce; arguments and results are those of robust_solve.

    What a wrong group leaves is then spread over all of them: they count alike, and weights fall faster.
    """
    count = int(groups.max()) + 1
    sizes = matrix.new_zeros(count).index_add(0, groups, matrix.square().sum(1)).sqrt()
    alive = (sizes > DEAD * sizes.max()).to(matrix)
    sizes = sizes.clamp_min(1e-300)[groups, None]
    matrix, wanted = matrix / sizes, wanted / sizes
    if start is None:
        weights = alive.clone()
        order = doubts.argsort(descending=True)
        spare = torch.bincount(groups)[order].cumsum(0) <= len(matrix) - TRIMMED * matrix.shape[1]
        weights[order[spare & (doubts[order] > 0)]] = 0
        start = _weighted(matrix, wanted, weights[groups], non_negative=True)
    solution, weights = start, torch.zeros_like(alive)
    for _ in range(ROUNDS):
        left = _left(matrix, wanted, groups, solution)
        before, weights = weights, alive / (1 + (left / left.quantile(AGREEING).clamp_min(1e-300)) ** 2) ** 2
        if float((weights - before).abs().max()) < SETTLED:
            break
        solution = _weighted(matrix, wanted, weights[groups], solution, non_negative=True)
    weights = alive * (left < DOUBTFUL * left.quantile(AGREEING))
    kept = weights >= SET_ASIDE
    solution = _weighted(matrix, wanted, kept[groups].to(matrix), solution, non_negative=True)
    return solution, weights, _share(matrix, wanted, kept[groups], solution)


def _left(matrix: Tensor, wanted: Tensor, groups: Tensor, solution: Tensor) -> Tensor:
    """Return what each group of rows leaves."""
    left = (matrix @ solution - wanted).square().sum(1)
    return matrix.new_zeros(int(groups.max()) + 1).index_add(0, groups, left).sqrt()


def _share(matrix: Tensor, wanted: Tensor, kept: Tensor, solution: Tensor) -> float:
    return float((matrix @ solution - wanted)[kept].norm() / wanted[kept].norm().clamp_min(1e-300))


def _weighted(
    matrix: Tensor, wanted: Tensor, weights: Tensor, start: Tensor | None = None, *, non_negative: bool = False
) -> Tensor:
    # Conditions are below a thousand where the peel goes on at all, so that normal equations lose nothing that counts.
    weighted = matrix * weights[:, None]
    normal, right = weighted.T @ matrix, weighted.T @ wanted
    # Channels in doubt may be all that sees some places, and derivatives that sum to zero hide constants.
    normal.diagonal().add_(RIDGE * normal.diagonal().mean())
    factor, failed = torch.linalg.cholesky_ex(normal)
    if int(failed):
        raise NotApplicable("the equations do not have full rank")
    plain = torch.cholesky_solve(right, factor)
    return solve_non_negative(normal, right, plain if start is None else start) if non_negative else plain


def agreed_ratio(known: Tensor, wanted: Tensor) -> float:
    """Return wanted / known by all entries that agree on it; NotApplicable where fewer than half do.

    >>> round(agreed_ratio(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([6.0, 4.0, 7.0])), 6)
    2.0
    """
    ratios = wanted / torch.where(known == 0, torch.ones_like(known), known)
    order = ratios.argsort()
    middle = known.abs()[order].cumsum(0)
    ratio = ratios[order][int((middle < middle[-1] / 2).sum())]
    agree = (ratios - ratio).abs() < SAME_RATIO * ratio.abs()
    if float(ratio) <= 0 or float(known[agree].square().sum()) < known.square().sum() / 2:
        raise NotApplicable("the bias gradient in front does not tell the scale")
    return float((known[agree] @ wanted[agree]) / known[agree].square().sum())
