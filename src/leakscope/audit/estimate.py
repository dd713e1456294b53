"""Time a few steps of jobs, for ``leakscope plan`` and for an audit's announcement; ``forecast`` adds them up.

One job of each kind is tried, of the first client only; a kind that is not timed counts as its nearest relative that
was. docs/scaling.md measures the model of ``forecast.wall_seconds``.
"""

import contextlib
import dataclasses
import math
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from leakscope.audit.assess import labels_of
from leakscope.audit.attempts import Bench
from leakscope.audit.forecast import Forecast, kind_of, wall_seconds
from leakscope.audit.keys import is_training
from leakscope.audit.memory import MOST_BYTES, PeakMemory, update_bytes
from leakscope.audit.plan import Job, count_plan, describe
from leakscope.audit.sections import span
from leakscope.audit.setup import Setup, build_setup, rehearse, torch_threads
from leakscope.audit.spec import AuditSpec
from leakscope.contracts.attack import Attack
from leakscope.contracts.checks import FLOAT, JOBS
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.results.records import job_facts

#: Steps that are timed, beside the first, which is slower.
STEPS = 3
#: Seconds after which a silent trial is stopped: of an audit, whose answer waits for it, and of ``leakscope plan``.
AUDIT_PATIENCE, PLAN_PATIENCE = 4.0, 15.0
#: The share of them from which on two steps are enough.
TWO_STEPS = 0.125
#: Seconds after which an alarm that came in the middle of an import rings again.
AGAIN_SECONDS = 0.05
#: Seconds for all trials of an audit, and of ``leakscope plan``.
AUDIT_SECONDS, ALL_SECONDS = 20.0, 60.0
#: An audit that takes longer is worth some advice.
LONG_SECONDS = 3600.0
#: Bytes of a row, of each example in it, and of the curves beside it; by the same runs.
ROW_BYTES, EXAMPLE_BYTES, CURVE_BYTES = 3000, 500, 3000
#: From so much of what a processor could have done on, the machine counts as free.
FREE_SHARE = 0.8


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


def try_out(setup: Setup, job: Job, patience: float | None = None) -> Trial | None:
    """Time the first steps of a job, by default as an audit does; None where it fails, which its row will tell."""
    patience = AUDIT_PATIENCE if patience is None else patience
    times: list[tuple[int, int, float]] = []
    started, used = time.perf_counter(), time.process_time()

    def watch(done: int, total: int, _value: float) -> None:
        times.append((int(done), int(total), time.perf_counter()))
        steps = len(times)
        if steps == 1:  # the second one takes no longer, and tells the step from what comes before it
            ring_in(max(patience, times[0][2] - started))
        elif steps > STEPS or times[-1][2] - started > TWO_STEPS * patience:
            raise _Enough

    try:
        with _alarm(patience) as ring_in:
            outcome = Bench(_uncompiled(setup)).run(job, watch)
        if outcome.status != "done":
            return None
        trial = Trial(outcome.seconds)
    except _Enough:
        trial = _extrapolated(started, times)
        if trial.step is not None and job.control is None:
            trial = _with_what_follows(setup, job, trial, patience)
    took = max(time.perf_counter() - started, 1e-9)
    return dataclasses.replace(trial, share=min(1.0, (time.process_time() - used) / took))


def _extrapolated(started: float, times: list[tuple[int, int, float]]) -> Trial:
    if not times:  # how many steps the attack has says nothing of what it does before the first
        return Trial(time.perf_counter() - started, at_least=True)
    (first, _, begun), (last, total, ended) = times[0], times[-1]
    step = (ended - begun) / (last - first) if last > first else (begun - started) / max(first, 1)
    return Trial(begun - started + step * max(total - first, 0), step, total)


@dataclass(frozen=True, kw_only=True)
class _Blank(Attack):
    """Return grey inputs at once, so that what is timed is what an audit does with a result."""

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        count = observation.num_examples or 1
        grey = observation.inputs.from_unit(torch.full((count, *observation.input_shape), 0.5))
        found = Reconstruction(grey.to(observation.dtype), None, torch.zeros(count))
        return dataclasses.replace(found, labels=labels_of(observation, found))


def _with_what_follows(setup: Setup, job: Job, trial: Trial, patience: float) -> Trial:
    """Add the time of measures and diagnosis to that of the steps; where it is long, the sum is a lower bound."""
    attacks = [part.model_copy(update={"instance": _Blank()}) for part in setup.spec.attacks]
    blank = dataclasses.replace(setup, spec=setup.spec.model_copy(update={"attacks": attacks}))
    started, ended = time.perf_counter(), False
    with contextlib.suppress(_Enough), _alarm(patience):
        ended = Bench(blank).run(job) is not None
    return dataclasses.replace(
        trial, seconds=trial.seconds + time.perf_counter() - started, at_least=trial.at_least or not ended
    )


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
def _alarm(seconds: float) -> Iterator[Callable[[float], object]]:
    """Raise _Enough after ``seconds``; yield what puts that off. Only the main thread can be stopped so."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield lambda seconds: None
        return
    under_way = True

    def ring(_number: int, frame: Any) -> None:
        if under_way and _importing(frame):  # a module that is imported in part stays broken for all jobs after this
            signal.setitimer(signal.ITIMER_REAL, AGAIN_SECONDS)
        elif under_way:
            raise _Enough

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    finally:
        under_way = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _importing(frame: Any) -> bool:
    """Check whether a module is being imported where the alarm rings."""
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _kind(job: Job) -> Job:
    return dataclasses.replace(job, key="", position=0, seed=0, batch=0)


def kinds_of(setup: Setup, jobs: Iterable[Job]) -> list[dict[str, Any]]:
    """Return the kinds of jobs as ``Forecast`` takes them, with how many there are of each."""
    counts = Counter(map(_kind, jobs))
    return [{**_facts(setup, kind), "jobs": count} for kind, count in counts.items()]


def _facts(setup: Setup, job: Job) -> dict[str, Any]:
    return {**job_facts(describe(setup, job)), "finding": job.finding}


def _work_of(kind: Job) -> tuple[Any, ...]:
    return kind.attack, kind.finding, kind.control if kind.attack is None else None


class Estimator:
    """Time jobs by kind, in trials of about ``seconds`` in all."""

    def __init__(self, setup: Setup, jobs: Iterable[Job], seconds: float = AUDIT_SECONDS) -> None:
        self._setup, self._seconds = setup, seconds
        self._until: float | None = None
        self.counts: Counter[Job] = Counter()
        self.firsts: dict[Job, Job] = {}
        self.trials: dict[Job, Trial | None] = {}
        for job in jobs:
            self.counts[_kind(job)] += 1
            self.firsts.setdefault(_kind(job), job)
        self._to_try = deque(self._in_order())

    def _in_order(self) -> list[Job]:
        """Order the trials: one of each attack, guess and finding under each protocol first; controls last."""
        turns: Counter[tuple[Any, ...]] = Counter()
        ranked = []
        for kind in sorted(self.firsts, key=lambda kind: kind.control is not None and kind.attack is not None):
            group = kind.protocol, *_work_of(kind)
            ranked.append((turns[group], kind.finding is not None, self.firsts[kind]))
            turns[group] += 1
        return [job for *_, job in sorted(ranked, key=lambda entry: entry[:2])]

    def next(self) -> Job | None:
        """Return the next job to try; None where there is none or the time is over."""
        self._until = time.monotonic() + self._seconds if self._until is None else self._until
        return self._to_try.popleft() if self._to_try and time.monotonic() < self._until else None

    def note(self, job: Job, trial: Trial | None) -> None:
        self.trials[_kind(job)] = trial

    def kinds(self) -> list[dict[str, Any]]:
        """Return all kinds of jobs with how many there are and what a trial took; nothing for one that refuses."""
        seconds = {kind: 0.0 if trial is None else trial.seconds for kind, trial in self.trials.items()}
        return [
            {**_facts(self._setup, first), "jobs": self.counts[kind], "seconds": seconds.get(kind)}
            for kind, first in self.firsts.items()
        ]

    def how(self, kind: Job) -> str:
        """Say how a kind was timed: by its own trial, or as its nearest relative with the same attack."""
        if kind in self.trials:
            trial = self.trials[kind]
            return "not timed" if trial is None else trial.how
        same = [one for one, trial in self.trials.items() if trial and _work_of(one) == _work_of(kind)]
        nearest = min(same, key=lambda one: (one.protocol != kind.protocol, one.control != kind.control), default=None)
        return "not timed" if nearest is None else f"as {_setting(self._setup, self.firsts[nearest])}"

    def tell(self, emit: Callable[[dict[str, Any]], None], workers: int) -> None:
        """Emit how long all jobs will take, if any was tried."""
        kinds = self.kinds()
        forecast = Forecast(kinds, workers)
        seconds = forecast.remaining()
        if not self.trials or seconds is None:
            return
        budget = self._setup.spec.budget
        at_least = forecast.at_least or any(trial is not None and trial.at_least for trial in self.trials.values())
        emit(
            {
                "event": "estimated",
                **{"seconds": seconds, "at_least": at_least, "jobs": sum(self.counts.values()), "workers": workers},
                **{"by_attack": {name: took / workers for name, took in forecast.by_attack().items()}, "kinds": kinds},
                **{"advice": self._advice(forecast, seconds), "budget": budget, "long": is_long(seconds, budget)},
            }
        )

    def _advice(self, forecast: Forecast, seconds: float) -> str | None:
        spec = self._setup.spec
        if not is_long(seconds, spec.budget):
            return None
        if spec.budget is not None:
            return (
                f"That is longer than the budget of {span(spec.budget)}: what is not begun by then is left for the "
                "next run of the same command."
            )
        shares = forecast.by_attack()
        name = max(shares, key=lambda one: shares[one])
        of_it = [t for kind, t in self.trials.items() if t and kind.attack is not None and self._name(kind) == name]
        slowest = max(of_it, key=lambda trial: trial.seconds, default=None)
        return _advice(name, slowest, findings=any(kind.finding is not None for kind in self.counts))

    def _name(self, kind: Job) -> str:
        return self._setup.spec.attacks[kind.attack or 0].name


def is_long(seconds: float, budget: float | None) -> bool:
    """Check whether an audit takes longer than its budget, or than is pleasant without one."""
    return seconds > (LONG_SECONDS if budget is None else budget)


def _advice(name: str, trial: Trial | None, findings: bool) -> str:
    pace = "" if trial is None or trial.step is None else f"{trial.step:.2g} s"
    steps = f", {trial.steps} steps of {pace} a job" if trial is not None and pace else ""
    shorter = "" if not pace else f"fewer steps (--attack {name}:iterations=...), "
    theory = " Theory takes extra time; --no-findings leaves it out." if findings else ""
    return (
        f"Most of it is {name}{steps}. To shorten it: {shorter}fewer examples (--examples) or seeds, inputs of a "
        f"smaller size, fewer attacks or defences, more --workers, or a --budget.{theory} What is done is kept, and "
        "more can be added later."
    )


@dataclass(frozen=True)
class Cell:
    """Jobs of one kind."""

    setting: str
    protocol: str
    defense: str
    attack: str
    kind: str
    jobs: int
    seconds: float | None  # for each job; None where nothing like it could be timed
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
    spec: AuditSpec,
    *,
    workers: int | None = None,
    clients: int | None = None,
    seconds: float = ALL_SECONDS,
    progress: Callable[[str, int, int], None] | None = None,
) -> Sizing:
    """Return what ``spec`` will take, from trials of about ``seconds``, as if ``clients`` held data like the first.

    ``progress`` is told of each trial: its name, how many are done, and how many there are.
    """
    notes = []
    if spec.training is not None:
        spec = spec.model_copy(update={"training": None})
        notes.append("The training before the audit is not counted, and times are those of the untrained model.")
    setup = build_setup(spec)
    rehearse(setup)
    if clients is not None:
        setup = dataclasses.replace(setup, batches=setup.batches[:1] * clients)
    estimator = Estimator(setup, count_plan(setup), seconds)
    memory = _try_all(setup, estimator, progress)
    firsts, counts = estimator.firsts, estimator.counts
    kinds = estimator.kinds()
    forecast = Forecast(kinds)
    cells = tuple(
        _cell(setup, firsts[kind], counts[kind], forecast.seconds_of(kind_of(told)) or None, estimator.how(kind))
        for kind, told in zip(firsts, kinds, strict=True)
    )
    total = sum(counts.values())
    if (problem := JOBS.problem(total)) is not None:
        notes.append(f"More jobs than one audit may have: {problem}.")
    shares = [trial.share for trial in estimator.trials.values() if trial is not None]
    if (share := sum(shares) / len(shares) if shares else 1.0) < FREE_SHARE:
        notes.append(f"The machine was busy: trials got {share:.0%} of a processor, and free ones are faster.")
    if untimed := sum(cell.jobs for cell in cells if cell.seconds is None):
        notes.append(f"{untimed:,} jobs could not be timed (they refuse or fail here) and count nothing.")
    if spec.stops_on_leak:
        notes.append("A scenario ends as soon as it exceeds the policy, so an audit that finds a leak takes less.")
    findings = sum(count for kind, count in counts.items() if kind.finding is not None)
    disk = disk_bytes(setup, total - findings, findings) / 2**20
    return Sizing(cells, len(setup.batches), spec.threads, memory, disk, workers, share, tuple(notes))


def _try_all(setup: Setup, estimator: Estimator, progress: Callable[[str, int, int], None] | None) -> float:
    """Try all kinds as far as the seconds go; return the megabytes that a worker takes."""
    rest, rise, update = psutil.Process().memory_info().rss, 0.0, 0
    with torch_threads(setup.spec.threads):
        while (job := estimator.next()) is not None:
            if progress is not None:
                progress(f"timing {_name_of(setup, job)}", len(estimator.trials), len(estimator.counts))
            memory = PeakMemory()
            estimator.note(job, try_out(setup, job, PLAN_PATIENCE))
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


def _cell(setup: Setup, job: Job, jobs: int, seconds: float | None, timed: str) -> Cell:
    facts = describe(setup, job)
    kind = "control" if job.control else "attempt" if job.finding is None else "finding"
    kind = "training" if is_training(job.finding) else kind
    place = _setting(setup, job), facts.protocol, facts.defense
    return Cell(*place, _name_of(setup, job), kind, jobs, seconds, timed)


def _name_of(setup: Setup, job: Job) -> str:
    name = describe(setup, job).attack_name
    return name if job.control is None or job.attack is None else f"{name} on {job.control}"


def _setting(setup: Setup, job: Job) -> str:
    """Name protocol and defence; number those that share a name."""
    names = []
    for parts, place in ((setup.spec.protocols, job.protocol), (setup.spec.defenses, job.defense)):
        if place is not None:
            same = [number for number, part in enumerate(parts) if part.name == parts[place].name]
            names.append(parts[place].name + (f" {same.index(place) + 1}" if len(same) > 1 else ""))
    return ", ".join(names)
