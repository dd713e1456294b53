"""How many workers: by what the system allows and what a measurement shows; told in one line, and no row shows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import audit_doubles as doubles
import psutil
import pytest
from audit_doubles import run, timeless

from leakscope.audit import AuditSpec, SpecError
from leakscope.audit.executors import crew_size as module
from leakscope.audit.executors import processes
from leakscope.audit.executors.crew_size import MEMORY_SHARE, Pace, choose, free_memory, memory_room, usable_processors

GB = 10**9


def paces(**rates: float) -> dict[int, list[Pace]]:
    """What ``n`` workers do together, shared equally, each of a tenth of a gigabyte."""
    return {int(n[1:]): [Pace(rate / int(n[1:]), GB // 10)] * int(n[1:]) for n, rate in rates.items()}


@pytest.mark.parametrize(
    "measured, workers, words",
    [
        (paces(n1=10, n2=19), 2, "2 together do 1.9 times the work of one"),
        (paces(n1=10, n2=11), 1, "2 together do only 1.1 times the work of one"),
        (paces(n1=10, n2=20, n4=39, n8=41), 4, "8 together do only 4.1 times the work of one, and 4 do 3.9"),
        (paces(n1=10, n2=20, n3=29), 3, "3 together do 2.9 times the work of one"),
        (paces(n1=10), 1, "there is one processor"),
        (paces(n1=0.0, n2=0.0), 2, "2 together do 0.0 times the work of one"),
    ],
    ids=["two cores", "one core", "four of eight", "three", "alone", "nothing measured"],
)
def test_as_many_as_help(measured: dict[int, list[Pace]], workers: int, words: str) -> None:
    choice = choose(measured, free=100 * GB)
    assert choice.workers == workers
    assert choice.reason == words


def test_no_more_than_there_is_memory_for() -> None:
    measured = paces(n1=10, n2=20, n4=40)
    # Each takes 0.1 GB and may take as much again; four of them are there.
    for free in (0, GB // 10, GB // 5, GB):
        fitting = int(MEMORY_SHARE * (free + 4 * GB // 10) / (2 * GB // 10))
        assert choose(measured, free).workers == min(4, max(1, fitting))


def test_processors_are_those_of_the_control_group_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
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


def test_memory_is_that_of_the_control_group_too(tmp_path: Path) -> None:
    machine = psutil.virtual_memory().total
    assert 0 < free_memory(tmp_path) <= machine
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    assert free_memory(tmp_path) == 600000
    (tmp_path / "memory.max").write_text("max")
    assert free_memory(tmp_path) > 600000


def test_room_is_counted_with_what_workers_hold_already(monkeypatch: pytest.MonkeyPatch) -> None:
    own = psutil.Process().memory_info().rss
    monkeypatch.setattr(module, "free_memory", lambda: 9 * own)
    assert memory_room([psutil.Process().pid], 0) == int(MEMORY_SHARE * 10)
    assert memory_room([psutil.Process().pid], 5 * own) == 1
    assert memory_room([None], 0) == 1, "what is not known changes nothing"


def audited(out: Path, **changes: Any) -> tuple[Any, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    done = run(out, executor="processes", progress=events.append, findings=False, **changes)
    return done, [event for event in events if event["event"] == "workers"]


@pytest.mark.parametrize("pace, workers", [(1.0, 2), (0.5, 1)], ids=["two cores", "one core"])
def test_the_choice_is_measured_told_once_and_changes_no_row(
    pace: float, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    serial = run(tmp_path / "serial", findings=False)
    monkeypatch.setattr(processes, "default_workers", lambda threads: 2)
    monkeypatch.setattr(
        processes._Processes,
        "_paces",
        lambda self, asked: [Pace(10.0 if len(asked) == 1 else 10 * pace, 1)] * len(asked),
    )
    done, told = audited(tmp_path / "auto")
    assert [event["workers"] for event in told] == [workers]
    assert "the work of one" in told[0]["reason"]
    assert timeless(done.rows) == timeless(serial.rows)


def test_workers_really_measure_and_nobody_is_asked_who_said_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "default_workers", lambda threads: 2)
    done, told = audited(tmp_path / "auto", workers="auto")
    assert len(told) == 1
    assert told[0]["workers"] in (1, 2)
    assert timeless(done.rows) == timeless(run(findings=False).rows)
    _, silence = audited(tmp_path / "fixed", workers=2, examples=1, controls=False)
    assert silence == []


def test_a_model_that_cannot_be_measured_costs_rows_and_not_the_audit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "default_workers", lambda threads: 2)
    done, told = audited(tmp_path, model="audit_doubles:fatal_net", controls=False, attacks=[doubles.Guess()])
    assert told == []
    assert {row.status for row in done.rows} == {"failed"}


def test_a_worker_without_room_for_its_jobs_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "default_workers", lambda threads: 2)
    monkeypatch.setattr(processes._Processes, "_paces", lambda self, asked: [Pace(10.0, 1)] * len(asked))
    monkeypatch.setattr(processes, "memory_room", lambda workers, needed: 1)
    done, told = audited(tmp_path)
    assert [event["workers"] for event in told] == [2, 1]
    assert told[1]["reason"].endswith("there is memory for no more")
    assert timeless(done.rows) == timeless(run(findings=False).rows)


@pytest.mark.parametrize("value, expected", [("auto", None), ("AUTO", None), (3, 3), (None, None)])
def test_auto_is_the_default(value: Any, expected: int | None) -> None:
    base = {**doubles.BASE, "model": doubles.net(), "data": doubles.examples()}
    assert AuditSpec.parse({**base, "workers": value}).workers == expected


@pytest.mark.parametrize("value", ["many", "0", 0, 5000])
def test_other_words_are_refused(value: Any) -> None:
    base = {**doubles.BASE, "model": doubles.net(), "data": doubles.examples()}
    with pytest.raises(SpecError, match="workers: expected"):
        AuditSpec.parse({**base, "workers": value})
