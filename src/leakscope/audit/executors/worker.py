"""A worker process: how it is started, and what it does until its parent has no more to do or is gone."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from leakscope.audit.attempts import Bench, failure_text
from leakscope.audit.estimate import try_out
from leakscope.audit.executors.base import throttled
from leakscope.audit.executors.crew_size import Pace, measure_pace
from leakscope.audit.output import unfailing_output
from leakscope.audit.plan import Job
from leakscope.audit.setup import build_setup
from leakscope.contracts.errors import UserError
from leakscope.contracts.imports import own_folders

_FROM_TERMINAL = tuple(getattr(signal, name) for name in ("SIGINT", "SIGHUP") if hasattr(signal, name))
_HELD_BACK = (*_FROM_TERMINAL, signal.SIGTERM)
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def serve(pipe: Connection, packed: bytes, threads: int) -> None:
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
                raise UserError(
                    f"the {what} rebuilt in a worker is not that of the parent; it must come out the same "
                    "each time. Draw random weights from the seed given, or use weights: a file."
                )
    except Exception as error:  # noqa: BLE001 - told to the parent, which stops the audit with it
        say("broken", failure_text(error))
        return
    bench = Bench(setup)
    try:
        say("ready", None)
        while (task := pickle.loads(pipe.recv_bytes())) is not None:
            kind, job = task

            def emit(event: dict[str, Any]) -> None:
                say("advanced", {key: event[key] for key in ("done", "total", "value")})

            if kind == "try":
                say("tried", try_out(setup, job))
            elif kind == "pace":
                say("pace", _pace(bench, job))
            else:
                say("outcome", bench.run(job, throttled(job, emit)))
    except (EOFError, OSError):
        return  # the parent is gone


def _pace(bench: Bench, job: Job) -> Pace | None:
    """How often a second this process makes the update of the job's client; None where it cannot be made."""
    try:
        return measure_pace(lambda: bench.make_brief_update(job))
    except Exception:  # noqa: BLE001 - what is wrong is told by the row of the job itself
        return None


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def interrupts_held_back() -> Iterator[None]:
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
def inheritance(threads: int) -> Iterator[None]:
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
