"""The sections that come from single jobs: the table of all, findings, objective curves, flags."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.metrics import Measure
from leakscope.report import svg, words
from leakscope.report.limits import settled
from leakscope.report.sentences import certificate_details
from leakscope.report.settings import PSNR, main_measures
from leakscope.report.words import figure, fixed, yes_or_share
from leakscope.results.names import parts_of, short_names
from leakscope.results.records import NAN, DiagnosisRecord, ExampleRecord, FindingRow, Row, mean, number
from leakscope.results.setting_verdict import SettingVerdict
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

    def __init__(self, rows: Sequence[Row], settings: Sequence[SettingVerdict], data: Mapping[str, Any]) -> None:
        self.rows = rows
        self.names = {setting.scenario: setting.name for setting in settings}
        self.class_names = data.get("class_names")
        self.measures = measures_of(example for row in rows for example in row.examples)
        self.main = main_measures(self.measures)
        self.several = any(len(row.examples) > 1 for row in rows)
        self.proofs = any(example.certificate is not None for row in rows for example in row.examples)

    def section(self) -> dict[str, Any]:
        figures = [PSNR.title, *([f"Best {PSNR.title}"] if self.several else []), *(m.title for m in self.main)]
        columns = [("#", True), ("Status", False), ("Setting", False), ("Attack", False), ("Seed", True)]
        columns += [("Batch", True), *((name, True) for name in figures), ("Seconds", True), ("Flags", False)]
        example_columns = ["Example", "Label", "Guess", *(m.label for m in self.measures), "Score"]
        example_columns += ["Certificate"] if self.proofs else []
        lines = [self._line(position, row) for position, row in enumerate(self.rows, start=1)]
        return {"columns": columns, "example_columns": example_columns, "lines": lines}

    def _line(self, position: int, row: Row) -> dict[str, Any]:
        seconds = number(row.seconds)
        run = [_figure_cell(fixed(seconds), seconds), Cell("", " ".join(row.flags), chips=row.flags)]
        cells = [*self._job_cells(position, row), *self._measure_cells(row), *run]
        examples = [self._example(example) for example in row.examples[:MAX_DETAILED_EXAMPLES]]
        left_out = len(row.examples) - len(examples)
        return {"row": row, "cells": cells, "facts": _facts(row), "examples": examples, "left_out": left_out}

    def _job_cells(self, position: int, row: Row) -> list[Cell]:
        job, setting = row.job, self.names.get(row.job.scenario, words.DASH)
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
        best = [(PSNR, NAN if row.result is None else row.result.best_psnr)] if self.several else []
        means = [(m, mean(example.value(m.key) for example in row.examples)) for m in (PSNR, *self.main)]
        reasons = {} if row.result is None else row.result.reasons
        cells = []
        for measure, value in (means[0], *best, *means[1:]):
            why = reasons.get(measure.key) or row.reason or measure.otherwise
            text = _figure(value, measure, len(row.examples))
            cells.append(_figure_cell(text, value, why if math.isnan(value) else ""))
        return cells

    def _example(self, example: ExampleRecord) -> list[str]:
        labels = [words.label_name(label, self.class_names) for label in (example.label, example.label_guess)]
        figures = [_figure(example.value(measure.key), measure, 1) for measure in self.measures]
        proof = [certificate_details(example.certificate, example.value(PSNR.key)) or words.DASH] if self.proofs else []
        return [str(example.index), *labels, *figures, fixed(example.score, 4), *proof]


def _figure(value: float, measure: Measure, count: int) -> str:
    return yes_or_share(value, count) if measure.digits is None else figure(value, measure.digits)


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
            ("Why", "" if diagnosis is None else _why(diagnosis, result.whole_psnr)),
            ("Notes", "; ".join(result.notes)),
            ("Run", _in_one_line(result.info)),
            ("Not measured", "; ".join(f"{key}: {reason}" for key, reason in result.reasons.items())),
        ]
    return [*facts, ("Finished", str(row.finished or ""))]


def _why(diagnosis: DiagnosisRecord, psnr: float) -> str:
    """Why a result is what it is; an attack may take its own for recovered, and the truth says whether it was."""
    outcome = settled(diagnosis.outcome, psnr, {})
    taken = "; the attack itself took it for recovered" if diagnosis.outcome == "recovered" != outcome else ""
    return f"{outcome}: {diagnosis.reason}{taken}"


def _in_one_line(values: Mapping[str, Any]) -> str:
    """A mapping as a person would write it.

    >>> _in_one_line({"steps": 5, "device": "cpu"})
    'steps: 5, device: cpu'
    """
    return ", ".join(f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in values.items())


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
