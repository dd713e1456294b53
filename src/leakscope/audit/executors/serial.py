"""Every job in this process, one after another."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from leakscope.audit.attempts import Bench
from leakscope.audit.estimate import ALL_SECONDS, estimate, trial_jobs, try_out
from leakscope.audit.executors.base import Emit, Executor, Record, throttled
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup


class Serial(Executor):
    """Jobs run here, so none can be stopped: there is no timeout."""

    def run(self, setup: Setup, groups: Sequence[Sequence[Job]], *, emit: Emit, record: Record) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(setup.spec.threads)
        bench = Bench(setup)
        try:
            jobs = [job for group in groups for job in group]
            if self.estimates:
                self._estimate(setup, jobs, emit)
            for job in jobs:
                if self.budget.spares(job):
                    continue
                if not self.budget.allows():
                    break
                emit({"event": "started", "job": job})
                record(job, bench.run(job, throttled(job, emit)))
        finally:
            torch.set_num_threads(before)

    def _estimate(self, setup: Setup, jobs: Sequence[Job], emit: Emit) -> None:
        until = time.monotonic() + self.budget.trial_seconds(ALL_SECONDS)
        trials = {job.key: try_out(setup, job) for job in trial_jobs(jobs) if time.monotonic() < until}
        if trials:
            emit(estimate(setup, jobs, trials, workers=1))
