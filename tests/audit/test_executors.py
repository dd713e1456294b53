from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
from audit_doubles import run, timeless

from leakscope.audit import AuditSpec, ExecutorError, SpecError
from leakscope.audit.executors import base as module
from leakscope.audit.executors import processes as processes_module
from leakscope.audit.executors.processes import default_workers, usable_processors
from leakscope.results import Store
from process_groups import group_is_gone


def processes(out: Path, **changes: Any) -> Any:
    return run(out, **{"executor": "processes", "workers": 2, **changes})


def test_processes_give_the_rows_of_serial(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    spread = processes(tmp_path / "a", progress=events.append)
    serial = run(tmp_path / "b")
    assert timeless(spread.rows) == timeless(serial.rows)
    assert timeless(spread.findings) == timeless(serial.findings)
    assert len(spread.findings) == 4
    total = len(spread.rows) + len(spread.findings)
    assert spread.verdict.outcome == "leaks"
    assert not [e for e in events if e["event"] == "workers"]  # nothing to tell of a number that was given
    finished = [e for e in events if e["event"] == "finished"]
    assert sorted(e["position"] for e in finished) == list(range(total))
    assert [e["completed"] for e in finished] == list(range(1, total + 1))
    again = processes(tmp_path / "a")
    assert again.rows == spread.rows
    assert again.findings == spread.findings


@pytest.mark.slow
def test_a_death_costs_one_job(tmp_path: Path) -> None:
    attacks = [doubles.Guess(), doubles.Trouble(how="exit"), doubles.Trouble(how="kill"), doubles.Quotient()]
    done = processes(tmp_path, attacks=attacks, defenses=None, controls=False, examples=1, workers=1)
    told = [(row.job.attack_name, row.status) for row in done.rows]
    assert told == [("guess", "done"), ("trouble", "failed"), ("trouble", "failed"), ("quotient", "done")]
    assert done.rows[1].error == "WorkerDied: the worker process ended with exit code 7"
    assert "by signal SIGKILL" in str(done.rows[2].error)
    assert done.verdict.settings[0].failed == 2


@pytest.mark.slow
def test_a_model_that_ends_its_process(tmp_path: Path) -> None:
    changes = {"attacks": [doubles.Guess()], "defenses": None, "controls": False, "examples": 2, "workers": 1}
    done = processes(tmp_path, model="audit_doubles:fatal_net", **changes)
    assert [row.status for row in done.rows] == ["failed"] * 2
    assert done.verdict.outcome == "nothing audited"


@pytest.mark.slow
def test_timeout(tmp_path: Path) -> None:
    attacks = [doubles.Trouble(how="hang"), doubles.Guess()]
    done = processes(tmp_path, attacks=attacks, defenses=None, controls=False, examples=1, timeout=1.5, workers=1)
    assert [row.status for row in done.rows] == ["failed", "done"]
    assert done.rows[0].error == "TimeoutError: stopped after more than 1.5 s"
    assert done.rows[0].seconds is not None
    assert 1.5 <= done.rows[0].seconds < 30


def test_a_model_that_cannot_travel(tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match="executor='serial'"):
        processes(tmp_path / "out", model=doubles.unpicklable_net())
    assert not (tmp_path / "out").exists()
    assert run(model=doubles.unpicklable_net()).verdict.outcome == "leaks"


@pytest.mark.slow
def test_a_model_that_differs_from_process_to_process(tmp_path: Path) -> None:
    with pytest.raises(ExecutorError, match="come out the same each time"):
        processes(tmp_path, model="audit_doubles:random_net")


@pytest.mark.slow
def test_workers_that_cannot_start_are_not_hired_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STARTS_IN_A_ROW", 2)
    with pytest.raises(ExecutorError, match=r"^2 worker processes in a row died before they were ready"):
        processes(tmp_path, model="audit_doubles:dying_factory", workers=1)


@pytest.mark.slow
def test_workers_are_processors_by_threads_and_told_where_nobody_said_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes_module, "usable_processors", lambda: 5)
    assert [default_workers(threads) for threads in (1, 2, 3, 10**6)] == [5, 2, 1, 1]
    monkeypatch.setattr(processes_module, "usable_processors", lambda: 2)
    events: list[dict[str, Any]] = []
    one = {"attacks": [doubles.Guess()], "findings": False, "controls": False}
    done = processes(tmp_path / "auto", workers="auto", progress=events.append, **one)
    assert [event["workers"] for event in events if event["event"] == "workers"] == [2]
    assert timeless(done.rows) == timeless(run(**one).rows)


def test_processors_are_those_of_the_control_group_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    assert usable_processors(tmp_path) == 16
    for text, expected in (("max 100000", 16), ("400000 100000", 4), ("50000 100000", 1), ("3200000 100000", 16)):
        (tmp_path / "cpu.max").write_text(text)
        assert usable_processors(tmp_path) == expected
    (tmp_path / "cpu.max").write_text("nonsense")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    for quota, expected in (("-1", 16), ("250000", 3), ("200000", 2)):
        (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
        assert usable_processors(tmp_path) == expected


@pytest.mark.parametrize("value, expected", [("AUTO", None), (3, 3), (None, None)])
def test_auto_is_the_default(value: Any, expected: int | None) -> None:
    base = {**doubles.BASE, "model": doubles.net(), "data": doubles.examples()}
    assert AuditSpec.parse({**base, "workers": value}).workers == expected


@pytest.mark.parametrize("value", ["many", 0, 5000])
def test_other_numbers_of_workers_are_refused(value: Any) -> None:
    base = {**doubles.BASE, "model": doubles.net(), "data": doubles.examples()}
    with pytest.raises(SpecError, match="workers: expected"):
        AuditSpec.parse({**base, "workers": value})


SLOW = 0.25
SCRIPT = """
import sys
import audit_doubles as doubles
from leakscope.audit import audit

if __name__ == "__main__":
    audit(
        model=doubles.net(), data=doubles.examples(), out=sys.argv[1], executor=sys.argv[2], workers=2,
        attacks=[doubles.Quotient(slow=float(sys.argv[3])), doubles.Guess()], defenses=["none"], examples=4,
        pictures=True, controls=["noise"],
    )
"""


def _default_interrupt() -> None:
    """A shell that starts the tests in the background has its children ignore Ctrl-C; others may have blocked it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def start(folder: Path, out: Path, executor: str, slow: float) -> subprocess.Popen[bytes]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.Popen(
        [sys.executable, str(script), str(out), executor, str(slow)],
        env={**doubles.environment(), "SLOW": "yes"},
        start_new_session=True,
        stderr=subprocess.PIPE,
        preexec_fn=_default_interrupt,
    )


def wait_for_rows(process: subprocess.Popen[bytes], out: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[1]
        if (out / "audit.sqlite").exists():
            with Store.open(out) as store:
                if len(store.rows()) >= count:
                    return
        time.sleep(0.02)
    raise AssertionError("no rows came")


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_kill_and_resume_equals_an_uninterrupted_run(tmp_path: Path, executor: str) -> None:
    out = tmp_path / "out"
    process = start(tmp_path, out, executor, SLOW)
    wait_for_rows(process, out, 2)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    with Store.open(out) as store:
        survived = store.rows()
        assert 2 <= len(survived) < 16
        for row in survived:
            assert row.status == "done"
            assert store.artifact(row.key) is not None
    assert group_is_gone(process.pid)  # workers notice that their parent is no more
    settings = {
        "attacks": [doubles.Quotient(slow=SLOW), doubles.Guess()],
        "defenses": ["none"],
        "examples": 4,
        "pictures": True,
        "controls": ["noise"],
    }
    run(out, executor=executor, workers=1, **settings)
    run(tmp_path / "whole", **settings)
    with Store.open(out) as store, Store.open(tmp_path / "whole") as other:
        rows = store.rows()
        assert len(rows) == 16
        assert timeless(rows) == timeless(other.rows())
        assert timeless(store.findings()) == timeless(other.findings())
        assert len(store.findings()) == 2
        assert [row for row in rows if row.key in {r.key for r in survived}] == survived
        assert store.meta("plan") == other.meta("plan")
    assert not list((out / "artifacts").glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_interrupt_ends_cleanly_and_keeps_rows(tmp_path: Path, executor: str) -> None:
    out = tmp_path / "out"
    process = start(tmp_path, out, executor, SLOW)
    wait_for_rows(process, out, 1)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    _, errors = process.communicate(timeout=30)
    assert process.returncode != 0
    # Of one process only; the traceback has two parts where the interrupt met a library that was handling an error.
    assert errors.count(b"\nKeyboardInterrupt") == 1, errors.decode()
    assert errors.rstrip().endswith(b"\nKeyboardInterrupt"), errors.decode()
    assert group_is_gone(process.pid)
    with Store.open(out) as store:
        assert len(store.rows()) >= 1
