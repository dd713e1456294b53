"""The section on what a defence costs: how the loss falls in the training that was attacked, with it and without."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from leakscope.report import svg, words
from leakscope.report.words import fixed
from leakscope.results.names import Setting
from leakscope.results.records import NAN, FindingRow, counted, number

#: A loss beyond so many times the first one is drawn at the edge: training that fails must not flatten the rest.
EDGE = 2.0
#: A training that leaves more of its loss than this has hardly learnt anything.
LEARNED = 0.95
#: Where the lowest loss is above this share of the highest, the axis does not begin at zero.
_NARROW = 0.5


class _Curve:
    """The training of one setting; NaN where the store says nothing that can be used."""

    def __init__(self, setting: Setting, finding: FindingRow) -> None:
        self.setting, self.reason = setting, finding.reason
        self.rounds, self.before = finding.value("rounds"), finding.value("before")
        self.after, self.last_tenth = finding.value("after"), finding.value("last_tenth")
        points = finding.content.get("points")
        pairs = (
            [pair for pair in points if isinstance(pair, list) and len(pair) == 2] if isinstance(points, list) else []
        )
        numbers = [(number(place), number(loss)) for place, loss in pairs]
        self.points = tuple(pair for pair in numbers if not any(map(math.isnan, pair)))


def costs_section(findings: Sequence[FindingRow], settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """One entry a protocol whose training is known; none where no protocol trains."""
    protocols: dict[str, list[_Curve]] = {}
    for setting in settings:
        cost = next((f for f in findings if f.kind == "cost" and f.setting == setting.cell), None)
        if cost is not None:
            protocols.setdefault(setting.protocol, []).append(_Curve(setting, cost))
    return [_entry(curves, f"cost-{place}") for place, curves in enumerate(protocols.values())]


def _entry(curves: list[_Curve], identity: str) -> dict[str, Any]:
    bare = next((curve for curve in curves if curve.setting.defense == "none"), None)
    notes = [f"{curve.setting.name}: not computed: {curve.reason}" for curve in curves if curve.reason]
    if bare is not None and bare.after > LEARNED * bare.before:
        notes.append("Even without a defence the loss hardly falls in these rounds, so the ratios say little.")
    drawn = [curve for curve in curves if curve.points]
    rounds = max((curve.rounds for curve in curves if not math.isnan(curve.rounds)), default=0.0)
    return {
        "setting": curves[0].setting,
        "rounds": counted(int(rounds), "round"),
        "drawing": _plot(drawn, identity) if drawn else "",
        "lines": [_line(curve, NAN if bare is None else bare.after, drawn) for curve in curves],
        "notes": notes,
    }


def _line(curve: _Curve, bare: float, drawn: list[_Curve]) -> dict[str, Any]:
    return {
        "setting": curve.setting,
        "colour": svg.colour(drawn.index(curve)) if curve in drawn else "",
        "before": fixed(curve.before, 3),
        "after": fixed(curve.after, 3),
        "small": "" if math.isnan(curve.last_tenth) else f"{fixed(curve.last_tenth, 3)} at last",
        "ratio": words.DASH if curve.setting.defense == "none" else ratio(curve.after, bare),
    }


def ratio(loss: float, undefended: float) -> str:
    """How many times the undefended loss this is; a dash where there is none to compare with.

    >>> ratio(1.15, 0.46), ratio(1.0, NAN), ratio(1.0, 0.0)
    ('× 2.50', '–', '–')
    """
    value = loss / undefended if undefended > 0 else NAN
    return words.DASH if math.isnan(value) else f"× {value:.2f}" if value < 1000 else f"× {value:.2g}"


def _plot(curves: list[_Curve], identity: str) -> Any:
    losses = [loss for curve in curves for _, loss in curve.points]
    edge = EDGE * max(curve.points[0][1] for curve in curves)
    low, high = min(losses), min(max(losses), edge)
    low = 0.0 if low < _NARROW * high else low - 0.05 * (high - low)
    return svg.line_plot(
        [svg.Line(name=f"{c.setting.name} {c.setting.defense_short}", points=c.points) for c in curves],
        title=f"Training loss under each defence, {curves[0].setting.protocol_short}",
        identity=identity,
        x_label="round",
        y_label="loss of the round's batch" + (f", {high:.3g} and more at the edge" if max(losses) > high else ""),
        x_range=(1.0, max(place for curve in curves for place, _ in curve.points)),
        floors=(low,),
        ceiling=high if high > low else low + 1.0,
        whole=True,
    )
