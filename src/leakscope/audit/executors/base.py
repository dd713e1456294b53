"""The contract of an executor, which says where jobs run; the serial executor; workers that share jobs (Crew)."""

import dataclasses
import pickle
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from leakscope.audit.agenda import Agenda, Budget, Queue
from leakscope.audit.attempts import Advance, Bench, Outcome
from leakscope.audit.estimate import AUDIT_PATIENCE, Estimator, try_out
from leakscope.audit.forecast import START_SECONDS
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup, torch_threads
from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import Setting, settings_of

T = TypeVar("T")
#: Told of what happens to a job.
Emit = Callable[[dict[str, Any]], None]
#: Keeps what became of a job.
Record = Callable[[Job, Outcome], None]

#: Seconds between two words on how far a job is.
ADVANCE_SECONDS = 0.2
#: Times the seconds of a trial after which a worker is stopped that does not heed the alarm.
TRIAL_PATIENCE = 8
#: Workers that die before they are ready, one after the other, until the audit gives up.
STARTS_IN_A_ROW = 3


class ExecutorError(UserError):
    """This executor cannot do this audit; the message says what to do."""


@dataclass(frozen=True)
class Executor(ABC):
    """Run ``workers`` jobs side by side (None: as many as fit), each stopped after ``timeout`` seconds (None: never).

    ``estimates``: tell beforehand how long it will take (``audit/estimate.py``). ``agenda`` is asked before each job
    (``Queue``): what its budget does not allow any more is left for another run, what nobody needs is passed over.
    """

    workers: int | None = None
    timeout: float | None = None
    estimates: bool = False
    agenda: Agenda = field(default_factory=lambda: Agenda(Budget()))

    @classmethod
    def own_settings(cls) -> tuple[Setting, ...]:
        """Return the settings that only this executor has: its fields made with ``setting``."""
        common = {field.name for field in dataclasses.fields(Executor)}
        return tuple(one for one in settings_of(cls) if one.name not in common)

    def check(self, setup: Setup) -> None:
        """Raise ExecutorError, before anything is written, where this audit cannot run here."""
        return

    @abstractmethod
    def run(self, setup: Setup, groups: Sequence[Sequence[Job]], *, emit: Emit, record: Record) -> None:
        """Do all jobs within the budget, and begin them in this order where there is one.

        The jobs of a group are on one client, so they are best done in one place. Run side by side only in processes:
        threads share torch's random numbers and its forward mode. ``emit`` takes each start, progress and estimate;
        ``record`` is called in the audit's own process, once for each job that was begun.
        """


class Serial(Executor):
    """Run every job in this process, one after another; none can be stopped, so there is no timeout."""

    def run(self, setup: Setup, groups: Sequence[Sequence[Job]], *, emit: Emit, record: Record) -> None:
        bench, jobs, queue = Bench(setup), [job for group in groups for job in group], Queue(groups, self.agenda)
        with torch_threads(setup.spec.threads):
            if self.estimates:
                estimator = Estimator(setup, jobs)
                while (job := estimator.next()) is not None:
                    emit({"event": "timing", "job": job})
                    estimator.note(job, try_out(setup, job))
                estimator.tell(emit, workers=1)
            while (job := queue.take()) is not None:
                emit({"event": "started", "job": job})
                record(job, bench.run(job, throttled(job, emit)))


def packed(content: Any, where: str, instead: str) -> bytes:
    """Pickle what workers are sent; raise ExecutorError if it cannot leave this process."""
    try:
        return pickle.dumps(content)
    except Exception as error:
        what = f"the model or another object of this audit cannot be sent to {where}"
        raise ExecutorError(f"{what} ({type(error).__name__}: {error}). Use executor={instead}.") from error


def throttled(job: Job, emit: Emit, seconds: float = ADVANCE_SECONDS) -> Advance:
    """Turn an attack's progress into events, at most one in so many seconds."""
    last = time.monotonic()

    def advance(done: int, total: int, value: float) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= seconds:
            last = now
            emit({"event": "advanced", "job": job, "done": int(done), "total": int(total), "value": float(value)})

    return advance


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return what ``call`` returns; raise TimeoutError where it takes longer, and leave its thread behind.

    >>> within(5.0, lambda: 3)
    3
    """
    answers: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((True, call()))
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            answers.put((False, error))

    threading.Thread(target=ask, daemon=True).start()
    try:
        fine, answer = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds:g} s") from None
    if not fine:
        raise answer
    return answer


@dataclass(eq=False)
class Worker:
    """What the audit's own process knows of a worker."""

    ready: bool = False
    job: Job | None = None
    trying: bool = False  # only times some steps of its job
    since: float = 0.0
    unneeded_since: float | None = None


W = TypeVar("W", bound=Worker)


class Crew(ABC, Generic[W]):
    """Share jobs, grouped by client, among workers, which subclasses start, address and stop."""

    def __init__(
        self, executor: Executor, setup: Setup, groups: Sequence[Sequence[Job]], emit: Emit, record: Record
    ) -> None:
        self._setup, self._threads, self._timeout = setup, setup.spec.threads, executor.timeout
        self._agenda, self._emit, self._record = executor.agenda, emit, record
        self._jobs = [job for group in groups for job in group]
        self._queue = Queue(groups, executor.agenda)
        self._workers: list[W] = []
        self._failed_starts, self._count = 0, 1
        #: Until it has told how long all will take, no job is begun.
        self._estimator = Estimator(setup, self._jobs) if executor.estimates else None

    @abstractmethod
    def _hire(self) -> None:
        """Start one more worker."""

    @abstractmethod
    def _turn(self) -> None:
        """Wait until some worker has something to say, dies, or has used up its time."""

    @abstractmethod
    def _send(self, worker: W, kind: str, job: Job) -> None:
        """Have the worker run a job, or try it out."""

    @abstractmethod
    def _stop(self, worker: W) -> None:
        """End the worker, whatever it does, and let go of what it leaves behind."""

    def work(self, count: int) -> None:
        """Do all jobs with so many workers."""
        self._count = count
        try:
            for _ in range(count):
                self._hire()
            while self._left():
                self._turn()
        finally:
            # Also on Ctrl-C: every finished row is in the store, so stopping at once loses only what runs.
            while self._workers:
                self._stop(self._workers.pop())

    def _left(self) -> int:
        return len(self._queue) + sum(worker.job is not None and not worker.trying for worker in self._workers)

    def _hear(self, worker: W, kind: str, content: Any) -> None:
        """Take a worker's message: it is ready, or what became of its job."""
        if kind == "broken":
            raise ExecutorError(f"a worker cannot prepare this audit. {content}\nUse executor='serial'.")
        job, worker.job = worker.job, None
        if kind == "ready":
            worker.ready, self._failed_starts = True, 0
        elif kind == "outcome" and job is not None:
            self._record(job, content)
            self._note_unneeded()
        elif kind == "tried" and job is not None and self._estimator is not None:
            self._estimator.note(job, content)
        self._assign(worker)

    def _assign(self, worker: W) -> None:
        if (estimator := self._estimator) is not None:
            # All are timed before the estimate is told and the jobs themselves begin.
            if (job := estimator.next()) is not None:
                self._emit({"event": "timing", "job": job})
                self._begin(worker, "try", job)
            elif all(colleague.job is None for colleague in self._workers):
                self._estimator = None
                estimator.tell(self._emit, self._count)
                self._wake()
            return
        job = self._queue.take(worker)
        if job is not None:
            self._emit({"event": "started", "job": job})
            self._begin(worker, "run", job)

    def _begin(self, worker: W, kind: str, job: Job) -> None:
        worker.job, worker.trying, worker.since, worker.unneeded_since = job, kind == "try", time.monotonic(), None
        self._send(worker, kind, job)

    def _wake(self) -> None:
        """Give every worker that is ready and idle something to do."""
        for worker in list(self._workers):
            if worker.ready and worker.job is None:
                self._assign(worker)

    def _note_unneeded(self) -> None:
        now = time.monotonic()
        for worker in self._workers:
            if worker.job is not None and worker.unneeded_since is None and self._agenda.stops(worker.job):
                worker.unneeded_since = now

    def _failed_start(self, last: str) -> None:
        """Raise ExecutorError where workers die again and again before they are ready."""
        self._failed_starts += 1
        if self._failed_starts >= STARTS_IN_A_ROW:
            died = f"{STARTS_IN_A_ROW} worker processes in a row died before they were ready"
            raise ExecutorError(f"{died}, the last one {last}")

    def _replace(self, worker: W, error: str | None) -> None:
        """Go on with another one; each costs a job or a trial or counts as a failed start, so there is an end.

        Without an ``error`` its job was not needed any more, and leaves no row.
        """
        self._stop(worker)
        self._workers.remove(worker)
        self._queue.release(worker)
        if worker.job is not None and not worker.trying and error is not None:
            self._record(worker.job, Outcome("failed", error=error, seconds=time.monotonic() - worker.since))
        elif worker.job is not None and self._estimator is not None:
            self._estimator.note(worker.job, None)
        if len(self._workers) < min(self._count, self._left()):
            self._hire()

    def _stop_overdue(self) -> None:
        now, late = time.monotonic(), f"TimeoutError: stopped after more than {self._timeout or 0:g} s"
        for worker in [one for one in self._workers if (end := self._deadline(one)) is not None and now > end]:
            self._replace(worker, late if worker.unneeded_since is None else None)
            self._wake()  # what it held is for everybody now

    def _deadline(self, worker: W) -> float | None:
        """Return when its job is stopped; a trial only where the attack does not even heed the alarm."""
        if worker.job is not None and worker.unneeded_since is not None:
            return worker.unneeded_since + START_SECONDS  # sooner, a new worker would cost more than is saved
        limit = TRIAL_PATIENCE * AUDIT_PATIENCE if worker.trying else self._timeout
        return None if worker.job is None or limit is None else worker.since + limit

    def _patience(self) -> float | None:
        ends = [end for worker in self._workers if (end := self._deadline(worker)) is not None]
        return max(0.01, min(ends) - time.monotonic() + 0.01) if ends else None
