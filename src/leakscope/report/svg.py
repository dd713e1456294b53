"""Small charts as inline SVG; every text is escaped here, and every chart has a description for screen readers."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from markupsafe import Markup, escape

MAX_POINTS = 160
#: Height of a line of a label, and how many characters of one fit above a row of a narrow chart.
LINE, _ABOVE = 16, 40
#: Beyond this PSNR pictures look the same; an exact copy must not squeeze everything else into a corner.
MAX_DECIBEL = 60.0


@dataclass(frozen=True, kw_only=True)
class DotRow:
    """One line of the dot plot; NaN where there is nothing to draw."""

    label: str
    outcome: str
    value: float
    low: float
    high: float
    baseline: float
    points: tuple[float, ...] = ()

    @property
    def sentence(self) -> str:
        """What it shows, in words.

        >>> nan = float("nan")
        >>> DotRow(label="S1", outcome="leaks", value=30.25, low=28.0, high=32.0, baseline=nan).sentence
        'S1: leaks, mean 30.2 dB, interval 28.0 to 32.0 dB.'
        """
        words = f"{self.label}: {self.outcome}"
        words += f", mean {self.value:.1f} dB" if math.isfinite(self.value) else ", no finite mean"
        if math.isfinite(self.low) and math.isfinite(self.high):
            words += f", interval {self.low:.1f} to {self.high:.1f} dB"
        if math.isfinite(self.baseline):
            words += f", zero-information baseline {self.baseline:.1f} dB"
        return words + "."


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


def dot_plot(rows: Sequence[DotRow], *, policy: float, identity: str, width: int, label_width: int) -> Markup:
    """Draw mean, interval, examples, baseline and policy; ``label_width`` 0 puts labels above the rows."""
    room = max(8, (label_width - 20) // 8) if label_width else _ABOVE
    labels = [_wrapped(row.label, room) for row in rows]
    left, pitch, top = (label_width, 34, 26) if label_width else (14, 50, 26)
    ends = list(accumulate((pitch + LINE * (len(label) - 1) for label in labels), initial=top))
    shown = [v for r in rows for v in (r.value, r.low, r.high, r.baseline, policy, *r.points) if math.isfinite(v)]
    low = min([0.0, *shown])
    high = max([25.0, *(min(v + 2, max(MAX_DECIBEL, policy + 5)) for v in shown)])
    beyond = f" ({high:g} and more at the edge)" if any(v > high for v in shown) else ""
    bottom, x = ends[-1], Scale(low, high, left, width - 22)
    allowed = [f"The policy allows less than {policy:g} dB."] if math.isfinite(policy) else []
    described = " ".join([*allowed, *(row.sentence for row in rows)])
    out = [opening(identity, width, bottom + 42, "PSNR of the strongest attack for each setting", described)]
    for tick in ticks(low, high, 8 if label_width else 4):
        at = x(tick)
        out += [line_at("grid", at, at, top, bottom), text_at("tick", at, bottom + 16, f"{tick:g}", "middle")]
    out.append(text_at("axis", x.middle, bottom + 34, f"PSNR, dB{beyond}", "middle"))
    if math.isfinite(policy):
        # The label turns to the other side where it would run out of the chart.
        anchor, shift = ("start", -3) if x(policy) < width * 0.6 else ("end", 1)
        out.append(line_at("policy", x(policy), x(policy), top - 6, bottom))
        out.append(text_at("policy-label", x(policy) + shift, top - 11, f"policy {policy:g} dB", anchor))
    for row, label, (start, end) in zip(rows, labels, pairwise(ends), strict=True):
        out.append(_dot_row(row, label, x, (start + end) / 2 if label_width else end - 14.0, label_width))
    return Markup("".join(out) + "</svg>")


def _wrapped(label: str, room: int) -> list[str]:
    """A label in lines of at most so many characters; nothing of it is left out.

    >>> _wrapped("S2 GradientNoise(sigma=0.01) · FedSGD", 30)
    ['S2 GradientNoise(sigma=0.01) ·', 'FedSGD']
    """
    return textwrap.wrap(label, room, break_on_hyphens=False) or [""]


def _dot_row(row: DotRow, label: Sequence[str], x: Scale, y: float, label_width: int) -> str:
    parts = [f'<g class="row {_word(row.outcome)}"><title>{escape(row.sentence)}</title>']
    for place, text in enumerate(label):
        below = len(label) - 1 - place
        if label_width:
            parts.append(text_at("label", label_width - 12, y + 4 + LINE * (place - below) / 2, text, "end"))
        else:
            parts.append(text_at("label", x.start, y - 14 - LINE * below, text))
    parts += [f'<circle class="point" cx="{x(p):.1f}" cy="{y:.1f}" r="3"/>' for p in row.points if p == p]
    if math.isfinite(row.low) and math.isfinite(row.high):
        parts.append(line_at("interval", x(row.low), x(row.high), y, y))
    if math.isfinite(row.baseline):
        parts.append(f'<path class="baseline" d="M{x(row.baseline):.1f} {y - 6:.1f}l6 6l-6 6l-6 -6z"/>')
    if row.value == row.value:
        parts.append(f'<circle class="mean" cx="{x(row.value):.1f}" cy="{y:.1f}" r="6"/>')
    else:
        parts.append(text_at("tick", x.start + 4, y + 4, "no measurement"))
    return "".join(parts) + "</g>"


def curve_plot(curves: Sequence[tuple[str, Sequence[float]]], *, title: str, identity: str) -> Markup:
    """Objective against recorded step, one line a curve; logarithmic where every value is positive."""
    width, height, left, right, top, bottom = 360, 200, 52, 350, 10, 160
    thinned = [(name, [(n, v) for n, v in thin(values) if math.isfinite(v)]) for name, values in curves]
    values = [v for _, points in thinned for _, v in points]
    logarithmic = min(values, default=0.0) > 0
    scale = "logarithmic" if logarithmic else "linear"
    described = f"{len(curves)} curves on a {scale} scale."
    if not values:
        return Markup(opening(identity, width, height, title, described) + nothing(width))
    described += f" Values from {min(values):.3g} to {max(values):.3g}."
    place = math.log10 if logarithmic else float
    low, high = place(min(values)), place(max(values))
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    last = max(n for _, points in thinned for n, _ in points) or 1
    x, y = Scale(0, last, left, right), Scale(low, high, bottom, top)
    marks = log_ticks(min(values), max(values)) if logarithmic else ticks(low, high, 3)
    out = [opening(identity, width, height, title, described)]
    out += [level(y(place(mark)), f"{mark:.3g}", x) for mark in marks]
    for number, (name, points) in enumerate(thinned):
        final = f", ends at {points[-1][1]:.3g}" if points else ""
        out.append(_curve(number, name + final, [(x(n), y(place(v))) for n, v in points]) + "</g>")
    out.append(text_at("tick", left, bottom + 16, 0) + text_at("tick", right, bottom + 16, last, "end"))
    out.append(text_at("axis", f"{x.middle:.0f}", height - 6, f"recorded step · {scale} scale", "middle"))
    return Markup("".join(out) + "</svg>")


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
    drawn = [[(a, b) for a, b in line.points if math.isfinite(a) and math.isfinite(b)] for line in lines]
    values = [b for points in drawn for _, b in points]
    out = [opening(identity, width, height, title, " ".join(line.sentence for line in lines))]
    if not values:
        return Markup(out[0] + nothing(width))
    low = next((floor for floor in floors if floor <= min(values)), floors[-1])
    start, end = x_range if x_range[0] < x_range[1] else (x_range[0] - 0.5, x_range[0] + 0.5)
    x, y = Scale(start, end, left, right), Scale(low, ceiling, bottom, top)
    out += [level(y(tick), f"{tick:g}", x) for tick in ticks(low, ceiling, 4)]
    for tick in ticks(start, end, 5):
        if not whole or tick == round(tick):
            out.append(text_at("tick", x(tick), bottom + 17, f"{tick:g}", "middle"))
    for place, (line, points) in enumerate(zip(lines, drawn, strict=True)):
        out.append(_curve(place, line.sentence, [(x(a), y(b)) for a, b in points]))
        # A line of one point is invisible, so it is marked itself.
        marked = [line.mark] if line.mark is not None else points if len(points) == 1 else []
        name = line.mark_name if len(lines) == 1 else ""
        out += [_mark(x(a), y(b), name, width, y(b) > y.middle) for a, b in marked if math.isfinite(a + b)]
        out.append("</g>")
    out.append(text_at("axis", left - 30, 14, y_label))
    out.append(text_at("axis", f"{x.middle:.0f}", height - 8, x_label, "middle"))
    return Markup("".join(out) + "</svg>")


def signal_pair(
    original: Sequence[float] | None, guess: Sequence[float] | None, *, title: str, identity: str
) -> Markup:
    """A signal in [0, 1] and an attack's guess of it, one above the other's trace."""
    width, height, margin = 200, 90, 6
    names = [n for n, v in (("original", original), ("attack's guess", guess)) if v is not None]
    out = [opening(identity, width, height, title, "Lines of the " + " and the ".join(names) + " over [0, 1].")]
    y = Scale(0.0, 1.0, height - margin, margin)
    for name, values in (("original", original), ("guess", guess)):
        if values is not None:
            x = Scale(0, max(1, len(values) - 1), margin, width - margin)
            line = _points([(x(n), y(v)) for n, v in thin(values) if math.isfinite(v)])
            out.append(f'<polyline class="signal {name}" points="{line}"/>')
    return Markup("".join(out) + "</svg>")


def opening(identity: str, width: int, height: int, title: str, description: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-labelledby="{identity}-t {identity}-d">'
        f'<title id="{identity}-t">{escape(title)}</title>'
        f'<desc id="{identity}-d">{escape(description)}</desc>'
    )


def _at(place: object) -> str:
    return f"{place:.1f}" if isinstance(place, float) else str(place)


def text_at(kind: str, x: object, y: object, words: object, anchor: str = "") -> str:
    side = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text class="{kind}" x="{_at(x)}" y="{_at(y)}"{side}>{escape(words)}</text>'


def line_at(kind: str, x1: object, x2: object, y1: object, y2: object) -> str:
    return f'<line class="{kind}" x1="{_at(x1)}" x2="{_at(x2)}" y1="{_at(y1)}" y2="{_at(y2)}"/>'


def level(y: float, words: str, x: Scale) -> str:
    """A line of the grid at a height, with its number."""
    return line_at("grid", x.start, x.end, y, y) + text_at("tick", x.start - 6, y + 4, words, "end")


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)


def _curve(number: int, title: str, places: Sequence[tuple[float, float]]) -> str:
    """Open a group with a line and its title."""
    return f'<g class="curve {colour(number)}"><title>{escape(title)}</title><polyline points="{_points(places)}"/>'


def _mark(x: float, y: float, name: str, width: int, above: bool) -> str:
    dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    anchor = "start" if x < width * 0.4 else "end" if x > width * 0.7 else "middle"
    return dot + (text_at("label", x, y + (-12 if above else 22), name, anchor) if name else "")


def nothing(width: int, words: str = "nothing finite") -> str:
    return text_at("axis", width / 2, 90, words, "middle") + "</svg>"


def _word(text: str) -> str:
    """A class name out of an outcome; only letters survive, so nothing can leave the attribute.

    >>> _word('within policy'), _word('">x')
    ('withinpolicy', 'x')
    """
    return "".join(c for c in text if c.isascii() and c.isalpha())
