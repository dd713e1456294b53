"""Least squares for what is not negative, many right-hand sides at once.

Block principal pivoting (Kim and Park, 2011): guess which unknowns are zero, solve for the others, move all that are on
the wrong side, and repeat. Behind a ReLU half of the unknowns are zero, so that systems that are nearly square, whose
plain solution amplifies errors ten thousand times, become well conditioned.
"""

import torch
from torch import Tensor

#: Shares of the largest below which a negative unknown, or a negative gradient of a zero one, is rounding.
WRONG_SIDE = 1e-8
#: Rounds of exchanges, and rounds in which a right-hand side may have no fewer on the wrong side than before until they
#: are exchanged one by one.
EXCHANGES, SETBACKS = 50, 3


def solve_non_negative(normal: Tensor, right: Tensor, start: Tensor) -> Tensor:
    """Minimise x' normal x / 2 - right' x over x >= 0, for each column; ``start`` is positive where x may be.

    >>> normal = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> x = solve_non_negative(normal, torch.tensor([[2.0], [-1.0]]).double(), torch.ones((2, 1)))
    >>> x.flatten().round(decimals=9).tolist()
    [1.0, 0.0]
    """
    positive, solution = start > 0, torch.zeros_like(right)
    fewest = torch.full(right.shape[1:], len(right) + 1)
    patience = torch.full(right.shape[1:], SETBACKS)
    last = (torch.arange(len(right)) + 1)[:, None]
    waiting = torch.arange(right.shape[1])
    for _ in range(EXCHANGES):
        for column in waiting.tolist():
            solution[:, column] = _restricted(normal, right[:, column], positive[:, column])
        own, free = solution[:, waiting], positive[:, waiting]
        slope = normal @ own - right[:, waiting]
        below = free & (own < -WRONG_SIDE * own.abs().amax(0))
        above = ~free & (slope < -WRONG_SIDE * right[:, waiting].abs().amax(0))
        wrong = below | above
        count = wrong.sum(0)
        better = count < fewest[waiting]
        patience[waiting] = torch.where(better, SETBACKS, patience[waiting] - 1)
        fewest[waiting] = torch.minimum(count, fewest[waiting])
        single = wrong & (last == (last * wrong).amax(0))
        positive[:, waiting] = free ^ torch.where(patience[waiting] >= 0, wrong, single)
        waiting = waiting[count > 0]
        if not len(waiting):
            break
    return solution.clamp_min(0)


def _restricted(normal: Tensor, right: Tensor, positive: Tensor) -> Tensor:
    places = positive.nonzero()[:, 0]
    solution = torch.zeros_like(right)
    factor, _ = torch.linalg.cholesky_ex(normal[places][:, places])
    solution[places] = torch.cholesky_solve(right[places, None], factor)[:, 0]
    return solution
