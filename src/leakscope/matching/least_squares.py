"""Solve nonlinear least squares on the map from inputs to update: Levenberg-Marquardt with conjugate gradients inside.

A step solves (J'J + lambda I) s = -J'r with lambda = mu mean(diag J'J) by products with J. Once a solve runs long, the
Jacobian is made in float32 and the inverse of its damped Gram matrix becomes the preconditioner of this step and of
those after it. Its errors cost iterations, never accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from leakscope.equations.conjugate_gradients import iterate
from leakscope.matching.gradient_map import Linearisation

#: Of the mean diagonal of J'J: below it float32 cannot tell a direction from rounding.
FLOAT32_FLOOR = 1e-7
#: Columns of a sketch for each unknown, so that its singular values are within a factor of two of the true ones ...
SKETCH = 4
#: ... and of a preconditioner's, where a cruder one only costs some iterations.
CRUDE_SKETCH = 3
#: So many columns need no sketch.
SMALL = 4096
#: A step shorter than this, root mean square in units of the value range, has come to rest.
REST = 1e-10
#: Conjugate gradients run for one iteration in so many unknowns before the Jacobian is made.
PATIENCE = 20
MAX_PATIENCE = 500
#: Unknowns times entries of the update above which the Jacobian is never made.
MAX_WORK = 2**31
#: Beyond this damping a step is too short to matter.
MAX_DAMPING = 1e10

Progress = Callable[[int, int, float], None]


@dataclass(frozen=True, eq=False)
class Roughness:
    """Add differences between neighbouring pixels as further residuals, each times ``weight``: a Gaussian prior."""

    shape: tuple[int, ...]
    weight: float

    def value(self, flat: Tensor) -> float:
        picture = flat.reshape(self.shape)
        return self.weight**2 * sum(float(picture.diff(dim=axis).square().sum()) for axis in range(2, picture.dim()))

    def gradient(self, flat: Tensor) -> Tensor:
        picture = flat.reshape(-1, *self.shape)
        total = torch.zeros_like(picture)
        for axis in range(3, picture.dim()):
            length, step = picture.shape[axis], picture.diff(dim=axis)
            total.narrow(axis, 1, length - 1).add_(step)
            total.narrow(axis, 0, length - 1).sub_(step)
        return self.weight**2 * total.reshape(flat.shape)


class SmoothMap(Protocol):
    """A map from a flat row of ``unknowns`` to ``entries`` numbers that has a derivative."""

    @property
    def unknowns(self) -> int: ...

    @property
    def entries(self) -> int: ...

    def __call__(self, flat: Tensor, /) -> Tensor: ...

    def linearise(self, flat: Tensor, /) -> Linearisation: ...

    def crude_jacobian(self, flat: Tensor, columns: int, /) -> Tensor: ...


class Solved(NamedTuple):
    step: Tensor
    iterations: int
    met: bool


@dataclass(frozen=True, eq=False)
class Fit:
    """Hold where the search ended, ||r||^2 and r there, and its cost: trials, pairs of products, Jacobians made."""

    x: Tensor
    objective: float
    residual: Tensor = field(repr=False)
    steps: int
    products: int
    builds: int
    at_rest: bool
    curve: list[float] = field(repr=False)
    preconditioner: Preconditioner | None = field(default=None, repr=False)


class Preconditioner:
    """An approximate inverse of J'J + lambda I (and a prior's share) from a float32 Jacobian at one point."""

    def __init__(self, mapping: SmoothMap, at: Tensor, damping: float, prior: Roughness | None = None) -> None:
        matrix = mapping.crude_jacobian(at, max(CRUDE_SKETCH * mapping.unknowns, SMALL))
        # Tiny gradients must not underflow when they are squared.
        self._scale = float(matrix.abs().max())
        usable = 0 < self._scale < math.inf
        gram = gram_matrix(matrix / self._scale) if usable else torch.eye(len(matrix))
        if prior is not None:
            share = prior.gradient(torch.eye(len(gram), dtype=torch.float64, device=gram.device))
            gram += (share / self._scale**2).to(gram) if usable else 0.0
        mean = float(gram.diagonal().mean())
        self.mean_diagonal = mean * self._scale**2 if usable else 0.0
        gram.diagonal().add_(max(damping / self._scale**2 if usable else 0.0, FLOAT32_FLOOR * mean))
        factor, failure = torch.linalg.cholesky_ex(gram)
        for attempt in range(1, 11):
            if not int(failure):
                break
            # Half of the digits may not be enough to see that it is positive; then all of them, and more damping.
            gram = gram.double()
            gram.diagonal().add_(FLOAT32_FLOOR * mean * 4**attempt)
            factor, failure = torch.linalg.cholesky_ex(gram)
        self._inverse = torch.cholesky_inverse(factor.float()) if usable and not int(failure) else None

    def __call__(self, vector: Tensor) -> Tensor:
        if self._inverse is None:
            return vector
        size = vector.norm().clamp_min(1e-300)
        return (self._inverse @ (vector / size).float()).to(vector) * (size / self._scale**2)


def gram_matrix(matrix: Tensor, blocks: int = 8) -> Tensor:
    """matrix @ matrix.T, of which little more than half is computed.

    >>> gram_matrix(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).tolist()
    [[5.0, 11.0], [11.0, 25.0]]
    """
    gram = matrix.new_empty(len(matrix), len(matrix))
    size = -(-len(matrix) // blocks)
    for start in range(0, len(matrix), size):
        part = matrix[start:] @ matrix[start : start + size].T
        gram[start:, start : start + size] = part
        gram[start : start + size, start:] = part.T
    return gram


def solve(
    products: Linearisation,
    right: Tensor,
    damping: float,
    *,
    tolerance: float,
    limit: int,
    preconditioner: Preconditioner | None = None,
    prior: Roughness | None = None,
) -> Solved:
    """Solve (J'J + damping I) s = right by conjugate gradients, to ``tolerance`` in the preconditioner's norm."""

    def product(direction: Tensor) -> Tensor:
        image = products.backward(products.forward(direction)) + damping * direction
        return image if prior is None else image + prior.gradient(direction)

    point, count = torch.zeros_like(right), 0
    for count, (point, left) in enumerate(islice(iterate(product, right, preconditioner), limit), start=1):
        if left <= tolerance:
            return Solved(point, count, True)
    return Solved(point, count, not bool(right.any()))


@dataclass(frozen=True, kw_only=True)
class LevenbergMarquardt:
    """Hold the settings of the search; :meth:`run` does the work.

    ``damping`` is mu, divided by ten after a step that lowers the objective and multiplied by ten after one that does
    not. ``dense``: most unknowns for which the Jacobian is made. ``tolerance``: relative residual at the end. A step
    that changes the objective by less than the share ``gain`` is the last, if mu is as small as at first.
    """

    steps: int = 30
    damping: float = 1e-3
    dense: int = 5000
    tolerance: float = 1e-13
    gain: float = 0.0

    def run(
        self,
        mapping: SmoothMap,
        observed: Tensor,
        start: Tensor,
        *,
        prior: Roughness | None = None,
        progress: Progress | None = None,
    ) -> Fit:
        """Least squares of G(x) - observed from ``start``; a prior adds its residuals."""

        def objective(x: Tensor) -> tuple[Tensor, float]:
            residual = mapping(x).detach() - observed
            return residual, float(residual @ residual) + (0.0 if prior is None else prior.value(x))

        x, mu = start, self.damping
        residual, value = objective(x)
        first, enough = value, self.tolerance**2 * float(observed @ observed)
        products = mapping.linearise(x)
        diagonal = _mean_diagonal(products, start)
        # Longer than this, a solve is better served by a Jacobian, which all that follow share.
        patience = max(20, min(MAX_PATIENCE, mapping.unknowns // PATIENCE))
        helper: Preconditioner | None = None
        curve, spent, builds, steps, at_rest = [value], 0, 0, 0, value <= enough
        while steps < self.steps and not at_rest and math.isfinite(value) and mu < MAX_DAMPING:
            steps += 1
            right = -products.backward(residual)
            if prior is not None:
                right = right - prior.gradient(x)
            # Newton's error is squared at every step, so that a solve need not be more exact than that.
            exactness = min(1e-3, max(1e-10, value / first))
            newton = solve(
                products, right, mu * diagonal, tolerance=exactness, limit=patience, preconditioner=helper, prior=prior
            )
            spent += newton.iterations
            trial, trial_value = objective(x + newton.step)
            length = float(newton.step.square().mean().sqrt())
            stays = mu <= self.damping and abs(value - trial_value) < self.gain * value
            if trial_value < value:
                x, residual, value = x + newton.step, trial, trial_value
                mu = max(mu / 10, 1e-14)
                products = mapping.linearise(x)
            else:
                mu *= 10
            at_rest = value <= enough or length < REST or stays
            small = mapping.unknowns <= self.dense and mapping.unknowns * mapping.entries <= MAX_WORK
            if not newton.met and not at_rest and small:
                # The step is taken as far as it goes; from the new point on, the Jacobian helps.
                helper = Preconditioner(mapping, x, mu * diagonal, prior)
                diagonal = helper.mean_diagonal or diagonal
                builds += 1
            curve.append(value)
            if progress is not None:
                progress(steps, self.steps, value)
        return Fit(x, value, residual, steps, spent, builds, at_rest, curve, helper)


def _mean_diagonal(products: Linearisation, like: Tensor, probes: int = 8) -> float:
    """The mean of diag(J'J), estimated with random signs: E ||J v||^2 = trace(J'J)."""
    draws = torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(probes):
        signs = (2 * torch.randint(2, like.shape, generator=draws) - 1).to(like)
        total += float(products.forward(signs).square().sum())
    return total / probes / like.numel()
