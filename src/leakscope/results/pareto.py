"""Which settings are worth choosing from: those that no other beats in leakage and utility together."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pareto_front(points: Sequence[tuple[float, float]], leakage: float = 0.0, utility: float = 0.0) -> list[bool]:
    """Which of the points (leakage, utility) no other dominates; what is not finite is never on the front.

    One dominates another if it is better by more than the tolerance in one and no worse by more than it in the other.
    That relation has no cycles, so that some point always remains.

    >>> pareto_front([(10.0, 0.9), (20.0, 0.8), (20.0, 0.95), (5.0, 0.1), (math.nan, 1.0)])
    [True, False, True, True, False]
    >>> pareto_front([(10.0, 0.90), (9.5, 0.91)]), pareto_front([(10.0, 0.90), (9.5, 0.91)], leakage=1.0, utility=0.02)
    ([False, True], [True, True])
    """
    return [
        all(map(math.isfinite, point)) and not any(dominates(other, point, leakage, utility) for other in points)
        for point in points
    ]


def dominates(one: tuple[float, float], other: tuple[float, float], leakage: float = 0.0, utility: float = 0.0) -> bool:
    """Whether ``one`` (leakage, utility) is better than ``other``, both told apart from these tolerances on.

    >>> dominates((10.0, 0.9), (20.0, 0.9)), dominates((10.0, 0.9), (10.5, 0.9), leakage=1.0)
    (True, False)
    """
    if not all(map(math.isfinite, (*one, *other))):
        return False
    less, more = other[0] - one[0], one[1] - other[1]
    return less >= -leakage and more >= -utility and (less > leakage or more > utility)
