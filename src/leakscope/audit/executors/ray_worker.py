"""What lives on a Ray cluster: workers, and the board on which they post how far they are.

Plain classes, which :mod:`leakscope.audit.executors.ray` makes actors of; nothing here imports Ray.
"""

from __future__ import annotations

import contextlib
import pickle
import platform
import sys
from collections.abc import Sequence
from typing import Any

import torch

from leakscope.audit.attempts import Bench, failure_text
from leakscope.audit.estimate import try_out
from leakscope.audit.executors.base import throttled
from leakscope.audit.output import unfailing_output
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup, is_intact
from leakscope.audit.versions import versions
from leakscope.contracts.errors import UserError

#: Seconds between two words of a worker on how far it is; hundreds of workers may talk to one board.
POST_SECONDS = 1.0

Advanced = dict[str, dict[str, float]]


class RayWorker:
    """One process of the cluster: prepared once from the object store, then one job after another."""

    def prepare(self, packed: bytes, folders: Sequence[str], ours: dict[str, str], board: Any) -> tuple[str, Any]:
        """Unpack the audit; ("ready", None), or ("broken", why) where this place is not like the audit's own.

        ``packed`` comes from the audit's process through the object store; no file is ever unpickled. ``folders`` are
        where that process finds modules; they are searched last, so that none of their files stands in for another.
        """
        sys.path += [folder for folder in folders if folder not in sys.path]
        theirs = {name: version for name, version in versions().items() if name in ours}
        differing = [f"{name} {theirs[name]}, not {ours[name]}" for name in ours if theirs[name] != ours[name]]
        if differing:
            return "broken", f"On {platform.node()} there is {', '.join(differing)}. Install the same there."
        try:
            setup: Setup = pickle.loads(packed)
            torch.set_num_threads(setup.spec.threads)
            if not is_intact(setup):
                raise UserError("the model that arrived is not that which was sent; its code must be the same here")
        except Exception as error:  # noqa: BLE001 - told to the audit's process, which stops with it
            return "broken", f"On {platform.node()}: {failure_text(error)}"
        self._setup, self._bench, self._board = setup, Bench(setup), board
        return "ready", None

    def run(self, job: Job) -> tuple[str, Any]:
        """Do one job."""

        def emit(event: dict[str, Any]) -> None:
            steps = {name: event[name] for name in ("done", "total", "value")}
            with contextlib.suppress(Exception):  # where the node is going down, the job must not fail for the telling
                if self._board is not None:
                    self._board.post.remote(job.key, steps)

        with unfailing_output():
            return "outcome", self._bench.run(job, throttled(job, emit, POST_SECONDS))

    def try_out(self, job: Job) -> tuple[str, Any]:
        """Time some steps of a job."""
        with unfailing_output():
            return "tried", try_out(self._setup, job)


class Board:
    """How far jobs are, by key; whoever takes it leaves it empty."""

    def __init__(self) -> None:
        self._posted: Advanced = {}

    def post(self, key: str, steps: dict[str, float]) -> None:
        self._posted[key] = steps

    def take(self) -> Advanced:
        """What was posted since the last time, the newest of each job."""
        posted, self._posted = self._posted, {}
        return posted
