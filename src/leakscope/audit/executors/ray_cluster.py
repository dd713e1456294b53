"""Connect to a Ray cluster, or start one for the audit, and count the workers that fit on its nodes."""

import contextlib
import math
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from leakscope.audit.executors.base import ExecutorError
from leakscope.audit.executors.processes import inheritance
from leakscope.results.records import counted

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
        ray.shutdown()


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
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


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
