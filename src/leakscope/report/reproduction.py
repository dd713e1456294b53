"""The page of a reproduced table. Papers may not be imported here, so a reproduction is read by its fields alone."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from leakscope.report import words
from leakscope.report.pictures import channel_note, draw
from leakscope.report.svg import colour, curve_plot
from leakscope.report.template import FileName, fill, write_page

#: A curve is drawn as its mean over so large a share of its steps, for the loss of single batches is ragged.
SMOOTHED = 0.02


def render_reproduction(result: Any, pictures: bool | None = None) -> str:
    """The page of a :class:`leakscope.papers.Reproduction`; ``pictures`` None: those not private, True: all."""
    count = Counter(row.verdict for row in result.rows)
    known = ("matches", "above", "below", "too few to tell", "measured", "not run")
    context = {
        "result": result,
        "seconds": words.duration(result.seconds),
        "provenance": [*result.versions.items(), *result.machine.items()],
        "verdicts": ", ".join(f"{count[name]} {name}" for name in known if count[name]),
        "charts": [_chart(curves, f"curves{n}") for n, curves in enumerate(result.curves)],
        "grids": [_grid(grid, pictures, f"grid{n}") for n, grid in enumerate(result.pictures)],
    }
    return fill("reproduction.html.j2", context)


def write_reproduction(result: Any, path: FileName, pictures: bool | None = None) -> Path:
    """Write the page of a reproduced table to ``path``."""
    return write_page(path, render_reproduction(result, pictures))


def smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and the ``window`` - 1 before it, as far as there are so many.

    >>> smooth([4.0, 2.0, 3.0, 1.0], 2)
    [4.0, 3.0, 2.5, 2.0]
    """
    if not all(math.isfinite(value) for value in values):
        return list(values)  # one of them would spoil all that follow
    sums = [0.0, *accumulate(values)]
    return [(sums[n] - sums[max(0, n - window)]) / min(n, window) for n in range(1, len(sums))]


def _chart(curves: Any, identity: str) -> dict[str, Any]:
    window = max([1, *(round(SMOOTHED * len(values)) for values in curves.lines.values())])
    drawn = [(str(name), smooth(values, window)) for name, values in curves.lines.items()]
    axes = f"{curves.y_label} by {curves.x_label}"
    return {
        "title": curves.title,
        "axes": axes if window == 1 else f"{axes}, each point the mean of {window}",
        "drawing": curve_plot(drawn, title=curves.title, identity=identity),
        "legend": [(name, colour(n), values[-1] if values else None) for n, (name, values) in enumerate(drawn)],
    }


def _grid(grid: Any, pictures: bool | None, identity: str) -> dict[str, Any]:
    if grid.private if pictures is None else not pictures:
        why = "reproduced-hidden" if pictures is False else "reproduced-private"
        return {"title": grid.title, "message": words.TEXTS["pictures"][why]}
    originals, guesses = (
        [draw(value, alt=f"{what} sample {n}", identity=f"{identity}-{what[0]}{n}") for n, value in enumerate(values)]
        for what, values in (("original of", grid.originals), ("attack's guess of", grid.recovered))
    )
    cells = list(zip(originals, guesses, grid.captions, strict=True))
    return {"title": grid.title, "message": "", "cells": cells, "note": channel_note(grid.originals.shape[1:])}
