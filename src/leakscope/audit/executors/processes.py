"""Jobs in worker processes, which may die without harm to others.

Workers are spawned, rebuild the audit from its spec, and take one job at a time over a pipe. Only the parent
writes to the store. What crosses the pipe was pickled by our own processes; no file is ever unpickled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import pickle
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from leakscope.audit.attempts import Outcome
from leakscope.audit.budget import Budget
from leakscope.audit.estimate import SILENT_SECONDS
from leakscope.audit.executors.base import Emit, Executor, ExecutorError, Record
from leakscope.audit.executors.crew import Crew, Worker
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


class Processes(Executor):
    """Spread the clients over worker processes; a job whose worker dies or takes too long is a failed row."""

    def check(self, setup: Setup) -> None:
        pack(setup)

    def run(self, setup: Setup, groups: Sequence[Sequence[Job]], *, emit: Emit, record: Record) -> None:
        if not groups:
            return
        jobs = sum(len(group) for group in groups)
        workers = min(self.workers or default_workers(setup.spec.threads), jobs)
        measured = self.workers is None and 1 < workers <= jobs // JOBS_A_WORKER
        crew = _Processes(setup, pack(setup), groups, self.timeout, self.budget, emit, record, measured)
        crew.work(workers, self.estimates)


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


@dataclass(eq=False, kw_only=True)
class _Process(Worker):
    process: SpawnProcess
    pipe: Connection


class _Processes(Crew[_Process]):
    def __init__(
        self,
        setup: Setup,
        packed: bytes,
        groups: Sequence[Sequence[Job]],
        timeout: float | None,
        budget: Budget,
        emit: Emit,
        record: Record,
        measured: bool,
    ) -> None:
        """``measured``: how many workers are worth it is found out by measurement."""
        super().__init__(setup, groups, timeout, budget, emit, record)
        self._packed = packed
        self._measured, self._unsized = measured, measured
        self._memory_of_jobs = self._memory_at_rest = 0
        self._sent_home: list[_Process] = []

    def _hire(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._packed, self._threads), daemon=True)
        with inheritance(self._threads), interrupts_held_back():
            process.start()
            self._workers.append(_Process(process=process, pipe=ours))
        theirs.close()

    def _turn(self) -> None:
        """Wait until some worker has something to say, dies, or has used up its time."""
        by_pipe: dict[Any, _Process] = {worker.pipe: worker for worker in self._workers}
        by_end: dict[Any, _Process] = {worker.process.sentinel: worker for worker in self._workers}
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
        self._stop_overdue()

    def _listen(self, worker: _Process) -> None:
        message = None
        with contextlib.suppress(EOFError, OSError):
            message = worker.pipe.recv_bytes()
        if message is None:
            worker.process.join(10)  # the pipe closes a moment before the process has ended
            self._bury(worker)
            return
        kind, content = pickle.loads(message)
        if kind == "advanced" and worker.job is not None:
            self._emit({"event": "advanced", "job": worker.job, **content})
        elif kind != "pace":  # which comes too late to count
            self._hear(worker, kind, content)

    def _may_go_on(self, worker: _Process, outcome: Outcome) -> bool:
        return not self._measured or self._fits(worker, outcome)

    def _assign(self, worker: _Process) -> None:
        if not self._unsized:
            super()._assign(worker)
        elif all(colleague.ready for colleague in self._workers):
            self._size()

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
            self._send_home(self._workers[choice.workers :], choice.reason)
        for worker in list(self._workers):
            self._assign(worker)

    def _paces(self, workers: Sequence[_Process]) -> list[Pace] | None:
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

    def _fits(self, worker: _Process, outcome: Outcome) -> bool:
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
        self._send_home([worker], f"each may take {needed / 1e9:.1f} GB, and there is memory for no more")
        return False

    def _send_home(self, workers: Sequence[_Process], reason: str) -> None:
        """Go on without these, and say why there are as many as there are."""
        for worker in list(workers):
            self._workers.remove(worker)
            self._sent_home.append(worker)
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(pickle.dumps(None))
        self._count = len(self._workers)
        self._emit({"event": "workers", "workers": self._count, "reason": reason})

    def _send(self, worker: _Process, kind: str, job: Job) -> None:
        # If it died just now its sentinel tells so, and the job is recorded then.
        with contextlib.suppress(OSError):
            worker.pipe.send_bytes(pickle.dumps((kind, job)))

    def _bury(self, worker: _Process) -> None:
        self._stop(worker)
        ended = f"WorkerDied: the worker process ended {_ending(worker.process.exitcode)}"
        if not worker.ready:
            self._failed_start(
                f"{_ending(worker.process.exitcode)}. If a script calls the audit, put the call under "
                "if __name__ == '__main__':. Or use executor='serial'."
            )
        self._replace(worker, ended)

    def _release(self, worker: _Process) -> None:
        worker.pipe.close()

    def _stop(self, worker: _Process) -> None:
        if worker.process.is_alive():
            worker.process.kill()
        worker.process.join(10)

    def _dismiss(self) -> None:
        for worker in self._workers:
            if worker.job is None and worker.ready:
                with contextlib.suppress(OSError):
                    worker.pipe.send_bytes(pickle.dumps(None))
            else:
                worker.process.kill()
        for worker in (*self._workers, *self._sent_home):
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
