"""Estimate how long an audit takes, for ``leakscope plan``, for the audit's announcement and for its progress.

A few steps of one job of each kind are timed, of the first client only; a kind that is not timed counts as its nearest
relative that was. docs/scaling.md measures the model of :func:`wall_seconds`.
"""

import dataclasses
import math
import signal
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from leakscope.audit.attempts import Bench
from leakscope.audit.keys import is_training
from leakscope.audit.memory import MOST_BYTES, PeakMemory, update_bytes
from leakscope.audit.plan import Job, count_plan, describe
from leakscope.audit.sections import span
from leakscope.audit.setup import Setup, build_setup, rehearse, torch_threads
from leakscope.audit.spec import AuditSpec
from leakscope.contracts.checks import FLOAT, JOBS

#: Steps that are timed, beside the first, which is slower.
STEPS = 3
#: Seconds after which two steps are enough, after which one is, and after which a silent attack is stopped.
TWO_STEPS_SECONDS, ONE_STEP_SECONDS, SILENT_SECONDS = 2.0, 8.0, 15.0
#: Seconds for all trials.
ALL_SECONDS = 60.0
#: An audit that takes longer is worth some advice.
LONG_SECONDS = 3600.0
#: Seconds in which a worker starts, and in which the audit's own process writes a row; by the runs of docs/scaling.md.
START_SECONDS, ROW_SECONDS = 6.0, 0.005
#: Bytes of a row, of each example in it, and of the curves beside it; by the same runs.
ROW_BYTES, EXAMPLE_BYTES, CURVE_BYTES = 3000, 500, 3000
#: From so much of what a processor could have done on, the machine counts as free.
FREE_SHARE = 0.8
#: The shares of the work from which on the pace tells the time left at all, and alone.
TOLD_FROM, SURE_FROM = 0.05, 0.25


class _Enough(BaseException):
    """Ends a trial; no Exception, so that an attack that catches those does not go on."""


@dataclass(frozen=True)
class Trial:
    """What one job takes: seconds in all, and of a step where it has steps; ``at_least`` where none was finished."""

    seconds: float
    step: float | None = None
    steps: int | None = None
    at_least: bool = False
    share: float = 1.0  # of a processor that the trial got

    @property
    def how(self) -> str:
        return "at least" if self.at_least else "whole" if self.step is None else "steps"


def try_out(setup: Setup, job: Job) -> Trial | None:
    """Time the first steps of a job; None where it fails, which its row will tell."""
    times: list[tuple[int, int, float]] = []
    started, used = time.perf_counter(), time.process_time()

    def watch(done: int, total: int, _value: float) -> None:
        times.append((int(done), int(total), time.perf_counter()))
        elapsed, steps = times[-1][2] - started, len(times)
        if steps > STEPS or (steps > 1 and elapsed > TWO_STEPS_SECONDS) or elapsed > ONE_STEP_SECONDS:
            raise _Enough

    try:
        with _alarm(SILENT_SECONDS):
            outcome = Bench(_uncompiled(setup)).run(job, watch)
        if outcome.status != "done":
            return None
        trial = Trial(outcome.seconds)
    except _Enough:
        trial = _extrapolated(started, times, None if job.attack is None else setup.spec.attacks[job.attack].instance)
    took = max(time.perf_counter() - started, 1e-9)
    return dataclasses.replace(trial, share=min(1.0, (time.process_time() - used) / took))


def _extrapolated(started: float, times: list[tuple[int, int, float]], attack: Any) -> Trial:
    if not times:
        steps = getattr(attack, "iterations", None)
        return Trial(SILENT_SECONDS * (steps or 1), SILENT_SECONDS if steps else None, steps, at_least=True)
    (first, _, begun), (last, total, ended) = times[0], times[-1]
    step = (ended - begun) / (last - first) if last > first else (begun - started) / max(first, 1)
    return Trial(begun - started + step * max(total - first, 0), step, total)


def _uncompiled(setup: Setup) -> Setup:
    """Return the audit without compilation, which takes longer than a trial may."""
    attacks = [
        part.model_copy(update={"instance": dataclasses.replace(part.instance, compile="never")})
        if hasattr(part.instance, "compile")
        else part
        for part in setup.spec.attacks
    ]
    return dataclasses.replace(setup, spec=setup.spec.model_copy(update={"attacks": attacks}))


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """Raise _Enough after ``seconds``; only the main thread can be stopped so."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    under_way = True

    def ring(_number: int, _frame: Any) -> None:
        if under_way:
            raise _Enough

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        under_way = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _kind(job: Job) -> Job:
    return dataclasses.replace(job, key="", position=0, seed=0, batch=0)


class Estimator:
    """Time jobs by kind, in trials of about ``seconds`` in all: each attack once per protocol, or ``every`` kind."""

    def __init__(self, setup: Setup, jobs: Iterable[Job], seconds: float | None = None, *, every: bool = False) -> None:
        self._setup = setup
        self._seconds = min(ALL_SECONDS, setup.spec.budget or ALL_SECONDS) if seconds is None else seconds
        self._until: float | None = None
        self.counts: Counter[Job] = Counter()
        self.firsts: dict[Job, Job] = {}
        self.trials: dict[Job, Trial | None] = {}
        for job in jobs:
            self.counts[_kind(job)] += 1
            self.firsts.setdefault(_kind(job), job)
        self._to_try = deque(self._in_order(every))

    def _in_order(self, every: bool) -> list[Job]:
        """Order the trials: one of each attack, guess or finding under each protocol first; controls last."""
        turns: Counter[tuple[Any, ...]] = Counter()
        ranked = []
        for kind in sorted(self.firsts, key=lambda kind: kind.control is not None and kind.attack is not None):
            group = kind.protocol, kind.attack, kind.finding, kind.control if kind.attack is None else None
            if every or (kind.attack is not None and not turns[group]):
                ranked.append((turns[group], self.firsts[kind]))
            turns[group] += 1
        return [job for _, job in sorted(ranked, key=lambda pair: pair[0])]

    def next(self) -> Job | None:
        """Return the next job to try; None where there is none or the time is over."""
        self._until = time.monotonic() + self._seconds if self._until is None else self._until
        return self._to_try.popleft() if self._to_try and time.monotonic() < self._until else None

    def note(self, job: Job, trial: Trial | None) -> None:
        self.trials[_kind(job)] = trial

    def of(self, kind: Job) -> tuple[Trial | None, str]:
        """Return the trial of this kind, or of its nearest relative with the same attack, and how it was timed."""
        if kind in self.trials:
            trial = self.trials[kind]
            return trial, "not timed" if trial is None else trial.how
        same = [one for one in self.trials if (one.attack, one.finding) == (kind.attack, kind.finding)]
        if kind.attack is None and kind.finding is None:  # a guess is a control without an attack
            same = [one for one in same if one.control == kind.control]
        for other in sorted(same, key=lambda one: (one.protocol != kind.protocol, one.control != kind.control)):
            if (trial := self.trials[other]) is not None:
                return trial, f"as {_setting(self._setup, self.firsts[other])}"
        return None, "not timed"

    def tell(self, emit: Callable[[dict[str, Any]], None], workers: int) -> None:
        """Emit how long the attacks will take, if any was tried; findings are not counted."""
        if not self.trials:
            return
        spec = self._setup.spec
        timed = [(kind, trial) for kind in self.counts if kind.attack is not None and (trial := self.of(kind)[0])]
        by_attack: defaultdict[str, float] = defaultdict(float)
        for kind, trial in timed:
            by_attack[spec.attacks[kind.attack or 0].name] += self.counts[kind] * trial.seconds / workers
        jobs = sum(count for kind, count in self.counts.items() if kind.attack is not None)
        longest = max((trial.seconds for _, trial in timed), default=0.0)
        seconds = wall_seconds(sum(by_attack.values()) * workers, jobs, workers, longest, start=0.0)
        advice = None
        if spec.budget is not None and seconds > spec.budget:
            advice = (
                f"That is longer than the budget of {span(spec.budget)}: what is not begun by then is left for the "
                "next run of the same command."
            )
        elif timed and seconds > LONG_SECONDS:
            name = max(by_attack, key=lambda one: by_attack[one])
            trials = [trial for kind, trial in timed if spec.attacks[kind.attack or 0].name == name]
            slowest = max(trials, key=lambda trial: trial.seconds)
            advice = _advice(name, slowest, findings=any(kind.finding is not None for kind in self.counts))
        told = {"seconds": seconds, "jobs": jobs, "by_attack": dict(by_attack), "advice": advice}
        emit({"event": "estimated", **told, "budget": spec.budget})


def _advice(name: str, trial: Trial, findings: bool) -> str:
    pace = "" if trial.step is None else f"{'at least ' if trial.at_least else ''}{trial.step:.2g} s"
    steps = f", {trial.steps} steps of {pace} a job" if pace else ""
    shorter = "" if not pace else f"fewer steps (--attack {name}:iterations=...), "
    theory = " Theory takes extra time; --no-findings leaves it out." if findings else ""
    return (
        f"Most of it is {name}{steps}. To shorten it: {shorter}fewer examples (--examples) or seeds, inputs of a "
        f"smaller size, fewer attacks or defences, more --workers, or a --budget.{theory} What is done is kept, and "
        "more can be added later."
    )


def wall_seconds(work: float, jobs: int, workers: int, longest: float = 0.0, *, start: float = START_SECONDS) -> float:
    """Return the wall-clock seconds: the most of work by workers, writing all rows in one process, the longest job.

    >>> wall_seconds(3600.0, jobs=100, workers=1), wall_seconds(3600.0, jobs=100, workers=10)
    (3606.0, 366.0)
    >>> wall_seconds(3600.0, jobs=36000, workers=1000)  # rows are written one after another
    186.0
    """
    return max(work / workers, jobs * ROW_SECONDS, longest) + start


def remaining_seconds(
    elapsed: float, share: float, estimated: float | None = None, budget: float | None = None
) -> float | None:
    """Return the seconds left within the budget: by the estimate at first, then ever more by the pace.

    The estimate assumes that every search uses all of its steps, so it soon gives way.

    >>> remaining_seconds(10.0, 0.0, estimated=100.0), remaining_seconds(10.0, 0.5, estimated=100.0)
    (90.0, 10.0)
    >>> remaining_seconds(10.0, 0.125, estimated=100.0), remaining_seconds(10.0, 0.01), remaining_seconds(10.0, 1.0)
    (80.0, None, None)
    """
    if share >= 1:
        return None
    by_pace = elapsed / share - elapsed if share > 0 else None
    by_estimate = None if estimated is None else max(estimated - elapsed, 0.0)
    if by_estimate is None:
        left = by_pace if share >= TOLD_FROM else None
    elif by_pace is None or by_estimate == 0.0:  # an estimate that has passed says nothing any more
        left = by_estimate if by_pace is None else by_pace
    else:
        trust = min(1.0, share / SURE_FROM)
        left = trust * by_pace + (1 - trust) * by_estimate
    return left if left is None or budget is None else min(left, max(budget - elapsed, 0.0))


@dataclass(frozen=True)
class Cell:
    """Jobs of one kind."""

    setting: str
    protocol: str
    defense: str
    attack: str
    kind: str
    jobs: int
    seconds: float | None  # of a processor for each job; None where nothing like it could be timed
    timed: str  # "whole", "steps", "at least", or what the time was taken over from

    @property
    def core_hours(self) -> float:
        return self.jobs * (self.seconds or 0.0) / 3600


@dataclass(frozen=True)
class Sizing:
    """What an audit will take: jobs, core-hours, memory of a worker, disk, hours on a cluster."""

    cells: tuple[Cell, ...]
    clients: int
    threads: int
    memory_mb: float
    disk_mb: float
    workers: int | None = None
    share: float = 1.0  # of a processor that the trials got
    notes: tuple[str, ...] = ()

    @property
    def jobs(self) -> int:
        return sum(cell.jobs for cell in self.cells)

    @property
    def core_hours(self) -> float:
        return sum(cell.core_hours for cell in self.cells) * self.threads

    def hours(self, workers: int) -> float:
        """Return wall-clock hours with so many workers, each with processors of its own like those here."""
        work = sum(cell.core_hours for cell in self.cells) * 3600
        longest = max((cell.seconds or 0.0 for cell in self.cells), default=0.0)
        return wall_seconds(work, self.jobs, workers, longest) / 3600


def size_audit(
    spec: AuditSpec, *, workers: int | None = None, clients: int | None = None, seconds: float = ALL_SECONDS
) -> Sizing:
    """Return what ``spec`` will take, from trials of about ``seconds``, as if ``clients`` held data like the first."""
    notes = []
    if spec.training is not None:
        spec = spec.model_copy(update={"training": None})
        notes.append("The training before the audit is not counted, and times are those of the untrained model.")
    setup = build_setup(spec)
    rehearse(setup)
    if clients is not None:
        setup = dataclasses.replace(setup, batches=setup.batches[:1] * clients)
    estimator = Estimator(setup, count_plan(setup), seconds, every=True)
    memory = _try_all(setup, estimator)
    firsts, counts = estimator.firsts, estimator.counts
    cells = tuple(_cell(setup, firsts[kind], counts[kind], *estimator.of(kind)) for kind in counts)
    total = sum(counts.values())
    if (problem := JOBS.problem(total)) is not None:
        notes.append(f"More jobs than one audit may have: {problem}.")
    shares = [trial.share for trial in estimator.trials.values() if trial is not None]
    if (share := sum(shares) / len(shares) if shares else 1.0) < FREE_SHARE:
        notes.append(f"The machine was busy: trials got {share:.0%} of a processor, which is allowed for.")
    if untimed := sum(cell.jobs for cell in cells if cell.seconds is None):
        notes.append(f"{untimed:,} jobs could not be timed (they refuse or fail here) and count nothing.")
    findings = sum(count for kind, count in counts.items() if kind.finding is not None)
    disk = disk_bytes(setup, total - findings, findings) / 2**20
    return Sizing(cells, len(setup.batches), spec.threads, memory, disk, workers, share, tuple(notes))


def _try_all(setup: Setup, estimator: Estimator) -> float:
    """Try all kinds as far as the seconds go; return the megabytes that a worker takes."""
    rest, rise, update = psutil.Process().memory_info().rss, 0.0, 0
    with torch_threads(setup.spec.threads):
        while (job := estimator.next()) is not None:
            memory = PeakMemory()
            estimator.note(job, try_out(setup, job))
            rise = max(rise, memory.megabytes())
            if not update and job.attack is not None:
                update = update_bytes(Bench(setup).observe(job))
    # A worker keeps updates for further jobs; one of them was there in the trial already.
    kept = max(0, min(MOST_BYTES, update * len(setup.spec.defenses) * len(setup.spec.protocols)) - update)
    return round((rest + kept) / 2**20 + rise, 1)


def disk_bytes(setup: Setup, attempts: int, findings: int) -> int:
    """Return what the folder of an audit takes: rows, curves, and pictures where they are kept."""
    pictures = 2 * FLOAT * math.prod(setup.data.x.shape[1:]) * setup.spec.batch if setup.pictures else 0
    row = ROW_BYTES + CURVE_BYTES + setup.spec.batch * EXAMPLE_BYTES + pictures
    return attempts * row + findings * ROW_BYTES


def _cell(setup: Setup, job: Job, jobs: int, trial: Trial | None, timed: str) -> Cell:
    facts = describe(setup, job)
    kind = "control" if job.control else "attempt" if job.finding is None else "finding"
    kind = "training" if is_training(job.finding) else kind
    name = facts.attack_name if job.control is None or job.attack is None else f"{facts.attack_name} on {job.control}"
    seconds = None if trial is None else trial.seconds * trial.share
    return Cell(_setting(setup, job), facts.protocol, facts.defense, name, kind, jobs, seconds, timed)


def _setting(setup: Setup, job: Job) -> str:
    """Name protocol and defence; number those that share a name."""
    names = []
    for parts, place in ((setup.spec.protocols, job.protocol), (setup.spec.defenses, job.defense)):
        if place is not None:
            same = [number for number, part in enumerate(parts) if part.name == parts[place].name]
            names.append(parts[place].name + (f" {same.index(place) + 1}" if len(same) > 1 else ""))
    return ", ".join(names)
