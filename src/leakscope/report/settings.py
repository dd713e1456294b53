"""The sections of an audit's page that come from its rows: settings, measures, attacks by setting, jobs, curves."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.metrics import MAX_CANDIDATES, MEASURES, Measure, interval
from leakscope.report import svg
from leakscope.report.limits import settled
from leakscope.report.words import figure, fixed, span, yes_or_share
from leakscope.results.baselines import Baselines
from leakscope.results.defense_study import IGNORES
from leakscope.results.names import parts_of, short_names, telling_options
from leakscope.results.records import NAN, DiagnosisRecord, FindingRow, Row, highest, mean, number
from leakscope.results.setting_verdict import SettingVerdict
from leakscope.results.store import Store
from leakscope.results.verdict import SettingSummary, measures_of

PSNR = MEASURES["psnr"]


def main_measures(measures: Iterable[Measure]) -> list[Measure]:
    """Those shown beside PSNR: of labels or targets, and such as the policy can limit."""
    return [m for m in measures if m is not PSNR and (m.limit is not None or m.of != "inputs")]


def settings_section(
    settings: Sequence[SettingVerdict], summaries: Sequence[SettingSummary], data: Any
) -> dict[str, Any]:
    """Each setting with the summaries of its measures by name; ``data`` are the facts on the data set."""
    lines = [
        (setting, {entry.name: entry for entry in summary.measures})
        for setting, summary in zip(settings, summaries, strict=True)
    ]
    present = {name for _, entries in lines for name in entries}
    # A blind guess picks one of the candidates that every reconstruction is compared with.
    count = min(number(data.get("count")), MAX_CANDIDATES)
    return {
        "lines": lines,
        "main": main_measures(measure for measure in MEASURES.values() if measure.name in present),
        "psnr": PSNR.title,
        "chance": 1 / count if count >= 1 else NAN,
    }


def charts(settings: Sequence[SettingVerdict], policy: float) -> dict[str, Any]:
    """The dot plot twice, for wide and for narrow screens; the style sheet shows one of them."""
    if not settings:
        return {"wide": "", "narrow": ""}
    room = min(380, max(120, 20 + 8 * max(len(svg.label_of(setting)) for setting in settings)))
    return {
        "wide": svg.dot_plot(settings, policy=policy, identity="dots-wide", width=960, label_width=room),
        "narrow": svg.dot_plot(settings, policy=policy, identity="dots-narrow", width=340, label_width=0),
    }


#: Lifts in dB from which on a cell is coloured, each more strongly.
HEAT = (3.0, 6.0, 12.0, 20.0)


@dataclass(frozen=True)
class Cell:
    """A mean with its interval, or the fate of the jobs where there is none; ``heat`` is 0 for none up to 4."""

    text: str
    interval: str = ""
    lift: str = ""
    heat: int = 0
    note: str = ""
    why: str = ""


def heat(lift: float) -> int:
    """How strongly a lift is coloured.

    >>> heat(math.nan), heat(-1.0), heat(3.0), heat(19.0), heat(150.0)
    (0, 0, 1, 3, 4)
    """
    return sum(lift >= step for step in HEAT)


def matrix_section(rows: Sequence[Row], settings: Sequence[SettingVerdict]) -> dict[str, Any]:
    """One line an attack with a cell a setting; the baseline of each protocol; the strongest of all."""
    attempts = [row for row in rows if row.counts]
    attacks = list(dict.fromkeys((row.job.attack_name, row.job.attack) for row in attempts))
    protocols = list(dict.fromkeys(setting.protocol for setting in settings))
    baselines = {
        protocol: Baselines(row for row in rows if not row.counts and row.job.protocol == protocol)
        for protocol in protocols
    }
    parts = parts_of(attempts)
    names = Counter(name for name, _ in attacks)
    told = telling_options((attack for _, attack in attacks), parts)
    lines = []
    whys: dict[tuple[str, str, str], list[str]] = {}
    for name, attack in attacks:
        own = [row for row in attempts if row.job.attack == attack]
        ignores = parts[attack].options.get(IGNORES) is True
        cells = []
        for setting in settings:
            jobs = [row for row in own if row.job.scenario == setting.scenario]
            cells.append(cell := _cell(jobs, attack, baselines[setting.protocol], ignores))
            if cell.why:
                whys.setdefault((name, cell.text, cell.why), []).append(setting.name)
        blind = [_blind(own, attack, protocol, baselines[protocol]) for protocol in protocols]
        options = ", ".join(told[attack]) if names[name] > 1 else ""
        lines.append({"name": name, "options": options, "attack": attack, "cells": cells, "blind": blind})
    return {
        "lines": lines,
        "strongest": [_strongest(setting) for setting in settings] if len(attacks) > 1 else [],
        "protocols": [", ".join(s.name for s in settings if s.protocol == protocol) for protocol in protocols],
        "whys": [(name, fate, ", ".join(places), why) for (name, fate, why), places in whys.items()],
    }


def _cell(jobs: Sequence[Row], attack: str, baselines: Baselines, ignores: bool) -> Cell:
    """For each example its best seed, as the verdict counts it; then the mean over the examples."""
    fates = Counter(row.status for row in jobs)
    if not jobs and ignores:
        return Cell("nothing to ignore")
    if not fates["done"]:
        fate = " and ".join(fate for fate in ("refused", "failed") if fates[fate]) or "not run"
        return Cell(fate, why=next((row.refusal for row in jobs if row.reason), ""))
    seeds: dict[int, list[float]] = {}
    for row in jobs:
        for example in row.examples:
            seeds.setdefault(example.index, []).append(example.value(PSNR.key))
    best = {index: highest(values) for index, values in seeds.items()}
    lift = mean(psnr - baselines.value(attack, index, PSNR) for index, psnr in best.items())
    values = [psnr for psnr in best.values() if not math.isnan(psnr)]
    note = ", ".join(f"{fates[fate]} {fate}" for fate in ("failed", "refused") if fates[fate])
    return _measured(mean(values), interval(values), len(values), lift, note)


def _strongest(setting: SettingVerdict) -> Cell:
    lift = mean(example.lift for example in setting.examples)
    return _measured(setting.mean_psnr, setting.interval, len(setting.examples), lift)


def _measured(psnr: float, ends: tuple[float, float], count: int, lift: float, note: str = "") -> Cell:
    if math.isnan(psnr):
        return Cell("no number", note=note)
    gain = "" if math.isnan(lift) else f"{'+' if lift >= 0 else ''}{fixed(lift)}"
    return Cell(fixed(psnr), span(ends, count), gain, heat(lift), note)


def _blind(own: Sequence[Row], attack: str, protocol: str, baselines: Baselines) -> str:
    indices = dict.fromkeys(e.index for row in own if row.job.protocol == protocol for e in row.examples)
    return fixed(mean(baselines.value(attack, index, PSNR) for index in indices))


MAX_CURVES = 12
MAX_DETAILED_EXAMPLES = 24


def jobs_section(rows: Sequence[Row], data: Mapping[str, Any], labelled: bool) -> dict[str, Any]:
    """All jobs in the order of the plan, and what the table shows of each; labels where it is ``labelled``."""
    measures = measures_of(example for row in rows for example in row.examples)
    main, several = main_measures(measures), any(len(row.examples) > 1 for row in rows)

    def means(row: Row) -> list[tuple[Measure, float]]:
        best = [(PSNR, NAN if row.result is None else row.result.best_psnr)] if several else []
        shown = [(m, mean(example.value(m.key) for example in row.examples)) for m in (PSNR, *main)]
        return [shown[0], *best, *shown[1:]]

    return {
        "rows": rows,
        "figures": [PSNR.title, *([f"Best {PSNR.title}"] if several else []), *(m.title for m in main)],
        "means": means,
        "measures": measures,
        "figure": _figure,
        "why": _why,
        "in_one_line": _in_one_line,
        "most": MAX_DETAILED_EXAMPLES,
        "class_names": data.get("class_names"),
        "labelled": labelled,
        "proofs": any(example.certificate is not None for row in rows for example in row.examples),
    }


def _figure(value: float, measure: Measure, count: int) -> str:
    return yes_or_share(value, count) if measure.digits is None else figure(value, measure.digits)


def _why(diagnosis: DiagnosisRecord, psnr: float) -> str:
    """Why a result is what it is; an attack may take its own for recovered, and the truth says whether it was."""
    outcome = settled(diagnosis.outcome, psnr, {})
    taken = "; the attack itself took it for recovered" if diagnosis.outcome == "recovered" != outcome else ""
    return f"{outcome}: {diagnosis.reason}{taken}"


def _in_one_line(values: Mapping[str, Any], between: str = ", ") -> str:
    """A mapping as a person would write it.

    >>> _in_one_line({"steps": 5, "device": "cpu"})
    'steps: 5, device: cpu'
    """
    return between.join(f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items())


def fates(findings: Sequence[FindingRow], planned: Any) -> str:
    statuses = Counter(finding.status for finding in findings)
    summary = ", ".join(f"{count} {status}" for status, count in statuses.items())
    missing = planned - len(findings) if isinstance(planned, int) else 0
    return f"{summary}, {missing} of {planned} missing" if missing > 0 else summary


def curves_section(store: Store, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """For each attack the objective of the job that came closest to an example, one line a restart."""
    attacks: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        if row.result is not None and row.status == "done" and row.counts:
            attacks.setdefault(row.job.attack, []).append((row.result.best_psnr, row))
    short = short_names(attacks, parts_of(rows))
    sections: list[dict[str, Any]] = []
    for attack, candidates in attacks.items():
        for psnr, row in sorted(candidates, key=lambda c: (math.inf if math.isnan(c[0]) else -c[0], c[1].position)):
            curves, objective = _curves(store, row.key)
            if curves:
                title, identity = f"{objective} of {row.job.attack_name}", f"curve-{len(sections)}"
                line = {"job": row.job, "short": short[attack], "psnr": psnr, "curves": len(curves)}
                sections.append({**line, "drawing": svg.curve_plot(curves, title=title, identity=identity)})
                break
    return sections


def _curves(store: Store, key: str) -> tuple[list[tuple[str, list[float]]], str]:
    """The curves of a job by name, and what they are of; nothing where the history is absent or damaged."""
    try:
        history = store.history(key)
    except (ValueError, KeyError, TypeError, OSError):
        return [], ""
    names = [n for n in ("objective", *sorted(history)) if isinstance(history.get(n), list) and history[n]]
    if not names:
        return [], ""
    value = history[names[0]]
    curves: Sequence[Any] = value if isinstance(value[0], list) else [value]
    numbered = enumerate(curves[:MAX_CURVES], start=1)
    lines = [(f"restart {n}", list(map(number, curve))) for n, curve in numbered if isinstance(curve, list) and curve]
    return lines, names[0]
