"""Make rows of a reproduced table, and say when a measured number counts as the published one."""

import math
import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from statistics import stdev
from typing import Any, ClassVar, Literal

import torch
from scipy.stats import binomtest
from scipy.stats import t as student
from torch import Tensor

from leakscope.audit.assess import Assessment, assess
from leakscope.audit.keys import versions
from leakscope.contracts.attack import Attack
from leakscope.contracts.errors import UserError
from leakscope.contracts.observation import Observation
from leakscope.contracts.registry import Entry
from leakscope.contracts.tables import shipped_table
from leakscope.data import Examples, load_data

Progress = Callable[[int, int, float], None]
Verdict = Literal["matches", "above", "below", "too few to tell", "measured", "not run"]
Interval = tuple[float, float]
Kind = Literal["sample", "shares", "exact"]
#: Points of a curve that ``as_dict`` keeps.
SHORT = 50
#: How far from a published number, in parts of it, ours may be and still count as the same.
TOLERANCE = 0.1
LEVEL = 0.95
#: The rule of a row's verdict, as tables tell it.
RULE = (
    f"A row matches, or is above or below, only where the {LEVEL:.0%} interval of ours lies wholly within the "
    f"tolerance of the published number or wholly beyond it; otherwise there are too few examples to tell. The "
    f"tolerance is the spread or rounding that the paper states, else {TOLERANCE:.0%} of its number."
).replace("%", " %")


@dataclass(frozen=True)
class Selection:
    """Say which rows of a table are run, and on how many examples; by default all, on as many as the scale has."""

    row: str = ""
    count: int | None = None

    def takes(self, line: "Line | Row") -> bool:
        """Tell whether the text is in the row's setting or measure.

        >>> Selection("mnist, idlg").takes(Line("MNIST, iDLG", "label accuracy (%)", 100.0))
        True
        """
        return self.row.casefold() in f"{line.setting}, {line.measure}".casefold()


_ALL = Selection()
_SELECTED: ContextVar[Selection] = ContextVar("selected", default=_ALL)


@contextmanager
def selecting(chosen: Selection) -> Iterator[None]:
    """Run tables with this selection for a while."""
    token = _SELECTED.set(chosen)
    try:
        yield
    finally:
        _SELECTED.reset(token)


def selected(lines: "Mapping[str, Line]") -> "dict[str, Line]":
    """Return the lines that are to be run."""
    return {name: line for name, line in lines.items() if _SELECTED.get().takes(line)}


def wanted(count: int, each: int = 1) -> int:
    """Return how many trials of ``each`` examples are run: those that were asked for, else the scale's ``count``."""
    asked = _SELECTED.get().count
    return count if asked is None else -(-asked // each)


def machine() -> dict[str, str]:
    """Say what the numbers may depend on; no name of a host or a user."""
    return {"processors": str(os.cpu_count() or 1), "threads of torch": str(torch.get_num_threads())}


@dataclass(frozen=True)
class Row:
    """Put one published number beside ours; ``measured`` is None where it was not run or not finite.

    ``published`` is None, and the verdict "measured", where the published number is not at hand or the paper has none.
    ``interval``: 95 % of the mean over ``count`` examples. ``tolerance``: how far from ``published`` counts as the
    same.
    """

    setting: str
    measure: str
    published: float | None
    measured: float | None
    interval: Interval | None
    count: int
    verdict: Verdict
    note: str = ""
    tolerance: float | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class PictureGrid:
    """Show originals beside recovered ones, (B, channels, height, width) in [0, 1]; ``private`` on request only."""

    title: str
    originals: Tensor = field(repr=False)
    recovered: Tensor = field(repr=False)
    captions: tuple[str, ...]
    private: bool = True

    def __post_init__(self) -> None:
        if self.originals.shape != self.recovered.shape or len(self.captions) != len(self.originals):
            raise UserError(
                f"PictureGrid: expected as many originals, recovered pictures and captions, got "
                f"{tuple(self.originals.shape)}, {tuple(self.recovered.shape)} and {len(self.captions)}"
            )


@dataclass(frozen=True, eq=False, kw_only=True)
class Curves:
    """Draw lines over the same steps, by name; a step is one entry."""

    title: str
    x_label: str
    y_label: str
    lines: Mapping[str, tuple[float, ...]] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Findings:
    rows: list[Row]
    pictures: tuple[PictureGrid, ...] = ()
    curves: tuple[Curves, ...] = ()


@dataclass(frozen=True)
class Reproduction:
    """Hold a table as reproduced at one scale; the rows are the same for the same seed."""

    name: str
    title: str
    paper: str
    scale: str
    seed: int
    rows: tuple[Row, ...]
    seconds: float = field(compare=False, default=0.0)
    pictures: tuple[PictureGrid, ...] = field(compare=False, default=())
    curves: tuple[Curves, ...] = field(compare=False, default=())
    selection: Selection = Selection()
    versions: Mapping[str, str] = field(compare=False, default_factory=versions)
    machine: Mapping[str, str] = field(compare=False, default_factory=machine)
    rule: ClassVar[str] = RULE

    @property
    def command(self) -> str:
        row, count = self.selection.row, self.selection.count
        if self.seed:
            more = f", row={row!r}" * bool(row) + f", count={count}" * (count is not None)
            return f"leakscope.papers.reproduce({self.name!r}, {self.scale!r}, seed={self.seed}{more})"
        more = f" --row {shlex.quote(row)}" * bool(row) + f" --n {count}" * (count is not None)
        return f"leakscope reproduce {self.name} --scale {self.scale}{more}"

    @property
    def caption(self) -> str:
        made_with = ", ".join(f"{name} {value}" for name, value in (*self.versions.items(), *self.machine.items()))
        return f"{self.rule} To run it again: {self.command} ({made_with})."

    def as_dict(self) -> dict[str, Any]:
        """Return what JSON can hold: no pixels, and of each curve some points, null where not finite."""
        names = ("name", "title", "paper", "scale", "seed", "command", "rule")
        facts = {name: getattr(self, name) for name in names}
        facts |= {"versions": dict(self.versions), "machine": dict(self.machine)}
        rows = [asdict(row) | {"interval": row.interval and list(row.interval)} for row in self.rows]
        pictures = [{"title": p.title, "captions": list(p.captions), "private": p.private} for p in self.pictures]
        curves = [
            {"title": c.title, "x_label": c.x_label, "y_label": c.y_label}
            | {"lines": {name: short(values) for name, values in c.lines.items()}}
            for c in self.curves
        ]
        return {**facts, "rows": rows, "seconds": self.seconds, "pictures": pictures, "curves": curves}


def short(values: Sequence[float], limit: int = SHORT) -> list[list[float | None]]:
    """Return at most ``limit`` pairs (step, value) of a curve, evenly spread with the last; None where not finite.

    >>> short([3.0, 2.0, math.inf, 1.0], limit=2)
    [[1, 2.0], [3, 1.0]]
    """
    every = max(1, -(-len(values) // limit))
    steps = reversed(range(len(values) - 1, -1, -every))
    return [[step, values[step] if math.isfinite(values[step]) else None] for step in steps]


@dataclass(frozen=True, kw_only=True)
class PaperTable(Entry):
    """Describe a published table. ``scales`` says in words what each scale runs; of a ``counted`` one any number can.

    ``target(scale, seed, progress)`` returns the rows, or findings where there are pictures or curves too.
    """

    title: str
    scales: Mapping[str, str]
    counted: bool = False


def paper_tables(
    paper: str,
    targets: Mapping[str, Callable[..., Any]],
    sizes: Mapping[str, Any] | None = None,
    counted: Collection[str] = (),
) -> tuple[PaperTable, ...]:
    """Make tables of what ``published/tables.toml`` says of them and the functions that run them, by table.

    ``sizes`` are the settings of each scale, whose fields its words may name; ``counted`` are the tables that ask
    :func:`wanted` how many trials to run.
    """
    facts = shipped_table("leakscope.papers", "published/tables.toml")[paper]
    made = []
    for name, table in facts["tables"].items():
        if name in targets:
            scales = {
                scale: text.format(**vars(sizes[scale])) if sizes else text for scale, text in table["scales"].items()
            }
            title, place = table["title"], f"{paper}/{name}"
            more = {"title": title, "scales": scales, "counted": name in counted}
            made.append(PaperTable(place, targets[name], table["summary"], facts["source"], **more))
    return tuple(made)


def examples_or_reason(name: str, **options: Any) -> Examples | str:
    try:
        return load_data(name, **options)
    except ValueError as error:
        return str(error)


def attacked(observation: Observation, attack: Attack, x: Tensor, y: Tensor, seed: int, **options: Any) -> Assessment:
    """Run one attack without controls, which are rows of their own. A refusal is raised."""
    found = assess(observation, attack, (x, y), controls=(), seed=seed, explain=False, **options)
    if found.refusal is not None:
        raise found.refusal
    return found


def recovered(found: Assessment) -> Tensor:
    """Return what came back, in the attack's order and as the model reads it."""
    assert found.reconstruction is not None
    return found.reconstruction.inputs


@dataclass(frozen=True)
class Line:
    """Hold a row before it is measured.

    ``tolerance`` is what the paper's own spread or digits leave open, by default the share :data:`TOLERANCE` of its
    number. Values are a sample; "shares" are each 0 or 100 %, and one that is "exact" was computed, not sampled.
    """

    setting: str
    measure: str
    published: float | None
    note: str = ""
    tolerance: float | None = None
    kind: Kind = "sample"

    def measured(self, values: Sequence[float]) -> Row:
        """Average ``values`` and judge their interval against the published number where it exists."""
        mean = sum(values) / len(values)
        intervals = {"sample": mean_interval, "shares": share_interval, "exact": lambda _: (mean, mean)}
        spread: Interval | None = intervals[self.kind](values)
        judged: Verdict = "measured"
        allowed: float | None = None
        if self.published is not None:
            allowed = TOLERANCE * abs(self.published) if self.tolerance is None else self.tolerance
            judged = verdict(self.published, spread, allowed)
        return Row(self.setting, self.measure, self.published, mean, spread, len(values), judged, self.note, allowed)

    def not_run(self, reason: str) -> Row:
        return Row(self.setting, self.measure, self.published, None, None, 0, "not run", f"not run: {reason}")


def verdict(published: float, interval: Interval | None, tolerance: float) -> Verdict:
    """Decide only where the interval lies wholly within ``tolerance`` of the published number or beyond it.

    >>> verdict(90.0, (88.0, 93.0), 9.0), verdict(90.0, (29.2, 100.0), 9.0), verdict(90.0, (20.0, 70.0), 9.0)
    ('matches', 'too few to tell', 'below')
    """
    low, high = (math.nan, math.nan) if interval is None else interval
    if published - tolerance <= low and high <= published + tolerance:
        return "matches"
    if low > published + tolerance:
        return "above"
    return "below" if high < published - tolerance else "too few to tell"


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Return Student's interval of a mean; None for one value, which has no spread.

    >>> mean_interval([20.0]) is None, [round(end, 1) for end in mean_interval([20.0, 22.0])]
    (True, [8.3, 33.7])
    """
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    reach = stdev(values) / math.sqrt(len(values)) * float(student.ppf((1 + LEVEL) / 2, len(values) - 1))
    return mean - reach, mean + reach


def share_interval(values: Sequence[float]) -> Interval:
    """Return Clopper and Pearson's interval, in percent, of values of 0 or 100; it has a width even where all agree.

    >>> [round(end, 1) for end in share_interval([100.0, 100.0, 100.0])]
    [29.2, 100.0]
    """
    found = binomtest(sum(value > 50 for value in values), len(values)).proportion_ci(LEVEL, "exact")
    return 100 * float(found.low), 100 * float(found.high)


@dataclass(frozen=True, eq=False)
class Group:
    """Group rows that the same trials fill, by the name of a trial's value; a text for ``trials`` says why none ran.

    ``main`` is the name whose mean so far is shown while it runs, the first unless told.
    """

    lines: Mapping[str, Line]
    trials: Iterable[Mapping[str, float]] | str
    main: str = ""


def measured_rows(groups: Iterable[Group], total: int, progress: Progress | None) -> list[Row]:
    """Measure the rows of each group that are selected; ``progress`` is told of every trial out of ``total``."""
    rows: list[Row] = []
    done = 0
    if _SELECTED.get().row:
        known = list(groups)
        groups = [group for group in known if selected(group.lines)]
        run, of = (sum(not isinstance(group.trials, str) for group in some) for some in (groups, known))
        total = round(total * run / max(1, of))
    for group in groups:
        lines, trials = selected(group.lines), group.trials
        if isinstance(trials, str):
            rows += [line.not_run(trials) for line in lines.values()]
            continue
        values: dict[str, list[float]] = defaultdict(list)
        for trial in trials:
            for name in trial.keys() & lines.keys():
                values[name].append(trial[name])
            done += 1
            if progress is not None:
                shown = values[group.main if group.main in lines else next(iter(lines))]
                progress(done, total, sum(shown) / len(shown))
        rows += [line.measured(values[name]) for name, line in lines.items() if name in values]
    return rows
