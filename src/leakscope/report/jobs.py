"""The sections that come from single jobs: the table of all, findings, objective curves, flags."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.metrics import Measure
from leakscope.report import svg, words
from leakscope.report.settings import PSNR, Setting, main_measures
from leakscope.report.words import figure, fixed, yes_or_share
from leakscope.results.records import NAN, ExampleRecord, FindingRow, Row, counted, mean, number
from leakscope.results.store import Store
from leakscope.results.summary import measures_of

MAX_CURVES = 12
MAX_DETAILED_EXAMPLES = 24


@dataclass(frozen=True)
class Cell:
    """A cell of the table of jobs; ``value`` is what its column is sorted by, empty where there is nothing."""

    text: str
    value: str = ""
    title: str = ""
    numeric: bool = False
    badge: str = ""
    note: str = ""
    chips: Sequence[str] = ()


def _figure_cell(text: str, value: float, title: str = "") -> Cell:
    return Cell(text, "" if math.isnan(value) else f"{value:.6g}", title, numeric=True)


class JobTable:
    """The table of all jobs, in the order of the plan."""

    def __init__(self, rows: Sequence[Row], settings: Sequence[Setting], data: Mapping[str, Any]) -> None:
        self.rows = rows
        self.names = {setting.cell: setting.name for setting in settings}
        self.class_names = data.get("class_names")
        self.measures = measures_of(example for row in rows for example in row.examples)
        self.main = main_measures(self.measures)
        self.several = any(len(row.examples) > 1 for row in rows)

    def section(self) -> dict[str, Any]:
        figures = [PSNR.title, *([f"Best {PSNR.title}"] if self.several else []), *(m.title for m in self.main)]
        columns = [("#", True), ("Status", False), ("Setting", False), ("Attack", False), ("Seed", True)]
        columns += [("Batch", True), *((name, True) for name in figures), ("Seconds", True), ("Flags", False)]
        return {
            "columns": columns,
            "example_columns": ["Example", "Label", "Guess", *(m.label for m in self.measures), "Score"],
            "lines": [self._line(position, row) for position, row in enumerate(self.rows, start=1)],
        }

    def _line(self, position: int, row: Row) -> dict[str, Any]:
        return {
            "row": row,
            "cells": [*self._job_cells(position, row), *self._measure_cells(row), *_run_cells(row)],
            "facts": _facts(row),
            "examples": [self._example(example) for example in row.examples[:MAX_DETAILED_EXAMPLES]],
            "left_out": max(0, len(row.examples) - MAX_DETAILED_EXAMPLES),
        }

    def _job_cells(self, position: int, row: Row) -> list[Cell]:
        """What was done, to whom."""
        job, setting = row.job, self.names.get(row.job.setting, words.DASH)
        control = f"{job.control} control" if job.control else ""
        return [
            _figure_cell(str(position), position),
            Cell(row.status, row.status, badge=row.status),
            Cell(setting, setting, f"{job.protocol}, defence {job.defense}"),
            Cell(job.attack_name, f"{job.attack_name} {control}".strip(), job.attack, note=control),
            _figure_cell(str(job.seed), job.seed),
            _figure_cell(str(job.batch), job.batch),
        ]

    def _measure_cells(self, row: Row) -> list[Cell]:
        """What came out: means over the examples of the job, or why there are none."""
        best = [(PSNR, NAN if row.result is None else row.result.best_psnr)] if self.several else []
        means = [(m, mean(example.value(m.key) for example in row.examples)) for m in (PSNR, *self.main)]
        cells = []
        for measure, value in (means[0], *best, *means[1:]):
            text = _figure(value, measure, len(row.examples))
            cells.append(_figure_cell(text, value, _why_missing(row, measure) if math.isnan(value) else ""))
        return cells

    def _example(self, example: ExampleRecord) -> list[str]:
        return [
            str(example.index),
            words.label_name(example.label, self.class_names),
            words.label_name(example.label_guess, self.class_names),
            *(_figure(example.value(measure.key), measure, 1) for measure in self.measures),
            fixed(example.score, 4),
        ]


def _figure(value: float, measure: Measure, count: int) -> str:
    """The mean of a measure over so many examples."""
    return yes_or_share(value, count) if measure.digits is None else figure(value, measure.digits)


def _why_missing(row: Row, measure: Measure) -> str:
    reasons = {} if row.result is None else row.result.reasons
    return reasons.get(measure.key) or row.reason or measure.otherwise


def _run_cells(row: Row) -> list[Cell]:
    seconds = number(row.seconds)
    return [_figure_cell(fixed(seconds), seconds), Cell("", " ".join(row.flags), chips=row.flags)]


def _facts(row: Row) -> list[tuple[str, str]]:
    """What the details of a job say; empty texts are not shown."""
    job, result = row.job, row.result
    facts = [
        ("Job key", row.key),
        ("Attack", job.attack),
        ("Protocol", job.protocol),
        ("Defence", job.defense),
        ("Examples", ", ".join(str(index) for index in job.indices)),
        ("Knowledge", _in_one_line(job.knowledge)),
    ]
    if result is not None:
        diagnosis = result.diagnosis
        facts += [
            ("Knows the defence", "yes" if result.adaptive else ""),
            ("Why", "" if diagnosis is None else f"{diagnosis.outcome}: {diagnosis.reason}"),
            ("Notes", "; ".join(result.notes)),
            ("Run", _in_one_line(result.info)),
            ("Not measured", "; ".join(f"{key}: {reason}" for key, reason in result.reasons.items())),
        ]
    return [*facts, ("Finished", str(row.finished or ""))]


def _in_one_line(values: Mapping[str, Any]) -> str:
    """A mapping as a person would write it.

    >>> _in_one_line({"steps": 5, "device": "cpu"})
    'steps: 5, device: cpu'
    """
    return ", ".join(f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items())


def findings_section(findings: Sequence[FindingRow], settings: Sequence[Setting], planned: Any) -> dict[str, Any]:
    """A line a finding: what became of it. What it says stands in the section of its kind."""
    names = {setting.cell: setting.name for setting in settings}
    fates = Counter(finding.status for finding in findings)
    missing = planned - len(findings) if isinstance(planned, int) and planned > len(findings) else 0
    return {
        "summary": ", ".join(f"{fates[status]} {status}" for status in fates)
        + (f", {missing} of {planned} missing" if missing else ""),
        "lines": [
            {
                "finding": finding,
                "setting": names.get(finding.setting, words.DASH),
                "seconds": fixed(number(finding.seconds)),
            }
            for finding in findings
        ],
    }


def curves_section(store: Store, rows: Sequence[Row], settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """For each attack the objective of the job that came closest to an example, one line a restart."""
    names = {setting.cell: setting.name for setting in settings}
    attacks: dict[str, list[tuple[float, Row]]] = {}
    for row in rows:
        if row.result is not None and row.status == "done" and row.counts:
            attacks.setdefault(row.job.attack, []).append((row.result.best_psnr, row))
    short = words.short_names(attacks)
    sections: list[dict[str, Any]] = []
    for attack, candidates in attacks.items():
        for psnr, row in sorted(candidates, key=lambda c: (math.inf if math.isnan(c[0]) else -c[0], c[1].position)):
            curves, objective = _curves(store, row.key)
            if not curves:
                continue
            title, identity = f"{objective} of {row.job.attack_name}", f"curve-{len(sections)}"
            sections.append(
                {
                    "job": row.job,
                    "short": short[attack],
                    "setting": names.get(row.job.setting, words.DASH),
                    "psnr": fixed(psnr),
                    "curves": counted(len(curves), "curve"),
                    "drawing": svg.curve_plot(curves, title=title, identity=identity),
                }
            )
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
    lines = [
        (f"restart {n}", [number(v) for v in curve])
        for n, curve in enumerate(curves[:MAX_CURVES], start=1)
        if isinstance(curve, list) and curve
    ]
    return lines, names[0]


def flags_section(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Every flag that occurs, in how many jobs, and what it means."""
    counts = Counter(flag for row in rows for flag in set(row.flags))
    return [
        {"name": name, "jobs": counted(counts[name], "job"), "meaning": words.explain_flag(name)}
        for name in sorted(counts)
    ]
