"""Workers that share the jobs of an audit, wherever they are: who does what next, and what becomes of it.

How a worker is started, spoken to and stopped is for those to say who inherit :class:`Crew`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from leakscope.audit.attempts import Outcome
from leakscope.audit.budget import Budget
from leakscope.audit.estimate import ALL_SECONDS, SILENT_SECONDS, Trial, estimate, trial_jobs
from leakscope.audit.executors.base import Emit, ExecutorError, Record
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup

STARTS_IN_A_ROW = 3
"""Workers that die before they are ready, one after the other, until the audit gives up."""


@dataclass(eq=False)
class Worker:
    """What the audit's own process knows of a worker."""

    ready: bool = False
    job: Job | None = None
    #: A job of which it times some steps.
    trial: Job | None = None
    since: float = 0.0
    #: What is left of the client it works on.
    group: deque[Job] = field(default_factory=deque)


W = TypeVar("W", bound=Worker)


class Crew(ABC, Generic[W]):
    """Jobs by client, and the workers that do them."""

    def __init__(
        self,
        setup: Setup,
        groups: Sequence[Sequence[Job]],
        timeout: float | None,
        budget: Budget,
        emit: Emit,
        record: Record,
    ) -> None:
        self._setup, self._threads, self._timeout = setup, setup.spec.threads, timeout
        self._budget, self._emit, self._record = budget, emit, record
        self._jobs = [job for group in groups for job in group]
        self._waiting = deque(deque(group) for group in groups)
        self._workers: list[W] = []
        self._failed_starts = 0
        self._count = 1
        self._to_try: deque[Job] = deque()
        self._trials: dict[str, Trial | None] = {}
        self._estimated, self._try_until = True, math.inf

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
        """End the worker, whatever it does."""

    @abstractmethod
    def _release(self, worker: W) -> None:
        """Let go of what a worker that has ended leaves behind."""

    @abstractmethod
    def _dismiss(self) -> None:
        """End all workers."""

    def work(self, count: int, estimates: bool) -> None:
        """Do all jobs with so many workers; ``estimates``: tell first how long it will take."""
        self._count = count
        if estimates:
            self._to_try, self._estimated = deque(trial_jobs(self._jobs)), False
        try:
            for _ in range(count):
                self._hire()
            while self._left():
                self._turn()
        finally:
            # Also on Ctrl-C: every finished row is in the store, so stopping at once loses only what runs.
            self._dismiss()

    def _left(self) -> int:
        """Jobs that are not done yet."""
        waiting = sum(len(group) for group in self._waiting)
        return waiting + sum(len(worker.group) + (worker.job is not None) for worker in self._workers)

    def _hear(self, worker: W, kind: str, content: Any) -> None:
        """What a worker says: it is ready, or what became of that which it was sent."""
        if kind == "broken":
            raise ExecutorError(f"a worker cannot prepare this audit. {content}\nUse executor='serial'.")
        if kind == "ready":
            worker.ready, self._failed_starts = True, 0
        elif kind == "outcome" and worker.job is not None:
            job, worker.job = worker.job, None
            self._record(job, content)
            if not self._may_go_on(worker, content):
                return
        elif kind == "tried" and worker.trial is not None:
            self._tried(worker, content)
        self._assign(worker)

    def _may_go_on(self, worker: W, outcome: Outcome) -> bool:
        """Whether a worker that has done a job gets another."""
        return True

    def _assign(self, worker: W) -> None:
        if not self._estimated:
            self._try_out(worker)
            return
        if not self._budget.allows():
            self._leave_the_rest()
        job = self._next(worker)
        while job is not None and self._budget.spares(job):
            job = self._next(worker)
        if job is None:
            return
        worker.job, worker.since = job, time.monotonic()
        self._emit({"event": "started", "job": worker.job})
        self._send(worker, "run", job)

    def _leave_the_rest(self) -> None:
        """Begin nothing more; what is under way gets to end."""
        self._waiting.clear()
        for worker in self._workers:
            worker.group.clear()

    def _try_out(self, worker: W) -> None:
        """Have it time some steps; when all are timed, tell the estimate and begin with the jobs themselves."""
        self._try_until = min(self._try_until, time.monotonic() + self._budget.trial_seconds(ALL_SECONDS))
        if self._to_try and time.monotonic() < self._try_until:
            worker.trial, worker.since = self._to_try.popleft(), time.monotonic()
            self._send(worker, "try", worker.trial)
        elif all(colleague.trial is None for colleague in self._workers):
            self._estimated = True
            if self._trials:
                self._emit(estimate(self._setup, self._jobs, self._trials, self._count))
            for colleague in list(self._workers):
                if colleague.ready and colleague.job is None:
                    self._assign(colleague)

    def _tried(self, worker: W, trial: Trial | None) -> None:
        assert worker.trial is not None
        self._trials[worker.trial.key], worker.trial = trial, None

    def _next(self, worker: W) -> Job | None:
        """The next job of its client, else another client; of one that a colleague works on only if none is left.

        A client's update is made once in each process that works on it, which at the end may be two.
        """
        if not worker.group and self._waiting:
            worker.group = self._waiting.popleft()
        if worker.group:
            return worker.group.popleft()
        busiest = max(self._workers, key=lambda colleague: len(colleague.group))
        return busiest.group.pop() if busiest.group else None

    def _failed_start(self, last: str) -> None:
        """ExecutorError where workers die again and again before they are ready; ``last`` is how the last one did."""
        self._failed_starts += 1
        if self._failed_starts >= STARTS_IN_A_ROW:
            raise ExecutorError(
                f"{STARTS_IN_A_ROW} worker processes in a row died before they were ready, the last one {last}"
            )

    def _replace(self, worker: W, error: str) -> None:
        """Each replacement costs a job or a trial or counts as a failed start, so there is an end to them."""
        self._workers.remove(worker)
        self._release(worker)
        if worker.trial is not None:
            self._tried(worker, None)
        if worker.group:
            self._waiting.appendleft(worker.group)
        if worker.job is not None:
            self._record(worker.job, Outcome("failed", error=error, seconds=time.monotonic() - worker.since))
        if len(self._workers) < min(self._count, self._left()):
            self._hire()

    def _stop_overdue(self) -> None:
        for worker in [worker for worker in self._workers if self._overdue(worker)]:
            self._stop(worker)
            self._replace(worker, f"TimeoutError: stopped after more than {self._timeout or 0:g} s")

    def _limit(self, worker: W) -> float | None:
        """Seconds after which what it does is stopped."""
        if worker.trial is not None:
            return 4 * SILENT_SECONDS  # an attack that does not even heed the alarm
        return None if worker.job is None else self._timeout

    def _overdue(self, worker: W) -> bool:
        limit = self._limit(worker)
        return limit is not None and time.monotonic() - worker.since > limit

    def _patience(self) -> float | None:
        limits = [(worker.since, self._limit(worker)) for worker in self._workers]
        ends = [since + limit for since, limit in limits if limit is not None]
        return max(0.01, min(ends) - time.monotonic() + 0.01) if ends else None
