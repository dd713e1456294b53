"""Jobs in worker processes, which may die without harm to others.

Workers are spawned, rebuild the audit from its spec, and take one job at a time over a pipe. Only the parent
writes to the store. What crosses the pipe was pickled by our own processes; no file is ever unpickled.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from leakscope.audit.attempts import Bench, Outcome, failure_text
from leakscope.audit.executors.base import Emit, Executor, ExecutorError, Record, throttled
from leakscope.audit.output import unfailing_output
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup, build_setup
from leakscope.contracts.imports import own_folders

STARTS_IN_A_ROW = 3
"""Workers that die before they are ready, one after the other, until the audit gives up."""
_FROM_TERMINAL = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name))
_HELD_BACK = (*_FROM_TERMINAL, signal.SIGTERM)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Processes(Executor):
    """Spread the clients over worker processes; a job whose worker dies or takes too long is a failed row."""

    def check(self, setup: Setup) -> None:
        pack(setup)

    def run(self, setup: Setup, groups: Sequence[Sequence[Job]], *, emit: Emit, record: Record) -> None:
        if not groups:
            return
        jobs = sum(len(group) for group in groups)
        workers = self.workers or default_workers(setup.spec.threads)
        _Crew(setup, pack(setup), groups, self.timeout, emit, record).work(min(workers, jobs))


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
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, usable // threads)


@dataclass(eq=False)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    ready: bool = False
    job: Job | None = None
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
        emit: Emit,
        record: Record,
    ) -> None:
        self._packed, self._threads, self._timeout = packed, setup.spec.threads, timeout
        self._emit, self._record = emit, record
        self._waiting = deque(deque(group) for group in groups)
        self._workers: list[_Worker] = []
        self._failed_starts = 0

    def work(self, count: int) -> None:
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
        process = context.Process(target=_serve, args=(theirs, self._packed, self._threads), daemon=True)
        with _inheritance(self._threads), _interrupts_held_back():
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
            self._replace(worker, f"TimeoutError: stopped after more than {self._timeout:g} s")

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
        if kind == "ready":
            worker.ready, self._failed_starts = True, 0
        elif kind == "outcome" and worker.job is not None:
            job, worker.job = worker.job, None
            self._record(job, content)
        self._assign(worker)

    def _assign(self, worker: _Worker) -> None:
        job = self._next(worker)
        if job is None:
            return
        worker.job, worker.since = job, time.monotonic()
        self._emit({"event": "started", "job": worker.job})
        # If it died just now its sentinel tells so, and the job is recorded then.
        with contextlib.suppress(OSError):
            worker.pipe.send_bytes(pickle.dumps(worker.job))

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
        """Each replacement costs a job or counts as a failed start, so there is an end to them."""
        self._workers.remove(worker)
        worker.pipe.close()
        if worker.group:
            self._waiting.appendleft(worker.group)
        if worker.job is not None:
            self._record(worker.job, Outcome("failed", error=error, seconds=time.monotonic() - worker.since))
        if len(self._workers) < self._left():
            self._hire()

    def _stop(self, worker: _Worker) -> None:
        if worker.process.is_alive():
            worker.process.kill()
        worker.process.join(10)

    def _overdue(self, worker: _Worker) -> bool:
        if self._timeout is None or worker.job is None:
            return False
        return time.monotonic() - worker.since > self._timeout

    def _patience(self) -> float | None:
        if self._timeout is None:
            return None
        ends = [worker.since + self._timeout for worker in self._workers if worker.job is not None]
        return max(0.01, min(ends) - time.monotonic() + 0.01) if ends else None

    def _dismiss(self) -> None:
        for worker in self._workers:
            if worker.job is None and worker.ready:
                with contextlib.suppress(OSError):
                    worker.pipe.send_bytes(pickle.dumps(None))
            else:
                worker.process.kill()
        for worker in self._workers:
            worker.process.join(5)
            self._stop(worker)
            worker.pipe.close()
        self._workers.clear()


def _serve(pipe: Connection, packed: bytes, threads: int) -> None:
    """A worker's life: prepare once, then jobs until the parent says None or is gone."""
    # What a terminal sends reaches the whole group; the parent decides what becomes of it.
    for number in _FROM_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    with unfailing_output():  # what a user's model prints may have no reader any more
        _work(pipe, packed)


def _work(pipe: Connection, packed: bytes) -> None:
    def say(kind: str, content: Any) -> None:
        pipe.send_bytes(pickle.dumps((kind, content)))

    try:
        spec, model_print, data_print, salt = pickle.loads(packed)
        setup = build_setup(spec, salt=salt)
        for what, ours, theirs in (
            ("model", setup.model_fingerprint, model_print),
            ("data", setup.data_fingerprint, data_print),
        ):
            if ours != theirs:
                raise ValueError(
                    f"the {what} rebuilt in a worker is not that of the parent; it must come out the same "
                    "each time. Draw random weights from the seed given, or use weights: a file."
                )
    except Exception as error:  # noqa: BLE001 - told to the parent, which stops the audit with it
        say("broken", failure_text(error))
        return
    bench = Bench(setup)
    try:
        say("ready", None)
        while (job := pickle.loads(pipe.recv_bytes())) is not None:

            def emit(event: dict[str, Any]) -> None:
                say("advanced", {key: event[key] for key in ("done", "total", "value")})

            say("outcome", bench.run(job, throttled(job, emit)))
    except (EOFError, OSError):
        return  # the parent is gone


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


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


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """No signal ends the audit between the start of a worker and its entry in the books.

    A process keeps the mask it is started with, so Ctrl-C does not reach a worker while it loads either.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _inheritance(threads: int) -> Iterator[None]:
    """What a process inherits at its start: libraries read how many threads they may use once, when they are loaded.

    And it must not import from the current folder what Python or an installed package has: a spawned interpreter looks
    there first, and multiprocessing hands on the search path of a parent that does. The user's folders come last.
    """
    variables = {**dict.fromkeys(_THREAD_VARIABLES, str(threads)), "PYTHONSAFEPATH": "1"}
    before, path = {name: os.environ.get(name) for name in variables}, list(sys.path)
    here = ["", os.getcwd()]
    last = [*own_folders(), *([os.getcwd()] if set(here) & set(path) else [])]
    os.environ.update(variables)
    sys.path[:] = [*(entry for entry in path if entry not in here), *last]
    try:
        yield
    finally:
        sys.path[:] = path
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
