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
from leakscope.report.sentences import reason_text
from leakscope.results.reasons import Remedy, Scenario, because


def job(attack_name: str = "dlg", defense: str = "none", **changes: Any) -> dict[str, Any]:
    facts = {"attack_name": attack_name, "defense": defense, "control": None, "finding": None, "batch": 0, "seed": 0}
    return {**facts, **changes}


def finished(number: int, total: int, status: str = "done", error: str = "ValueError: no", **job_facts: Any) -> Any:
    facts = {"event": "finished", "key": str(number), "completed": number + 1, "total": total, "seconds": 1.0}
    fate = {"status": status, "psnr": 20.0, "error": None if status == "done" else error}
    return {**facts, **fate, "job": job(**job_facts)}


def estimated(jobs: int, seconds: float | None, **changes: Any) -> dict[str, Any]:
    """What an audit of one kind of job announces."""
    kinds = [{**job(), "jobs": jobs, "seconds": seconds}]
    facts = {"seconds": jobs * (seconds or 0.0), "at_least": False, "jobs": jobs, "workers": 1, "kinds": kinds}
    more = {"by_attack": {}, "advice": None, "budget": None, "long": False}
    return {"event": "estimated", **facts, **more, **changes}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a pipe gets."""
    stream = io.StringIO()
    monkeypatch.setattr(command_line, "make_console", lambda stderr: Console(file=stream, width=80, highlight=False))
    return stream


def run(jobs: int, **options: Any) -> None:
    with audit_progress(**options) as tell:
        tell({"event": "planned", "total": jobs, "finished": 0})
        tell(estimated(jobs, 1.0, by_attack={"dlg": 250.0}, advice="Fewer steps"))
        for number in range(jobs):
            tell({"event": "started", "key": str(number), "job": job()})
            tell({"event": "advanced", "key": str(number), "job": job(), "done": 5, "total": 10, "value": 0.25})
            tell(finished(number, jobs, "failed" if number % 10 == 9 else "done", error="RuntimeError: broke"))


def test_three_hundred_jobs_in_a_pipe_are_few_lines(log: io.StringIO) -> None:
    run(300)
    assert log.getvalue().splitlines() == [
        "300 jobs to run",
        "Estimated time: about 5 min for 300 jobs.",
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
    assert "Estimated time: about 20 s" in log.getvalue()
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
        tell({"event": "started", "key": "a", "job": job(finding="floor", attack_name="floor")})
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


@pytest.mark.parametrize("exceeded, words", [(False, "jobs"), (True, "policy already exceeded")])
def test_a_bar_of_eighty_columns_cuts_none_of_it(exceeded: bool, words: str) -> None:
    now, stream = 0.0, io.StringIO()
    tally = Tally(lambda: now)
    events = [{"event": "planned", "total": 64, "finished": 0}, estimated(64, 60.0, budget=600.0)]
    with module._Bars(Console(file=stream, width=80, force_terminal=True, _environ={}), tally) as bars:
        for event in (*events, *([{"event": "exceeded"}] if exceeded else [])):
            tally.take(event)
            bars.take(event)
    line = stream.getvalue()
    assert words in line, line
    assert "work 64 min, budget 10 min" in line


def test_work_left_and_budget_left_are_told_apart() -> None:
    now = 0.0
    tally = Tally(lambda: now)
    tally.take({"event": "planned", "total": 10, "finished": 0})
    tally.take({"event": "timing", "job": job()})
    assert tally.line() == "[0/10] timing dlg; after 0.0 s"
    tally.take(estimated(10, 60.0, budget=300.0))
    assert tally.left() == "work left: about 10 min, budget left: 5 min"
    now = 290.0
    tally.take(finished(0, 10))
    assert tally.left() == "work left: about 10 s, budget left: 10 s", "nine jobs like the one that took a second"
    now = 400.0
    assert tally.left() == "work left: about 10 s, budget used up"


def test_few_quick_jobs_do_not_hide_a_slow_one() -> None:
    now = 0.0
    tally = Tally(lambda: now)
    tally.take({"event": "planned", "total": 10, "finished": 0})
    slow = {**job("slow", attack="Slow()"), "jobs": 1, "seconds": 120.0}
    quick = {**job("quick", attack="Quick()"), "jobs": 9, "seconds": 1.0}
    tally.take(estimated(10, None, kinds=[slow, quick]))
    tally.take({"event": "started", "key": "slow", "job": job("slow", attack="Slow()")})
    for number in range(9):
        tally.take(finished(number, 10, attack_name="quick", attack="Quick()") | {"key": f"quick {number}"})
    now = 10.0
    assert tally.remaining == pytest.approx(110.0), "nine tenths of the jobs are not nine tenths of the work"
    now = 200.0  # an estimate that has passed is no sign that the end is near
    assert tally.remaining == pytest.approx(100.0)


def test_what_is_left_out_takes_no_time(log: io.StringIO) -> None:
    leak = because(
        *("reconstruction", Remedy("again")),
        **{"scenario": Scenario("FedSGD()", "none"), "example": 0, "attack": "dlg"},
        **{"measure": "psnr", "value": 40.0, "limit": 20.0, "baseline": 10.0},
    )
    exceeded = {"scenario": module.scenario_name(leak), "reason": reason_text(leak), "example": 0}
    with audit_progress() as tell:
        tell({"event": "planned", "total": 10, "finished": 0})
        tell(estimated(10, 60.0))
        tell({"event": "exceeded", **exceeded, "stops": True})
        tell({"event": "left out", "kinds": [{**job(), "jobs": 8}], "total": 2})
        tell(finished(0, 2))
        tell(finished(1, 2))
    told = " ".join(log.getvalue().split())
    assert "Policy already exceeded, FedSGD with no defence: example 0 leaks by dlg: PSNR 40.0 dB" in told
    assert "--no-stop-on-leak runs it" in told
    assert "[2/2] policy already exceeded; 2 done" in told
    tally = Tally(lambda: 0.0)
    tally.take({"event": "planned", "total": 10, "finished": 0})
    tally.take(estimated(10, 60.0))
    tally.take({"event": "left out", "kinds": [{**job(), "jobs": 8}], "total": 2})
    assert tally.remaining == pytest.approx(120.0)


@pytest.mark.parametrize("long", [True, False])
def test_the_command_of_a_first_answer_is_printed_where_the_whole_takes_long(long: bool, log: io.StringIO) -> None:
    with audit_progress(quick="leakscope audit --quick") as tell:
        tell({"event": "planned", "total": 10, "finished": 0})
        tell(estimated(10, 60.0, long=long))
    assert ("For a first answer in minutes: leakscope audit --quick" in log.getvalue()) == long


def test_a_job_in_few_words() -> None:
    pruning = "GradientPruning(fraction=0.9, scope='tensor')"
    assert job_name(job(defense=pruning)) == "dlg, GradientPruning(fraction=0.9)"
    assert job_name(job(control="noise")) == "dlg, control (noise)"
    line = job_line(finished(0, 1, "failed", error="ValueError: " + "x" * 10_000))
    assert len(line) < 300
    assert job_line(finished(0, 1)) == "dlg, no defence, batch 0, seed 0: 20.0 dB, 1.0 s"
