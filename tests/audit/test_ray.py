"""The Ray executor on local clusters: the rows of serial whatever is lost on the way, and what cannot run is told."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
from audit_doubles import run, timeless
from test_executors import SLOW, start, wait_for_rows

from leakscope.audit import EXECUTORS, AuditSpec, ExecutorError, SpecError
from leakscope.audit.executors import ray as module
from leakscope.audit.executors.ray import OURS, Board, RayWorker, resource_problem
from leakscope.results import Store
from process_groups import group_is_gone

ray = pytest.importorskip("ray")
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20}
ONE: dict[str, Any] = {"defenses": None, "controls": False, "findings": False, "examples": 1}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes on this machine, the first with something that calls itself a GPU; jobs take their time there."""
    from ray.cluster_utils import Cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLOW", "yes")
        for name, value in OURS.items():
            patch.setenv(name, value)
        made = Cluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 1, "include_dashboard": False})
    try:
        ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def unconnected() -> None:
    if ray.is_initialized():
        ray.shutdown()


def on(cluster: Any, out: Path, **changes: Any) -> Any:
    return run(out, **{"executor": {"ray": {"address": cluster.address}}, **changes})


@pytest.mark.slow
def test_two_hundred_jobs_and_a_node_killed_on_the_way(cluster: Any, tmp_path: Path) -> None:
    node = cluster.add_node(**NODE)
    events: list[dict[str, Any]] = []

    def progress(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "finished" and event["completed"] == 40:
            cluster.remove_node(node, allow_graceful=False)

    settings: dict[str, Any] = {
        "data": doubles.examples(50),
        "examples": 50,
        "attacks": [doubles.Quotient(slow=0.05), doubles.Guess()],
        "controls": False,
        "findings": False,
    }
    spread = on(cluster, tmp_path / "spread", progress=progress, **settings)
    assert not node.any_processes_alive()
    assert [e["workers"] for e in events if e["event"] == "workers"] == [2]
    finished = Counter(event["key"] for event in events if event["event"] == "finished")
    assert len(finished) == 200
    assert set(finished.values()) == {1}
    with Store.open(tmp_path / "spread") as store:
        assert len(store.rows()) == len({row.key for row in store.rows()}) == 200
    serial = run(tmp_path / "serial", **settings)
    assert {row.status for row in serial.rows} == {"done"}
    assert timeless(spread.rows) == timeless(serial.rows)


def test_the_rows_of_serial_and_resumed(cluster: Any, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    first = on(cluster, tmp_path / "a", attacks=[doubles.Quotient()])
    whole = on(cluster, tmp_path / "a", progress=events.append)
    serial = run(tmp_path / "b")
    assert timeless(whole.rows) == timeless(serial.rows)
    assert timeless(whole.findings) == timeless(serial.findings)
    again = {event["key"] for event in events if event["event"] == "started"}
    assert not again & {row.key for row in first.rows}
    assert whole.store.meta("spec")["executor"] == "ray"
    assert cluster.address not in str(whole.store.meta("spec"))


def test_what_a_job_does_to_its_worker_costs_that_job_alone(cluster: Any, tmp_path: Path) -> None:
    """With two workers, of which one has long been idle when the other is lost with all that is left."""
    cluster.add_node(**NODE)
    attacks = [doubles.Guess(), doubles.Trouble(how="kill"), doubles.Trouble(how="hang"), doubles.Quotient()]
    done = on(cluster, tmp_path, attacks=attacks, timeout=20, workers=2, **ONE)
    assert [row.status for row in done.rows] == ["done", "failed", "failed", "done"]
    assert str(done.rows[1].error).startswith("WorkerDied: 3 workers were lost while they did this job, the last one")
    assert done.rows[2].error == "TimeoutError: stopped after more than 20 s"


def test_a_share_of_a_gpu(cluster: Any, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    asked = {"ray": {"address": cluster.address, "gpus": 0.5}}
    done = run(tmp_path / "a", executor=asked, attacks=[doubles.Guess()], progress=events.append, **ONE)
    assert [row.status for row in done.rows] == ["done"]
    assert [e["reason"] for e in events if e["event"] == "workers"] == ["the cluster has 1 place of 1 CPU and 0.5 GPU"]


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"executor": {"ray": {"gpus": 2.0}}}, "expected a node with 1 CPU and 2 GPU, got one of"),
        ({"threads": 64}, "expected a node with 64 CPUs, got one of 1 CPUs"),
        ({"executor": {"ray": {"address": "10.1.1.1:6379"}}}, "connected to the Ray cluster at .* already"),
        ({"model": "unpicklable"}, "cannot be sent to a cluster"),
    ],
)
def test_what_this_cluster_cannot_do_is_told_first(
    cluster: Any, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    if "model" in changes:
        changes = {"model": doubles.unpicklable_net()}
    with pytest.raises(ExecutorError, match=words):
        on(cluster, tmp_path / "out", **changes)
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_another_elsewhere(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match="the model that arrived is not that which was sent"):
        on(cluster, tmp_path, model=doubles.Elsewhere(), attacks=[doubles.Guess()], **ONE)


@pytest.mark.usefixtures("unconnected")
def test_a_cluster_by_its_address(cluster: Any, tmp_path: Path) -> None:
    done = on(cluster, tmp_path, attacks=[doubles.Guess()], workers=1, **ONE)
    assert [row.status for row in done.rows] == ["done"]
    assert not ray.is_initialized()


@pytest.mark.slow
def test_interrupt_ends_the_cluster_keeps_rows_and_the_next_run_goes_on(tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = start(tmp_path, out, "ray", SLOW)
    wait_for_rows(process, out, 1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert errors.rstrip().endswith(b"\nKeyboardInterrupt"), errors.decode()
    assert group_is_gone(process.pid)
    settings: dict[str, Any] = {
        "attacks": [doubles.Quotient(slow=SLOW), doubles.Guess()],
        "defenses": ["none"],
        "examples": 4,
        "pictures": True,
        "controls": ["noise"],
    }
    with Store.open(out) as store:
        survived = store.rows()
        assert 1 <= len(survived) < 16
    rows = run(out, **settings).rows
    assert timeless(rows) == timeless(run(tmp_path / "whole", **settings).rows)
    assert [row for row in rows if row.key in {one.key for one in survived}] == survived


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize(
    "options, words",
    [
        ({"address": "127.0.0.1:1"}, r"address: nothing answers at 127\.0\.0\.1:1 .*ray start --head"),
        ({"address": "no-such-host.invalid:6379"}, "address: nothing answers at no-such-host"),
        ({"address": "127.0.0.1:99999999"}, "address: nothing answers"),
        ({"address": "ray://127.0.0.1:10001"}, "address: expected HOST:PORT"),
        ({"address": "head"}, "address: expected HOST:PORT"),
        ({"gpus": 0.25}, r"gpus: expected a cluster with GPUs for gpus=0\.25, got one without any"),
        ({"gpus": 1.5}, r"gpus: expected a share of one GPU or a whole number of them, got 1\.5"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(
    options: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "gpus_here", lambda: 0.0)
    with pytest.raises(ExecutorError, match=words):
        run(tmp_path / "out", executor={"ray": options})
    assert not (tmp_path / "out").exists()
    assert not ray.is_initialized()


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ExecutorError, match=r"pip install leakscope\[ray\]"):
        run(tmp_path / "out", executor="ray")
    assert not (tmp_path / "out").exists()


def test_settings_are_checked_with_the_spec() -> None:
    base = {"model": "logistic", "data": "tiles"}
    spec = AuditSpec.parse({**base, "executor": {"ray": {"address": "auto", "gpus": 0.5}}})
    assert (spec.executor.name, spec.executor.options) == ("ray", {"address": "auto", "gpus": 0.5})
    wrong = {"ray": {"adress": "auto", "gpus": -1}}
    with pytest.raises(SpecError, match=r"(?s)executor: ray: .*did you mean address.*gpus: expected a number of at le"):
        AuditSpec.parse({**base, "executor": wrong})
    with pytest.raises(SpecError, match="executor: serial: unknown setting 'address'"):
        AuditSpec.parse({**base, "executor": {"serial": {"address": "auto"}}})
    assert [setting.name for setting in EXECUTORS["ray"].target.own_settings()] == ["address", "gpus"]


def test_nodes_that_no_job_fits_on() -> None:
    assert (
        resource_problem([], 1, 0.0, "cpu") == "ray: expected a node with 1 CPU, got none. Lower threads, or add nodes"
    )
    assert "got one of 0 CPUs" in str(resource_problem([{"CPU": 0.0}], 1, 0.0, "cpu"))
    assert "gpus: expected with device cuda" in str(resource_problem([{"CPU": 1.0}], 1, 0.0, "cuda:0"))
    assert resource_problem([{"CPU": 1.0}], 1, 0.0, "cpu") is None


def test_another_version_on_a_node_is_told() -> None:
    kind, why = RayWorker().prepare(b"", [], {"torch": "0.1"}, None)
    assert kind == "broken"
    assert ", not 0.1. Install the same there." in why
    kind, why = RayWorker().prepare(b"", [], {}, None)
    assert kind == "broken"
    assert "EOFError" in why


@pytest.mark.slow
def test_a_board_is_read_once() -> None:
    board = Board()
    board.post("a", {"done": 1})
    board.post("a", {"done": 2})
    assert board.take() == {"a": {"done": 2}}
    assert board.take() == {}


class Dead:
    """A library whose cluster has died: what asks it never returns."""

    exceptions = type("exceptions", (), {"RayError": OSError})

    def __init__(self) -> None:
        self.over = threading.Event()

    def nodes(self) -> list[Any]:
        self.over.wait(60)
        return []

    def shutdown(self) -> None:
        self.over.wait(60)

    def is_initialized(self) -> bool:
        return False

    def init(self, **_options: Any) -> None:
        pass


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dead]:
    library = Dead()
    monkeypatch.setattr(module, "library", lambda: library)
    monkeypatch.setattr(module, "_without_folder", lambda: None)
    for name in ("ANSWER_SECONDS", "END_SECONDS"):
        monkeypatch.setattr(module, name, 0.2)
    yield library
    library.over.set()


def test_a_cluster_that_does_not_answer_is_given_up(dead: Dead) -> None:
    with pytest.raises(ExecutorError, match="does not answer any more"):
        module.alive_nodes(dead)


def test_a_cluster_that_does_not_end_is_left_behind(dead: Dead) -> None:
    begun = time.monotonic()
    with module.connection(None, 1, 1, 0):
        pass
    assert time.monotonic() - begun < 30
