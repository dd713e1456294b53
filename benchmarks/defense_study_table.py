"""The table of docs/defense-study.md, from the figures that ``leakscope audit benchmarks/defense_study.yaml`` wrote.

The committed benchmarks/defense_study.csv is the file defense-study.csv of that audit's folder. Reads figures only.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from leakscope.results.names import short_names

Row = Mapping[str, str]

HEADS = (
    "defence",
    "leakage (95 %)",
    "highest",
    "identified",
    "strongest attack",
    "accuracy",
    "cost",
    "epsilon",
    "place",
)


def read_rows(path: Path) -> list[Row]:
    """The settings, those that leak least first."""
    with path.open(encoding="utf-8", newline="") as stream:
        return sorted(csv.DictReader(stream), key=lambda row: float(row["leakage"]))


def table(rows: Sequence[Row]) -> str:
    """All settings as Markdown."""
    names = short_names(row["defense"] for row in rows)
    settings = {row["setting"]: names[row["defense"]] for row in rows}
    lines = [HEADS, ["---"] * len(HEADS), *([*_cells(row, names), place(row, settings)] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(row: Row, names: Mapping[str, str]) -> list[str]:
    leakage = f"{float(row['leakage']):.1f} ({float(row['leakage_low']):.1f} to {float(row['leakage_high']):.1f})"
    return [
        names[row["defense"]],
        leakage,
        f"{float(row['highest']):.1f}",
        f"{100 * float(row['identified']):.0f} %",
        row["attack"] if row["known"] == "True" else f"{row['attack']} (none knew it)",
        f"{100 * float(row['utility']):.0f} %",
        points(row["cost"], row["cost_low"], row["cost_high"]),
        f"{float(row['epsilon']):.3g}" if row["epsilon"] else "",
    ]


def points(cost: str, low: str, high: str) -> str:
    """Accuracy that was lost, in percentage points, with its range over seeds.

    >>> points("0.05", "0.04", "0.06"), points("", "", "")
    ('5.0 (4.0 to 6.0)', '')
    """
    if not cost or math.isnan(float(cost)):
        return ""
    return f"{100 * float(cost):.1f} ({100 * float(low):.1f} to {100 * float(high):.1f})"


def place(row: Row, settings: Mapping[str, str]) -> str:
    """On the front, beaten by which, or not compared."""
    if row["on_front"] == "True":
        return "**on the front**"
    if not row["beaten_by"]:
        return "not compared"
    clearly = "" if row["beaten_clearly"] == "True" else ", intervals overlap"
    return f"beaten by {settings[row['beaten_by']]}{clearly}"
