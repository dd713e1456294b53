"""What runs in the processes of a Ray cluster: workers, and the board on which they post their progress."""

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
from leakscope.audit.keys import versions
from leakscope.audit.output import unfailing_output
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup, is_intact
from leakscope.contracts.errors import UserError

#: Seconds between two posts of a worker.
POST_SECONDS = 1.0


class RayWorker:
    """One process of the cluster: prepared once from the object store, then one job after another."""

    def prepare(self, content: bytes, folders: Sequence[str], ours: dict[str, str], board: Any) -> tuple[str, Any]:
        """Unpack the audit; return ("ready", None), or ("broken", why) where this node is not like the audit's own.

        ``content`` comes through the object store; no file is ever unpickled. ``folders`` are searched last, so that
        none of their files stands in for another.
        """
        sys.path += [folder for folder in folders if folder not in sys.path]
        theirs = {name: version for name, version in versions().items() if name in ours}
        differing = [f"{name} {theirs[name]}, not {ours[name]}" for name in ours if theirs[name] != ours[name]]
        if differing:
            return "broken", f"On {platform.node()} there is {', '.join(differing)}. Install the same there."
        try:
            setup: Setup = pickle.loads(content)
            torch.set_num_threads(setup.spec.threads)
            if not is_intact(setup):
                raise UserError("the model that arrived is not that which was sent; its code must be the same here")
        except Exception as error:  # noqa: BLE001 - told to the audit's process, which stops with it
            return "broken", f"On {platform.node()}: {failure_text(error)}"
        self._setup, self._bench, self._board = setup, Bench(setup), board
        return "ready", None

    def run(self, job: Job) -> tuple[str, Any]:
        def emit(event: dict[str, Any]) -> None:
            steps = {name: event[name] for name in ("done", "total", "value")}
            with contextlib.suppress(Exception):  # where the node is going down, the job must not fail for the telling
                if self._board is not None:
                    self._board.post.remote(job.key, steps)

        with unfailing_output():
            return "outcome", self._bench.run(job, throttled(job, emit, POST_SECONDS))

    def try_out(self, job: Job) -> tuple[str, Any]:
        with unfailing_output():
            return "tried", try_out(self._setup, job)


class Board:
    """Progress of jobs by key; whoever takes it leaves it empty."""

    def __init__(self) -> None:
        self._posted: dict[str, dict[str, float]] = {}

    def post(self, key: str, steps: dict[str, float]) -> None:
        self._posted[key] = steps

    def take(self) -> dict[str, dict[str, float]]:
        posted, self._posted = self._posted, {}
        return posted
