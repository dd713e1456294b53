"""The table of ``executors.py runs``: measured runs beside the model of ``leakscope plan``. Reads its file only."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
NOTHING = "Nothing has been measured yet."
HEADS = (
    "jobs",
    "executor",
    "workers",
    "start, CPU s",
    "CPU s a job",
    "of it in the audit's own process",
    "s on free processors, by the model",
    "measured s",
    "processors busy",
    "KB a row",
)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """The measured runs; none without a file."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def model_seconds(row: Row) -> float:
    """Seconds from the first job to the last row if every worker had a processor of its own.

    >>> model_seconds({"worker_cpu_seconds": 20.0, "own_cpu_seconds": 4.0, "workers": 2})
    10.0
    """
    return max(row["worker_cpu_seconds"] / row["workers"], row["own_cpu_seconds"])


def table(rows: Sequence[Row]) -> str:
    """A line for each run, in the order of jobs, executors and workers."""
    if not rows:
        return NOTHING
    lines = ["| " + " | ".join(HEADS) + " |", "| " + " | ".join(["---"] * len(HEADS)) + " |"]
    for row in sorted(rows, key=lambda row: (row["jobs"], row["executor"], row["workers"])):
        own, others, jobs = row["own_cpu_seconds"], row["worker_cpu_seconds"], row["jobs"]
        cells = (
            *(f"{jobs:,}", f"`{row['executor']}`", row["workers"], f"{row['start_cpu_seconds']:.1f}"),
            *(f"{(own + others) / jobs:.3f}", f"{own / jobs:.3f}", f"{model_seconds(row):.1f}"),
            *(f"{row['wall_seconds']:.1f}", f"{row['processors_busy']:.1f} of {row['processors']}"),
            f"{row['bytes'] / jobs / 1000:.1f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)
