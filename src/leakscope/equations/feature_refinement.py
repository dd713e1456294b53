"""Features in front of a dense layer that fit the gradients of that layer and of the head behind it; float64.

With features Z (n, d), output gradients R (n, classes) and slopes D = s'(ZW' + b), both gradients are visible products:

    dA = R' s(ZW' + b)          dW = ((R A) * D)' Z

Where entries were set to zero or noise was added, the layer's own gradient leaves features partly open (a small entry
of all features is gone with its whole column), but every entry of the head's gradient weighs all of a feature. From
features that are roughly right R follows by least squares, then a Gauss-Newton step on Z by conjugate gradients with
the slopes held, and both in turn. Entries that are exactly zero are left out where they were set to zero. No labels are
needed, and the residual needs no truth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leakscope.equations.dense import slope

ROUNDS, CONJUGATE_STEPS = 12, 25
#: First every so-manieth unit alone, where these have so many equations for each unknown; then all, for fewer rounds.
COARSE, SPARE, FINE_ROUNDS = 4, 3, 4
#: A round that lowers the residual by less than this share is the last.
AT_REST = 1e-4
#: Damping of a step, relative to the mean square of what an entry of a feature weighs.
DAMPING = 1e-6


@dataclass(frozen=True, eq=False)
class TwoGradients:
    """Weights and gradients of a dense layer and of the head behind it, and which entries of the gradients count.

    ``weight``, ``gradient``, ``mask``: (m, d). ``head``, ``head_gradient``, ``head_mask``: (classes, m). ``bias``:
    (m,).
    """

    weight: Tensor
    gradient: Tensor
    mask: Tensor
    head: Tensor
    head_gradient: Tensor
    head_mask: Tensor
    activation: Callable[[Tensor], Tensor]
    bias: Tensor | None = None

    def inner(self, features: Tensor) -> Tensor:
        """What the activation receives, (n, m)."""
        product = features @ self.weight.T
        return product if self.bias is None else product + self.bias

    def of_units(self, units: slice) -> TwoGradients:
        """The same of some of the layer's units."""
        return TwoGradients(
            *(self.weight[units], self.gradient[units], self.mask[units]),
            *(self.head[:, units], self.head_gradient[:, units], self.head_mask[:, units]),
            activation=self.activation,
            bias=None if self.bias is None else self.bias[units],
        )

    @cached_property
    def size(self) -> float:
        """The norm of all entries that count."""
        squares = (self.gradient * self.mask).square().sum() + (self.head_gradient * self.head_mask).square().sum()
        return float(squares.sqrt())


@dataclass(frozen=True, eq=False)
class Refined:
    """``features`` (n, d) with ``output_gradients`` (n, classes), and what they leave of the gradients, relative."""

    features: Tensor
    output_gradients: Tensor
    residual: float


def refine_features(problem: TwoGradients, start: Tensor) -> Refined:
    """The features near ``start`` (n, d) that explain both gradients best; signs and lengths as in ``start``.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight, head = (torch.randn(shape, generator=draws).double() for shape in ((300, 8), (4, 300)))
    >>> z, r = torch.randn((2, 8), generator=draws).double(), torch.randn((2, 4), generator=draws).double()
    >>> dense = ((r @ head) * (z @ weight.T > 0)).T @ z
    >>> last = r.T @ torch.relu(z @ weight.T)
    >>> mask = dense.abs() > dense.abs().median()
    >>> everything = torch.ones_like(last).bool()
    >>> problem = TwoGradients(weight, dense * mask, mask, head, last, everything, torch.relu)
    >>> found = refine_features(problem, z + 0.2 * torch.randn((2, 8), generator=draws))
    >>> found.residual < 1e-3, bool((torch.cosine_similarity(z, found.features) > 1 - 1e-6).all())
    (True, True)
    """
    coarse = problem.of_units(slice(None, None, COARSE))
    if coarse.head.shape[1] * len(coarse.head) >= SPARE * start.numel():
        start = _refined(coarse, start, ROUNDS).features
        return _refined(problem, start, FINE_ROUNDS)
    return _refined(problem, start, ROUNDS)


def _refined(problem: TwoGradients, start: Tensor, rounds: int) -> Refined:
    best = fitted_output_gradients(problem, start)
    for _ in range(rounds):
        step = _gauss_newton(problem, best)
        found = best
        for share in (1.0, 0.5, 0.2):
            found = fitted_output_gradients(problem, best.features + share * step)
            if found.residual < best.residual:
                break
        if not found.residual < best.residual:
            break
        done = found.residual > best.residual * (1 - AT_REST)
        best = found
        if done:
            break
    return best


def with_best_signs(problem: TwoGradients, directions: Tensor) -> Tensor:
    """The directions with signs that let them explain the head's gradient best, one after the other."""
    best, least = directions, _head_fit(problem, directions)[1]
    for number in range(len(directions)):
        flipped = best.clone()
        flipped[number] *= -1
        residual = _head_fit(problem, flipped)[1]
        if residual < least:
            best, least = flipped, residual
    return best


def _head_fit(problem: TwoGradients, features: Tensor) -> tuple[Tensor, float]:
    """Output gradients (n, classes) by least squares on the head's gradient, and the norm of what they leave."""
    outputs = problem.activation(problem.inner(features))
    weights = problem.head_mask.double()
    systems = torch.einsum("kj,aj,bj->kab", weights, outputs, outputs)
    ridge = 1e-12 * systems.diagonal(dim1=1, dim2=2).mean() + 1e-300
    systems = systems + ridge * torch.eye(len(features), dtype=torch.float64)
    sides = (weights * problem.head_gradient) @ outputs.T
    found = torch.linalg.solve(systems, sides).T
    gap = (problem.head_gradient - found.T @ outputs) * weights
    return found, float(gap.norm())


def fitted_output_gradients(problem: TwoGradients, features: Tensor) -> Refined:
    """The features as they are, with the output gradients that the head's gradient gives them."""
    found, gap = _head_fit(problem, features)
    signals = (found @ problem.head) * slope(problem.activation, problem.inner(features))
    rest = (problem.gradient - signals.T @ features) * problem.mask
    residual = (gap**2 + float(rest.square().sum())) ** 0.5 / max(problem.size, 1e-300)
    return Refined(features, found, residual)


def _gauss_newton(problem: TwoGradients, at: Refined) -> Tensor:
    """The step in the features that lowers the residual most, with output gradients and slopes held."""
    inner = problem.inner(at.features)
    slopes = slope(problem.activation, inner)
    signals = (at.output_gradients @ problem.head) * slopes
    mask, head_mask = problem.mask.double(), problem.head_mask.double()

    gaps = (
        (problem.gradient - signals.T @ at.features) * mask,
        (problem.head_gradient - at.output_gradients.T @ problem.activation(inner)) * head_mask,
    )

    def from_head(last: Tensor) -> Tensor:
        return ((at.output_gradients @ last) * slopes) @ problem.weight

    # The layer's own equations are apart for each column of the features: small systems, made once.
    pairs = (signals[:, None] * signals[None]).flatten(0, 1)
    columns = (pairs @ mask).T.reshape(-1, len(signals), len(signals))

    def normal(step: Tensor) -> Tensor:
        moved = at.output_gradients.T @ ((step @ problem.weight.T) * slopes)
        return torch.einsum("lab,bl->al", columns, step) + from_head(moved * head_mask)

    side = signals @ gaps[0] + from_head(gaps[1])
    # Features differ in how loud they are; dividing each by its own weight lets conjugate gradients treat them alike.
    loudness = signals.square().sum(1) + (at.output_gradients.square() @ head_mask * slopes.square()).sum(1)
    scale = 1 / loudness.clamp_min(1e-300).sqrt()[:, None]
    step = torch.zeros_like(side)
    residual = scale * side
    direction, size = residual.clone(), residual.square().sum()
    stop = 1e-20 * float(size)
    for _ in range(CONJUGATE_STEPS):
        product = scale * normal(scale * direction) + DAMPING * direction
        length = size / (direction * product).sum().clamp_min(1e-300)
        step = step + length * direction
        residual = residual - length * product
        renewed = residual.square().sum()
        if float(renewed) <= stop:
            break
        direction = residual + (renewed / size) * direction
        size = renewed
    return scale * step
