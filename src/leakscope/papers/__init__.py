"""Reproduce published tables; one paper a file.

>>> [(row.published, round(row.measured, 3), row.verdict) for row in reproduce("gradients/counting").rows][2]
(4.002, 4.002, 'matches')
"""

import time
from collections import defaultdict

from leakscope.contracts.errors import UserError
from leakscope.contracts.registry import Registry
from leakscope.papers import cafe, gradients, hybrid, idlg, sme, systematic
from leakscope.papers.base import Curves, Findings, PaperTable, PictureGrid, Progress, Reproduction, Row, verdict

_PAPERS = (idlg, gradients, hybrid, cafe, sme, systematic)
PAPERS: Registry[PaperTable] = Registry("table", (table for paper in _PAPERS for table in paper.TABLES))


def reproduce(name: str, scale: str = "smoke", progress: Progress | None = None, *, seed: int = 0) -> Reproduction:
    """Measure again what the table called ``name`` reports, at a scale of "smoke", "small" or "paper".

    A row's verdict follows ``Reproduction.rule``; it is "measured" where there is no published number. A row whose data
    is not there is "not run" and says why; ValueError where no row could be run. The same seed gives the same rows.
    """
    table = PAPERS.find(name)
    if scale not in table.scales:
        raise UserError(f"{name}: unknown scale {scale!r}: expected one of {', '.join(table.scales)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"seed: expected an integer of at least 0, got {seed!r}")
    started = time.perf_counter()
    outcome = table.target(scale, seed, progress)
    findings = outcome if isinstance(outcome, Findings) else Findings(outcome)
    rows = tuple(findings.rows)
    if all(row.verdict == "not run" for row in rows):
        settings: dict[str, list[str]] = defaultdict(list)
        for row in rows:
            settings[row.note].append(row.setting)
        reasons = [
            f"{first}{f' and {len(others)} more' if others else ''}: {note}"
            for note, (first, *others) in settings.items()
        ]
        raise UserError("\n  - ".join([f"{name}: no row could be run:", *reasons]))
    identity, seconds = (table.name, table.title, table.source, scale, seed), time.perf_counter() - started
    return Reproduction(*identity, rows, seconds, findings.pictures, findings.curves)
