"""What a reproduced table is made of, and when a measured number counts as the published one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from leakscope.contracts.registry import Entry
from leakscope.data import Examples, load_data
from leakscope.metrics import interval

Progress = Callable[[int, int, float], None]
Verdict = Literal["matches", "above", "below", "measured", "not run"]
#: Points of a curve that ``as_dict`` keeps.
SHORT = 50


@dataclass(frozen=True)
class Row:
    """One published number beside ours; ``measured`` and ``interval`` are None where it was not run or not finite.

    ``published`` is None, and the verdict "measured", where the published number is not at hand or the paper has none.
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


@dataclass(frozen=True, eq=False, kw_only=True)
class PictureGrid:
    """Originals and what was recovered of them, both (B, channels, height, width) in [0, 1]; one caption a picture.

    ``private`` ones are shown only where somebody asks for them.
    """

    title: str
    originals: Tensor = field(repr=False)
    recovered: Tensor = field(repr=False)
    captions: tuple[str, ...]
    private: bool = True

    def __post_init__(self) -> None:
        if self.originals.shape != self.recovered.shape or len(self.captions) != len(self.originals):
            raise ValueError(
                f"PictureGrid: expected as many originals, recovered pictures and captions, got "
                f"{tuple(self.originals.shape)}, {tuple(self.recovered.shape)} and {len(self.captions)}"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Curves:
    """Lines over the same steps, by name; a step is one entry."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[float, ...]] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Findings:
    """What the run of a table brings: rows, and what else a page about it shows."""

    rows: list[Row]
    pictures: tuple[PictureGrid, ...] = ()
    curves: tuple[Curves, ...] = ()


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
    pictures: tuple[PictureGrid, ...] = field(compare=False, default=())
    curves: tuple[Curves, ...] = field(compare=False, default=())

    def as_dict(self) -> dict[str, Any]:
        """The whole as JSON can hold it: no pixels, and of each curve some points, null where not finite."""
        facts = {name: getattr(self, name) for name in ("name", "title", "paper", "scale", "seed")}
        rows = [asdict(row) | {"interval": row.interval and list(row.interval)} for row in self.rows]
        pictures = [{"title": p.title, "captions": list(p.captions), "private": p.private} for p in self.pictures]
        curves = [
            {"title": c.title, "x_label": c.x_label, "y_label": c.y_label}
            | {"lines": {name: short(values) for name, values in c.lines.items()}}
            for c in self.curves
        ]
        return {**facts, "rows": rows, "seconds": self.seconds, "pictures": pictures, "curves": curves}


def short(values: Sequence[float], limit: int = SHORT) -> list[list[float | None]]:
    """At most ``limit`` pairs (step, value) of a curve, evenly spread with the last; None where not finite.

    >>> short([3.0, 2.0, math.inf, 1.0], limit=2)
    [[1, 2.0], [3, 1.0]]
    """
    every = max(1, -(-len(values) // limit))
    steps = reversed(range(len(values) - 1, -1, -every))
    return [[step, values[step] if math.isfinite(values[step]) else None] for step in steps]


@dataclass(frozen=True, kw_only=True)
class PaperTable(Entry):
    """A published table that can be reproduced. ``scales`` says in words what each scale runs.

    ``target(scale, seed, progress)`` returns the rows, or findings where there are pictures or curves too.
    """

    title: str
    scales: Mapping[str, str]

    def __post_init__(self) -> None:
        object.__setattr__(self, "scales", MappingProxyType(dict(self.scales)))


def examples_or_reason(name: str, **options: Any) -> Examples | str:
    """The examples, or why there are none."""
    try:
        return load_data(name, **options)
    except ValueError as error:
        return str(error)


def measured_row(
    setting: str, measure: str, published: float | None, values: Sequence[float], note: str = "", tolerance: float = 0.0
) -> Row:
    """The row of ``values``: their mean, its interval, and the verdict against the published number where it exists."""
    mean = sum(values) / len(values)
    spread = interval(values)
    judgement: Verdict = "measured" if published is None else verdict(published, mean, spread, tolerance)
    return Row(setting, measure, published, mean, spread, len(values), judgement, note)


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


@dataclass(frozen=True)
class Line:
    """A row before it is measured; that of a ``share`` in percent has a :func:`sampling_tolerance`."""

    setting: str
    measure: str
    published: float | None
    note: str = ""
    tolerance: float = 0.0
    share: bool = False


@dataclass(frozen=True, eq=False)
class Group:
    """Rows that the same trials fill: ``lines`` by the name under which a trial gives its value, or why there are none.

    ``main`` is the name whose mean so far is shown while it runs.
    """

    lines: Mapping[str, Line]
    trials: Iterable[Mapping[str, float]] | str
    main: str


def measured_rows(groups: Iterable[Group], total: int, progress: Progress | None) -> list[Row]:
    """The rows of each group; ``progress`` is told of every trial out of ``total``."""
    rows: list[Row] = []
    done = 0
    for group in groups:
        lines, trials = group.lines, group.trials
        if isinstance(trials, str):
            rows += [not_run(line.setting, line.measure, line.published, trials) for line in lines.values()]
            continue
        values: dict[str, list[float]] = {}
        for trial in trials:
            for name, value in trial.items():
                values.setdefault(name, []).append(value)
            done += 1
            if progress is not None:
                progress(done, total, sum(values[group.main]) / len(values[group.main]))
        for name, numbers in values.items():
            line, tolerance = lines[name], lines[name].tolerance
            if line.share and line.published is not None:
                tolerance = sampling_tolerance(line.published, len(numbers))
            rows.append(measured_row(line.setting, line.measure, line.published, numbers, line.note, tolerance))
    return rows
