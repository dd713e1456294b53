"""What a reproduced table is made of, and when a measured number counts as the published one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from leakscope.metrics import interval

Progress = Callable[[int, int, float], None]
Verdict = Literal["matches", "above", "below", "measured", "not run"]


@dataclass(frozen=True)
class Row:
    """One published number beside ours; ``measured`` and ``interval`` are None where it was not run.

    ``published`` is None, and the verdict "measured", where the published number is not at hand or the paper has none;
    ours stands alone there.

    ``interval`` is the 95 % bootstrap interval of the measured mean over ``count`` examples.
    """

    setting: str
    measure: str
    published: float | None
    measured: float | None
    interval: tuple[float, float] | None
    count: int
    verdict: Verdict
    note: str = ""


@dataclass(frozen=True)
class Reproduction:
    """A table as reproduced at one scale; the rows are the same for the same seed."""

    name: str
    title: str
    paper: str
    scale: str
    seed: int
    rows: tuple[Row, ...]
    seconds: float = field(compare=False, default=0.0)

    def as_dict(self) -> dict[str, Any]:
        """The whole as JSON can hold it."""
        facts = asdict(self)
        facts["rows"] = [
            {**row, "interval": None if row["interval"] is None else list(row["interval"])} for row in facts["rows"]
        ]
        return facts


@dataclass(frozen=True)
class PaperTable:
    """A published table that can be reproduced. ``scales`` says in words what each scale runs."""

    name: str
    title: str
    summary: str
    paper: str
    scales: Mapping[str, str]
    run: Callable[[str, int, Progress | None], list[Row]] = field(repr=False)


def measured_row(
    setting: str, measure: str, published: float | None, values: Sequence[float], note: str = "", tolerance: float = 0.0
) -> Row:
    """The row of ``values``: their mean, its interval, and the verdict against the published number where it exists."""
    mean = sum(values) / len(values)
    spread = interval(values)
    found: Verdict = "measured" if published is None else verdict(published, mean, spread, tolerance)
    return Row(setting, measure, published, mean, spread, len(values), found, note)


def verdict(published: float, measured: float, interval: tuple[float, float], tolerance: float = 0.0) -> Verdict:
    """ "matches" if the published number lies in the interval or within ``tolerance`` of ours; else which side ours is.

    >>> verdict(89.9, 95.0, (85.0, 100.0)), verdict(89.9, 100.0, (100.0, 100.0)), verdict(100.0, 50.0, (20.0, 80.0))
    ('matches', 'above', 'below')
    >>> verdict(89.9, 100.0, (100.0, 100.0), tolerance=13.5)
    'matches'
    """
    low, high = interval
    if low <= published <= high or abs(measured - published) <= tolerance:
        return "matches"
    return "above" if measured > published else "below"


def sampling_tolerance(published: float, count: int) -> float:
    """Two standard errors, in points, of a share of ``published`` percent estimated from ``count`` examples.

    The bootstrap interval has no width where all examples agree, however few they are; this keeps three hits of
    three from reading as better than a published 90 %.

    >>> round(sampling_tolerance(89.9, 20), 2), sampling_tolerance(100.0, 20)
    (13.48, 0.0)
    """
    if not 0 <= published <= 100 or count < 1:
        raise ValueError(f"expected a percentage and at least one example, got {published} and {count}")
    share = published / 100
    return 200 * math.sqrt(share * (1 - share) / count)


def not_run(setting: str, measure: str, published: float | None, reason: str) -> Row:
    """The row of a published number that could not be measured here."""
    return Row(setting, measure, published, None, None, 0, "not run", f"not run: {reason}")
