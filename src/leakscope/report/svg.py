"""Small charts as inline SVG: places are computed here, ``charts.svg.j2`` draws them and escapes every text."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

from markupsafe import Markup

from leakscope.report.template import environment
from leakscope.results.setting_verdict import SettingVerdict

MAX_POINTS = 160
#: Height of a line of a label, and how many characters of one fit above a row of a narrow chart.
LINE, _ABOVE = 16, 40
#: Beyond this PSNR pictures look the same; an exact copy must not squeeze everything else into a corner.
MAX_DECIBEL = 60.0
NOTHING = "nothing finite"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a plot, with one place on it marked if it has one; NaN where there is nothing to draw."""

    name: str
    points: tuple[tuple[float, float], ...]
    mark: tuple[float, float] | None = None
    mark_name: str = ""

    @property
    def sentence(self) -> str:
        """What it shows, in words.

        >>> Line(name="batch 0", points=((0.0, 0.5), (1.0, 0.75)), mark_name="0.800 at 0.70").sentence
        'batch 0: from 0.5 to 0.75, highest 0.800 at 0.70.'
        """
        values = [b for _, b in self.points if math.isfinite(b)]
        text = f"from {values[0]:.3g} to {values[-1]:.3g}" if values else "nothing finite"
        return f"{self.name}: {text}" + (f", highest {self.mark_name}." if self.mark_name else ".")


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers that span ``low`` to ``high``.

    >>> ticks(0, 37)
    [0.0, 10.0, 20.0, 30.0]
    >>> ticks(0.2, 0.9, 4)
    [0.2, 0.4, 0.6, 0.8]
    """
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low] if math.isfinite(low) else []
    raw = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = min((m * power for m in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / raw)))
    return [round(n * step, 12) for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two positive values, at most five; 1, 2 and 5 of each power where there are few.

    >>> log_ticks(0.004, 2.0)
    [0.01, 0.1, 1.0]
    >>> log_ticks(0.03, 0.3)
    [0.05, 0.1, 0.2]
    """
    steps = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    powers = [10.0**n for n in steps if low <= 10.0**n <= high]
    if len(powers) < 2:
        finer = (float(f"{m}e{n}") for n in steps for m in (1, 2, 5))
        return [value for value in finer if low <= value <= high]
    return powers[:: math.ceil(len(powers) / 5)]


def thin(values: Sequence[float], limit: int = MAX_POINTS) -> list[tuple[int, float]]:
    """At most ``limit`` (step, value) pairs, evenly spread, with the first and the last.

    >>> thin([5.0, 4.0, 3.0, 2.0, 1.0], 3)
    [(0, 5.0), (2, 3.0), (4, 1.0)]
    """
    count = len(values)
    if count <= limit:
        return list(enumerate(values))
    return [(n, values[n]) for n in (round(k * (count - 1) / (limit - 1)) for k in range(limit))]


def colour(place: int) -> str:
    """Name the style sheet's class for the line at this place; colours come back after six.

    >>> colour(0), colour(7)
    ('c0', 'c1')
    """
    return f"c{place % 6}"


@dataclass(frozen=True)
class Scale:
    """Where the values of an axis are drawn; those beyond an end of it stand at its edge."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        share = (min(max(value, self.low), self.high) - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    @property
    def middle(self) -> float:
        return (self.start + self.end) / 2


def dot_plot(
    settings: Sequence[SettingVerdict], *, policy: float, identity: str, width: int, label_width: int
) -> Markup:
    """Draw mean, interval, examples, baseline and policy; ``label_width`` 0 puts labels above the rows."""
    room = max(8, (label_width - 20) // 8) if label_width else _ABOVE
    labels = [_wrapped(label_of(setting), room) for setting in settings]
    left, pitch, top = (label_width, 34, 26) if label_width else (14, 50, 26)
    ends = list(accumulate((pitch + LINE * (len(label) - 1) for label in labels), initial=top))
    middles = [(start + end) / 2 if label_width else end - 14.0 for start, end in pairwise(ends)]
    values = [v for s in settings for v in (s.mean_psnr, *s.interval, s.baseline_psnr, *(e.psnr for e in s.examples))]
    shown = [v for v in (policy, *values) if settings and math.isfinite(v)]
    low = min([0.0, *shown])
    high = max([25.0, *(min(v + 2, max(MAX_DECIBEL, policy + 5)) for v in shown)])
    beyond = f" ({high:g} and more at the edge)" if any(v > high for v in shown) else ""
    bottom, x = ends[-1], Scale(low, high, left, width - 22)
    marks = ticks(low, high, 8 if label_width else 4)
    chart = {
        **{"identity": identity, "width": width, "height": bottom + 42},
        "title": "PSNR of the strongest attack for each setting",
        "ticks": [(x(mark), bottom + 16, f"{mark:g}", "middle") for mark in marks],
        "axes": [(x.middle, bottom + 34, f"PSNR, dB{beyond}", "middle")],
    }
    facts = {"marks": [(x(mark), top) for mark in marks], "bottom": bottom, "policy": policy, "x": x}
    lines = list(zip(settings, labels, middles, strict=True))
    return drawn("dots", chart, rows=lines, label_width=label_width, height=LINE, **facts)


def label_of(setting: SettingVerdict) -> str:
    return f"{setting.name} {setting.defense_short} · {setting.protocol_short}"


def _wrapped(label: str, room: int) -> list[str]:
    """A label in lines of at most so many characters; nothing of it is left out.

    >>> _wrapped("S2 GradientNoise(sigma=0.01) · FedSGD", 30)
    ['S2 GradientNoise(sigma=0.01) ·', 'FedSGD']
    """
    return textwrap.wrap(label, room, break_on_hyphens=False) or [""]


def curve_plot(curves: Sequence[tuple[str, Sequence[float]]], *, title: str, identity: str) -> Markup:
    """Objective against recorded step, one line a curve; logarithmic where every value is positive."""
    width, height, left, right, top, bottom = 360, 200, 52, 350, 10, 160
    thinned = [(name, [(n, v) for n, v in thin(values) if math.isfinite(v)]) for name, values in curves]
    values = [v for _, points in thinned for _, v in points]
    logarithmic = min(values, default=0.0) > 0
    scale = "logarithmic" if logarithmic else "linear"
    described = f"{len(curves)} curves on a {scale} scale."
    chart: dict[str, Any] = {"identity": identity, "width": width, "height": height, "title": title}
    if not values:
        return drawn("plot", {**chart, "description": described, "empty": NOTHING}, curves=())
    place = math.log10 if logarithmic else float
    low, high = place(min(values)), place(max(values))
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    last = max(n for _, points in thinned for n, _ in points) or 1
    x, y = Scale(0, last, left, right), Scale(low, high, bottom, top)
    marks = log_ticks(min(values), max(values)) if logarithmic else ticks(low, high, 3)
    chart |= {
        "description": f"{described} Values from {min(values):.3g} to {max(values):.3g}.",
        "x": x,
        "levels": [(y(place(mark)), f"{mark:.3g}") for mark in marks],
        "ticks": [(left, bottom + 16, 0, ""), (right, bottom + 16, last, "end")],
        "axes": [(f"{x.middle:.0f}", height - 6, f"recorded step · {scale} scale", "middle")],
    }
    lines = [
        (
            *(colour(number), name + (f", ends at {points[-1][1]:.3g}" if points else "")),
            *([(x(n), y(place(v))) for n, v in points], ()),
        )
        for number, (name, points) in enumerate(thinned)
    ]
    return drawn("plot", chart, curves=lines)


def line_plot(
    lines: Sequence[Line],
    *,
    title: str,
    identity: str,
    x_label: str,
    y_label: str,
    x_range: tuple[float, float],
    floors: Sequence[float],
    ceiling: float = 1.0,
    whole: bool = False,
) -> Markup:
    """Draw values from the first of the ``floors`` below them all to the ``ceiling``; ``whole``: only whole x ticks."""
    width, height, left, right, top, bottom = 360, 214, 44, 346, 28, 168
    finite = [[(a, b) for a, b in line.points if math.isfinite(a) and math.isfinite(b)] for line in lines]
    values = [b for points in finite for _, b in points]
    chart: dict[str, Any] = {"identity": identity, "width": width, "height": height, "title": title}
    chart["description"] = " ".join(line.sentence for line in lines)
    if not values:
        return drawn("plot", {**chart, "empty": NOTHING}, curves=())
    low = next((floor for floor in floors if floor <= min(values)), floors[-1])
    start, end = x_range if x_range[0] < x_range[1] else (x_range[0] - 0.5, x_range[0] + 0.5)
    x, y = Scale(start, end, left, right), Scale(low, ceiling, bottom, top)
    steps = [tick for tick in ticks(start, end, 5) if not whole or tick == round(tick)]
    chart |= {
        "x": x,
        "levels": [(y(tick), f"{tick:g}") for tick in ticks(low, ceiling, 4)],
        "ticks": [(x(tick), bottom + 17, f"{tick:g}", "middle") for tick in steps],
        "axes": [(left - 30, 14, y_label, ""), (f"{x.middle:.0f}", height - 8, x_label, "middle")],
    }
    curves = []
    for place, (line, points) in enumerate(zip(lines, finite, strict=True)):
        # A line of one point is invisible, so it is marked itself.
        marked = [line.mark] if line.mark is not None else points if len(points) == 1 else []
        name = line.mark_name if len(lines) == 1 else ""
        marks = [(x(a), y(b), name, y(b) > y.middle) for a, b in marked if math.isfinite(a + b)]
        curves.append((colour(place), line.sentence, [(x(a), y(b)) for a, b in points], marks))
    return drawn("plot", chart, curves=curves)


def signal_pair(
    original: Sequence[float] | None, guess: Sequence[float] | None, *, title: str, identity: str
) -> Markup:
    """A signal in [0, 1] and an attack's guess of it, one above the other's trace."""
    width, height, margin = 200, 90, 6
    names = [n for n, v in (("original", original), ("attack's guess", guess)) if v is not None]
    described = "Lines of the " + " and the ".join(names) + " over [0, 1]."
    y, lines = Scale(0.0, 1.0, height - margin, margin), []
    for name, values in (("original", original), ("guess", guess)):
        if values is not None:
            x = Scale(0, max(1, len(values) - 1), margin, width - margin)
            lines.append((name, [(x(n), y(v)) for n, v in thin(values) if math.isfinite(v)]))
    chart = {"identity": identity, "width": width, "height": height, "title": title, "description": described}
    return drawn("signals", chart, lines=lines)


def drawn(macro: str, chart: Mapping[str, Any], **facts: Any) -> Markup:
    """Draw a chart by a macro of the templates; what all charts have in common is in ``chart``."""
    blank = {"levels": (), "ticks": (), "axes": (), "empty": ""}
    return Markup(getattr(_templates(), macro)({**blank, **chart}, **facts))


@cache
def _templates() -> Any:
    page = environment(autoescape=True)
    page.filters["letters"] = _letters
    return page.get_template("charts.svg.j2").module


def _letters(text: str) -> str:
    """A class name out of an outcome; only letters survive, so nothing can leave the attribute.

    >>> _letters('within policy'), _letters('">x')
    ('withinpolicy', 'x')
    """
    return "".join(c for c in text if c.isascii() and c.isalpha())
