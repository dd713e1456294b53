"""Published orders of the reconstruction error under seven defences.

Liu et al., "Data Reconstruction Attacks and Defenses: A Systematic Evaluation", table 1: for a network with one hidden
layer of m random units on d features and a batch of B examples, what an attack reaches (upper) and what no attack can
beat (lower). Orders only: constants and logarithms are dropped, so that a number below compares defences and sizes with
each other and is no error that would be measured. For a floor with constants see :mod:`leakscope.limits.cramer_rao`.

``pruned`` (p_hat) is the share of the squared Jacobian that lies in the pruned entries. The paper's main text and
appendix disagree on which part the hat means, and print (1 - p_hat)^m for (1 - p_hat) m; meant is what is used here.
For dropout the text says that units are dropped with probability 1 - p but shrinks the width to (1 - p) m: p is the
probability that a unit is dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: What the table takes for granted.
CONDITIONS = (
    "one hidden layer with random Gaussian weights that the adversary knows",
    "every example has norm 1",
    "the examples are linearly independent, with smallest singular value pi > 0",
    "B is at most of the order d^(1/4)",
    "m is at least of the order B^2 d / pi^2, up to constants of the activation",
)


@dataclass(frozen=True, kw_only=True)
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
    """The seven rows of the table, in its order.

    ``sigma`` is the noise that the observed gradient has anyhow, without which lower orders are zero; ``noise``
    (sigma_0) what the defence adds; ``clip`` (C) and ``gradient_norm`` (|G|) go together; ``dropout`` (p) and
    ``pruned`` (p_hat) are shares.

    >>> rows = {row.defense: row for row in order_bounds(batch=4, features=100, width=400, sigma=0.1, clip=2.0,
    ...                                                  gradient_norm=6.0, pruned=0.75)}
    >>> rows["none"].upper, rows["none"].lower
    (2.0, 0.05)
    >>> [round(rows[name].lower, 6) for name in ("clipping", "pruning")], rows["pruning"].upper
    ([0.15, 0.1], None)
    """
    _check(batch, features, width, sigma, noise, clip, gradient_norm, dropout, pruned)
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
        Order(
            defense=name,
            upper=_times(above, scale),
            lower=_times(below, other),
            upper_formula=upper_formula,
            lower_formula=lower_formula,
        )
        for name, above, scale, below, other, upper_formula, lower_formula in rows
    )


def _times(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one * other


def _check(
    batch: int,
    features: int,
    width: int,
    sigma: float | None,
    noise: float | None,
    clip: float | None,
    gradient_norm: float | None,
    dropout: float | None,
    pruned: float | None,
) -> None:
    problems = []
    for name, count in (("batch", batch), ("features", features), ("width", width)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            problems.append(f"{name}: expected a whole number of at least 1, got {count!r}")
    for name, size in (("sigma", sigma), ("noise", noise), ("gradient_norm", gradient_norm)):
        if size is not None and not 0 <= size < math.inf:
            problems.append(f"{name}: expected a finite number of at least 0 or None, got {size}")
    if clip is not None and not 0 < clip < math.inf:
        problems.append(f"clip: expected a finite number above 0 or None, got {clip}")
    for name, share in (("dropout", dropout), ("pruned", pruned)):
        if share is not None and not 0 <= share < 1:
            problems.append(f"{name}: expected a share of at least 0 and below 1 or None, got {share}")
    if problems:
        raise ValueError("order_bounds:\n  - " + "\n  - ".join(problems))
