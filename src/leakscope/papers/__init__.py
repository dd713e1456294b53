"""Reproduce published tables; one paper a file.

>>> [(row.published, round(row.measured, 3), row.verdict) for row in reproduce("gradients/counting").rows][2]
(4.002, 4.002, 'matches')
"""

import time
from collections import defaultdict

from leakscope.contracts.checks import refuse, whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.registry import Registry
from leakscope.papers import cafe, gradients, hybrid, idlg, sme, systematic
from leakscope.papers.base import (
    Curves,
    Findings,
    PaperTable,
    PictureGrid,
    Progress,
    Reproduction,
    Row,
    Selection,
    selecting,
    verdict,
)

_PAPERS = (idlg, gradients, hybrid, cafe, sme, systematic)
PAPERS: Registry[PaperTable] = Registry("table", (table for paper in _PAPERS for table in paper.TABLES))


def reproduce(
    name: str,
    scale: str = "smoke",
    progress: Progress | None = None,
    *,
    seed: int = 0,
    row: str = "",
    count: int | None = None,
) -> Reproduction:
    """Measure again what the table called ``name`` reports, at a scale of "smoke", "small" or "paper".

    A row's verdict follows ``Reproduction.rule``; it is "measured" where there is no published number. A row whose data
    is not there is "not run" and says why; ValueError where no row could be run. The same seed gives the same rows.
    ``row`` runs only rows with this text in their setting or measure, and ``count`` so many examples for each.
    """
    table = PAPERS.find(name)
    if scale not in table.scales:
        raise UserError(f"{name}: unknown scale {scale!r}: expected one of {', '.join(table.scales)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise UserError(f"seed: expected an integer of at least 0, got {seed!r}")
    refuse("not a valid selection", [] if count is None else whole(count=count))
    if count is not None and not table.counted:
        raise UserError(f"count: {name} has no examples to count; its scales say what is run")
    started, selection = time.perf_counter(), Selection(row, count)
    with selecting(selection):
        outcome = table.target(scale, seed, progress)
    findings = outcome if isinstance(outcome, Findings) else Findings(outcome)
    rows = tuple(line for line in findings.rows if selection.takes(line))
    if not rows:
        raise UserError(f"row: {name} has no row with {row!r} at scale {scale!r}; run it without to see all of them")
    if all(line.verdict == "not run" for line in rows):
        settings: dict[str, list[str]] = defaultdict(list)
        for line in rows:
            settings[line.note].append(line.setting)
        reasons = [
            f"{first}{f' and {len(others)} more' if others else ''}: {note}"
            for note, (first, *others) in settings.items()
        ]
        raise UserError("\n  - ".join([f"{name}: no row could be run:", *reasons]))
    identity, seconds = (table.name, table.title, table.source, scale, seed), time.perf_counter() - started
    return Reproduction(*identity, rows, seconds, findings.pictures, findings.curves, selection)
