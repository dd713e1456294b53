"""The expected number of examples alone in their bin, against exact counts, simulation and published figures."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch

from leakscope.limits import alone_distribution, imprint_guarantee, published_count


def by_inclusion_and_exclusion(bins: int, examples: int) -> list[float]:
    """The same distribution in whole numbers, from factorial moments."""
    most = min(bins, examples)
    terms = [math.comb(bins, r) * math.perm(examples, r) * (bins - r) ** (examples - r) for r in range(most + 1)]
    ways = [
        sum((-1) ** (r - count) * math.comb(r, count) * terms[r] for r in range(count, most + 1))
        for count in range(examples + 1)
    ]
    return [float(Fraction(number, bins**examples)) for number in ways]


@pytest.mark.parametrize("bins, examples", [(1, 1), (1, 4), (3, 1), (2, 5), (7, 7), (128, 64), (100, 64), (16, 90)])
def test_agrees_with_whole_numbers(bins: int, examples: int) -> None:
    found = alone_distribution(bins, examples)
    assert found == pytest.approx(by_inclusion_and_exclusion(bins, examples), abs=1e-13)
    assert sum(found) == pytest.approx(1, abs=1e-12)
    mean = sum(count * chance for count, chance in enumerate(found))
    assert mean == pytest.approx(imprint_guarantee(bins, examples).expected, rel=1e-10)


def test_agrees_with_every_way_to_fill_few_bins() -> None:
    counts = [0] * 6
    for places in itertools.product(range(4), repeat=5):
        counts[sum(places.count(place) == 1 for place in range(4))] += 1
    assert alone_distribution(4, 5) == pytest.approx([count / 4**5 for count in counts], abs=1e-15)


def test_published_count_is_that_of_patterns_less_one_bin() -> None:
    """Every way to fill bins with examples that cannot be told apart, listed."""
    bins, examples = 4, 6
    patterns = [p for p in itertools.product(range(examples + 1), repeat=bins) if sum(p) == examples]
    mean = sum(pattern.count(1) for pattern in patterns) / len(patterns)
    assert published_count(bins, examples) == pytest.approx(mean - examples / bins)
    assert published_count(128, 64) == pytest.approx(28.17, abs=0.005)
    assert published_count(100, 64) == pytest.approx(23.35, abs=0.005)


def test_the_interval_holds_what_it_promises() -> None:
    guarantee = imprint_guarantee(128, 64)
    low, high = guarantee.interval
    draws = torch.Generator().manual_seed(0)
    counts = []
    for _ in range(2000):
        filled = torch.bincount(torch.randint(128, (64,), generator=draws), minlength=128)
        counts.append(int((filled == 1).sum()))
    inside = sum(low <= count <= high for count in counts) / len(counts)
    assert 0.94 <= inside <= 0.99
    assert sum(counts) / len(counts) == pytest.approx(guarantee.expected, abs=0.5)
    chances = alone_distribution(128, 64)
    assert sum(chances[:low]) <= 0.025 < sum(chances[: low + 1])
    assert sum(chances[high + 1 :]) <= 0.025 < sum(chances[high:])


def test_one_shot() -> None:
    assert imprint_guarantee(10, 1).one_shot == pytest.approx(0.1)
    assert imprint_guarantee(128, 64).one_shot == pytest.approx(64 / 128 * (127 / 128) ** 63)


@pytest.mark.parametrize(
    "bins, examples, confidence, words",
    [
        (0, 3, 0.95, "bins: expected a whole number of at least 1, got 0"),
        (3, 2.5, 0.95, "examples: expected a whole number"),
        (3, True, 0.95, "examples: expected a whole number"),
        (3, 10_000, 0.95, "expected at most 512"),
        (3, 3, 1.0, "confidence: expected a number between 0 and 1"),
    ],
)
def test_wrong_numbers_are_refused(bins: int, examples: int, confidence: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        imprint_guarantee(bins, examples, confidence)
