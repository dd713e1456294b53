"""How much differential privacy Gaussian noise gives, by the Renyi accountant of opacus.

Mironov, Talwar, Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism", 2019. A release is the sum of
vectors of norm at most C over a random part of the examples, plus noise of standard deviation ``noise_multiplier``
times C. ``sampling_rate`` is the chance with which each example is in that part, drawn for each example on its own.
Two data sets are neighbours if one has an example that the other lacks. The classical sqrt(2 ln(1.25 / delta)) /
epsilon is not used: it is proved for epsilon up to 1 only, and false at 10.
"""

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from scipy.optimize import brentq, minimize_scalar

from leakscope.contracts.checks import expected, is_whole, refuse
from leakscope.contracts.errors import UserError

#: Orders of the Renyi divergence that are tried, the best of them refined; to try fewer only makes epsilon larger.
ORDERS = (*range(2, 64), *(round(64 * 1.1**n) for n in range(54)))
#: ... and the least one between whole numbers, which take far longer.
_LEAST_ORDER = 1.01
#: Orders of sampled releases: up to here those between whole ones are tried, and above no more at all.
_REFINED, _MOST_SAMPLED = 12, 1000
#: How exactly a noise multiplier is found, as a factor above 1.
_PRECISION = 1e-5
#: No less noise than this is handed out: epsilon is then about a million and the word privacy misplaced.
LEAST_NOISE = 1e-3
_MOST_NOISE = 1e9
#: With less noise sampling is not counted in favour: the series of the accountant overflows there.
_LEAST_SAMPLED_NOISE = 0.1


def epsilon_of(noise_multiplier: float, sampling_rate: float = 1.0, steps: int = 1, delta: float = 1e-5) -> float:
    """The epsilon that ``steps`` releases with this noise keep to at ``delta``. Infinite without noise.

    >>> round(epsilon_of(4.0), 2), round(epsilon_of(1.1, sampling_rate=0.01, steps=1000), 2)
    (1.01, 1.71)
    """
    numbers = {"sampling_rate": sampling_rate, "steps": steps, "delta": delta}
    refuse("epsilon_of", problems_of(noise_multiplier=noise_multiplier, **numbers))
    return _epsilon(noise_multiplier, sampling_rate, steps, delta)


@lru_cache(maxsize=256)  # half a second, and an audit asks for the same one several times
def _epsilon(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    if noise_multiplier**2 == 0:  # or so little that its square is
        return math.inf
    from opacus.accountants.analysis import rdp  # slow to import

    rate = 1.0 if noise_multiplier < _LEAST_SAMPLED_NOISE else sampling_rate

    def at(order: float) -> float:
        divergence = rdp.compute_rdp(q=rate, noise_multiplier=noise_multiplier, steps=steps, orders=[order])
        return float(rdp.get_privacy_spent(orders=[order], rdp=divergence, delta=delta)[0])

    orders = [order for order in ORDERS if rate == 1 or order <= _MOST_SAMPLED]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best order is the first or last of the list
        epsilons = [at(order) for order in orders]
        best = epsilons.index(min(epsilons))
        if rate == 1 or orders[best] < _REFINED:
            low = orders[best - 1] if best else _LEAST_ORDER
            high = orders[min(len(orders) - 1, best + 1)]
            refined = minimize_scalar(at, bounds=(low, high), method="bounded", options={"xatol": 1e-3 * (high - low)})
            epsilons.append(float(refined.fun))
    return max(0.0, min(epsilons))


def noise_multiplier_for(epsilon: float, sampling_rate: float = 1.0, steps: int = 1, delta: float = 1e-5) -> float:
    """The least noise multiplier for which ``epsilon_of`` is at most ``epsilon``; 1e-5 too much rather than too little.

    >>> round(noise_multiplier_for(1.0), 2), round(noise_multiplier_for(10.0), 2)
    (4.05, 0.53)
    """
    numbers = {"sampling_rate": sampling_rate, "steps": steps, "delta": delta}
    refuse("noise_multiplier_for", problems_of(epsilon=epsilon, **numbers))
    return _noise_multiplier(epsilon, sampling_rate, steps, delta)


@lru_cache(maxsize=256)
def _noise_multiplier(epsilon: float, sampling_rate: float, steps: int, delta: float) -> float:
    def excess(power: float) -> float:
        return epsilon_of(math.exp(power), sampling_rate, steps, delta) - epsilon

    high = 0.0
    while excess(high) > 0:
        high += math.log(2)
        if math.exp(high) > _MOST_NOISE:
            wanted = f"one that noise can reach in {steps} steps at delta {delta:g}"
            raise UserError(f"epsilon: expected {wanted}, got {epsilon:g}; use a larger epsilon or fewer steps")
    low = high - math.log(2)
    while excess(low) <= 0:
        low, high = low - math.log(2), low
        if math.exp(high) < LEAST_NOISE:
            return math.exp(high)
    multiplier = math.exp(brentq(excess, low, high, xtol=_PRECISION / 10))
    while epsilon_of(multiplier, sampling_rate, steps, delta) > epsilon:
        multiplier *= 1 + _PRECISION / 10  # the root is met from either side
    return multiplier


_RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "epsilon": ("a finite positive number", lambda value: 0 < value < math.inf),
    "noise_multiplier": ("a finite number >= 0", lambda value: 0 <= value < math.inf),
    "sampling_rate": ("0 < sampling_rate <= 1", lambda value: 0 < value <= 1),
    "steps": ("a whole number of at least 1", is_whole),
    "delta": ("0 < delta < 1", lambda value: 0 < value < 1),
}


def problems_of(**promise: float) -> list[str]:
    """What is wrong with the numbers of a promise, one line each.

    >>> problems_of(epsilon=-1.0)
    ['epsilon: expected a finite positive number, got -1.0']
    """
    return [line for name, value in promise.items() for line in expected(*_RULES[name], **{name: value})]
