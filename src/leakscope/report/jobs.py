"""The sections that come from single jobs: the table of all, findings, objective curves, flags."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from leakscope.metrics import Measure
from leakscope.report import svg
from leakscope.report.limits import settled
from leakscope.report.settings import PSNR, main_measures
from leakscope.report.words import figure, yes_or_share
from leakscope.results.names import parts_of, short_names
from leakscope.results.records import NAN, DiagnosisRecord, FindingRow, Row, mean, number
from leakscope.results.store import Store
from leakscope.results.summary import measures_of

MAX_CURVES = 12
MAX_DETAILED_EXAMPLES = 24


def jobs_section(rows: Sequence[Row], data: Mapping[str, Any]) -> dict[str, Any]:
    """All jobs in the order of the plan, and what the table shows of each."""
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
