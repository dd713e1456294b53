"""Published orders of the reconstruction error under seven defences, and how many examples an imprint leaves alone.

Orders: Liu et al., "Data Reconstruction Attacks and Defenses: A Systematic Evaluation", table 1: for a network with one
hidden layer of m random units on d features and a batch of B examples, what an attack reaches (upper) and what no
attack can beat (lower). Constants and logarithms are dropped, so that a number compares defences and sizes with each
other. ``pruned`` (p_hat) is the share of the squared Jacobian that lies in the pruned entries. The paper's main text
and appendix disagree on which part the hat means, and print (1 - p_hat)^m for (1 - p_hat) m; meant is what is used
here. For dropout the text says that units are dropped with probability 1 - p but shrinks the width to (1 - p) m: p is
the probability that a unit is dropped. The table takes for granted: random Gaussian weights that the adversary knows;
examples of norm 1, linearly independent with smallest singular value pi > 0; B at most of the order d^(1/4); m at least
of the order B^2 d / pi^2, up to constants of the activation.

Imprint: n examples fall independently into k bins of equal mass, and S of them are alone. E[S] = n (1 - 1/k)^(n-1). The
distribution of S comes from dropping one example after the other: with o occupied bins, s of them with one example, the
next goes to an empty bin with probability (k-o)/k, to one of the s with s/k, to another occupied one with (o-s)/k. Fowl
et al. (2022) take every way to fill the bins with examples that cannot be told apart as equally likely (as for bosons),
and leave one bin out. That is n k (k-1) / ((n+k-1) (n+k-2)) - n/k, which is less.
"""

import itertools
import math
from dataclasses import dataclass

import torch

from leakscope.contracts.checks import COUNT, expected, is_whole, refuse, whole
from leakscope.contracts.errors import UserError


@dataclass(frozen=True)
class Order:
    """The orders for one defence; None where nothing is published (no formula) or something needed is not given."""

    defense: str
    upper: float | None
    lower: float | None
    upper_formula: str | None
    lower_formula: str


def order_bounds(
    *,
    batch: int,
    features: int,
    width: int,
    sigma: float | None = None,
    noise: float | None = None,
    clip: float | None = None,
    gradient_norm: float | None = None,
    dropout: float | None = None,
    pruned: float | None = None,
) -> tuple[Order, ...]:
    """Return the seven rows of the table, in its order.

    ``sigma`` is the noise that the observed gradient has anyhow, without which lower orders are zero; ``noise``
    (sigma_0) what the defence adds; ``clip`` is C, ``gradient_norm`` |G|, ``dropout`` p and ``pruned`` p_hat.

    >>> rows = {row.defense: row for row in order_bounds(batch=4, features=100, width=400, sigma=0.1, clip=2.0,
    ...                                                  gradient_norm=6.0, pruned=0.75)}
    >>> rows["none"].upper, rows["none"].lower
    (2.0, 0.05)
    >>> [round(rows[name].lower, 6) for name in ("clipping", "pruning")], rows["pruning"].upper
    ([0.15, 0.1], None)
    """
    sizes = {"sigma": sigma, "noise": noise, "gradient_norm": gradient_norm}
    shares = {"dropout": dropout, "pruned": pruned}
    problems = whole(batch=batch, features=features, width=width)
    problems += expected("a finite number of at least 0 or None", lambda a: a is None or 0 <= a < math.inf, **sizes)
    problems += expected("a finite number above 0 or None", lambda a: a is None or 0 < a < math.inf, clip=clip)
    problems += expected("a share of at least 0 and below 1 or None", lambda a: a is None or 0 <= a < 1, **shares)
    refuse("order_bounds", problems)
    root = math.sqrt(features / width)
    factor = None if clip is None or gradient_norm is None else max(1.0, gradient_norm / clip)
    thinner = None if dropout is None else math.sqrt(features / ((1 - dropout) * width))
    sparser = None if pruned is None else math.sqrt(features / ((1 - pruned) * width))
    spread = None if noise is None or factor is None else batch + noise * factor
    plain, beneath = "B sqrt(d/m)", "sigma sqrt(d/m)"
    clipped = "sigma max(1, |G|/C) sqrt(d/m)"
    rows = (
        ("none", batch, root, sigma, root, plain, beneath),
        ("local aggregation", batch, root, sigma, root, plain, beneath),
        ("noise", None if noise is None else batch + noise, root, sigma, root, "(B + sigma_0) sqrt(d/m)", beneath),
        ("clipping", batch, root, _times(sigma, factor), root, plain, clipped),
        ("DP-SGD", spread, root, _times(sigma, factor), root, "(B + sigma_0 max(1, |G|/C)) sqrt(d/m)", clipped),
        ("dropout", batch, thinner, sigma, thinner, "B sqrt(d/((1-p) m))", "sigma sqrt(d/((1-p) m))"),
        ("pruning", None, None, sigma, sparser, None, "sigma sqrt(d/((1-p_hat) m))"),
    )
    return tuple(
        Order(name, _times(above, scale), _times(below, other), upper_formula, lower_formula)
        for name, above, scale, below, other, upper_formula, lower_formula in rows
    )


def _times(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other


MAX_EXAMPLES = 512  # up to which the exact distribution takes seconds


@dataclass(frozen=True, kw_only=True)
class ImprintGuarantee:
    """What to expect of ``examples`` in ``bins`` of equal mass.

    ``expected`` examples are alone, with probability ``confidence`` within ``interval``; ``published`` is the paper's
    count, ``one_shot`` the probability that a certain bin holds exactly one example.
    """

    bins: int
    examples: int
    expected: float
    published: float
    one_shot: float
    confidence: float
    interval: tuple[int, int]


def imprint_guarantee(bins: int, examples: int, confidence: float = 0.95) -> ImprintGuarantee:
    """Say how many of ``examples`` are alone among ``bins`` of equal mass.

    >>> found = imprint_guarantee(128, 64)
    >>> round(found.expected, 2), round(found.published, 2), round(found.one_shot, 3), found.interval
    (39.05, 28.17, 0.305, (30, 48))
    >>> found = imprint_guarantee(100, 64)
    >>> round(found.expected, 2), round(found.published, 2)
    (33.98, 23.35)
    """
    if not 0 < confidence < 1:
        raise UserError(f"confidence: expected a number between 0 and 1, got {confidence!r}")
    chances = alone_distribution(bins, examples)  # checks both
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
    """Return the probability that exactly 0, 1, ..., n of n examples are alone in their bin.

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
    """Return the paper's expected number, in closed form.

    >>> round(published_count(128, 64), 2)
    28.17
    """
    _check(bins, examples)
    if bins == 1:
        return 0.0
    return examples * bins * (bins - 1) / ((examples + bins - 1) * (examples + bins - 2)) - examples / bins


def _interval(chances: tuple[float, ...], tail: float) -> tuple[int, int]:
    """Return the least and the greatest number that leave at most ``tail`` outside on either side."""
    sums = itertools.accumulate(chances), itertools.accumulate(reversed(chances))
    low, above = (next(place for place, total in enumerate(side) if total > tail) for side in sums)
    return low, len(chances) - 1 - above


def _check(bins: int, examples: int) -> None:
    for name, value in (("bins", bins), ("examples", examples)):
        if not is_whole(value):
            raise UserError(f"{name}: expected a whole number of at least 1, got {value!r}")
        COUNT.check(name, value)
    if examples > MAX_EXAMPLES:
        raise UserError(f"examples: expected at most {MAX_EXAMPLES}, for which it is computed, got {examples}")
