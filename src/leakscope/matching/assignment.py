"""Linear assignment as one operation of torch, so that a step with it can be batched and compiled."""

from __future__ import annotations

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor


@torch.library.custom_op("leakscope::assignment", mutates_args=())
def assignment(costs: Tensor) -> Tensor:
    """For each row of ``costs`` (n, m) its column in the one-to-one assignment of least total cost; -1 without one.

    Costs that are not finite count as larger than any other. Nothing is differentiated.

    >>> assignment(torch.tensor([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0], [3.0, 2.0, 2.0]])).tolist()
    [1, 0, 2]
    """
    table = costs.detach().double().cpu()
    finite = torch.isfinite(table)
    most = float(table[finite].abs().max()) if bool(finite.any()) else 1.0
    rows, columns = linear_sum_assignment(torch.where(finite, table, 2 * (most + 1) * sum(table.shape)).numpy())
    order = torch.full((len(table),), -1, dtype=torch.int64)
    order[torch.from_numpy(rows)] = torch.from_numpy(columns)
    return order.to(costs.device)


@assignment.register_fake
def _(costs: Tensor) -> Tensor:
    return costs.new_empty(costs.shape[0], dtype=torch.int64)


@assignment.register_vmap
def _(info: object, dimensions: tuple[int | None, ...], costs: Tensor) -> tuple[Tensor, int]:
    (dimension,) = dimensions
    return torch.stack([assignment(table) for table in costs.movedim(dimension or 0, 0)]), 0
