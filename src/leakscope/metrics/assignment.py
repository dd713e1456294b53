"""Which reconstruction belongs to which original: an attack returns a batch in any order.

``order[i]`` is the number of the reconstruction that is compared with original i, so
``reconstructions[order]`` lines up with ``originals``; it is the permutation to apply, not its inverse.
"""

from typing import Literal, get_args

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.metrics.image import ssim

Cost = Literal["mse", "psnr", "ssim", "cosine"]
Method = Literal["hungarian", "greedy", "best", "none"]
#: A mean squared error, in parts of the squared range of the originals, below which a reconstruction is a copy: 60 dB.
COPY = 1e-6


def assign(originals: Tensor, reconstructions: Tensor, cost: Cost = "mse", method: Method = "hungarian") -> Tensor:
    """Return for each original the number of its reconstruction, or -1 where there are not enough of them.

    ``hungarian`` minimises the total cost one-to-one, by mean squared error after as many copies as possible have their
    originals: else a wild guess elsewhere could take a copy away. ``greedy`` takes the cheapest pair that is left,
    ``best`` gives each original its cheapest reconstruction, which may serve several, ``none`` keeps the order.
    A reconstruction that is not finite costs more than any that is.

    >>> originals = torch.tensor([[0.0], [0.5], [1.0]])
    >>> assign(originals, torch.tensor([[0.4], [0.9], [0.1]])).tolist()
    [2, 0, 1]
    >>> assign(originals, torch.tensor([[0.9]])).tolist()
    [-1, -1, 0]
    """
    if method not in get_args(Method):
        raise UserError(f"method: expected one of {', '.join(get_args(Method))}, got {method!r}")
    if originals.shape[1:] != reconstructions.shape[1:] or originals.dim() < 2:
        got = f"{tuple(originals.shape)} and {tuple(reconstructions.shape)}"
        raise UserError(f"expected originals (N, *shape) and reconstructions (M, *shape), got {got}")
    number = len(originals)
    order = np.full(number, -1, dtype=np.int64)
    if method == "none":
        order[: len(reconstructions)] = np.arange(min(number, len(reconstructions)))
    elif number and len(reconstructions):
        table = cost_matrix(originals, reconstructions, cost)
        if cost == "mse" and method == "hungarian":
            table = _copies_first(table, float(originals.max() - originals.min()) ** 2)
        solvers = {"best": lambda costs: costs.argmin(axis=1), "greedy": _greedy, "hungarian": hungarian}
        order = solvers[method](table.cpu().numpy())
    return torch.from_numpy(order).to(originals.device)


def cost_matrix(originals: Tensor, reconstructions: Tensor, cost: Cost = "mse") -> Tensor:
    """Cost (N, M) of every pair; smaller is more alike: MSE, -PSNR, 1 - SSIM, or 1 - |cosine|.

    >>> cost_matrix(torch.zeros(1, 4), torch.tensor([[0.5] * 4, [0.0] * 4])).tolist()
    [[0.25, 0.0]]
    """
    a, b = originals.detach().double(), reconstructions.detach().double()
    if cost in ("mse", "psnr"):
        # The fast matrix form of cdist cancels: near-equal pictures would look a thousand times worse.
        distance = torch.cdist(a.flatten(1), b.flatten(1), compute_mode="donot_use_mm_for_euclid_dist")
        costs = distance.square() / a[0].numel()
        if cost == "psnr":
            costs = 10 * torch.log10(costs.clamp(min=1e-20))
    elif cost == "cosine":
        unit_a, unit_b = (torch.nn.functional.normalize(x.flatten(1), dim=1) for x in (a, b))
        costs = 1 - (unit_a @ unit_b.T).abs()
    elif cost == "ssim":
        if a.dim() < 3:
            raise UserError("cost 'ssim' needs pictures or signals, got rows of a table; use 'mse'")
        costs = 1 - torch.stack([ssim(row.expand_as(b), b) for row in a])
    else:
        raise UserError(f"cost: expected one of {', '.join(get_args(Cost))}, got {cost!r}")
    finite = torch.isfinite(costs)
    largest = costs[finite].abs().max() if bool(finite.any()) else costs.new_tensor(1.0)
    return torch.where(finite, costs, 2 * (largest + 1) * (len(a) + len(b)))


def _copies_first(costs: Tensor, squared_range: float) -> Tensor:
    # No sum of other errors may outweigh one copy.
    bonus = 2 * float(costs.max()) * len(costs) + 1
    return costs - bonus * (costs < COPY * squared_range)


def hungarian(costs: np.ndarray) -> np.ndarray:
    """The one-to-one assignment of least total cost: for each row its column, or -1 where columns run out.

    >>> hungarian(np.array([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0], [3.0, 2.0, 2.0]])).tolist()
    [1, 0, 2]
    """
    order = np.full(costs.shape[0], -1, dtype=np.int64)
    rows, columns = linear_sum_assignment(costs)
    order[rows] = columns
    return order


def _greedy(costs: np.ndarray) -> np.ndarray:
    order = np.full(len(costs), -1, dtype=np.int64)
    left = costs.copy()
    for _ in range(min(costs.shape)):
        row, column = np.unravel_index(left.argmin(), left.shape)
        order[row] = column
        left[row, :] = left[:, column] = np.inf
    return order
