"""The settings of an audit on the page: the table and the chart of the strongest attacks, all measures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from leakscope.metrics import MAX_CANDIDATES, MEASURES, Measure
from leakscope.report import svg, words
from leakscope.report.words import figure, percent, span
from leakscope.results.names import Setting
from leakscope.results.records import highest, mean, number
from leakscope.results.summary import MeasureSummary, SettingSummary

PSNR = MEASURES["psnr"]


def main_measures(measures: Iterable[Measure]) -> list[Measure]:
    """Those that tables show beside PSNR: of labels or targets, and such as the policy can limit."""
    return [m for m in measures if m is not PSNR and (m.limit is not None or m.of != "inputs")]


def settings_table(settings: Sequence[Setting], summaries: Sequence[SettingSummary], data: Any) -> dict[str, Any]:
    """One line a setting, for each example its strongest attack; ``data`` are the facts on the data set."""
    present = {entry.name for summary in summaries for entry in summary.measures}
    measures = main_measures(measure for measure in MEASURES.values() if measure.name in present)
    # A blind guess picks one of the candidates that every reconstruction is compared with.
    count = min(number(data.get("count")), MAX_CANDIDATES)
    chance = f"chance {percent(1 / count) if count >= 1 else words.DASH}"
    lines = []
    for setting, summary in zip(settings, summaries, strict=True):
        verdict, means = setting.verdict, {entry.name: entry.mean for entry in summary.measures}
        shown = [(figure(means.get(measure.name, math.nan), measure.digits), "") for measure in measures]
        for place, measure in enumerate(measures):
            # An example that any attempt identifies is identified, by the strongest or not.
            if measure.name == "identification":
                shown[place] = (percent(verdict.identification), chance)
            elif measure.name == "label_accuracy":
                blind = verdict.label_baseline
                shown[place] = (
                    percent(verdict.label_accuracy),
                    "" if math.isnan(blind) else f"chance {percent(blind)}",
                )
        line = {
            "setting": setting,
            "interval": span(verdict.interval, len(verdict.examples)),
            "best": highest(example.psnr for example in verdict.examples),
            "lift": mean(example.lift for example in verdict.examples),
            "measures": shown,
        }
        lines.append(line)
    return {"columns": [measure.title for measure in measures], "psnr": PSNR.title, "lines": lines}


def charts(settings: Sequence[Setting], policy: float) -> dict[str, Any]:
    """The dot plot twice, for wide and for narrow screens; the style sheet shows one of them."""
    if not settings:
        return {"wide": "", "narrow": ""}
    rows = [
        svg.DotRow(
            label=f"{setting.name} {setting.defense_short} · {setting.protocol_short}",
            outcome=setting.verdict.outcome,
            value=setting.verdict.mean_psnr,
            low=setting.verdict.interval[0],
            high=setting.verdict.interval[1],
            baseline=setting.verdict.baseline_psnr,
            points=tuple(example.psnr for example in setting.verdict.examples),
        )
        for setting in settings
    ]
    room = min(380, max(120, 20 + 8 * max(len(row.label) for row in rows)))
    return {
        "wide": svg.dot_plot(rows, policy=policy, identity="dots-wide", width=960, label_width=room),
        "narrow": svg.dot_plot(rows, policy=policy, identity="dots-narrow", width=340, label_width=0),
    }


def all_measures(settings: Sequence[Setting], summaries: Sequence[SettingSummary]) -> list[tuple[Setting, list[Any]]]:
    """Each setting with a line a measure; no lines where nothing was measured at all."""
    return [
        (setting, [(entry.measure, _cells(entry)) for entry in summary.measures if setting.verdict.examples])
        for setting, summary in zip(settings, summaries, strict=True)
    ]


def _cells(entry: MeasureSummary) -> list[tuple[str, str]]:
    """Mean, interval, both without information, and the count: each as text, with why it is missing."""
    digits = entry.measure.digits
    why, baseline_why = entry.reason or "", entry.baseline_reason or ""
    cells = [
        (figure(entry.mean, digits), why),
        (span(entry.interval, entry.count, digits), why),
        (figure(entry.baseline, digits), baseline_why),
        (span(entry.baseline_interval, entry.baseline_count, digits), baseline_why),
    ]
    shown = [(text, reason if text == words.DASH else "") for text, reason in cells]
    # Fewer examples than there are: the reason belongs to the number, too.
    return [*shown, (_count(entry.count, entry.baseline_count), why or baseline_why)]


def _count(count: int, baseline_count: int) -> str:
    """How many examples were measured, and how many without information where that differs.

    >>> _count(4, 4), _count(4, 3), _count(4, 0)
    ('4', '4, without 3', '4')
    """
    return f"{count}, without {baseline_count}" if baseline_count not in (0, count) else str(count)
