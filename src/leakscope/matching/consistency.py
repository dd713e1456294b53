"""See through Gradients: Image Batch Recovery via GradInversion. Yin et al. CVPR 2021: group consistency.

Several searches from different starts agree where the update tells something and differ where it does not. While they
run, each is pulled towards the mean of all: weight * mean over pixels of (x_g - E_g[x_g])^2.

Differences. Yin et al. take the length instead of the mean square, and register pictures before the mean is taken, so
that shifted ones add up; here the examples of a batch are put in one order, for equal labels leave it open, and nothing
is shifted. The mean is held while each is pulled, and best iterates are judged without the pull: by the update alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from leakscope.matching.assignment import assignment
from leakscope.matching.search import Evaluate, Evaluation

if TYPE_CHECKING:
    from leakscope.matching.problem import Problem


@dataclass(frozen=True, eq=False)
class GroupConsistency:
    """The evaluation of a problem in which the rows, its restarts, are pulled towards their mean."""

    problem: Problem
    evaluate: Evaluate
    weight: float

    def __call__(self, rows: Tensor, iteration: int) -> Evaluation:
        objectives, judged, gradients = self.evaluate(rows, iteration)
        with torch.enable_grad():
            points = rows.detach().requires_grad_()
            pictures = torch.stack([self.problem.unpack(row)[0] for row in points])
            mean = group_mean(pictures.detach(), self.problem.targets)
            penalty = self.weight * (pictures - mean).square().flatten(1).mean(1)
            (pull,) = torch.autograd.grad(penalty.sum(), points)
        return objectives + penalty.detach(), judged, gradients + pull


def group_mean(pictures: Tensor, targets: Tensor | None) -> Tensor:
    """The mean of (restarts, examples, ...) in the order of each restart; restarts that are not finite do not count.

    Only examples of equal targets may change places, all where targets are None or no classes.

    >>> one = torch.tensor([[0.0], [1.0]])
    >>> group_mean(torch.stack([one, one.flip(0) + 0.2]), torch.tensor([3, 3])).flatten(1).tolist()
    [[0.10000000149011612, 1.100000023841858], [1.100000023841858, 0.10000000149011612]]
    """
    finite = torch.isfinite(pictures).flatten(1).all(1)
    if not bool(finite.any()):
        return pictures
    reference = pictures[finite][0].flatten(1)
    total, orders = torch.zeros_like(pictures[0]), []
    for picture, counts in zip(pictures, finite.tolist(), strict=True):
        costs = torch.cdist(reference, picture.flatten(1)).square().nan_to_num()
        if targets is not None and targets.dim() == 1 and not targets.is_floating_point():
            costs = costs + (targets[:, None] != targets[None]) * (1 + costs.max()) * len(targets)
        order = assignment(costs)
        orders.append(order)
        if counts:
            total += picture[order]
    mean = total / finite.sum()
    return torch.stack([mean[torch.argsort(order)] for order in orders])
