"""Known features of the examples as a prior: what a layer receives of the candidates should point the same way."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from leakscope.contracts.errors import UserError
from leakscope.matching.assignment import assignment
from leakscope.matching.priors import Scene

FeatureForm = Literal["direction", "span"]
#: Added to squared lengths: features of nothing have no direction, but derivatives.
TINY = 1e-24


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureMatching:
    """weight * the mean over examples of how far the input of ``layer`` is from the known ``features`` (n, d).

    "direction": 1 - cos^2 of the angle to the feature that an assignment gives to the example, by the candidates' own
    features at each step: order and signs of what was recovered are open. "span": the share of the squared length that
    lies outside the span of all features, which needs neither.
    """

    weight: float
    layer: str
    features: Tensor
    form: FeatureForm = "direction"
    _basis: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.form not in get_args(FeatureForm):
            raise UserError(f"form: expected one of {', '.join(get_args(FeatureForm))}, got {self.form!r}")
        if self.features.dim() != 2 or not self.features.numel():
            raise UserError(f"features: expected (n, d), got {tuple(self.features.shape)}")
        object.__setattr__(self, "_basis", orthonormal(self.features))

    def __call__(self, picture: Tensor, scene: Scene) -> Tensor:
        own = scene.layer_inputs[self.layer].flatten(1)
        if self.form == "span":
            return self.weight * outside_span(own, self._basis.to(own))
        return self.weight * misdirection(own, self.features.to(own))


def misdirection(own: Tensor, known: Tensor) -> Tensor:
    """Mean of 1 - cos^2 between each of ``own`` (examples, d) and its feature of ``known`` (n, d).

    With fewer features than examples, the mean over those that have one.

    >>> own = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    >>> float(misdirection(own, torch.tensor([[0.0, -1.0], [1.0, 0.0]])))
    0.0
    >>> float(misdirection(own, torch.tensor([[1.0, 1.0]])))
    0.5
    """
    lengths = own.square().sum(1)[:, None] * known.square().sum(1)[None]
    apart = 1 - (own @ known.T).square() / (lengths + TINY)
    order = assignment(apart.detach())
    each = apart.gather(1, order.clamp_min(0)[:, None])[:, 0]
    matched = (order >= 0).to(each)
    return (each * matched).sum() / matched.sum()


def outside_span(own: Tensor, basis: Tensor) -> Tensor:
    """Mean share of the squared length of each of ``own`` (examples, d) outside the span of an orthonormal ``basis``.

    >>> float(outside_span(torch.tensor([[3.0, 4.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])))
    0.6399999856948853
    """
    inside = own @ basis.T @ basis
    return ((own - inside).square().sum(1) / (own.square().sum(1) + TINY)).mean()


def orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis (r, d) of the rows' span; directions below 1e-6 of the largest are rounding."""
    _, values, basis = torch.linalg.svd(F.normalize(rows, dim=1), full_matrices=False)
    return basis[values > 1e-6 * values[0]]
