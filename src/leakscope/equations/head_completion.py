"""The head of one example where entries of its gradient were set to zero: what is left of a matrix of rank one.

G = delta f' has one row for each class, and of the entries that are seen each tells the product of one number of delta
and one of f. Under cross-entropy the example's own class has the largest |delta|, so that pruning by magnitude leaves
its row longest. From that row, with delta there read off the bias gradient or off what the features say through the
head's own weights, alternating least squares fill in all numbers with an entry in their row or column. What has none
is small: a number of delta is taken from the softmax of the features, one of f is left open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.head_solution import REFUSED, HeadSolution

#: Alternating least squares of a matrix of rank one converge in a few rounds.
ROUNDS = 20
#: Values of delta at the example's own class that are tried where no bias tells it, from a sure model to a wrong one.
GRID = 400


@dataclass(frozen=True, eq=False)
class CompletedHead:
    """The head's solution, and which of its features were seen at all."""

    solution: HeadSolution
    seen: Tensor


def complete_head(
    weight: Tensor,
    bias: Tensor | None,
    weight_gradient: Tensor,
    bias_gradient: Tensor | None,
    *,
    label: int | None = None,
    scale: float = 1.0,
) -> CompletedHead:
    """One example's features and output gradient from what is left of the head's gradient; zeros are what is missing.

    ``scale``: what the gradient was multiplied by. NotApplicable where the entries are not those of one example.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight, f = torch.randn((4, 40), generator=draws).double(), torch.rand(40, generator=draws).double()
    >>> delta = torch.softmax(weight @ f, 0) - torch.eye(4).double()[2]
    >>> gradient = torch.outer(delta, f)
    >>> pruned = torch.where(gradient.abs() > gradient.abs().quantile(0.8), gradient, 0.0)
    >>> found = complete_head(weight, None, pruned, torch.where(delta.abs() == delta.abs().max(), delta, 0.0))
    >>> seen = found.seen
    >>> int(found.solution.labels), bool((found.solution.features[0, seen] - f[seen]).abs().max() < 1e-9)
    (2, True)
    """
    observed = weight_gradient.detach().double().cpu() / scale
    sums = None if bias_gradient is None else bias_gradient.detach().double().cpu() / scale
    head = (weight.detach().double().cpu(), 0.0 if bias is None else bias.detach().double().cpu())
    entries = observed != 0
    if not bool(entries.any()):
        raise NotApplicable("nothing is left of the head's gradient")
    chosen = int(observed.square().sum(1).argmax()) if label is None else label
    if not bool(entries[chosen].any()):
        raise NotApplicable(f"nothing is left of the row of class {chosen} in the head's gradient")
    if sums is not None and float(sums[chosen]) != 0:
        own = float(sums[chosen])
    else:
        own = _own_delta(head, observed[chosen], chosen)
    delta, features, seen = _alternate(observed, entries, chosen, own)
    signal = _filled(head, delta, features, entries.any(1), chosen)
    fitted = torch.outer(delta, features) * entries
    residual = float((fitted - observed).norm() / observed.norm())
    if residual > REFUSED:
        raise NotApplicable(
            f"what is left of the head's gradient is not of one example: {residual:.1e} of it is missing from the "
            "nearest matrix of rank one"
        )
    # What was not seen lies anywhere below the smallest entry that was.
    smallest = float(observed[entries].abs().min() / abs(own))
    error = smallest * math.sqrt(int((~seen).sum()) / 3) / float(features.norm().clamp_min(1e-300))
    logits = head[0] @ features + head[1]
    solution = HeadSolution(
        output_gradients=scale * signal[None],
        features=features[None],
        labels=torch.tensor([chosen]),
        losses=-torch.log_softmax(logits, 0)[chosen][None],
        residual=residual,
        error=error,
        exact=False,
        scale=scale,
        notes=(f"{int(seen.sum())} of {len(seen)} features of the head were seen; the others are small",),
    )
    return CompletedHead(solution, seen)


def _alternate(observed: Tensor, entries: Tensor, chosen: int, own: float) -> tuple[Tensor, Tensor, Tensor]:
    """delta, f, and which of f have an entry, by least squares in turn from the row of the example's own class."""
    seen = entries.any(0)
    delta = torch.zeros(len(observed), dtype=torch.float64)
    delta[chosen] = own
    features = torch.where(entries[chosen], observed[chosen] / own, 0.0)
    for _ in range(ROUNDS):
        weights = entries * features.square()
        others = (observed * features).sum(1) / weights.sum(1).clamp_min(1e-300)
        delta = torch.where(weights.sum(1) > 0, others, delta)
        delta[chosen] = own  # fixes the scale, which a product leaves open
        weights = entries * delta.square()[:, None]
        features = torch.where(seen, (observed * delta[:, None]).sum(0) / weights.sum(0).clamp_min(1e-300), 0.0)
    return delta, features, seen


def _filled(head: tuple[Tensor, Tensor | float], delta: Tensor, features: Tensor, seen: Tensor, chosen: int) -> Tensor:
    """delta with the classes of which nothing was seen by the softmax of the features; it adds up to zero."""
    guess = torch.softmax(head[0] @ features + head[1], 0)
    missing = ~seen
    missing[chosen] = False
    left = -delta[~missing].sum().clamp(max=0.0)
    share = guess * missing
    return torch.where(missing, left * share / share.sum().clamp_min(1e-300), delta)


def _own_delta(head: tuple[Tensor, Tensor | float], row: Tensor, chosen: int) -> float:
    """delta of the example's own class where no bias tells it: the one that its features give back."""
    tried = -torch.logspace(-4, -1e-6, GRID, dtype=torch.float64)
    logits = (row / tried[:, None]) @ head[0].T + head[1]
    back = torch.softmax(logits, 1)[:, chosen] - 1
    return float(tried[(torch.log(-tried) - torch.log((-back).clamp_min(1e-12))).abs().argmin()])
