"""The contract of an executor, which says where jobs run, and the executor of one process."""

from __future__ import annotations

import dataclasses
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from leakscope.audit.attempts import Advance, Bench, Outcome
from leakscope.audit.budget import Budget
from leakscope.audit.estimate import Estimator, try_out
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup, torch_threads
from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import Setting, settings_of

#: Told of what happens to a job.
Emit = Callable[[dict[str, Any]], None]
#: Keeps what became of a job.
Record = Callable[[Job, Outcome], None]

#: Seconds between two words on how far a job is.
ADVANCE_SECONDS = 0.2


class ExecutorError(UserError):
    """This executor cannot do this audit; the message says what to do."""


@dataclass(frozen=True)
class Executor(ABC):
    """Run ``workers`` jobs side by side (None: as many as fit), each stopped after ``timeout`` seconds (None: never).

    ``estimates``: tell beforehand how long it will take (``audit/estimate.py``). ``budget`` is asked before each job;
    what it does not allow any more is left for another run, what it spares is passed over.
    """

    workers: int | None = None
    timeout: float | None = None
    estimates: bool = False
    budget: Budget = field(default_factory=Budget)

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
        bench, jobs = Bench(setup), [job for group in groups for job in group]
        with torch_threads(setup.spec.threads):
            if self.estimates:
                estimator = Estimator(setup, jobs)
                while (job := estimator.next()) is not None:
                    estimator.note(job, try_out(setup, job))
                estimator.tell(emit, workers=1)
            for job in jobs:
                if self.budget.spares(job):
                    continue
                if not self.budget.allows():
                    break
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
