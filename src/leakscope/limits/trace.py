"""The trace of the inverse of a matrix that is known by its products alone.

Hutchinson, "A Stochastic Estimator of the Trace of the Influence Matrix", 1990: z' A^-1 z for a random vector z of
signs has the trace of A^-1 as its mean. Each such form comes from conjugate gradients on A y = z: after k steps from
zero it is the sum of (step length) x (squared residual), which is Gauss quadrature (Golub and Meurant, "Matrices,
Moments and Quadrature", 1994) and so grows with every step and never beyond z' A^-1 z. A probe that is stopped early
stands too low and never too high.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.special import stdtrit
from torch import Tensor

from leakscope.matching.gradient_map import Progress

#: A probe has settled when its last quarter of steps, ten at least, added less than this share.
_SETTLED = 1e-3
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class InverseTrace:
    """``inverse`` is the mean of the probes, infinite where one met a direction that the matrix takes to zero.

    ``interval`` is Student's at 95 %. ``converged`` is the share of probes that had settled, ``trace`` the estimate of
    the matrix's own trace by the same probes.
    """

    inverse: float
    standard_error: float
    interval: tuple[float, float]
    trace: float
    converged: float


def signs(unknowns: int, probes: int, seed: int) -> Tensor:
    """Random vectors of +1 and -1 in rows, in float64.

    >>> signs(4, 2, seed=0).abs().sum().item()
    8.0
    """
    generator = torch.Generator().manual_seed(seed)
    return 2.0 * torch.randint(2, (probes, unknowns), generator=generator).double() - 1


def inverse_trace(
    product: Callable[[Tensor], Tensor], directions: Tensor, *, steps: int, progress: Progress | None = None
) -> InverseTrace:
    """The trace of the inverse of a symmetric positive matrix, from its ``product`` with vectors.

    ``directions`` are the probes, two at least, one a row (see :func:`signs`); each takes ``steps`` products at most.

    >>> result = inverse_trace(lambda v: 4 * v, signs(6, 3, seed=0), steps=10)
    >>> result.inverse, result.standard_error, result.trace, result.converged
    (1.5, 0.0, 24.0, 1.0)
    """
    count = len(directions)

    def probe(number: int) -> tuple[float, float, bool]:
        def tell(step: int) -> None:
            if progress is not None:
                progress(number * steps + step, count * steps)

        return _quadratic_form(product, directions[number], steps, tell)

    values, traces, settled = zip(*map(probe, range(count)), strict=True)
    inverses = torch.tensor(values, dtype=torch.float64)
    mean = float(inverses.mean())
    error = float(inverses.std()) / math.sqrt(count) if math.isfinite(mean) else math.inf
    reach = float(stdtrit(count - 1, (1 + _CONFIDENCE) / 2)) * error
    interval = (mean - reach if math.isfinite(mean) else mean, mean + reach)
    return InverseTrace(mean, error, interval, sum(traces) / count, sum(settled) / count)


def _quadratic_form(
    product: Callable[[Tensor], Tensor], start: Tensor, steps: int, tell: Callable[[int], None]
) -> tuple[float, float, bool]:
    """start' A^-1 start from below, start' A start, and whether the former had settled."""
    left, direction = start, start
    size = trace = float(start @ start)
    # The largest stretch of a direction so far: what is tiny beside it is rounding.
    largest = 0.0
    sums = [0.0]
    for step in range(1, steps + 1):
        image = product(direction)
        curvature, length = float(direction @ image), float(direction @ direction)
        if step == 1:
            trace = curvature
        largest = max(largest, curvature / length)
        if curvature <= len(start) * torch.finfo(start.dtype).eps * largest * length:
            return math.inf, trace, True
        stride = size / curvature
        sums.append(sums[-1] + stride * size)
        left = left - stride * image
        rest = float(left @ left)
        tell(step)
        back = max(10, step // 4)
        if rest == 0 or (step > back and sums[-1] - sums[-1 - back] <= _SETTLED * sums[-1]):
            tell(steps)
            return sums[-1], trace, True
        direction = left + (rest / size) * direction
        size = rest
    return sums[-1], trace, False
