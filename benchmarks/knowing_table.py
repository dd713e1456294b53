"""What ``knowing.py`` measured, as a table of docs/defense-study.md. Reads figures only."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

Row = Mapping[str, Any]

KNOWING, IGNORING = "knowing", "ignoring"
STATES = {"untrained": "untrained", "1": "after one epoch"}


def read_rows(path: Path) -> list[Row]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def pairs(rows: Sequence[Row], state: str, defense: str) -> list[tuple[float, float]]:
    """PSNR of each image without and with the knowledge.

    >>> row = {"state": "1", "defense": "sign", "image": 7}
    >>> pairs([{**row, "way": "knowing", "psnr": 9.0}, {**row, "way": "ignoring", "psnr": 6.0}], "1", "sign")
    [(6.0, 9.0)]
    """
    by_image: dict[int, dict[str, float]] = defaultdict(dict)
    for row in rows:
        if row["state"] == state and row["defense"] == defense:
            by_image[row["image"]][row["way"]] = row["psnr"]
    return [(ways[IGNORING], ways[KNOWING]) for ways in by_image.values() if len(ways) == 2]


def cell(measured: Sequence[tuple[float, float]]) -> str:
    """Both means, and the gain with its least.

    >>> cell([(10.0, 16.0), (12.0, 16.0)])
    '11.0 → 16.0; gain 5.0, least 4.0'
    """
    if not measured:
        return ""
    gains = [after - before for before, after in measured]
    before, after = mean(b for b, _ in measured), mean(a for _, a in measured)
    return f"{before:.1f} → {after:.1f}; gain {mean(gains):.1f}, least {min(gains):.1f}"


def table(rows: Sequence[Row]) -> str:
    defenses = list(dict.fromkeys(row["defense"] for row in rows))
    lines = [["defence", *STATES.values()], ["---"] * (1 + len(STATES))]
    lines += [[name, *(cell(pairs(rows, state, name)) for state in STATES)] for name in defenses]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
