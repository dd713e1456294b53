"""The plots of ``scaling.py``: seconds and megabytes against an axis, both logarithmic. Reads measured rows only."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from leakscope.report.svg import log_ticks
from scaling_table import AXES, Axis

Row = Mapping[str, Any]

WIDTH, HEIGHT, TOP, BOTTOM = 640, 230, 30, 180
#: Left and right end of each panel's axis.
PANELS = ((56, 298), (380, 622))
MEASURED = {"seconds": "seconds", "megabytes": "megabytes"}
#: A file by itself has no page's style sheet, and is shown on light and on dark pages.
STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#5d6b7e}.grid{stroke:#8794a6;stroke-opacity:.35}"
    "polyline{fill:none;stroke:#2f6fde;stroke-width:2}circle{fill:#2f6fde}"
    "@media(prefers-color-scheme:dark){text{fill:#9fadbf}polyline{stroke:#86aefc}circle{fill:#86aefc}}"
)


def plot(name: str, rows: Sequence[Row]) -> str:
    """One picture of an axis, as a file's text."""
    axis, points = AXES[name], [row for row in rows if row["axis"] == name]
    facts = f"From {points[0]['point']} to {points[-1]['point']} {axis.point}. {axis.exponents(points)}"
    panels = "".join(
        _panel(axis, [(float(row["point"]), float(row[key])) for row in points], title, ends)
        for (key, title), ends in zip(MEASURED.items(), PANELS, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        f"<title>{escape(axis.title)}</title><desc>{escape(facts)}</desc><style>{STYLE}</style>{panels}</svg>\n"
    )


def _panel(axis: Axis, points: Sequence[tuple[float, float]], title: str, ends: tuple[int, int]) -> str:
    xs, ys = zip(*points, strict=True)
    left, right = ends
    x, y = _place(min(xs), max(xs), left, right), _place(min(ys), max(ys), BOTTOM, TOP)
    parts = [_text(left - 40, 16, title)]
    for tick in log_ticks(min(ys), max(ys)):
        parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>')
        parts.append(_text(left - 6, y(tick) + 4, f"{tick:g}", "end"))
    # Every measured point is written below the axis, unless that would overlap the one before it.
    written = -math.inf
    for value in xs:
        if x(value) - written > 26:
            written = x(value)
            parts.append(_text(written, BOTTOM + 18, f"{value:g}", "middle"))
    places = [(x(a), y(b)) for a, b in points]
    parts.append('<polyline points="' + " ".join(f"{a:.1f},{b:.1f}" for a, b in places) + '"/>')
    parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3.5"/>' for a, b in places]
    parts.append(_text((left + right) / 2, BOTTOM + 40, axis.point, "middle"))
    return "".join(parts)


def _place(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Where a value is drawn, by its logarithm."""
    span = math.log(high / low) or 1.0
    return lambda value: start + math.log(value / low) / span * (end - start)


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'
