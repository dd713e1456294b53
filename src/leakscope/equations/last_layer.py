"""The loss's derivative at the logits, from the gradient of a last linear layer without a bias; float64.

With a bias it is the bias's gradient. Without one, dL/dW = k x' shows x and k only up to a factor each way, and the
factor follows from what k must be: softmax minus one-hot, or sigmoid minus label, of the logits that x itself gives.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import expit, lambertw

from leakscope.network.activations import Activation

#: -W_0(1/e): the least value that margin x derivative of the logistic loss takes, at the margin 1.278465.
LEAST_PRODUCT = -float(lambertw(math.exp(-1)).real)


@dataclass(frozen=True, kw_only=True, eq=False)
class LastSignal:
    signal: np.ndarray
    label: int
    mismatch: float = 0.0


def logistic_margins(product: float) -> tuple[float, ...]:
    """Return the margins mu with mu l'(mu) = -mu / (1 + e^mu) = ``product``, for the logistic loss log(1 + e^-mu).

    R-GAP (Zhu and Blaschko, ICLR 2021) searches the margin by descent; in closed form mu = -c - W_k(c e^-c) with
    Lambert's W. One margin for c > 0 (the example is misclassified); two for -0.278465 < c < 0, smaller first; below
    that there is none, and the nearest (1.278465) is returned.

    >>> [round(mu, 6) for mu in logistic_margins(-0.2 / (1 + math.exp(0.2)))]
    [0.2, 3.687925]
    >>> logistic_margins(0.0)
    (0.0,)
    """
    c = float(product)
    if c == 0:
        return (0.0,)
    if c <= LEAST_PRODUCT:
        return (1 - LEAST_PRODUCT,)
    argument = c * math.exp(-c)
    branches = (0,) if c > 0 else (0, -1)
    margins = []
    for mu in (-c - float(lambertw(argument, branch).real) for branch in branches):
        slope = 1 + c * math.exp(min(mu, 30.0))
        if mu <= 30 and abs(slope) >= 1e-3:  # one step of Newton's for the digits that are lost at small c
            mu -= (mu + c * (1 + math.exp(mu))) / slope
        margins += [mu] if math.isfinite(mu) else []
    return tuple(margins)


def logistic_signals(
    weight: np.ndarray, gradient: np.ndarray, labels: tuple[int, ...], last: Activation
) -> list[LastSignal]:
    """Return every derivative at the one output that explains the gradient; a LeakyReLU ``last`` is as good as none."""
    signals = []
    for margin in logistic_margins(float((weight * gradient).sum())):
        for label in labels:
            sign = 2 * label - 1
            inner = last.inverse(torch.tensor([sign * margin], dtype=torch.float64))
            slope = float(last.derivative(inner))
            signals.append(LastSignal(signal=np.array([-sign * slope * expit(-margin)]), label=label))
    return signals


def softmax_signals(
    weight: np.ndarray, bias: np.ndarray | None, gradient: np.ndarray, labels: tuple[int, ...] | None, last: Activation
) -> list[LastSignal]:
    """Do the same for several classes, best first: search the length of x along the one direction the gradient has.

    With dL/dW = g u' and |u| = 1, x = s u and k = g / s, where s k_y(s) = g_y for the label's entry; all entries
    together say which root is right. k_y is the only negative entry, so with three or more classes the signs of g tell
    the label (``labels`` None) and the direction of u. One output is the sigmoid's case, with labels 0 and 1.
    """
    left, sizes, right = np.linalg.svd(gradient, full_matrices=False)
    spread, direction = left[:, 0] * sizes[0], right[0]
    if labels is None and len(spread) > 2:  # the class whose sign is the rarer one
        negative = (spread < 0).sum() <= (spread > 0).sum()
        labels = (int(np.argmin(spread if negative else -spread)),)
    labels = (0, 1) if labels is None else labels  # entries of two classes are always opposite
    signals = [candidate for label in labels for candidate in _for_label(spread, weight @ direction, bias, label, last)]
    return sorted(signals, key=lambda candidate: candidate.mismatch)


def _for_label(
    spread: np.ndarray, along: np.ndarray, bias: np.ndarray | None, label: int, last: Activation
) -> list[LastSignal]:
    """Every length s > 0 with s k_y(s) = g_y, after turning g and u so that the label's entry has the sign it must."""
    entry = label if len(spread) > 1 else 0
    negative = len(spread) > 1 or label == 1
    sign = 1.0 if bool(spread[entry] < 0) == negative else -1.0
    goal, shift = sign * spread, np.zeros(len(spread)) if bias is None else bias

    def scaled(length: float) -> np.ndarray:
        return length * _signal_at(sign * length * along + shift, label, last)

    def mismatch(length: float) -> float:
        size = float(np.linalg.norm(goal))
        return float(np.linalg.norm(scaled(length) - goal)) / size if size > 0 else 0.0

    lengths = _roots(lambda length: float(scaled(length)[entry] - goal[entry]))
    return [LastSignal(signal=goal / length, label=label, mismatch=mismatch(length)) for length in lengths]


def _signal_at(inner: np.ndarray, label: int, last: Activation) -> np.ndarray:
    z = torch.from_numpy(inner)
    logits, slope = last(z), last.derivative(z)
    if len(z) == 1:
        return np.asarray(((torch.sigmoid(logits) - label) * slope).numpy())
    probabilities = torch.softmax(logits, dim=0)
    probabilities[label] = -(probabilities.sum() - probabilities[label])  # 1 - p without cancellation
    return np.asarray((probabilities * slope).numpy())


def _roots(difference: Callable[[float], float]) -> list[float]:
    lengths = np.geomspace(1e-6, 1e6, 1201)
    values = np.array([difference(float(length)) for length in lengths])
    places = np.flatnonzero(np.sign(values[:-1]) != np.sign(values[1:]))
    if not len(places):
        return [float(lengths[np.argmin(np.abs(values))])]
    return [float(brentq(difference, lengths[p], lengths[p + 1], xtol=1e-300, rtol=1e-15)) for p in places]
