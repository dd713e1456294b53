"""The least number of hidden units for a batch: proposition 2 of "What Can We Learn from Gradients?".

The numbers are those of the paper's count of equations and unknowns for 1024 inputs and 10 classes, to three
decimals; they need no data and no attack, so every scale computes the same.
"""

from __future__ import annotations

import math
from types import MappingProxyType

from leakscope.limits import hidden_units_bound
from leakscope.papers.base import PaperTable, Progress, Row, verdict

FEATURES, CLASSES = 1024, 10
#: Batch size and the bound to three decimals.
BOUNDS = MappingProxyType({1: 0.99, 2: 1.992, 4: 4.002, 8: 8.045, 16: 16.226})


def run(scale: str, seed: int, progress: Progress | None = None) -> list[Row]:
    """All bounds; a bound matches if it rounds to the one given."""
    rows = []
    for number, (batch, published) in enumerate(BOUNDS.items(), start=1):
        bound = hidden_units_bound(batch, FEATURES, CLASSES)
        rows.append(
            Row(
                setting=f"batch {batch}, {FEATURES} inputs, {CLASSES} classes",
                measure="least hidden units",
                published=published,
                measured=bound,
                interval=(bound, bound),
                count=1,
                verdict=verdict(published, bound, (bound, bound), tolerance=0.0005),
                note=f"exact; that is {math.ceil(bound)} whole units, about {batch} by the rule of thumb",
            )
        )
        if progress is not None:
            progress(number, len(BOUNDS), bound)
    return rows


_EXACT = "all five bounds, exact, at once"
TABLE = PaperTable(
    name="gradients/counting",
    title="Least hidden units by batch size",
    summary="proposition 2: how many hidden units give a batch away, by counting equations",
    paper="Qian, Hansen, What Can We Learn from Gradients?, 2021",
    scales=MappingProxyType({"smoke": _EXACT, "small": _EXACT, "paper": _EXACT}),
    run=run,
)
