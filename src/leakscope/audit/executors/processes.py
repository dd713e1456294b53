"""Jobs in worker processes, which may die without harm to others.

Workers are spawned, rebuild the audit from its spec, and take one job at a time over a pipe. Only the parent
writes to the store. What crosses the pipe was pickled by our own processes; no file is ever unpickled.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import pickle
import signal
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from leakscope.audit.attempts import Outcome
from leakscope.audit.budget import Budget
from leakscope.audit.estimate import ALL_SECONDS, SILENT_SECONDS, Trial, estimate, trial_jobs
from leakscope.audit.executors.base import Emit, Executor, ExecutorError, Record
from leakscope.audit.executors.crew_size import (
    JOBS_A_WORKER,
    REPEATS,
    SLOWEST_PACE,
    Pace,
    choose,
    free_memory,
    memory_room,
    sizes,
    usable_processors,
)
from leakscope.audit.executors.worker import inheritance, interrupts_held_back, serve
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup

STARTS_IN_A_ROW = 3
"""Workers that die before they are ready, one after the other, until the audit gives up."""


class Processes(Executor):
    """Spread the clients over worker processes; a job whose worker dies or takes too long is a failed row."""

    def check(self, setup: Setup) -> None:
        pack(setup)

    def run(self, setup: Setup, groups: Sequence[Sequence[Job]], *, emit: Emit, record: Record) -> None:
        if not groups:
            return
        jobs = sum(len(group) for group in groups)
        workers = min(self.workers or default_workers(setup.spec.threads), jobs)
        crew = _Crew(setup, pack(setup), groups, self.timeout, self.budget, emit, record)
        measured = self.workers is None and 1 < workers <= jobs // JOBS_A_WORKER
        crew.work(workers, self.estimates, measured)


def pack(setup: Setup) -> bytes:
    """The spec as workers are sent it, objects included; ExecutorError if it cannot leave this process."""
    _check_not_bootstrapping()
    try:
        return pickle.dumps((setup.spec, setup.model_fingerprint, setup.data_fingerprint, setup.salt))
    except Exception as error:
        raise ExecutorError(
            f"the model or another object of this audit cannot be sent to worker processes "
            f"({type(error).__name__}: {error}). "
            "Use executor='serial', or a model named package.module:factory."
        ) from error


def default_workers(threads: int) -> int:
    """As many as the processors this process may use can serve."""
    return max(1, usable_processors() // threads)


@dataclass(eq=False)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    ready: bool = False
    job: Job | None = None
    #: A job of which it times some steps.
    trial: Job | None = None
    since: float = 0.0
    #: What is left of the client it works on.
    group: deque[Job] = field(default_factory=deque)


class _Crew:
    def __init__(
        self,
        setup: Setup,
        packed: bytes,
        groups: Sequence[Sequence[Job]],
        timeout: float | None,
        budget: Budget,
        emit: Emit,
        record: Record,
    ) -> None:
        self._setup, self._packed, self._threads, self._timeout = setup, packed, setup.spec.threads, timeout
        self._budget, self._emit, self._record = budget, emit, record
        self._jobs = [job for group in groups for job in group]
        self._waiting = deque(deque(group) for group in groups)
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._to_try: deque[Job] = deque()
        self._trials: dict[str, Trial | None] = {}
        self._estimated = True
        self._count, self._measured, self._unsized = 1, False, False
        self._memory_of_jobs = self._memory_at_rest = 0
        self._released: list[_Worker] = []

    def work(self, count: int, estimates: bool, measured: bool) -> None:
        """``measured``: how many workers are worth it is found out by measurement, at most ``count``."""
        self._count, self._measured, self._unsized = count, measured, measured
        if estimates:
            self._to_try, self._estimated = deque(trial_jobs(self._jobs)), False
            self._try_until = math.inf
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

    def _hire(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._packed, self._threads), daemon=True)
        with inheritance(self._threads), interrupts_held_back():
            process.start()
            self._workers.append(_Worker(process, ours))
        theirs.close()

    def _turn(self) -> None:
        """Wait until some worker has something to say, dies, or has used up its time."""
        by_pipe: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers}
        by_end: dict[Any, _Worker] = {worker.process.sentinel: worker for worker in self._workers}
        events = wait([*by_pipe, *by_end], self._patience())
        # Words before deaths: a worker may have handed in its result and died afterwards.
        for event in [e for e in events if e in by_pipe] + [e for e in events if e in by_end]:
            worker = by_pipe.get(event) or by_end[event]
            if worker not in self._workers:
                continue
            if event in by_pipe:
                self._listen(worker)
            elif not worker.pipe.poll():
                self._bury(worker)
        for worker in [w for w in self._workers if self._overdue(w)]:
            self._stop(worker)
            self._replace(worker, f"TimeoutError: stopped after more than {self._timeout or 0:g} s")

    def _listen(self, worker: _Worker) -> None:
        message = None
        with contextlib.suppress(EOFError, OSError):
            message = worker.pipe.recv_bytes()
        if message is None:
            worker.process.join(10)  # the pipe closes a moment before the process has ended
            self._bury(worker)
            return
        kind, content = pickle.loads(message)
        if kind == "broken":
            raise ExecutorError(f"a worker process cannot prepare this audit. {content}\nUse executor='serial'.")
        if kind == "advanced" and worker.job is not None:
            self._emit({"event": "advanced", "job": worker.job, **content})
            return
        if kind == "pace":
            return  # too late to count
        if kind == "ready":
            worker.ready, self._failed_starts = True, 0
        elif kind == "outcome" and worker.job is not None:
            job, worker.job = worker.job, None
            self._record(job, content)
            if self._measured and not self._fits(worker, content):
                return
        elif kind == "tried" and worker.trial is not None:
            self._tried(worker, content)
        self._assign(worker)

    def _assign(self, worker: _Worker) -> None:
        if self._unsized:
            if all(colleague.ready for colleague in self._workers):
                self._size()
            return
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

    def _size(self) -> None:
        """Measure what one worker and several do, and go on with as many as are worth it."""
        self._unsized = False
        paces: dict[int, list[Pace]] = {}
        for count in sizes(len(self._workers)) * REPEATS:
            asked = self._paces(self._workers[:count])
            # One of them died, which its job will tell, or what is measured takes longer than it can save.
            if asked is None or min(pace.rate for pace in asked) < SLOWEST_PACE:
                paces.clear()
                break
            if sum(pace.rate for pace in asked) > sum(pace.rate for pace in paces.get(count, [])):
                paces[count] = asked
        if paces:
            choice = choose(paces, free_memory())
            self._memory_at_rest = max(pace.memory for each in paces.values() for pace in each)
            self._release(self._workers[choice.workers :], choice.reason)
        for worker in list(self._workers):
            self._assign(worker)

    def _paces(self, workers: Sequence[_Worker]) -> list[Pace] | None:
        for worker in workers:
            self._send(worker, "pace", self._jobs[0])
        paces = []
        for worker in workers:
            try:
                kind, pace = pickle.loads(worker.pipe.recv_bytes()) if worker.pipe.poll(SILENT_SECONDS) else ("", None)
            except (EOFError, OSError):
                return None
            if kind != "pace" or pace is None:
                return None
            paces.append(pace)
        return paces

    def _fits(self, worker: _Worker, outcome: Outcome) -> bool:
        """Whether there is memory for this worker beside the others, by the largest job so far; or it is released."""
        peak = ((outcome.result or {}).get("peak_memory_mb") or 0.0) * 2**20
        self._memory_of_jobs = max(self._memory_of_jobs, int(peak))
        needed = self._memory_at_rest + self._memory_of_jobs
        room = memory_room([one.process.pid for one in self._workers], needed)
        if len(self._workers) <= room:
            return True
        if worker.group:
            self._waiting.appendleft(worker.group)
            worker.group = deque()
        self._release([worker], f"each may take {needed / 1e9:.1f} GB, and there is memory for no more")
        return False

    def _release(self, workers: Sequence[_Worker], reason: str) -> None:
        """Go on without these, and say why there are as many as there are."""
        for worker in list(workers):
            self._workers.remove(worker)
            self._released.append(worker)
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(pickle.dumps(None))
        self._count = len(self._workers)
        self._emit({"event": "workers", "workers": self._count, "reason": reason})

    def _leave_the_rest(self) -> None:
        """Begin nothing more; what is under way gets to end."""
        self._waiting.clear()
        for worker in self._workers:
            worker.group.clear()

    def _send(self, worker: _Worker, kind: str, job: Job) -> None:
        # If it died just now its sentinel tells so, and the job is recorded then.
        with contextlib.suppress(OSError):
            worker.pipe.send_bytes(pickle.dumps((kind, job)))

    def _try_out(self, worker: _Worker) -> None:
        """Have it time some steps; when all are timed, tell the estimate and begin with the jobs themselves."""
        self._try_until = min(self._try_until, time.monotonic() + self._budget.trial_seconds(ALL_SECONDS))
        if self._to_try and time.monotonic() < self._try_until:
            worker.trial, worker.since = self._to_try.popleft(), time.monotonic()
            self._send(worker, "try", worker.trial)
        elif all(colleague.trial is None for colleague in self._workers):
            self._estimated = True
            if self._trials:
                self._emit(estimate(self._setup, self._jobs, self._trials, self._count))
            for colleague in self._workers:
                if colleague.ready and colleague.job is None:
                    self._assign(colleague)

    def _tried(self, worker: _Worker, trial: Trial | None) -> None:
        assert worker.trial is not None
        self._trials[worker.trial.key], worker.trial = trial, None

    def _next(self, worker: _Worker) -> Job | None:
        """The next job of its client, else another client; of one that a colleague works on only if none is left.

        A client's update is made once in each process that works on it, which at the end may be two.
        """
        if not worker.group and self._waiting:
            worker.group = self._waiting.popleft()
        if worker.group:
            return worker.group.popleft()
        busiest = max(self._workers, key=lambda colleague: len(colleague.group))
        return busiest.group.pop() if busiest.group else None

    def _bury(self, worker: _Worker) -> None:
        self._stop(worker)
        ended = f"WorkerDied: the worker process ended {_ending(worker.process.exitcode)}"
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= STARTS_IN_A_ROW:
                raise ExecutorError(
                    f"{STARTS_IN_A_ROW} worker processes in a row died before they were ready, the last one "
                    f"{_ending(worker.process.exitcode)}. If a script calls the audit, put the call under "
                    "if __name__ == '__main__':. Or use executor='serial'."
                )
        self._replace(worker, ended)

    def _replace(self, worker: _Worker, error: str) -> None:
        """Each replacement costs a job or a trial or counts as a failed start, so there is an end to them."""
        self._workers.remove(worker)
        worker.pipe.close()
        if worker.trial is not None:
            self._tried(worker, None)
        if worker.group:
            self._waiting.appendleft(worker.group)
        if worker.job is not None:
            self._record(worker.job, Outcome("failed", error=error, seconds=time.monotonic() - worker.since))
        if len(self._workers) < min(self._count, self._left()):
            self._hire()

    def _stop(self, worker: _Worker) -> None:
        if worker.process.is_alive():
            worker.process.kill()
        worker.process.join(10)

    def _limit(self, worker: _Worker) -> float | None:
        """Seconds after which what it does is stopped."""
        if worker.trial is not None:
            return 4 * SILENT_SECONDS  # an attack that does not even heed the alarm
        return None if worker.job is None else self._timeout

    def _overdue(self, worker: _Worker) -> bool:
        limit = self._limit(worker)
        return limit is not None and time.monotonic() - worker.since > limit

    def _patience(self) -> float | None:
        limits = [(worker.since, self._limit(worker)) for worker in self._workers]
        ends = [since + limit for since, limit in limits if limit is not None]
        return max(0.01, min(ends) - time.monotonic() + 0.01) if ends else None

    def _dismiss(self) -> None:
        for worker in self._workers:
            if worker.job is None and worker.ready:
                with contextlib.suppress(OSError):
                    worker.pipe.send_bytes(pickle.dumps(None))
            else:
                worker.process.kill()
        for worker in (*self._workers, *self._released):
            worker.process.join(5)
            self._stop(worker)
            worker.pipe.close()
        self._workers.clear()


def _ending(code: int | None) -> str:
    """How a process ended, in words.

    >>> _ending(-9)
    'by signal SIGKILL (the system does this when memory runs out)'
    >>> _ending(3)
    'with exit code 3'
    """
    if code is None:
        return "in an unknown way"
    if code >= 0:
        return f"with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = str(-code)
    hint = " (the system does this when memory runs out)" if name == "SIGKILL" else ""
    return f"by signal {name}{hint}"


def _check_not_bootstrapping() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ExecutorError(
            "the audit was started again while a worker process imported your script. "
            "Put the call under if __name__ == '__main__':"
        )
