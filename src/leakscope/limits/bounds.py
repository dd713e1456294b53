"""Published orders of the reconstruction error under seven defences.

Liu et al., "Data Reconstruction Attacks and Defenses: A Systematic Evaluation", table 1: for a network with one hidden
layer of m random units on d features and a batch of B examples, what an attack reaches (upper) and what no attack can
beat (lower). Orders only: constants and logarithms are dropped, so that a number below compares defences and sizes with
each other and is no error that would be measured. For a floor with constants see :mod:`leakscope.limits.cramer_rao`.

``pruned`` (p_hat) is the share of the squared Jacobian that lies in the pruned entries. The paper's main text and
appendix disagree on which part the hat means, and print (1 - p_hat)^m for (1 - p_hat) m; meant is what is used here.
For dropout the text says that units are dropped with probability 1 - p but shrinks the width to (1 - p) m: p is the
probability that a unit is dropped.

The table takes for granted: one hidden layer with random Gaussian weights that the adversary knows; examples of norm 1,
linearly independent with smallest singular value pi > 0; B at most of the order d^(1/4); m at least of the order
B^2 d / pi^2, up to constants of the activation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from leakscope.contracts.checks import expected, refuse, whole


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
