"""Every job in this process, one after another."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from leakscope.audit.attempts import Bench
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
            for group in groups:
                for job in group:
                    emit({"event": "started", "job": job})
                    record(job, bench.run(job, throttled(job, emit)))
        finally:
            torch.set_num_threads(before)
