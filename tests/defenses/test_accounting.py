"""The accountant against closed forms, against other accountants, and against the exact privacy of the mechanism."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from leakscope.defenses.accounting import epsilon_of, noise_multiplier_for, problems_of

DELTA = 1e-5

# (noise multiplier, sampling rate, steps): epsilon of Opacus 1.6.0 (RDP, its default orders), which an accountant of
# the same kind with finer orders may undercut a little, and epsilon of the privacy loss distribution accountant of
# dp-accounting 0.6.0 (interval 1e-4), nearly the true one, which none may undercut. Both at delta 1e-5.
OTHERS = {
    (4.0, 1.0, 1): (1.012551, 0.926342),
    (1.0, 1.0, 1): (4.728507, 4.377178),
    (0.5, 1.0, 1): (10.725510, 9.997256),
    (0.3, 1.0, 1): (20.392520, 19.130768),
    (10.0, 1.0, 100): (4.728507, 4.377178),
    (1.1, 0.01, 1000): (1.711770, 1.515370),
    (0.8, 0.05, 300): (10.439686, 9.310230),
    (1.0, 0.05, 600): (9.111442, 8.289360),
    (2.0, 0.05, 600): (3.051158, 2.794536),
    (0.5, 0.05, 600): (48.399481, 43.945194),
    (0.7, 0.2, 10): (11.005758, 9.570316),
    (0.4, 0.5, 5): (33.235774, 30.683441),
    (3.0, 0.1, 1): (0.233733, 0.175327),
    (1.3, 256 / 60000, 14062): (1.988993, 1.823655),
    (0.2, 0.05, 20): (94.960633, 81.976995),
    (20.0, 0.5, 100): (1.018640, 0.931049),
}


@pytest.mark.parametrize("setting", OTHERS, ids=str)
def test_epsilon_lies_between_the_true_one_and_that_of_opacus(setting: tuple[float, float, int]) -> None:
    noise, rate, steps = setting
    opacus, true = OTHERS[setting]
    found = epsilon_of(noise, rate, steps, DELTA)
    assert true < found < opacus + 1e-6
    assert found > 0.997 * opacus, "the same bound: only the choice of orders differs"


def exact_epsilon(noise: float, delta: float = DELTA) -> float:
    """Balle and Wang 2018, theorem 8: the exact privacy of one release without sampling."""

    def excess(epsilon: float) -> float:
        half = 1 / (2 * noise)
        upper = norm.cdf(half - epsilon * noise)
        return float(upper - math.exp(epsilon + norm.logcdf(-half - epsilon * noise)) - delta)

    return float(brentq(excess, 0, 400))


@pytest.mark.parametrize("noise", [0.3, 0.5, 1.0, 2.0, 4.0, 10.0, 40.0])
def test_without_sampling_epsilon_is_a_little_above_the_exact_one(noise: float) -> None:
    assert 1 < epsilon_of(noise) / exact_epsilon(noise) < 1.35


def test_the_classical_formula_breaks_its_promise_and_the_one_here_does_not() -> None:
    classical = math.sqrt(2 * math.log(1.25 / DELTA)) / 10
    assert exact_epsilon(classical) > 10.2
    assert exact_epsilon(noise_multiplier_for(10.0)) < 10


def whole_order(order: int, noise: float, rate: float) -> float:
    """Mironov, Talwar and Zhang 2019, section 3.3: the Renyi divergence of whole orders is a binomial sum."""
    terms = [
        math.log(math.comb(order, k))
        + (order - k) * math.log1p(-rate)
        + k * math.log(rate)
        + k * (k - 1) / 2 / noise**2
        for k in range(order + 1)
    ]
    top = max(terms)  # taken out, for exp would overflow
    return (top + math.log(math.fsum(math.exp(term - top) for term in terms))) / (order - 1)


@pytest.mark.parametrize("noise", [0.4, 1.0, 3.0, 50.0])
@pytest.mark.parametrize("rate", [1e-4, 0.05, 0.5, 0.99])
def test_epsilon_is_at_most_that_of_whole_orders(noise: float, rate: float) -> None:
    """Canonne, Kamath and Steinke 2020, proposition 12, turns a divergence into an epsilon."""
    steps, orders = 20, range(2, 64)
    bounds = [
        steps * whole_order(order, noise, rate)
        + math.log1p(-1 / order)
        - (math.log(DELTA) + math.log(order)) / (order - 1)
        for order in orders
    ]
    found = epsilon_of(noise, rate, steps, DELTA)
    assert found <= max(0.0, min(bounds)) * (1 + 1e-9)


def test_many_releases_without_sampling_are_one_with_less_noise() -> None:
    assert epsilon_of(5.0, steps=25) == pytest.approx(epsilon_of(1.0), rel=1e-12)


def test_epsilon_moves_the_way_it_must() -> None:
    base = epsilon_of(1.0, 0.1, 50)
    assert epsilon_of(1.1, 0.1, 50) < base
    assert epsilon_of(1.0, 0.09, 50) < base
    assert epsilon_of(1.0, 0.1, 49) < base
    assert epsilon_of(1.0, 0.1, 50, 2e-5) < base
    assert epsilon_of(0.099, 0.1) > epsilon_of(0.101, 0.1), "also where sampling stops to be counted"
    assert epsilon_of(0.0) == math.inf
    assert epsilon_of(1e-300) > 1e300
    assert 0 < epsilon_of(1e6) < 1e-3
    assert epsilon_of(1.0, sampling_rate=1e-9) < 0.05 * epsilon_of(1.0)


# (epsilon, sampling rate, steps): get_noise_multiplier of Opacus 1.6.0, accountant "rdp", tolerance 0.001 epsilon.
OPACUS_NOISE = {
    (1.0, 1.0, 1): 4.04541,
    (10.0, 1.0, 1): 0.52960,
    (1.0, 0.05, 600): 5.08301,
    (10.0, 0.05, 600): 0.95459,
    (5.0, 0.01, 2000): 0.79163,
    (10.0, 0.05, 800): 1.03149,
    (1.0, 0.05, 800): 5.83496,
}


@pytest.mark.parametrize("setting", OPACUS_NOISE, ids=str)
def test_noise_is_that_of_opacus(setting: tuple[float, float, int]) -> None:
    epsilon, rate, steps = setting
    assert noise_multiplier_for(epsilon, rate, steps) == pytest.approx(OPACUS_NOISE[setting], rel=2e-3)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(epsilon=st.floats(0.01, 200), steps=st.integers(1, 10_000), rate=st.sampled_from([1.0, 0.05]))
def test_noise_is_just_enough(epsilon: float, steps: int, rate: float) -> None:
    noise = noise_multiplier_for(epsilon, rate, steps)
    assert epsilon_of(noise, rate, steps) <= epsilon < epsilon_of(noise * 0.9999, rate, steps)


def test_epsilons_beyond_sense() -> None:
    assert noise_multiplier_for(1e12) < 1e-3
    with pytest.raises(ValueError, match=r"epsilon: expected one that noise can reach in 3 steps.*larger epsilon"):
        noise_multiplier_for(1e-7, steps=3)


def test_everything_wrong_is_told_at_once() -> None:
    bad = {"noise_multiplier": -1.0, "sampling_rate": 1.5, "steps": 0, "delta": 0.0}
    with pytest.raises(ValueError, match=r"(?s)epsilon_of.*noise_multiplier.*sampling_rate.*steps.*delta"):
        epsilon_of(**bad)
    with pytest.raises(ValueError, match=r"(?s)noise_multiplier_for.*epsilon.*sampling_rate"):
        noise_multiplier_for(0.0, sampling_rate=0.0)
    assert problems_of(steps=True) == ["steps: expected a whole number of at least 1, got True"]
    assert problems_of() == []
