"""How much differential privacy Gaussian noise gives: a Renyi accountant of the subsampled Gaussian mechanism.

Mironov, Talwar, Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism", 2019, for the privacy of one
release; Mironov, "Renyi Differential Privacy", CSF 2017, for that of many, which adds up; Canonne, Kamath, Steinke,
"The Discrete Gaussian for Differential Privacy", NeurIPS 2020, proposition 12, for the way to epsilon and delta.

A release is the sum of vectors of length at most C over a random part of the examples, plus noise of standard
deviation ``noise_multiplier`` times C. ``sampling_rate`` is the chance with which each example is in that part, drawn
for each example on its own; 1 is all of them. Two data sets are neighbours if one has an example that the other lacks.

Deliberate difference: the moments of Mironov et al. are integrated numerically rather than summed in two series, so
that whole and fractional orders are one formula without cancelling terms; the trapezoidal rule is exact to rounding.
The classical sqrt(2 ln(1.25 / delta)) / epsilon is not used: it is proved for epsilon up to 1 only, and false at 10.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

#: Orders of the Renyi divergence that are tried, 1.01 to 10001; the best of them is then refined.
ORDERS = tuple(1 + 10 ** (power / 10) for power in range(-20, 41))
#: An order whose integral takes more points is left out; to try fewer orders only makes epsilon larger.
_POINTS = 20_000
#: With less noise sampling is not counted in favour: epsilon stays true, and is so large that it hardly matters.
_LEAST_SAMPLED_NOISE = 0.1
#: How exactly a noise multiplier is found, as a factor above 1.
_PRECISION = 1e-5
#: No less noise than this is handed out: epsilon is then about a million and the word privacy misplaced.
LEAST_NOISE = 1e-3


def renyi_divergence(order: float, noise_multiplier: float, sampling_rate: float = 1.0) -> float:
    """The Renyi divergence of ``order`` above 1 that one release costs at most.

    Without sampling it is order / (2 noise_multiplier^2). With sampling rate q it is log A / (order - 1), where A is
    the mean of (1 - q + q exp((2z - 1) / (2 noise_multiplier^2)))^order over z ~ N(0, noise_multiplier^2). NaN where
    this would take too long to integrate: a high order with little noise, which is not the one that matters.

    >>> renyi_divergence(8.0, 2.0)
    1.0
    >>> round(renyi_divergence(2.0, 1.0, 0.5), 6), round(math.log(1 + 0.5**2 * (math.e - 1)), 6)
    (0.357374, 0.357374)
    """
    problems = problems_of(noise_multiplier=noise_multiplier, sampling_rate=sampling_rate)
    if not 1 < order < math.inf:
        problems.append(f"order: expected a finite number above 1, got {order}")
    _raise("renyi_divergence", problems)
    if noise_multiplier == 0:
        return math.inf
    if sampling_rate == 1 or noise_multiplier < _LEAST_SAMPLED_NOISE:
        return order / 2 / noise_multiplier / noise_multiplier
    variance = noise_multiplier**2
    # The integrand has its weight around 0 and around the order, and bends within about the variance of one place.
    step = min(noise_multiplier, variance) / 4
    reach = 12 * noise_multiplier
    points = math.ceil((order + 2 * reach) / step)
    if points > _POINTS:
        return math.nan
    z = np.arange(points) * step - reach
    mixture = np.logaddexp(math.log1p(-sampling_rate), math.log(sampling_rate) + (2 * z - 1) / (2 * variance))
    normal = -(z**2) / (2 * variance) - math.log(noise_multiplier * math.sqrt(2 * math.pi))
    log_moment = float(logsumexp(normal + order * mixture)) + math.log(step)
    return max(0.0, log_moment / (order - 1))


def epsilon_of(noise_multiplier: float, sampling_rate: float = 1.0, steps: int = 1, delta: float = 1e-5) -> float:
    """The epsilon that ``steps`` releases with this noise keep to at ``delta``. Infinite without noise.

    >>> round(epsilon_of(4.0), 2), round(epsilon_of(1.1, sampling_rate=0.01, steps=1000), 2)
    (1.01, 1.71)
    """
    problems = problems_of(noise_multiplier=noise_multiplier, sampling_rate=sampling_rate, steps=steps, delta=delta)
    _raise("epsilon_of", problems)

    def at(order: float) -> float:
        divergence = steps * renyi_divergence(order, noise_multiplier, sampling_rate)
        # Proposition 12. Every order gives a valid epsilon, so the least of any may be taken.
        epsilon = divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1)
        return math.inf if math.isnan(epsilon) else max(0.0, epsilon)

    found = [at(order) for order in ORDERS]
    best = found.index(min(found))
    if math.isinf(found[best]):
        return math.inf
    around = (ORDERS[max(0, best - 1)], ORDERS[min(len(ORDERS) - 1, best + 1)])
    refined = minimize_scalar(at, bounds=around, method="bounded", options={"xatol": 1e-3 * (around[1] - around[0])})
    return min(found[best], float(refined.fun))


def noise_multiplier_for(epsilon: float, sampling_rate: float = 1.0, steps: int = 1, delta: float = 1e-5) -> float:
    """The least noise multiplier for which ``epsilon_of`` is at most ``epsilon``; 1e-5 too much rather than too little.

    >>> round(noise_multiplier_for(1.0), 3), round(noise_multiplier_for(10.0), 3)
    (4.045, 0.53)
    """
    problems = problems_of(epsilon=epsilon, sampling_rate=sampling_rate, steps=steps, delta=delta)
    _raise("noise_multiplier_for", problems)
    return _noise_multiplier(epsilon, sampling_rate, steps, delta)


@lru_cache(maxsize=256)
def _noise_multiplier(epsilon: float, sampling_rate: float, steps: int, delta: float) -> float:
    def enough(noise: float) -> bool:
        return epsilon_of(noise, sampling_rate, steps, delta) <= epsilon

    high = 1.0
    while not enough(high):
        high *= 2
        if high > 1e9:
            raise ValueError(
                f"epsilon: expected one that noise can reach in {steps} steps at delta {delta:g}, got {epsilon:g}; "
                "use a larger epsilon or fewer steps"
            )
    low = high / 2
    while enough(low):
        low, high = low / 2, low
        if high < LEAST_NOISE:
            return high
    while high > low * (1 + _PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def problems_of(
    *,
    epsilon: float = 1.0,
    noise_multiplier: float = 1.0,
    sampling_rate: float = 1.0,
    steps: int = 1,
    delta: float = 1e-5,
) -> list[str]:
    """What is wrong with the numbers of a promise, one line each.

    >>> problems_of(epsilon=-1.0)
    ['epsilon: expected a finite positive number, got -1.0']
    """
    problems = []
    if not 0 < epsilon < math.inf:
        problems.append(f"epsilon: expected a finite positive number, got {epsilon}")
    if not 0 <= noise_multiplier < math.inf:
        problems.append(f"noise_multiplier: expected a finite number >= 0, got {noise_multiplier}")
    if not 0 < sampling_rate <= 1:
        problems.append(f"sampling_rate: expected 0 < sampling_rate <= 1, got {sampling_rate}")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        problems.append(f"steps: expected a whole number of at least 1, got {steps!r}")
    if not 0 < delta < 1:
        problems.append(f"delta: expected 0 < delta < 1, got {delta}")
    return problems


def _raise(what: str, problems: list[str]) -> None:
    if problems:
        raise ValueError(f"{what}:\n  - " + "\n  - ".join(problems))
