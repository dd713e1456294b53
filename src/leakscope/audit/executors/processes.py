"""Run jobs in worker processes, which may die without harm to others.

Workers are spawned, rebuild the audit from its spec, and take one job at a time over a pipe; no file is ever unpickled.
No pool library: a worker's death breaks a loky pool, and a Pebble pool too where none works. Neither sends a job to the
worker that holds its client's update, carries progress, or starts processes with a signal mask and search path of ours.
"""

import contextlib
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import torch

from leakscope.audit.attempts import Bench, failure_text
from leakscope.audit.estimate import try_out
from leakscope.audit.executors.base import Crew, Emit, Executor, ExecutorError, Record, Worker, packed, throttled
from leakscope.audit.output import unfailing_output
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup, build_setup
from leakscope.contracts.errors import UserError
from leakscope.contracts.registry import own_folders

_CGROUP = Path("/sys/fs/cgroup")
_FROM_TERMINAL = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name))
_HELD_BACK = (*_FROM_TERMINAL, signal.SIGTERM)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class Processes(Executor):
    """Spread the clients over worker processes; a job whose worker dies or takes too long is a failed row."""

    def check(self, setup: Setup) -> None:
        _pack(setup)

    def run(self, setup: Setup, groups: Sequence[Sequence[Job]], *, emit: Emit, record: Record) -> None:
        if not groups:
            return
        count = min(self.workers or default_workers(setup.spec.threads), sum(len(group) for group in groups))
        if self.workers is None:
            emit({"event": "workers", "workers": count, "reason": f"there are {usable_processors()} processors"})
        _Processes(self, setup, groups, emit, record).work(count)


def default_workers(threads: int) -> int:
    """Return how many workers of ``threads`` threads fit on the usable processors."""
    return max(1, usable_processors() // threads)


def usable_processors(cgroup: Path = _CGROUP) -> int:
    """Count the processors that this process may use, by affinity and by the quota of its control group."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
            limit, period = " ".join((cgroup / file).read_text() for file in files).split()
            quota = math.inf if limit == "max" or float(limit) < 0 else float(limit) / float(period)
            return max(1, math.floor(min(usable, quota + 0.5)))
    return usable


def _pack(setup: Setup) -> bytes:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ExecutorError(
            "the audit was started again while a worker process imported your script. "
            "Put the call under if __name__ == '__main__':"
        )
    content = setup.spec, setup.model_fingerprint, setup.data_fingerprint, setup.salt
    return packed(content, "worker processes", "'serial', or a model named package.module:factory")


@dataclass(eq=False, kw_only=True)
class _Process(Worker):
    process: SpawnProcess
    pipe: Connection


class _Processes(Crew[_Process]):
    @cached_property
    def _packed(self) -> bytes:
        return _pack(self._setup)

    def _hire(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._packed, self._threads), daemon=True)
        with inheritance(self._threads), _interrupts_held_back():
            process.start()
            self._workers.append(_Process(process=process, pipe=ours))
        theirs.close()

    def _turn(self) -> None:
        by_pipe: dict[Any, _Process] = {worker.pipe: worker for worker in self._workers}
        for pipe in wait(list(by_pipe), self._patience()):
            if by_pipe[pipe] in self._workers:
                self._listen(by_pipe[pipe])
        self._stop_overdue()

    def _listen(self, worker: _Process) -> None:
        try:
            kind, content = pickle.loads(worker.pipe.recv_bytes())
        except (EOFError, OSError):  # what a worker said before it died was read before
            self._bury(worker)
            return
        if kind == "advanced":
            self._emit({"event": "advanced", "job": worker.job, **content})
        else:
            self._hear(worker, kind, content)

    def _send(self, worker: _Process, kind: str, job: Job) -> None:
        # If it died just now its pipe tells so, and the job is recorded then.
        with contextlib.suppress(OSError):
            worker.pipe.send_bytes(pickle.dumps((kind, job)))

    def _bury(self, worker: _Process) -> None:
        worker.process.join(10)  # the pipe closes a moment before the process has ended
        ending = _ending(worker.process.exitcode)
        if not worker.ready:
            advice = "If a script calls the audit, put the call under if __name__ == '__main__':."
            self._failed_start(f"{ending}. {advice} Or use executor='serial'.")
        self._replace(worker, f"WorkerDied: the worker process ended {ending}")

    def _stop(self, worker: _Process) -> None:
        worker.process.kill()
        worker.process.join(10)
        worker.pipe.close()


def _ending(code: int | None) -> str:
    """Describe how a process ended.

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


def serve(pipe: Connection, packed: bytes, threads: int) -> None:
    """Work as a worker process: prepare once, then do jobs until the parent ends this process or is gone."""
    # What a terminal sends reaches the whole group; the parent decides what becomes of it.
    for number in _FROM_TERMINAL:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HELD_BACK)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    # What a user's model prints may have no reader any more, and the parent may be gone.
    with unfailing_output(), contextlib.suppress(EOFError, OSError):
        _work(pipe, packed)


def _work(pipe: Connection, packed: bytes) -> None:
    def say(kind: str, content: Any) -> None:
        pipe.send_bytes(pickle.dumps((kind, content)))

    def emit(event: dict[str, Any]) -> None:
        say("advanced", {key: event[key] for key in ("done", "total", "value")})

    try:
        setup = _rebuilt(*pickle.loads(packed))
    except Exception as error:  # noqa: BLE001 - told to the parent, which stops the audit with it
        say("broken", failure_text(error))
        return
    bench = Bench(setup)
    say("ready", None)
    while True:
        kind, job = pickle.loads(pipe.recv_bytes())
        if kind == "try":
            say("tried", try_out(setup, job))
        else:
            say("outcome", bench.run(job, throttled(job, emit)))


def _rebuilt(spec: Any, model: str, data: str, salt: str) -> Setup:
    """Build the set-up again; raise UserError where its fingerprints are not those of the parent."""
    setup = build_setup(spec, salt=salt)
    for what, ours, theirs in (("model", setup.model_fingerprint, model), ("data", setup.data_fingerprint, data)):
        if ours != theirs:
            raise UserError(
                f"the {what} rebuilt in a worker is not that of the parent; it must come out the same "
                "each time. Draw random weights from the seed given, or use weights: a file."
            )
    return setup


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _interrupts_held_back() -> Iterator[None]:
    """Let no signal end the audit between the start of a worker and its entry in the list, nor the loading worker."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def inheritance(threads: int, variables: Mapping[str, str] | None = None) -> Iterator[None]:
    """Set what a process inherits at its start: threads, which libraries read when they are loaded, and search path.

    It must not import from the current folder what Python or an installed package has: a spawned interpreter looks
    there first, and multiprocessing hands on the search path of a parent that does. The user's folders come last.
    """
    values = {**dict.fromkeys(_THREAD_VARIABLES, str(threads)), "PYTHONSAFEPATH": "1", **(variables or {})}
    before, path = {name: os.environ.get(name) for name in values}, list(sys.path)
    here = ["", os.getcwd()]
    last = [*own_folders(), *([os.getcwd()] if set(here) & set(path) else [])]
    os.environ.update(values)
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
