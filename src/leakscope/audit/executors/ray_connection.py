"""The way to a Ray cluster: one that is there, or one that an audit starts for itself; Ray is loaded only then."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from leakscope.audit.executors.base import ExecutorError
from leakscope.audit.executors.worker import inheritance

#: Seconds for the head of a cluster to answer.
CONNECT_SECONDS = 5.0
#: Bytes of the object store of a cluster of our own, and for each byte that it is to hold.
STORE_BYTES, STORE_SHARE = 2**28, 4
#: What the processes of a cluster of our own inherit: nothing is told to anybody, and workers are no less urgent than
#: those of other executors.
OURS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


@contextlib.contextmanager
def connection(address: str | None, processors: int, threads: int, size: int) -> Iterator[Any]:
    """Ray, connected to the cluster at ``address``; None: to one of so many ``processors`` that is started here.

    Where the process was connected before it stays so. ``size``: bytes that the object store is to hold.
    """
    ray = library()
    if ray.is_initialized():
        _check_same_cluster(address, ray.get_runtime_context().gcs_address)
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
        with inheritance(threads), _variables(OURS), _signals_restored(), _no_warnings():
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
    """What each node that is there has."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _check_same_cluster(address: str | None, connected: str) -> None:
    if address not in (None, "auto", connected):
        raise ExecutorError(
            f"address: this process is connected to the Ray cluster at {connected} already, got {address}. "
            "Leave the address out, or call ray.shutdown() before."
        )


def _without_folder() -> Any:
    """Ray puts the current folder first on the search path of workers, where a file of it stands in for a library."""
    from ray.job_config import JobConfig

    class WithoutFolder(JobConfig):
        def _runtime_env_has_working_dir(self) -> bool:
            return True

    return WithoutFolder()


def _reach(address: str) -> None:
    """ExecutorError at once where nothing answers; Ray itself tries for long."""
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
def _variables(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Ray has SIGTERM end the process on the spot; the audit's own way out is to stay."""
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


@contextlib.contextmanager
def _no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
