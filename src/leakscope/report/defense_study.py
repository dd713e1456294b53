"""The section of a defence study: the front, the table behind it, what to choose, pictures, what knowing is worth."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from markupsafe import Markup

from leakscope.report.pictures import Gallery
from leakscope.report.sentences import reason_text
from leakscope.report.svg import Scale, drawn, ticks
from leakscope.report.words import DASH, TEXTS, figure, fixed
from leakscope.results.defense_study import LEGIBLE, SAME_LEAKAGE, Study, StudyRow
from leakscope.results.reasons import Scenario
from leakscope.results.setting_verdict import SettingVerdict

#: Examples whose pictures stand side by side, a line for each defence.
MAX_PICTURES = 4


def study_section(study: Study | None, settings: Sequence[SettingVerdict], gallery: Gallery) -> dict[str, Any] | None:
    """Everything the template shows of the study; None where nothing was trained."""
    if study is None:
        return None
    named = {setting.scenario: setting for setting in settings}
    rows = [row for row in study.rows if row.scenario in named]
    protocols = {row.protocol: [other for other in rows if other.protocol == row.protocol] for row in rows}
    digits, sign = (None, 1.0) if study.accuracy else (3, -1.0)

    def utility_ends(row: StudyRow) -> str:
        seeds = 0 if row.training is None else len(row.training.seeds)
        if seeds < 2:
            return "one seed" if seeds else DASH
        return " to ".join(figure(end, digits) for end in sorted(sign * end for end in row.utility_interval))

    return {
        "utility": utility_words(study).capitalize(),
        "tolerance": figure(study.tolerance, None if study.accuracy else 3),
        **{"same_leakage": f"{SAME_LEAKAGE:g}", "legible": f"{LEGIBLE:g}"},
        **{"named": named, "rows": rows, "protocols": protocols, "choices": study.choices, "worths": study.worths},
        "fronts": [_front(study, own, named, place) for place, own in enumerate(protocols.values())],
        "utility_of": lambda row: figure(sign * row.utility, digits),
        "utility_ends": utility_ends,
        "cost": lambda row: cost_words(row, study),
        "place": lambda row: place_words(row, named),
        "goal": goal,
        "choice": lambda row: choice_words(row, study),
        "doubts": lambda row: "" if row is None else "; ".join(map(reason_text, row.doubts)),
        "pictures": _pictures(gallery, rows, named),
        "notes": _notes(rows, named),
    }


def utility_words(study: Study) -> str:
    """Name what is lost where a defence costs something."""
    return "accuracy" if study.accuracy else "test loss"


def _front(
    study: Study, rows: Sequence[StudyRow], named: Mapping[Scenario, SettingVerdict], place: int
) -> dict[str, Any]:
    words = "test accuracy" if study.accuracy else "less the test loss"
    guess = next((row.guess for row in rows if not math.isnan(row.guess)), math.nan)
    facts: dict[str, Any] = {"utility": words, "share": study.accuracy, "guess": guess}
    return {
        "protocol": named[rows[0].scenario].protocol_short,
        "wide": front_plot(rows, named, identity=f"front-{place}", **facts),
        "narrow": front_plot(rows, named, identity=f"front-narrow-{place}", width=360, height=400, **facts),
    }


def cost_words(row: StudyRow, study: Study) -> str:
    """What is lost to training without a defence, in words.

    >>> def row(cost):
    ...     return StudyRow(protocol="P()", defense="D()", outcome="", cost=cost)
    >>> study = Study(rows=(), choices=(), worths=(), tolerance=0.02)
    >>> [cost_words(row(cost), study) for cost in (0.034, 0.004, -0.05, math.nan)]
    ['3.4 points', 'no cost', 'no cost', '–']
    """
    if row.defense == "none" or math.isnan(row.cost):
        return DASH
    if row.cost <= study.tolerance:
        return "no cost"
    return f"{100 * row.cost:.1f} points" if study.accuracy else f"{row.cost:.3g} of test loss"


def place_words(row: StudyRow, named: Mapping[Scenario, SettingVerdict]) -> str:
    """Whether a setting is worth choosing."""
    if not row.comparable:
        return "not compared"
    if row.on_front:
        return "on the front"
    better = named.get(Scenario(row.protocol, row.beaten_by or ""))
    overlap = "" if row.beaten_clearly else ", though intervals overlap"
    return f"beaten by {better.name if better else row.beaten_by}{overlap}"


def goal(limits: Sequence[float]) -> str:
    """What a choice is to achieve.

    >>> goal((30.0, 25.0, 20.0)), goal((15.0,)), goal(())
    ('every example stays below 30, 25 or 20 dB', 'every example stays below 15 dB', 'no example is identified')
    """
    if not limits:
        return "no example is identified"
    *more, last = (f"{limit:g}" for limit in limits)
    return f"every example stays below {', '.join(more)}{' or ' if more else ''}{last} dB"


def choice_words(row: StudyRow | None, study: Study) -> str:
    """What a choice gives and costs.

    >>> row = StudyRow(protocol="P()", defense="D()", outcome="", highest=14.0, utility=0.88, cost=0.03)
    >>> choice_words(row, Study(rows=(), choices=(), worths=(), tolerance=0.02))
    'at most 14.0 dB; it costs 3.0 points and leaves an accuracy of 88 %'
    """
    if row is None:
        return "no setting that was tested keeps to this"
    if row.defense == "none":
        return f"no defence is needed, for the highest is {fixed(row.highest)} dB"
    left = f"an accuracy of {figure(row.utility, None)}" if study.accuracy else f"a test loss of {-row.utility:.3g}"
    lost = cost_words(row, study)
    cost = {"no cost": "nothing that shows", DASH: "an unknown amount"}.get(lost, lost)
    return f"at most {fixed(row.highest)} dB; it costs {cost} and leaves {left}"


def _pictures(
    gallery: Gallery, rows: Sequence[StudyRow], named: Mapping[Scenario, SettingVerdict]
) -> dict[str, Any] | None:
    """A line a defence: what the strongest attack made of the same few examples; None where none may be shown."""
    if not gallery.allowed:
        return None
    indices = sorted({example.index for row in rows for example in named[row.scenario].examples})[:MAX_PICTURES]
    originals: dict[int, Any] = {}
    lines = []
    for place, row in enumerate(rows):
        by_index = {example.index: example for example in named[row.scenario].examples}
        cells = []
        for index in indices:
            original, guess = None, None
            if example := by_index.get(index):
                original, guess = gallery.pair(example, f"study-{place}-{index}")
            originals[index] = originals.get(index) or original
            cells.append((example, guess))
        lines.append((named[row.scenario], cells))
    return {"originals": list(originals.items()), "lines": lines} if any(originals.values()) else None


def _notes(rows: Sequence[StudyRow], named: Mapping[Scenario, SettingVerdict]) -> list[str]:
    notes = []
    bare = next((row for row in rows if row.defense == "none"), None)
    if bare is None:
        notes.append(TEXTS["study"]["no-bare"])
    elif bare.training is not None and not bare.training.learns:
        notes.append(TEXTS["study"]["not-learning"])
    weak = dict.fromkeys(named[row.scenario].weakness for row in rows)
    notes += [f"Nothing is compared where the attacks tell nothing: {weakness}." for weakness in weak if weakness]
    if any(not row.known and row.examples for row in rows):
        notes.append(TEXTS["study"]["unknown"])
    return notes


#: Size of a letter of a label, roughly, of a line of it, and of a mark.
_LETTER, _HEIGHT, _RADIUS = 8.0, 13.0, 6.0
#: How far from its mark, and in which directions, a label may stand: the first place that is free.
_RINGS = (15.0, 26.0, 38.0, 52.0, 68.0, 86.0, 106.0)
_DIRECTIONS = (0, 180, 90, 270, 45, 315, 135, 225, 22, 338, 158, 202, 67, 293, 113, 247)
Box = tuple[float, float, float, float]


def front_plot(
    rows: Sequence[StudyRow],
    named: Mapping[Scenario, SettingVerdict],
    *,
    identity: str,
    utility: str,
    share: bool,
    guess: float = math.nan,
    width: int = 720,
    height: int = 430,
) -> Markup:
    """Leakage downwards is better, utility to the right: the best corner is the lower right one.

    ``share``: utility in percent. ``guess``: what can be had without any update. What is not finite is left out.
    """
    known = [row for row in rows if math.isfinite(row.utility) and math.isfinite(row.leakage)]
    chart: dict[str, Any] = {"identity": identity, "width": width, "height": height}
    chart["title"] = "What each defence leaks, against what the model still learns"
    if not known:
        return drawn("plot", {**chart, "description": "", "empty": "nothing to draw"}, curves=())
    left, right, top, bottom = 46, width - 26, 34, height - 52
    x = _axis([v for m in known for v in (m.utility, *m.utility_interval)], left, right, 0.02 if share else 0.05)
    y = _axis([guess, *(v for m in known for v in (m.leakage, *m.leakage_interval))], bottom, top, 2.0)
    marked = ticks(x.low, x.high, 6 if width > 500 else 4)
    below = f"{x.middle:.0f}", height - 12, f"{utility} (further right is better)", "middle"
    chart |= {
        "x": x,
        "levels": [(y(tick), f"{tick:g}") for tick in ticks(y.low, y.high, 6)],
        "ticks": [(x(v), bottom + 18, f"{100 * v:g} %" if share else f"{v:g}", "middle") for v in marked],
        "axes": [(left - 34, 16, "leakage, dB (lower is safer)", ""), below],
    }
    settings = [named[row.scenario] for row in known]
    places = _label_places([(x(row.utility), y(row.leakage)) for row in known], settings, (width, bottom))
    facts = {"guess": guess, "stairs": _stairs([row for row in known if row.comparable and row.on_front], x, y)}
    labelled = list(zip(settings, known, places, strict=True))
    return drawn("front", chart, x=x, y=y, marks=labelled, radius=_RADIUS, far=_RINGS[1], **facts)


def _axis(values: Sequence[float], start: float, end: float, least: float) -> Scale:
    finite = [value for value in values if math.isfinite(value)]
    low, high = min(finite), max(finite)
    room = max(0.06 * (high - low), least)
    return Scale(low - room, high + room, start, end)


def _stairs(front: Sequence[StudyRow], x: Scale, y: Scale) -> list[tuple[float, float]]:
    """Return steps from mark to mark, never claiming what lies between; none where there is one mark."""
    ordered = sorted(front, key=lambda mark: (mark.utility, mark.leakage))
    points = [(x(ordered[0].utility), y(ordered[0].leakage))] if len(ordered) > 1 else []
    for one, other in pairwise(ordered):
        points += [(x(one.utility), y(other.leakage)), (x(other.utility), y(other.leakage))]
    return points


def _label_places(
    places: Sequence[tuple[float, float]], settings: Sequence[SettingVerdict], room: tuple[float, float]
) -> list[Box]:
    """A box for each label that covers no mark and no other label, as far as there is one near enough."""
    taken = [(across - _RADIUS, height - _RADIUS, 2 * _RADIUS, 2 * _RADIUS) for across, height in places]
    for at, setting in zip(places, settings, strict=True):
        length = _LETTER * len(setting.name)
        boxes = [_box(*at, length, ring, direction) for ring in _RINGS for direction in _DIRECTIONS]
        inside = [
            box for box in boxes if box[0] >= 0 and box[0] + length <= room[0] and 0 <= box[1] <= room[1] - _HEIGHT
        ]
        free = (box for box in inside if not any(_overlap(box, other) for other in taken))
        taken.append(next(free, (inside or boxes)[0]))
    return taken[len(places) :]


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
