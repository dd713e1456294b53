"""What a head's gradient says of each example, and when that is down to rounding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

#: Residuals up to this are those of rounding; above the other, the update is not the gradient of such a batch.
EXACT, REFUSED = 1e-5, 0.1
#: Expected relative errors of features: up to the first they count as exact, above the second they are left out.
EXACT_FEATURES, USELESS_FEATURES = 1e-3, 0.3


@dataclass(frozen=True, eq=False)
class HeadSolution:
    """What the head's gradient says of each of n examples, in the order of ``labels``.

    ``output_gradients`` (n, C): each example's share of the gradient at the logits; they add up to the bias gradient,
    so that the 1/n of a mean is inside. ``features`` (n, d): the head's inputs, None where only the output gradients
    follow. ``labels`` and ``losses`` (n,), None for a loss that is not cross-entropy. ``residual`` is the certificate:
    the largest relative gap between what was observed and what the solution gives. ``error``: the relative error of the
    features to be expected from the gradient's rounding or noise. ``exact``: the residual is that of rounding, and the
    error small. ``scale``: what the gradient was multiplied by.
    """

    output_gradients: Tensor
    features: Tensor | None
    labels: Tensor | None
    losses: Tensor | None
    residual: float
    error: float
    exact: bool
    scale: float = 1.0
    notes: tuple[str, ...] = ()


def exact_residual(signal: float, examples: int, rounding: float) -> float:
    """The residual that rounding leaves: softmax minus one is rounded to the last digits of one, however small it is.

    ``signal`` is the norm of softmax minus one-hot of all examples.

    >>> exact_residual(1.0, 1, 3e-8), exact_residual(1e-3, 1, 3e-8)
    (1e-05, 0.0006)
    """
    return max(EXACT, 20 * rounding * math.sqrt(examples) / max(signal, 1e-300))
