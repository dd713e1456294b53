"""Progress: short in a log, complete when asked for, and the time that is left."""

from __future__ import annotations

import io
import threading
from typing import Any

import pytest
from rich.console import Console

from leakscope.audit import progress as module
from leakscope.audit.progress import Tally, job_line, job_name
from leakscope.cli import progress as command_line
from leakscope.cli.progress import audit_progress


def job(attack: str = "dlg", defense: str = "none", **changes: Any) -> dict[str, Any]:
    facts = {"attack_name": attack, "defense": defense, "control": None, "finding": None, "batch": 0, "seed": 0}
    return {**facts, **changes}


def finished(number: int, total: int, status: str = "done", error: str = "ValueError: no", **job_facts: Any) -> Any:
    facts = {"event": "finished", "key": str(number), "completed": number + 1, "total": total, "seconds": 1.0}
    fate = {"status": status, "psnr": 20.0, "error": None if status == "done" else error}
    return {**facts, **fate, "job": job(**job_facts)}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a pipe gets."""
    stream = io.StringIO()
    monkeypatch.setattr(command_line, "make_console", lambda stderr: Console(file=stream, width=80, highlight=False))
    return stream


def run(jobs: int, **options: Any) -> None:
    with audit_progress(**options) as tell:
        tell({"event": "planned", "total": jobs, "finished": 0})
        tell(
            {"event": "estimated", "seconds": 300.0, "jobs": jobs, "by_attack": {"dlg": 250.0}, "advice": "Fewer steps"}
        )
        for number in range(jobs):
            tell({"event": "started", "key": str(number), "job": job()})
            tell({"event": "advanced", "key": str(number), "job": job(), "done": 5, "total": 10, "value": 0.25})
            tell(finished(number, jobs, "failed" if number % 10 == 9 else "done", error="RuntimeError: broke"))


def test_three_hundred_jobs_in_a_pipe_are_few_lines(log: io.StringIO) -> None:
    run(300)
    assert log.getvalue().splitlines() == [
        "300 jobs to run",
        "Estimated time: at most 5 min for 300 jobs.",
        "Hint: Fewer steps",
        "failed: dlg, no defence: RuntimeError: broke",
        "[300/300] 270 done, 30 failed; best 20.0 dB; after 0.0 s",
    ]
    assert "\x1b" not in log.getvalue()


def test_how_many_workers_there_are_is_one_line(log: io.StringIO) -> None:
    with audit_progress() as tell:
        tell({"event": "workers", "workers": 2, "reason": "there are 2 processors"})
    assert log.getvalue().splitlines()[0] == "Using 2 workers: there are 2 processors."


def test_verbose_tells_every_job_and_the_estimate_of_each_attack(log: io.StringIO) -> None:
    run(20, verbose=True)
    told = log.getvalue()
    assert told.count("] dlg, no defence, batch 0, seed 0: ") == 20
    assert "  dlg: 4 min" in told


def test_without_progress_only_remarks_remain_and_quiet_says_nothing(log: io.StringIO) -> None:
    run(20, show=False)
    assert "[20/20]" not in log.getvalue()
    assert "Estimated time: at most 5 min" in log.getvalue()
    log.truncate(0)
    log.seek(0)
    run(20, quiet=True, show=False)
    assert log.getvalue() == ""


def test_a_silent_job_is_told_of_now_and_then(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.01)
    spoken = threading.Event()
    heard = module._say

    def say(console: Any, text: str) -> None:
        heard(console, text)
        if text.startswith("[0/2]"):
            spoken.set()

    monkeypatch.setattr(module, "_say", say)
    with audit_progress() as tell:
        tell({"event": "planned", "total": 2, "finished": 0})
        tell({"event": "started", "key": "a", "job": job(finding="floor", attack="floor")})
        assert spoken.wait(20)
    assert "now theory (floor); after" in log.getvalue()


def test_the_bars_show_the_steps_of_running_jobs() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, _environ={})
    tally = Tally()
    with module._Bars(console, tally) as bars:
        for event in (
            {"event": "planned", "total": 4, "finished": 1},
            {"event": "started", "key": "a", "job": job("inverting-gradients")},
            {"event": "advanced", "key": "a", "job": job(), "done": 7, "total": 10, "value": 0.25},
            {"event": "started", "key": "b", "job": job(finding="floor")},
        ):
            tally.take(event)
            bars.take(event)
        audit, attack, theory = bars._view.tasks
        assert (audit.completed, audit.total) == (1, 4)
        assert (attack.description, attack.completed, attack.total) == ("inverting-gradients, no defence", 7, 10)
        assert attack.fields["note"] == "objective 0.25"
        assert theory.description == "theory (floor), no defence"
        event = finished(0, 4) | {"key": "a"}
        tally.take(event)
        bars.take(event)
        assert len(bars._view.tasks) == 2


def test_time_left_follows_the_estimate_first_and_the_pace_later() -> None:
    now = 0.0
    tally = Tally(lambda: now)
    tally.take({"event": "planned", "total": 12, "finished": 2})
    assert tally.remaining is None  # nothing is known yet
    tally.take({"event": "estimated", "seconds": 100.0, "jobs": 10, "by_attack": {}, "advice": None})
    assert tally.remaining == 100.0
    now = 40.0
    tally.take(finished(2, 12))
    tally.take({"event": "advanced", "key": "x", "job": job(), "done": 1, "total": 1, "value": None})
    assert tally.share == pytest.approx(0.2)
    # By pace 160 s are left, by the estimate 60 s.
    assert tally.remaining == pytest.approx(0.8 * 160 + 0.2 * 60), "a fifth of the work done, four fifths of the trust"
    now = 120.0
    assert tally.remaining == pytest.approx(480)  # the estimate has passed, the pace remains
    tally.take(finished(11, 12))
    assert tally.remaining is None


def test_no_more_time_is_left_than_the_budget_allows() -> None:
    now = 0.0
    tally = Tally(lambda: now)
    tally.take({"event": "planned", "total": 10, "finished": 0})
    told = {"event": "estimated", "seconds": 100.0, "jobs": 10, "by_attack": {}, "advice": None, "budget": 30.0}
    tally.take(told)
    assert tally.remaining == 30.0
    now = 10.0
    assert tally.left() == "about 20 s left"
    now = 40.0
    assert tally.remaining == 0.0


def test_a_job_in_few_words() -> None:
    pruning = "GradientPruning(fraction=0.9, scope='tensor')"
    assert job_name(job(defense=pruning)) == "dlg, GradientPruning(fraction=0.9)"
    assert job_name(job(control="noise")) == "dlg, control (noise)"
    line = job_line(finished(0, 1, "failed", error="ValueError: " + "x" * 10_000))
    assert len(line) < 300
    assert job_line(finished(0, 1)) == "dlg, no defence, batch 0, seed 0: 20.0 dB, 1.0 s"
