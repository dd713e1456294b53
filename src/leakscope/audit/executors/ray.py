"""Run jobs on a Ray cluster, whose workers and nodes may be lost without harm to others.

The set-up (model, data) goes into the object store once. Each worker is an actor that takes it from there and then does
one job at a time. Ray is loaded when an audit asks for it.
"""

import atexit
import contextlib
import math
import os
import signal
import socket
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leakscope.audit.executors.base import Crew, Emit, Executor, ExecutorError, Record, Worker, packed, within
from leakscope.audit.executors.processes import default_workers, inheritance
from leakscope.audit.executors.ray_worker import Board, RayWorker
from leakscope.audit.keys import versions
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup
from leakscope.contracts.registry import own_folders
from leakscope.contracts.settings import setting
from leakscope.results.records import counted

#: How often a job is begun again whose worker or node was lost; one that ends every worker is a failed row after that.
RETRIES = 2
#: Seconds between two looks at the board, and two at the nodes.
BOARD_SECONDS, NODES_SECONDS = 0.5, 5.0
#: Seconds in which a cluster must answer, and end; where its processes died, Ray itself may wait for ever.
ANSWER_SECONDS, END_SECONDS = 30.0, 20.0
#: Seconds without a node that could do a job after which the audit ends.
STRANDED_SECONDS = 30.0
#: Packages whose version decides what a row holds.
_PACKAGES = ("leakscope", "torch", "numpy")


@dataclass(frozen=True)
class RayCluster(Executor):
    """Spread the clients over the workers of a Ray cluster; what is lost with a worker or a node is begun again."""

    address: str | None = setting(
        None, "HOST:PORT of the cluster's head, or auto for the one on this machine; None starts one here."
    )
    gpus: float = setting(0.0, "GPUs of a worker, also a share of one such as 0.25.", ge=0, le=1024)

    def check(self, setup: Setup) -> None:
        ray = library()
        _pack(setup)
        threads = setup.spec.threads
        if self.address is None and not ray.is_initialized():
            nodes: list[dict[str, float]] = [{"CPU": float(self._processors(threads)), "GPU": gpus_here()}]
        else:
            with connection(self.address, self._processors(threads), threads, 0) as ray:
                nodes = alive_nodes(ray)
        if (problem := resource_problem(nodes, threads, self.gpus, setup.spec.device)) is not None:
            raise ExecutorError(problem)

    def run(self, setup: Setup, groups: Sequence[Sequence[Job]], *, emit: Emit, record: Record) -> None:
        if not groups:
            return
        threads, jobs, content = setup.spec.threads, sum(len(group) for group in groups), _pack(setup)
        with connection(self.address, self._processors(threads), threads, len(content)) as ray:
            free = places(alive_nodes(ray), threads, self.gpus)
            count = min(self.workers or free, jobs)
            if self.workers is None:
                reason = f"the cluster has {counted(free, 'place')} of {demand(threads, self.gpus)}"
                emit({"event": "workers", "workers": count, "reason": reason})
            _Actors(ray, content, self, setup, groups, emit, record).work(max(count, 1))

    def _processors(self, threads: int) -> int:
        return threads * (self.workers or default_workers(threads))


@dataclass(eq=False, kw_only=True)
class _Actor(Worker):
    actor: Any
    answer: Any  # a reference to what it was asked last, or None


class _Actors(Crew[_Actor]):
    def __init__(self, ray: Any, content: bytes, executor: RayCluster, *work: Any) -> None:
        super().__init__(executor, *work)
        self._ray, self._gpus, self._packed = ray, executor.gpus, ray.put(content)
        once = {"max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": "SPREAD"}
        self._kind = ray.remote(RayWorker).options(num_cpus=self._threads, num_gpus=self._gpus, **once)
        self._losses: Counter[str] = Counter()
        self._by_key = {job.key: job for job in self._jobs}
        # Only where somebody listens is there a board.
        self._board = ray.remote(Board).options(num_cpus=0, max_restarts=-1).remote() if executor.estimates else None
        self._posted: Any = None
        self._look_at = self._nodes_at = time.monotonic()
        self._stranded_since: float | None = None

    def _hire(self) -> None:
        actor = self._kind.remote()
        ours = {name: version for name, version in versions().items() if name in _PACKAGES}
        path = [entry for entry in sys.path if entry not in ("", os.getcwd())]  # the current folder comes last
        answer = actor.prepare.remote(self._packed, [*path, *own_folders(), os.getcwd()], ours, self._board)
        self._workers.append(_Actor(actor=actor, answer=answer))

    def _turn(self) -> None:
        asked = {worker.answer: worker for worker in self._workers if worker.answer is not None}
        awaited = [*asked, *([] if self._posted is None else [self._posted])]
        if awaited:
            pauses = [NODES_SECONDS, self._patience() or math.inf]
            if self._board is not None and self._posted is None:
                pauses.append(max(0.0, self._look_at - time.monotonic()))
            self._ray.wait(awaited, timeout=min(pauses))
        # All that is there is read before anybody counts as overdue: starting or ending a worker may take long.
        answered, _ = self._ray.wait(awaited, num_returns=len(awaited), timeout=0) if awaited else ([], [])
        for answer in answered:
            if answer == self._posted:
                self._read_board()
            elif asked[answer] in self._workers:
                self._listen(asked[answer])
        self._stop_overdue()
        if self._board is not None and self._posted is None and time.monotonic() >= self._look_at:
            self._posted = self._board.take.remote()
        self._check_nodes()

    def _listen(self, worker: _Actor) -> None:
        try:
            kind, content = self._ray.get(worker.answer, timeout=ANSWER_SECONDS)
        except self._ray.exceptions.RayError as error:
            self._lose(worker, error)
            return
        worker.answer = None
        self._hear(worker, kind, content)

    def _send(self, worker: _Actor, kind: str, job: Job) -> None:
        # Of one that died just now the answer is its death.
        worker.answer = (worker.actor.run if kind == "run" else worker.actor.try_out).remote(job)

    def _lose(self, worker: _Actor, error: Exception) -> None:
        """Begin its job again, unless that has cost too many workers."""
        # A node that is lost takes all that was starting on it along; only where nobody works is something wrong.
        if not worker.ready and not any(colleague.ready for colleague in self._workers):
            self._failed_start(f"with {type(error).__name__}: {error}\nIs leakscope installed on every node?")
        if worker.job is not None and not worker.trying:
            self._losses[worker.job.key] += 1
            if self._losses[worker.job.key] <= RETRIES:
                self._queue.put_back(worker, worker.job)
                worker.job = None
        lost = f"{RETRIES + 1} workers were lost while they did this job"
        self._replace(worker, f"WorkerDied: {lost}, the last one because {_cause(error)}")
        self._wake()  # what was given back may be all that is left, and the others may have gone idle before

    def _stop(self, worker: _Actor) -> None:
        worker.answer = None
        with contextlib.suppress(self._ray.exceptions.RayError, TimeoutError):
            within(END_SECONDS, lambda: self._ray.kill(worker.actor, no_restart=True))

    def _read_board(self) -> None:
        posted: dict[str, Any] = {}
        with contextlib.suppress(self._ray.exceptions.RayError):  # the board was lost, and comes again with nothing on
            posted = self._ray.get(self._posted, timeout=ANSWER_SECONDS)
        self._posted, self._look_at = None, time.monotonic() + BOARD_SECONDS
        busy = {worker.job.key for worker in self._workers if worker.job is not None}
        for key, steps in posted.items():
            if key in busy:
                self._emit({"event": "advanced", "job": self._by_key[key], **steps})

    def _check_nodes(self) -> None:
        """Raise ExecutorError where no node that is left could do a job, or nobody says which are left.

        Also while workers are at work: where the head died, nobody tells that they are gone.
        """
        now = time.monotonic()
        if now < self._nodes_at:
            return
        self._nodes_at = now + NODES_SECONDS
        if places(alive_nodes(self._ray), self._threads, self._gpus) > 0:
            self._stranded_since = None
            return
        self._stranded_since = now if self._stranded_since is None else self._stranded_since
        if now - self._stranded_since >= STRANDED_SECONDS:
            raise ExecutorError(
                f"the cluster has no node left with {demand(self._threads, self._gpus)}. Finished jobs are kept; the "
                "same command goes on with the rest once there are nodes."
            )


def _pack(setup: Setup) -> bytes:
    """Pack the whole set-up, so that nodes need neither the data's files nor the training."""
    return packed(setup, "a cluster", "'processes' or 'serial'")


def _cause(error: Exception) -> str:
    """Say why Ray gave a worker up, in its words, without what names machines.

    >>> _cause(RuntimeError("The actor died.\\n\\tip: 10.0.0.1\\nIt is dead because its node has died. Node Id: 1"))
    'its node has died'
    """
    text = str(error)
    for mark in ("is dead because ", "died because "):
        if mark in text:
            return text.split(mark, 1)[1].split(".")[0].split("\n")[0].strip()
    return type(error).__name__


#: Seconds for the head of a cluster to answer.
CONNECT_SECONDS = 5.0
#: Bytes of the object store of a cluster of our own, and for each byte that it is to hold.
STORE_BYTES, STORE_SHARE = 2**28, 4
#: Environment of our own cluster: no usage statistics, and workers as urgent as those of other executors.
OURS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


@contextlib.contextmanager
def connection(address: str | None, processors: int, threads: int, size: int) -> Iterator[Any]:
    """Yield Ray, connected as before, to ``address``, or to a cluster started here that holds ``size`` bytes."""
    ray = library()
    if ray.is_initialized():
        if address not in (None, "auto", connected := ray.get_runtime_context().gcs_address):
            raise ExecutorError(
                f"address: this process is connected to the Ray cluster at {connected} already, got {address}. "
                "Leave the address out, or call ray.shutdown() before."
            )
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "configure_logging": False, "job_config": _without_folder()}
    if address is None:
        room = max(STORE_BYTES, STORE_SHARE * size)
        options |= {"address": "local", "num_cpus": processors, "object_store_memory": room, "include_dashboard": False}
    else:
        _reach(address)
        options["address"] = address
    try:
        with inheritance(threads, OURS), _signals_restored(), warnings.catch_warnings(action="ignore"):
            ray.init(**options)
    except (OSError, RuntimeError, ValueError, AssertionError, ray.exceptions.RayError) as error:
        where = "started here" if address is None else f"reached at {address}"
        why = (str(error).strip().splitlines() or ["no message"])[0]
        raise ExecutorError(f"ray: no cluster could be {where}. {type(error).__name__}: {why}") from error
    try:
        yield ray
    finally:
        try:
            within(END_SECONDS, ray.shutdown)
        except TimeoutError:
            atexit.unregister(ray.shutdown)  # or Python would wait for it at its own end


def library() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise ExecutorError(
            f"executor: 'ray' needs the package ray ({error}). Install it with pip install leakscope[ray], or use "
            "executor 'processes'."
        ) from error
    return ray


def alive_nodes(ray: Any) -> list[dict[str, float]]:
    """Return the resources of each node; raise ExecutorError where the cluster does not say."""
    try:
        nodes = within(ANSWER_SECONDS, ray.nodes)
    except (TimeoutError, OSError, RuntimeError, ray.exceptions.RayError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ExecutorError(
            f"the cluster does not answer any more ({why}). Finished jobs are kept; the same command goes on with the "
            "rest once it is there again."
        ) from error
    return [node["Resources"] for node in nodes if node["Alive"]]


def _without_folder() -> Any:
    """Keep Ray from putting the current folder first on the search path, where its files stand in for libraries."""
    from ray.job_config import JobConfig

    class WithoutFolder(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return WithoutFolder()


def _reach(address: str) -> None:
    """Raise ExecutorError at once where nothing answers; Ray itself tries for long."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdecimal():
        raise ExecutorError(
            f"address: expected HOST:PORT of the cluster's head such as 10.0.0.1:6379, or auto, got {address!r}. Run "
            "the audit on a machine of the cluster"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ExecutorError(
            f"address: nothing answers at {address} ({error}). Expected HOST:PORT of the head, as ray start --head "
            "prints it"
        ) from error


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Restore signal handlers: Ray lets SIGTERM end the process on the spot, before the audit can clean up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def places(nodes: Sequence[Mapping[str, float]], threads: int, gpus: float = 0.0) -> int:
    """Count the workers that fit, by the processors and GPUs of each node.

    >>> places([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 8.0}], threads=1)
    12
    >>> places([{"CPU": 4.0, "GPU": 1.0}, {"CPU": 8.0}], threads=1, gpus=0.25)
    4
    >>> places([{"CPU": 3.0}, {"CPU": 3.0}], threads=2)
    2
    """
    room = 0
    for node in nodes:
        by_processor = math.floor(node.get("CPU", 0.0) / threads)
        room += by_processor if not gpus else min(by_processor, math.floor(node.get("GPU", 0.0) / gpus + 1e-9))
    return room


def resource_problem(nodes: Sequence[Mapping[str, float]], threads: int, gpus: float, device: str) -> str | None:
    """Say why no worker would ever start on these nodes, or would not see its device; None if all is well.

    >>> resource_problem([{"CPU": 2.0}], threads=1, gpus=0.5, device="cpu")
    'gpus: expected a cluster with GPUs for gpus=0.5, got one without any. Leave gpus out, or add nodes that have them'
    """
    if gpus > 1 and gpus != int(gpus):
        return f"gpus: expected a share of one GPU or a whole number of them, got {gpus:g}"
    if gpus and not any(node.get("GPU", 0.0) for node in nodes):
        return (
            f"gpus: expected a cluster with GPUs for gpus={gpus:g}, got one without any. Leave gpus out, or add nodes "
            "that have them"
        )
    if not gpus and torch.device(device).type == "cuda":
        return "gpus: expected with device cuda, for Ray shows a GPU only to workers that ask for one; try gpus=1"
    if places(nodes, threads, gpus) == 0:
        there = [(node.get("CPU", 0.0), node.get("GPU", 0.0)) for node in nodes]
        got = ", ".join(f"one of {cpu:g} CPUs" + (f" and {gpu:g} GPUs" if gpu else "") for cpu, gpu in there) or "none"
        return f"ray: expected a node with {demand(threads, gpus)}, got {got}. Lower threads, or add nodes"
    return None


def demand(threads: int, gpus: float) -> str:
    return counted(threads, "CPU") + (f" and {gpus:g} GPU" if gpus else "")


def gpus_here() -> float:
    return float(torch.cuda.device_count()) if torch.cuda.is_available() else 0.0
