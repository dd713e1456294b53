"""What an audit will take, told before anything runs: jobs, core-hours, memory of a worker, disk, hours on a cluster.

Some steps of one job of each kind are timed; what is not timed counts as its nearest relative that was. No client but
the first makes an update, so that ten thousand of them are sized as fast as one. The model, measured in
docs/scaling.md: hours = (core-hours of jobs / workers, or what the one process that writes rows takes, or the longest
job, whichever is most) + the start of workers.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from leakscope.audit.attempts import Bench
from leakscope.audit.estimate import ALL_SECONDS, Trial, try_out
from leakscope.audit.findings import FINDINGS
from leakscope.audit.memory import MOST_BYTES, PeakMemory, update_bytes
from leakscope.audit.parts import Part
from leakscope.audit.plan import Job, count_plan, describe
from leakscope.audit.setup import Setup, build_setup, rehearse
from leakscope.audit.spec import AuditSpec
from leakscope.contracts.caps import FLOAT, JOBS

#: Seconds in which a worker starts, and in which the audit's own process writes a row; by the runs of docs/scaling.md.
START_SECONDS, ROW_SECONDS = 6.0, 0.005
#: Bytes of a row, of each example in it, and of the curves beside it; by the same runs.
ROW_BYTES, EXAMPLE_BYTES, CURVE_BYTES = 3000, 500, 3000
#: From so much of what a processor could have done on, the machine counts as free.
FREE_SHARE = 0.8


@dataclass(frozen=True)
class Cell:
    """Jobs of one kind. ``seconds`` of a processor for each, None where nothing like it could be timed."""

    #: Short names of protocol and defence.
    setting: str
    protocol: str
    defense: str
    attack: str
    kind: str
    jobs: int
    seconds: float | None
    #: "whole", "steps", "at least", or what the time was taken over from.
    timed: str

    @property
    def core_hours(self) -> float:
        return self.jobs * (self.seconds or 0.0) / 3600


@dataclass(frozen=True)
class Sizing:
    """What an audit will take."""

    cells: tuple[Cell, ...]
    clients: int
    threads: int
    memory_mb: float
    disk_mb: float
    workers: int | None = None
    #: Share of a processor that the trials got.
    share: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def jobs(self) -> int:
        return sum(cell.jobs for cell in self.cells)

    @property
    def core_hours(self) -> float:
        return sum(cell.core_hours for cell in self.cells) * self.threads

    def hours(self, workers: int) -> float:
        """Wall-clock hours with so many workers, each with processors of its own like those here."""
        work = sum(cell.core_hours for cell in self.cells) * 3600
        longest = max((cell.seconds or 0.0 for cell in self.cells), default=0.0)
        return wall_seconds(work, self.jobs, workers, longest) / 3600

    @property
    def confidence(self) -> str:
        """How sure the core-hours are, in a sentence."""
        by: defaultdict[str, float] = defaultdict(float)
        for cell in self.cells:
            by[cell.timed if cell.timed in ("whole", "steps", "at least", "not timed") else "alike"] += cell.core_hours
        total = sum(by.values())
        if not total:
            return "Nothing could be timed."
        words = {
            "whole": "from whole jobs",
            "steps": "from some steps of a job, without what follows the last one and without compilation",
            "alike": "taken over from a job of the same attack in another setting",
            "at least": "a lower bound, as no step ended in time",
        }
        told = [f"{by[name] / total:.0%} {text}" for name, text in words.items() if by[name] >= 0.005 * total]
        return f"Of the core-hours {', '.join(told)}."

    def document(self) -> dict[str, Any]:
        """Plain values."""
        cells = [{**dataclasses.asdict(cell), "core_hours": cell.core_hours} for cell in self.cells]
        facts = {name: getattr(self, name) for name in ("clients", "jobs", "core_hours", "threads", "memory_mb")}
        hours = None if self.workers is None else self.hours(self.workers)
        rest = {"disk_mb": self.disk_mb, "workers": self.workers, "hours": hours, "processor_share": self.share}
        return {**facts, **rest, "confidence": self.confidence, "notes": list(self.notes), "cells": cells}


def wall_seconds(work: float, jobs: int, workers: int, longest: float = 0.0) -> float:
    """Seconds on ``workers`` workers for so many seconds of work.

    >>> wall_seconds(3600.0, jobs=100, workers=1), wall_seconds(3600.0, jobs=100, workers=10)
    (3606.0, 366.0)
    >>> wall_seconds(3600.0, jobs=36000, workers=1000)  # rows are written one after another
    186.0
    """
    return max(work / workers, jobs * ROW_SECONDS, longest) + START_SECONDS


def size_audit(
    spec: AuditSpec, *, workers: int | None = None, clients: int | None = None, seconds: float = ALL_SECONDS
) -> Sizing:
    """What ``spec`` will take, from trials of at most about so many seconds; nothing is written.

    ``clients``: as if so many held data like the first one, whether the data has them or not.
    """
    notes = []
    if spec.training is not None:
        spec = spec.model_copy(update={"training": None})
        notes.append("The training before the audit is not counted, and times are those of the untrained model.")
    setup = build_setup(spec)
    rehearse(setup)
    if clients is not None:
        setup = dataclasses.replace(setup, batches=setup.batches[:1] * clients)
    before = torch.get_num_threads()
    torch.set_num_threads(spec.threads)
    try:
        return _sized(setup, workers, seconds, notes)
    finally:
        torch.set_num_threads(before)


def _sized(setup: Setup, workers: int | None, seconds: float, notes: list[str]) -> Sizing:
    counts: Counter[_Kind] = Counter()
    firsts: dict[_Kind, Job] = {}
    for job in count_plan(setup):
        kind = _Kind.of(job)
        counts[kind] += 1
        firsts.setdefault(kind, job)
    trials = _Trials(setup, firsts, seconds)
    cells = tuple(_cell(setup, firsts[kind], count, *trials.of(kind)) for kind, count in counts.items())
    total = sum(counts.values())
    problem = JOBS.problem(total)
    if problem is not None:
        notes.append(f"More jobs than one audit may have: {problem}.")
    if trials.share < FREE_SHARE:
        notes.append(f"The machine was busy: trials got {trials.share:.0%} of a processor, which is allowed for.")
    untimed = sum(cell.jobs for cell in cells if cell.seconds is None)
    if untimed:
        notes.append(f"{untimed:,} jobs could not be timed (they refuse or fail here) and count nothing.")
    attempts = sum(count for kind, count in counts.items() if kind.finding is None)
    disk = disk_bytes(setup, attempts, total - attempts)
    clients = len(setup.batches)
    return Sizing(
        *(cells, clients, setup.spec.threads, trials.memory_mb, disk / 2**20, workers, trials.share, tuple(notes))
    )


def disk_bytes(setup: Setup, attempts: int, findings: int) -> int:
    """What the folder of an audit takes: rows, curves, and pictures where they are kept."""
    pixels = math.prod(setup.data.x.shape[1:])
    pictures = 2 * FLOAT * pixels * setup.spec.batch if setup.pictures else 0
    row = ROW_BYTES + CURVE_BYTES + setup.spec.batch * EXAMPLE_BYTES + pictures
    return attempts * row + findings * ROW_BYTES


@dataclass(frozen=True)
class _Kind:
    """Jobs that differ in nothing but the client and the seed."""

    protocol: int
    defense: int | None
    attack: int | None
    control: str | None
    finding: str | None

    @classmethod
    def of(cls, job: Job) -> _Kind:
        return cls(job.protocol, job.defense, job.attack, job.control, job.finding)

    def relatives(self, others: Iterable[_Kind]) -> list[_Kind]:
        """Those with the same attack or finding, the nearest first: same protocol, then no control."""
        same = [one for one in others if (one.attack, one.finding) == (self.attack, self.finding)]
        if self.attack is None and self.finding is None:
            same = [one for one in same if one.control == self.control]
        return sorted(same, key=lambda one: (one.protocol != self.protocol, one.control != self.control))


class _Trials:
    """Times of one job of each kind, as far as the seconds go; first one of each attack and protocol, then the rest."""

    def __init__(self, setup: Setup, firsts: Mapping[_Kind, Job], seconds: float) -> None:
        self._setup, self._firsts = setup, firsts
        self._timed: dict[_Kind, tuple[Trial | None, float]] = {}
        spent = wall = rise = 0.0
        rest, update = psutil.Process().memory_info().rss, 0
        until = time.monotonic() + seconds
        for kind in _in_order(firsts):
            if time.monotonic() >= until:
                break
            memory, began, clock = PeakMemory(), time.process_time(), time.perf_counter()
            trial = try_out(setup, firsts[kind])
            used, took = time.process_time() - began, time.perf_counter() - clock
            rise = max(rise, memory.megabytes())
            spent, wall = spent + used, wall + took
            self._timed[kind] = trial, min(1.0, used / max(took, 1e-9))
            if not update and kind.attack is not None:
                update = update_bytes(Bench(setup).observe(firsts[kind]))
        self.share = min(1.0, spent / wall) if wall else 1.0
        # A worker keeps updates for further jobs; one of them was there in the trial already.
        kept = max(0, min(MOST_BYTES, update * len(setup.spec.defenses) * len(setup.spec.protocols)) - update)
        self.memory_mb = round((rest + kept) / 2**20 + rise, 1)

    def of(self, kind: _Kind) -> tuple[float | None, str]:
        """Seconds of a processor, and how they were found."""
        if kind in self._timed:
            trial, share = self._timed[kind]
            if trial is None:
                return None, "not timed"
            how = "at least" if trial.at_least else "whole" if trial.step is None else "steps"
            return trial.seconds * share, how
        for other in kind.relatives(self._timed):
            seconds, _ = self.of(other)
            if seconds is not None:
                return seconds, f"as {_setting(self._setup, self._firsts[other])}"
        return None, "not timed"


def _in_order(kinds: Iterable[_Kind]) -> list[_Kind]:
    """One of each attack, guess or finding under each protocol before any other of them; controls last."""
    turns: Counter[tuple[Any, ...]] = Counter()
    ranked = []
    for kind in sorted(kinds, key=lambda kind: kind.control is not None and kind.attack is not None):
        group = kind.protocol, kind.attack, kind.finding, kind.control if kind.attack is None else None
        ranked.append((turns[group], kind))
        turns[group] += 1
    return [kind for _, kind in sorted(ranked, key=lambda pair: pair[0])]


def _cell(setup: Setup, job: Job, jobs: int, seconds: float | None, timed: str) -> Cell:
    facts = describe(setup, job)
    kind = "attempt" if job.control is None and job.finding is None else "control" if job.control else "finding"
    if job.finding is not None and FINDINGS[job.finding].per == "training":
        kind = "training"
    name = facts.attack_name if job.control is None or job.attack is None else f"{facts.attack_name} on {job.control}"
    return Cell(_setting(setup, job), facts.protocol, facts.defense, name, kind, jobs, seconds, timed)


def _setting(setup: Setup, job: Job) -> str:
    """Short names of protocol and defence; of several with the same name, their place among them."""
    names = [_short(setup.spec.protocols, job.protocol)]
    if job.defense is not None:
        names.append(_short(setup.spec.defenses, job.defense))
    return ", ".join(names)


def _short(parts: Sequence[Part], place: int) -> str:
    name = parts[place].name
    same = [number for number, part in enumerate(parts) if part.name == name]
    return name if len(same) == 1 else f"{name} {same.index(place) + 1}"
