"""The page of a reproduced table: one self-contained HTML file with its rows, curves and pictures.

The room of the papers comes after this one, so a reproduction is read here by the names of its fields alone.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from leakscope.report import words
from leakscope.report.pictures import channel_note, draw
from leakscope.report.svg import colour, curve_plot
from leakscope.report.template import fill, write_page

#: A curve is drawn as its mean over so large a share of its steps, for the loss of single batches is ragged.
SMOOTHED = 0.02
_PRIVATE = (
    "The pictures show private data, so they are left out of this page. "
    "Run leakscope reproduce again with --pictures to show them."
)
_HIDDEN = "Pictures were left out on request."


def render_reproduction(result: Any, pictures: bool | None = None) -> str:
    """The HTML page of a :class:`leakscope.papers.Reproduction`.

    ``pictures`` None shows those that are not private, True shows all, False none.
    """
    count = Counter(row.verdict for row in result.rows)
    verdicts = [name for name in ("matches", "above", "below", "measured", "not run") if count[name]]
    return fill(
        "reproduction.html.j2",
        {
            "title": result.title,
            "name": result.name,
            "paper": result.paper,
            "scale": result.scale,
            "seed": result.seed,
            "seconds": words.duration(result.seconds),
            "verdicts": ", ".join(f"{count[name]} {name}" for name in verdicts),
            "lines": [_line(row) for row in result.rows],
            "charts": [_chart(curves, f"curves{n}") for n, curves in enumerate(result.curves)],
            "grids": [_grid(grid, pictures, f"grid{n}") for n, grid in enumerate(result.pictures)],
        },
    )


def write_reproduction(result: Any, path: str | os.PathLike[str], pictures: bool | None = None) -> Path:
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


def _line(row: Any) -> dict[str, Any]:
    low, high = row.interval if row.interval is not None else (None, None)
    return {
        "setting": row.setting,
        "measure": row.measure,
        "published": figure(row.published),
        "measured": figure(row.measured),
        "interval": f"{figure(low)} to {figure(high)}" if row.count > 1 and row.interval is not None else "",
        "count": row.count or words.DASH,
        "verdict": row.verdict,
        "tone": {"matches": "done", "not run": "refused"}.get(row.verdict, "none"),
        "note": row.note,
    }


def figure(value: float | None) -> str:
    """A number of any size in four digits.

    >>> figure(12.3456), figure(-0.5), figure(5147994882048.0), figure(None)
    ('12.35', '−0.5', '5.148e+12', '–')
    """
    return words.DASH if value is None or math.isnan(value) else f"{value:.4g}".replace("-", "−")


def _chart(curves: Any, identity: str) -> dict[str, Any]:
    window = max([1, *(round(SMOOTHED * len(values)) for values in curves.lines.values())])
    drawn = [(str(name), smooth(values, window)) for name, values in curves.lines.items()]
    axes = f"{curves.y_label} by {curves.x_label}"
    return {
        "title": curves.title,
        "axes": axes if window == 1 else f"{axes}, each point the mean of {window}",
        "drawing": curve_plot(drawn, title=curves.title, identity=identity),
        "legend": [
            {"name": name, "colour": colour(number), "end": figure(values[-1] if values else None)}
            for number, (name, values) in enumerate(drawn)
        ],
    }


def _grid(grid: Any, pictures: bool | None, identity: str) -> dict[str, Any]:
    if not _allowed(grid, pictures):
        return {"title": grid.title, "message": _HIDDEN if pictures is False else _PRIVATE, "cells": [], "note": ""}
    cells = []
    triples = zip(grid.originals, grid.recovered, grid.captions, strict=True)
    for number, (original, recovered, caption) in enumerate(triples):
        cells.append(
            {
                "original": draw(original, alt=f"original of sample {number}", identity=f"{identity}-o{number}"),
                "recovered": draw(recovered, alt=f"recovered sample {number}", identity=f"{identity}-r{number}"),
                "caption": caption,
            }
        )
    return {"title": grid.title, "message": "", "cells": cells, "note": channel_note(grid.originals.shape[1:]) or ""}


def _allowed(grid: Any, pictures: bool | None) -> bool:
    return not grid.private if pictures is None else pictures
