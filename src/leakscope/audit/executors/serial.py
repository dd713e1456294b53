"""Every job in this process, one after another."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

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
            if self.estimates and trial_jobs(jobs):
                emit(_estimate(setup, jobs))
            for group in groups:
                for job in group:
                    emit({"event": "started", "job": job})
                    record(job, bench.run(job, throttled(job, emit)))
        finally:
            torch.set_num_threads(before)


def _estimate(setup: Setup, jobs: Sequence[Job]) -> dict[str, Any]:
    until = time.monotonic() + ALL_SECONDS
    trials = {job.key: try_out(setup, job) for job in trial_jobs(jobs) if time.monotonic() < until}
    return estimate(setup, jobs, trials, workers=1)
