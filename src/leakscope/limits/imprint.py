"""How many examples an imprint leaves alone in their bin, before any update is seen.

n examples fall independently into k bins of equal mass, and S of them are alone. E[S] = n (1 - 1/k)^(n-1). The
distribution of S comes from dropping one example after the other: with o occupied bins, s of them with one example, the
next goes to an empty bin with probability (k-o)/k, to one of the s with s/k, to another occupied one with (o-s)/k. All
terms are positive, so that nothing is lost to rounding.

Fowl et al. (2022) count otherwise: they take every way to fill the bins with examples that cannot be told apart as
equally likely (as for bosons), and leave one bin out. That is n k (k-1) / ((n+k-1) (n+k-2)) - n/k, which is less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leakscope.contracts.checks import COUNT, is_whole
from leakscope.contracts.errors import UserError

#: Examples up to which the exact distribution is computed: seconds.
MAX_EXAMPLES = 512


@dataclass(frozen=True, kw_only=True)
class ImprintGuarantee:
    """What to expect of ``examples`` in ``bins`` of equal mass.

    ``expected`` examples are alone, with probability ``confidence`` at least ``interval[0]`` and at most
    ``interval[1]``; ``published`` is the paper's count. ``one_shot`` is the probability that a certain bin holds
    exactly one example.
    """

    bins: int
    examples: int
    expected: float
    published: float
    one_shot: float
    confidence: float
    interval: tuple[int, int]


def imprint_guarantee(bins: int, examples: int, confidence: float = 0.95) -> ImprintGuarantee:
    """How many of ``examples`` are alone among ``bins`` of equal mass.

    >>> found = imprint_guarantee(128, 64)
    >>> round(found.expected, 2), round(found.published, 2), round(found.one_shot, 3), found.interval
    (39.05, 28.17, 0.305, (30, 48))
    >>> found = imprint_guarantee(100, 64)
    >>> round(found.expected, 2), round(found.published, 2)
    (33.98, 23.35)
    """
    if not 0 < confidence < 1:
        raise UserError(f"confidence: expected a number between 0 and 1, got {confidence!r}")
    chances = alone_distribution(bins, examples)
    expected = examples * (1 - 1 / bins) ** (examples - 1)
    return ImprintGuarantee(
        bins=bins,
        examples=examples,
        expected=expected,
        published=published_count(bins, examples),
        one_shot=expected / bins,
        confidence=confidence,
        interval=_interval(chances, (1 - confidence) / 2),
    )


def alone_distribution(bins: int, examples: int) -> tuple[float, ...]:
    """The probability that exactly 0, 1, ..., n of n examples are alone in their bin.

    Two examples in two bins share one or are both alone:

    >>> alone_distribution(2, 2)
    (0.5, 0.0, 0.5)
    >>> round(sum(count * chance for count, chance in enumerate(alone_distribution(128, 64))), 2)
    39.05
    """
    _check(bins, examples)
    most = min(bins, examples)
    occupied = torch.arange(most + 1, dtype=torch.float64)[:, None]
    single = torch.arange(examples + 1, dtype=torch.float64)[None]
    chances = torch.zeros(most + 1, examples + 1, dtype=torch.float64)
    chances[0, 0] = 1.0
    for _ in range(examples):
        following = chances * ((occupied - single) / bins).clamp(min=0)
        following[1:, 1:] += (chances * ((bins - occupied) / bins))[:-1, :-1]
        following[:, :-1] += (chances * (single / bins))[:, 1:]
        chances = following
    return tuple(chances.sum(0).tolist())


def published_count(bins: int, examples: int) -> float:
    """The paper's expected number, in closed form.

    >>> round(published_count(128, 64), 2)
    28.17
    """
    _check(bins, examples)
    if bins == 1:
        return 0.0
    return examples * bins * (bins - 1) / ((examples + bins - 1) * (examples + bins - 2)) - examples / bins


def _interval(chances: tuple[float, ...], tail: float) -> tuple[int, int]:
    """The least and the greatest number that leave at most ``tail`` outside on either side."""
    below, low = 0.0, 0
    while below + chances[low] <= tail:
        below += chances[low]
        low += 1
    above, high = 0.0, len(chances) - 1
    while above + chances[high] <= tail:
        above += chances[high]
        high -= 1
    return low, high


def _check(bins: int, examples: int) -> None:
    for name, value in (("bins", bins), ("examples", examples)):
        if not is_whole(value):
            raise UserError(f"{name}: expected a whole number of at least 1, got {value!r}")
        COUNT.check(name, value)
    if examples > MAX_EXAMPLES:
        raise UserError(f"examples: expected at most {MAX_EXAMPLES}, for which it is computed, got {examples}")
