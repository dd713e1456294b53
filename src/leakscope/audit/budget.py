"""A time budget: how long jobs may be begun, and which of them are not worth the time.

Not worth it are attempts on examples that another attack has recovered exactly, as measured against the truth.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from leakscope.audit.controls import CONTROLS
from leakscope.audit.plan import Job, describe
from leakscope.audit.setup import Setup
from leakscope.results.records import POSITIVE, AttemptRecord, Row

#: Errors this small vanish when grey values are rounded to one of 256 (dB).
EXACT_PSNR = 60.0


class Spared:
    """Tell which of ``jobs`` need not be run any more, by what was recovered so far."""

    def __init__(self, setup: Setup, jobs: Iterable[Job]) -> None:
        self._setup = setup
        # Nothing is spared of a policy that tells good reconstructions from better ones.
        self._enough = max(EXACT_PSNR, setup.spec.policy.max_psnr)
        self._recovered: set[tuple[Any, ...]] = set()
        self._attempts = [job for job in jobs if _is_attempt(job)]

    def learn(self, job: Job, result: AttemptRecord | None) -> None:
        if result is None or not _is_attempt(job):
            return
        if result.examples and all(example.value("psnr") >= self._enough for example in result.examples):
            self._recovered.add(_client(job))

    def learn_rows(self, jobs: Iterable[Job], rows: Iterable[Row]) -> None:
        results = {row.key: row.result for row in rows if row.status == "done"}
        for job in jobs:
            self.learn(job, results.get(job.key))

    def spares(self, job: Job) -> bool:
        """Tell whether it is an attempt on recovered examples, or a control of such attempts only."""
        if _is_attempt(job):
            return _client(job) in self._recovered
        if job.control is None or job.attack is None:
            return False
        same = [one for one in self._attempts if (one.protocol, one.attack) == (job.protocol, job.attack)]
        # A positive control speaks of the attack on all examples, others of what they were taken of.
        everywhere = CONTROLS[job.control].kind == POSITIVE
        return all(self.spares(one) for one in same if everywhere or one.batch == job.batch)

    def meta(self, jobs: Iterable[Job]) -> dict[str, Any]:
        """Count the spared ``jobs``: attempts of each setting, and controls."""
        spared = list(jobs)
        settings = Counter(describe(self._setup, job).scenario for job in spared if _is_attempt(job))
        attempts = [{"protocol": p, "defense": d, "jobs": count} for (p, d), count in settings.items()]
        return {"attempts": attempts, "controls": len(spared) - settings.total()}


class Budget:
    """Limit the seconds, from the first job on, in which jobs are begun; None: no limit, and nothing is spared.

    The first job is always begun, so that every run gets on.

    >>> ticks = iter([0.0, 5.0, 10.0])
    >>> budget = Budget(10.0, clock=lambda: next(ticks))
    >>> budget.allows(), budget.allows(), budget.allows()
    (True, True, False)
    """

    def __init__(
        self, seconds: float | None = None, spared: Spared | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.seconds, self._spared, self._clock = seconds, spared, clock
        self._since: float | None = None

    def allows(self) -> bool:
        if self.seconds is None:
            return True
        now = self._clock()
        self._since = now if self._since is None else self._since
        return now - self._since < self.seconds

    def spares(self, job: Job) -> bool:
        return self.seconds is not None and self._spared is not None and self._spared.spares(job)


def _is_attempt(job: Job) -> bool:
    return job.control is None and job.finding is None


def _client(job: Job) -> tuple[Any, ...]:
    return job.protocol, job.defense, job.batch  # whatever the seed, the examples are the same
