"""Published tables as data, and the settings that reproduce them; one paper a file, the table of them is explicit.

>>> [(row.published, round(row.measured, 3), row.verdict) for row in reproduce("gradients/counting").rows][2]
(4.002, 4.002, 'matches')
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Mapping
from types import MappingProxyType

from leakscope.papers import cafe, cafe_training, gradients, hybrid, idlg, sme
from leakscope.papers.base import (
    Curves,
    Findings,
    PaperTable,
    PictureGrid,
    Progress,
    Reproduction,
    Row,
    sampling_tolerance,
    verdict,
)

__all__ = [
    "PAPERS",
    "Curves",
    "Findings",
    "PaperTable",
    "PictureGrid",
    "Progress",
    "Reproduction",
    "Row",
    "reproduce",
    "sampling_tolerance",
    "verdict",
]

PAPERS: Mapping[str, PaperTable] = MappingProxyType(
    {
        table.name: table
        for table in (idlg.TABLE, *gradients.TABLES, hybrid.TABLE, *cafe.TABLES, cafe_training.TABLE, *sme.TABLES)
    }
)


def reproduce(name: str, scale: str = "smoke", progress: Progress | None = None, *, seed: int = 0) -> Reproduction:
    """Measure again what the table called ``name`` reports, at a scale of "smoke", "small" or "paper".

    A row's verdict is "matches" if the published number lies in the bootstrap interval of ours or within a tolerance of
    it (for shares, two standard errors of the published one at our number of examples), otherwise "above" or "below":
    where ours lies; it is "measured" where there is no published number to compare with. A row whose data is not there
    is "not run" and says why; ValueError where no row could be run. The same seed gives the same rows.
    """
    if name not in PAPERS:
        near = difflib.get_close_matches(str(name), PAPERS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown table {name!r}: expected one of {', '.join(PAPERS)}.{hint}")
    table = PAPERS[name]
    if scale not in table.scales:
        raise ValueError(f"{name}: unknown scale {scale!r}: expected one of {', '.join(table.scales)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed: expected an integer of at least 0, got {seed!r}")
    started = time.perf_counter()
    found = table.run(scale, seed, progress)
    findings = found if isinstance(found, Findings) else Findings(found)
    rows = tuple(findings.rows)
    if all(row.verdict == "not run" for row in rows):
        settings: dict[str, list[str]] = {}
        for row in rows:
            settings.setdefault(row.note, []).append(row.setting)
        reasons = [
            f"{first}{f' and {len(others)} more' if others else ''}: {note}"
            for note, (first, *others) in settings.items()
        ]
        raise ValueError("\n  - ".join([f"{name}: no row could be run:", *reasons]))
    return Reproduction(
        name,
        table.title,
        table.paper,
        scale,
        seed,
        rows,
        seconds=time.perf_counter() - started,
        pictures=findings.pictures,
        curves=findings.curves,
    )
