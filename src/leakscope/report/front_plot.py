"""The plot of a defence study: leakage against utility, one mark a setting, and the front of those worth choosing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from markupsafe import Markup, escape

from leakscope.report.svg import Scale, level, line_at, opening, text_at, ticks

#: Size of a letter of a label, roughly, of a line of it, and of a mark.
_LETTER, _HEIGHT, _RADIUS = 8.0, 13.0, 6.0
#: How far from its mark, and in which directions, a label may stand: the first place that is free.
_RINGS = (15.0, 26.0, 38.0, 52.0, 68.0, 86.0, 106.0)
_DIRECTIONS = (0, 180, 90, 270, 45, 315, 135, 225, 22, 338, 158, 202, 67, 293, 113, 247)
Box = tuple[float, float, float, float]


@dataclass(frozen=True, kw_only=True)
class Mark:
    """One setting. ``kind`` is how it is drawn: "front", "beaten", or "untested" where no attack knew the defence."""

    label: str
    title: str
    utility: float
    leakage: float
    utility_interval: tuple[float, float]
    leakage_interval: tuple[float, float]
    kind: str

    @property
    def sentence(self) -> str:
        """What it shows, in words.

        >>> ends = (0.9, 0.92), (10.0, 14.0)
        >>> facts = {"utility_interval": ends[0], "leakage_interval": ends[1], "kind": "front"}
        >>> Mark(label="S2", title="noise", utility=0.91, leakage=12.0, **facts).sentence
        'S2 noise: leaks 12.0 dB (10.0 to 14.0) at utility 0.91 (0.9 to 0.92), front.'
        """
        low, high = self.leakage_interval
        least, most = self.utility_interval
        leaks = f"leaks {self.leakage:.1f} dB ({low:.1f} to {high:.1f})"
        learns = f"at utility {self.utility:.3g} ({least:.3g} to {most:.3g})"
        return f"{self.label} {self.title}: {leaks} {learns}, {self.kind}."


def front_plot(
    marks: Sequence[Mark],
    *,
    identity: str,
    utility: str,
    share: bool,
    guess: float = math.nan,
    width: int = 720,
    height: int = 430,
) -> Markup:
    """Leakage downwards is better, utility to the right: the best corner is the lower right one.

    ``share``: utility is a share, written in percent. ``guess`` is what can be had without any update, drawn as a line.
    Marks that are not finite are left out.
    """
    drawn = [mark for mark in marks if math.isfinite(mark.utility) and math.isfinite(mark.leakage)]
    title = "What each defence leaks, against what the model still learns"
    out = [opening(identity, width, height, title, " ".join(mark.sentence for mark in drawn))]
    if not drawn:
        return Markup(out[0] + text_at("axis", width / 2, 90, "nothing to draw", "middle") + "</svg>")
    left, right, top, bottom = 46, width - 26, 34, height - 52
    x = _axis([v for m in drawn for v in (m.utility, *m.utility_interval)], left, right, 0.02 if share else 0.05)
    y = _axis([guess, *(v for m in drawn for v in (m.leakage, *m.leakage_interval))], bottom, top, 2.0)
    out += [level(y(tick), f"{tick:g}", x) for tick in ticks(y.low, y.high, 6)]
    for tick in ticks(x.low, x.high, 6 if width > 500 else 4):
        words = f"{100 * tick:g} %" if share else f"{tick:g}"
        out.append(text_at("tick", f"{x(tick):.1f}", bottom + 18, words, "middle"))
    out.append(text_at("axis", left - 34, 16, "leakage, dB (lower is safer)"))
    out.append(text_at("axis", f"{x.middle:.0f}", height - 12, f"{utility} (further right is better)", "middle"))
    if math.isfinite(guess):
        out.append(line_at("guess", left, right, f"{y(guess):.1f}", f"{y(guess):.1f}"))
    out.append(_stairs([mark for mark in drawn if mark.kind == "front"], x, y))
    places = _label_places(drawn, x, y, (width, bottom))
    out += [_mark(mark, x, y, place) for mark, place in zip(drawn, places, strict=True)]
    return Markup("".join(out) + "</svg>")


def _axis(values: Sequence[float], start: float, end: float, least: float) -> Scale:
    """An axis that holds all values, with some room at its ends."""
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    room = max(0.06 * (high - low), least)
    return Scale(low - room, high + room, start, end)


def _stairs(front: Sequence[Mark], x: Scale, y: Scale) -> str:
    """The line of what can be had: from one mark of the front to the next, never claiming what lies between."""
    ordered = sorted(front, key=lambda mark: (mark.utility, mark.leakage))
    points = [(x(ordered[0].utility), y(ordered[0].leakage))] if ordered else []
    for one, other in pairwise(ordered):
        points += [(x(one.utility), y(other.leakage)), (x(other.utility), y(other.leakage))]
    line = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
    return f'<polyline class="front-line" points="{line}"/>' if len(points) > 1 else ""


def _label_places(marks: Sequence[Mark], x: Scale, y: Scale, room: tuple[float, float]) -> list[Box]:
    """A box for each label that covers no mark and no other label, as far as there is one near enough."""
    taken = [(x(m.utility) - _RADIUS, y(m.leakage) - _RADIUS, 2 * _RADIUS, 2 * _RADIUS) for m in marks]
    places = []
    for mark in marks:
        length = _LETTER * len(mark.label)
        boxes = [
            _box(x(mark.utility), y(mark.leakage), length, ring, direction)
            for ring in _RINGS
            for direction in _DIRECTIONS
        ]
        inside = [
            box for box in boxes if box[0] >= 0 and box[0] + length <= room[0] and 0 <= box[1] <= room[1] - _HEIGHT
        ]
        free = (box for box in inside if not any(_overlap(box, other) for other in taken))
        chosen = next(free, (inside or boxes)[0])
        taken.append(chosen)
        places.append(chosen)
    return places


def _box(x: float, y: float, length: float, ring: float, direction: float) -> Box:
    """The box of a label whose middle stands at this distance and direction; wide ones are moved out of the way.

    >>> [round(value) for value in _box(100, 100, 16, 15, 0)]
    [109, 94, 16, 13]
    """
    across, up = math.cos(math.radians(direction)), math.sin(math.radians(direction))
    middle = x + across * (ring + length / 2 - _RADIUS)
    return middle - length / 2, y - up * ring - _HEIGHT / 2, length, _HEIGHT


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    """Whether two boxes (left, top, width, height) overlap.

    >>> _overlap((0, 0, 2, 2), (1, 1, 2, 2)), _overlap((0, 0, 2, 2), (2, 0, 2, 2))
    (True, False)
    """
    apart = (one[0] + one[2] <= other[0], other[0] + other[2] <= one[0])
    return not any((*apart, one[1] + one[3] <= other[1], other[1] + other[3] <= one[1]))


def _mark(mark: Mark, x: Scale, y: Scale, label: Box) -> str:
    at, height = x(mark.utility), y(mark.leakage)
    parts = [f'<g class="setting {mark.kind}"><title>{escape(mark.sentence)}</title>']
    for low, high in [mark.utility_interval]:
        if math.isfinite(low + high):
            parts.append(line_at("spread", f"{x(low):.1f}", f"{x(high):.1f}", f"{height:.1f}", f"{height:.1f}"))
    for low, high in [mark.leakage_interval]:
        if math.isfinite(low + high):
            parts.append(line_at("spread", f"{at:.1f}", f"{at:.1f}", f"{y(low):.1f}", f"{y(high):.1f}"))
    middle, centre = label[0] + label[2] / 2, label[1] + label[3] / 2
    if math.hypot(middle - at, centre - height) > _RINGS[1]:  # too far to be read as its own without a line
        parts.append(line_at("leader", f"{at:.1f}", f"{middle:.1f}", f"{height:.1f}", f"{centre:.1f}"))
    parts.append(f'<circle cx="{at:.1f}" cy="{height:.1f}" r="{_RADIUS:g}"/>')
    return "".join(parts) + text_at("label", f"{label[0]:.1f}", f"{label[1] + 10:.1f}", mark.label) + "</g>"
