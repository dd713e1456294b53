"""The section of a defence study: the front, the table behind it, what to choose, pictures, what knowing is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from leakscope.report.front_plot import Mark, front_plot
from leakscope.report.gallery import Gallery
from leakscope.report.sentences import reason_text
from leakscope.report.words import DASH, figure, fixed, span
from leakscope.results.defense_study import SAME_LEAKAGE, Choice, Study, StudyRow
from leakscope.results.knowledge_worth import LEGIBLE, Worth
from leakscope.results.names import Setting
from leakscope.results.reasons import Scenario

#: Examples whose pictures stand side by side, a line for each defence.
MAX_PICTURES = 4


def study_section(
    study: Study | None, settings: Sequence[Setting], matrix: Mapping[str, Any], gallery: Gallery
) -> dict[str, Any] | None:
    """Everything the template shows of the study; None where nothing was trained."""
    if study is None:
        return None
    named = {setting.cell: setting for setting in settings}
    rows = [row for row in study.rows if row.setting in named]
    protocols = list(dict.fromkeys(row.protocol for row in rows))
    return {
        "utility": utility_words(study).capitalize(),
        "tolerance": figure(study.tolerance, None if study.accuracy else 3),
        "same_leakage": f"{SAME_LEAKAGE:g}",
        "legible": f"{LEGIBLE:g}",
        "fronts": [_front(study, protocol, rows, named, place) for place, protocol in enumerate(protocols)],
        "lines": [_line(row, study, named) for row in rows],
        "choices": [_choice(choice, study, named, len(protocols) > 1) for choice in study.choices],
        "heat": _heat(matrix, settings, rows),
        "pictures": _pictures(gallery, rows, named),
        "worths": [_worth(worth, named) for worth in study.worths if worth.scenario in named],
        "notes": _notes(rows, named),
    }


def utility_words(study: Study) -> str:
    """What is lost where a defence costs something."""
    return "accuracy" if study.accuracy else "test loss"


def _front(
    study: Study, protocol: str, rows: Sequence[StudyRow], named: Mapping[Scenario, Setting], place: int
) -> dict[str, Any]:
    marks = [
        Mark(
            label=named[row.setting].name,
            title=named[row.setting].defense_short,
            utility=row.utility,
            leakage=row.leakage,
            utility_interval=row.utility_interval,
            leakage_interval=row.leakage_interval,
            kind="untested" if not row.comparable else "front" if row.on_front else "beaten",
        )
        for row in rows
        if row.protocol == protocol
    ]
    words = "test accuracy" if study.accuracy else "less the test loss"
    guess = next((row.guess for row in rows if row.protocol == protocol and not math.isnan(row.guess)), math.nan)
    facts: dict[str, Any] = {"utility": words, "share": study.accuracy, "guess": guess}
    return {
        "protocol": next(named[row.setting].protocol_short for row in rows if row.protocol == protocol),
        "wide": front_plot(marks, identity=f"front-{place}", **facts),
        "narrow": front_plot(marks, identity=f"front-narrow-{place}", width=360, height=400, **facts),
    }


def _line(row: StudyRow, study: Study, named: Mapping[Scenario, Setting]) -> dict[str, Any]:
    digits = None if study.accuracy else 3
    sign = 1.0 if study.accuracy else -1.0
    seeds = 0 if row.training is None else len(row.training.seeds)
    losses = () if row.training is None else row.training.losses
    return {
        "setting": named[row.setting],
        "row": row,
        "leakage": fixed(row.leakage),
        "leakage_interval": span(row.leakage_interval, row.examples),
        "highest": fixed(row.highest),
        "identified": figure(row.identified, None),
        "utility": figure(sign * row.utility, digits),
        "utility_interval": _seeds(row.utility_interval, seeds, digits, sign),
        "loss": fixed(math.fsum(losses) / len(losses), 3) if losses else DASH,
        "cost": cost_words(row, study),
        "epsilon": "" if row.training is None or math.isnan(row.training.epsilon) else f"ε {row.training.epsilon:.3g}",
        "allowed": fixed(row.allowed_psnr),
        "place": place_words(row, named),
        "doubts": "; ".join(map(reason_text, row.doubts)),
    }


def _seeds(ends: tuple[float, float], seeds: int, digits: int | None, sign: float) -> str:
    if seeds < 2:
        return "one seed" if seeds else DASH
    low, high = sorted(sign * end for end in ends)
    return f"{figure(low, digits)} to {figure(high, digits)}"


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


def place_words(row: StudyRow, named: Mapping[Scenario, Setting]) -> str:
    """Whether a setting is worth choosing."""
    if not row.comparable:
        return "not compared"
    if row.on_front:
        return "on the front"
    better = named.get(Scenario(row.protocol, row.beaten_by or ""))
    name = better.name if better is not None else row.beaten_by
    return f"beaten by {name}{'' if row.beaten_clearly else ', though intervals overlap'}"


def _choice(choice: Choice, study: Study, named: Mapping[Scenario, Setting], several: bool) -> dict[str, Any]:
    protocol = next((s.protocol_short for s in named.values() if s.protocol == choice.protocol), choice.protocol)
    alike = ", ".join(named[other.setting].name for other in choice.alike if other.setting in named)
    return {
        "goal": goal(choice.limits),
        "where": f" under {protocol}" if several else "",
        "setting": None if choice.row is None else named[choice.row.setting],
        "text": choice_words(choice.row, study),
        "alike": f"as cheap: {alike}" if alike else "",
        "doubts": "" if choice.row is None else "; ".join(map(reason_text, choice.row.doubts)),
    }


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


def _heat(matrix: Mapping[str, Any], settings: Sequence[Setting], rows: Sequence[StudyRow]) -> dict[str, Any]:
    """Attack by defence, turned so that defences are lines: there are more of them than attacks."""
    shown = {row.setting for row in rows}
    places = [(place, setting) for place, setting in enumerate(settings) if setting.cell in shown]
    return {
        "attacks": [(line["name"], line["options"], line["attack"]) for line in matrix["lines"]],
        "lines": [(setting, [line["cells"][place] for line in matrix["lines"]]) for place, setting in places],
    }


def _pictures(gallery: Gallery, rows: Sequence[StudyRow], named: Mapping[Scenario, Setting]) -> dict[str, Any] | None:
    """A line a defence: what the strongest attack made of the same few examples; None where none may be shown."""
    if not gallery.allowed:
        return None
    indices = sorted({example.index for row in rows for example in named[row.setting].verdict.examples})[:MAX_PICTURES]
    originals: dict[int, Any] = {}
    lines = []
    for place, row in enumerate(rows):
        by_index = {example.index: example for example in named[row.setting].verdict.examples}
        cells = []
        for index in indices:
            example = by_index.get(index)
            original, guess = (None, None) if example is None else gallery.pair(example, f"study-{place}-{index}")
            if original is not None:
                originals.setdefault(index, original)
            cells.append((example, guess))
        lines.append((named[row.setting], cells))
    if not originals:
        return None
    return {"originals": [(index, originals.get(index)) for index in indices], "lines": lines}


def _worth(worth: Worth, named: Mapping[Scenario, Setting]) -> dict[str, Any]:
    gain = f"{'+' if worth.gain >= 0 else ''}{fixed(worth.gain)}"
    return {
        "setting": named[worth.scenario],
        "attack": worth.attack_name,
        "gain": gain,
        "interval": span(worth.interval, worth.examples),
        "examples": worth.examples,
    }


def _notes(rows: Sequence[StudyRow], named: Mapping[Scenario, Setting]) -> list[str]:
    notes = []
    bare = next((row for row in rows if row.defense == "none"), None)
    if bare is None:
        notes.append("Without the setting “no defence” among them, what a defence costs is not known; add none.")
    elif bare.training is not None and not bare.training.learns:
        notes.append(
            "Even without a defence the model learns hardly more than a constant guess, so that nothing is compared: "
            "give the training more rounds or other learning rates."
        )
    for weakness in dict.fromkeys(named[row.setting].verdict.weakness for row in rows):
        if weakness:
            notes.append(f"Nothing is compared where the attacks tell nothing: {weakness}.")
    if any(not row.known and row.examples for row in rows):
        notes.append(
            "Some defences were attacked by nobody who knew them. Let the adversary know the defence "
            "(knowledge: adaptive_server); one without a channel cannot be compared yet."
        )
    return notes
