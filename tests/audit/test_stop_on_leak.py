"""A scenario ends as soon as it exceeds the policy beyond doubt; what is run is the same as without that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
import torch
from audit_doubles import run, timeless

from leakscope.attacks import LinearLayer
from leakscope.audit import Audit, AuditSpec
from leakscope.audit.attempts import Bench
from leakscope.audit.executors.base import Emit, Queue, Record, Serial
from leakscope.audit.plan import Job
from leakscope.audit.setup import Setup
from leakscope.contracts.attack import Attack
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.results.verdict import judge

#: Its audits stop where others do.
DEFAULT_STOP = True

#: The closed form leaks behind no defence and not behind noise; the guess after it never does.
GRID: dict[str, Any] = {
    "attacks": [doubles.Quotient(), doubles.Guess()],
    "defenses": ["none", {"gradient-noise": {"sigma": 0.3}}],
    "examples": 3,
    "controls": ["noise", "other-examples", "prior-mean", "planted"],
    "findings": False,
    "stop_on_leak": True,
}


@dataclass(frozen=True, kw_only=True)
class Memory(Attack):
    """Knows one example by heart and returns it whatever the update is: a prior, which is no leak."""

    iterations: int = 1

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        x = doubles.examples()[0][:1]
        return Reconstruction(x, None, torch.zeros(1))


def made(done: Audit, attack: str, defense: str = "none") -> list[tuple[int, str | None]]:
    rows = [row for row in done.rows if row.job.attack_name == attack and row.job.defense.startswith(defense)]
    return [(row.job.batch, row.job.control) for row in rows]


def events_of(out: Path | None = None, **changes: Any) -> tuple[Audit, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    return run(out, **{**GRID, **changes}, progress=events.append), events


def begun(events: list[dict[str, Any]]) -> list[tuple[str, int, str | None]]:
    jobs = [event["job"] for event in events if event["event"] == "started"]
    return [(job["attack_name"], job["batch"], job["control"]) for job in jobs]


class InPairs(Serial):
    """Begins two jobs before the first of them ends, as two workers do."""

    def run(self, setup: Setup, groups: Sequence[Sequence[Job]], *, emit: Emit, record: Record) -> None:
        bench, queue = Bench(setup), Queue(groups, self.agenda)
        while pair := [job for job in (queue.take(), queue.take()) if job is not None]:
            for job, outcome in [(job, bench.run(job, None)) for job in pair]:
                record(job, outcome)


def test_jobs_under_way_when_their_scenario_ends_are_counted() -> None:
    changes = {"attacks": [doubles.Proved(), doubles.Guess()], "defenses": None, "executor": f"{__name__}:InPairs"}
    done, events = events_of(**changes)
    counts = [(event["completed"], event["total"]) for event in events if event["event"] == "finished"]
    assert all(completed <= total for completed, total in counts)
    assert counts[-1] == (len(done.rows), len(done.rows))


@pytest.mark.parametrize("executor", ["serial", pytest.param("processes", marks=pytest.mark.slow)])
def test_a_certified_leak_ends_its_scenario_at_once(executor: str, tmp_path: Path) -> None:
    changes = {"attacks": [doubles.Proved(), doubles.Guess()], "defenses": None, "executor": executor, "workers": 1}
    done, events = events_of(tmp_path, **changes)
    assert done.verdict.outcome == "leaks"
    assert [name for name, *_ in begun(events)] == ["prior-mean"] * 3 + ["proved"], "a proof needs no control"
    (told,) = [event for event in events if event["event"] == "exceeded"]
    assert (told["example"], told["stops"]) == (0, True)
    assert [event["total"] for event in events if event["event"] == "finished"][-1] == len(done.rows)


def test_a_leak_without_a_proof_ends_in_leaks_with_the_controls_it_needs(tmp_path: Path) -> None:
    done, events = events_of(tmp_path, defenses=None)
    assert begun(events)[3:] == [("quotient", 0, None), ("quotient", 0, "noise"), ("quotient", 0, "other-examples")]
    kinds = [event["event"] for event in events]
    assert kinds.index("exceeded") > kinds.index("started")
    (setting,) = done.verdict.settings
    assert setting.outcome == "leaks"
    leak, stopped = setting.reasons
    assert (leak.code, leak.baseline is not None) == ("reconstruction", True)
    assert (stopped.code, stopped.count, stopped.total) == ("stopped", 5, 6)
    assert setting.missing == 0
    assert not done.verdict.doubts_of_all, "no job is missing by accident"


def test_what_only_a_prior_knows_ends_nothing(tmp_path: Path) -> None:
    done, events = events_of(tmp_path, attacks=[Memory(), doubles.Guess()], defenses=None, examples=1)
    assert done.rows[0].examples[0].value("psnr") > 60
    assert not [event for event in events if event["event"] == "exceeded"]
    assert done.verdict.outcome == "inconclusive"
    assert len(done.rows) == 2 * (1 + 3) + 1, "every attempt and every control"


def test_other_scenarios_are_judged_as_ever(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", **{**GRID, "stop_on_leak": False})
    done, _ = events_of(tmp_path / "stopped")
    before, after = whole.verdict.settings[1], done.verdict.settings[1]
    assert [reason.code for reason in after.reasons] == [reason.code for reason in before.reasons]
    assert (after.outcome, after.baseline_psnr, after.missing) == (before.outcome, before.baseline_psnr, 0)
    assert len(made(done, "quotient")) < len(made(whole, "quotient"))


def test_the_bare_update_stays_the_proof_that_attacks_work(tmp_path: Path) -> None:
    """The first attack leaks; the second one must still show on the bare update that it works."""
    second = LinearLayer()
    policy = {"waive": doubles.STANDARD, "max_psnr": 25.0}
    facts = {"attacks": [doubles.Quotient(), second], "knowledge": "adaptive_server", "policy": policy}
    done, _ = events_of(tmp_path, **facts)
    assert (0, None) in made(done, "linear-layer"), "it ran once, and succeeded"
    assert (2, None) not in made(done, "linear-layer")


def test_rows_do_not_depend_on_it(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", **{**GRID, "stop_on_leak": False})
    done, _ = events_of(tmp_path / "stopped")
    every = {row[0]: row for row in timeless(whole.rows)}
    assert 0 < len(done.rows) < len(every)
    assert all(every[row[0]] == row for row in timeless(done.rows))


def test_the_same_folder_with_and_without_it(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", **{**GRID, "stop_on_leak": False})
    first, _ = events_of(tmp_path / "one")
    again, events = events_of(tmp_path / "one")
    assert not begun(events), "what was left out stays left out"
    assert again.verdict.reasons == first.verdict.reasons
    rest = run(tmp_path / "one", **{**GRID, "stop_on_leak": False})
    assert timeless(rest.rows) == timeless(whole.rows)
    assert str(rest.verdict) == str(whole.verdict)
    assert rest.store.meta("plan") == whole.store.meta("plan")


def test_a_laxer_policy_runs_what_was_left_out(tmp_path: Path) -> None:
    events_of(tmp_path, defenses=None)
    done, _ = events_of(tmp_path, defenses=None, policy={"max_psnr": 300.0})
    assert len(done.rows) == 3 + 2 * (3 + 3 + 3 + 2)
    assert not any(reason.code == "stopped" for reason in done.verdict.reasons)


def test_an_attack_that_is_added_by_itself_is_run(tmp_path: Path) -> None:
    events_of(tmp_path, attacks=[doubles.Quotient()], defenses=None)
    grown, events = events_of(tmp_path, attacks=[doubles.Guess()], defenses=None)
    assert ("guess", 2, None) in begun(events), "what others found stops nothing of it"
    assert not any("missing" in reason.code for reason in grown.verdict.reasons), "stopped is not forgotten"
    assert [r.count for r in grown.verdict.reasons if r.code == "stopped"] == [2]


def test_no_scenario_passes_with_attempts_that_were_left_out(tmp_path: Path) -> None:
    done, _ = events_of(tmp_path, defenses=None)
    lenient = judge(done.rows, {"max_psnr": 300.0, "waive": doubles.STANDARD}, done.store.meta("plan"))
    assert lenient.outcome == "inconclusive"
    assert any(reason.code == "stopped" for reason in lenient.reasons)


@pytest.mark.parametrize("limit, attempts", [(0.5, 2), (0.7, 3)])
def test_shares_are_of_all_planned_examples(limit: float, attempts: int, tmp_path: Path) -> None:
    """After two attempts two of three labels are certain: two thirds, not all of those that were attacked."""
    policy = {"max_psnr": 300.0, "max_label_accuracy": limit}
    facts = {"attacks": [doubles.Quotient()], "defenses": None, "data": doubles.examples(6)}
    done, _ = events_of(tmp_path, **facts, policy=policy, knowledge="honest_server")
    assert done.verdict.outcome == "leaks"
    assert sum(row.counts for row in done.rows) == attempts
    (label,) = [reason for reason in done.verdict.reasons if reason.code == "labels"]
    assert label.limit == limit


@pytest.mark.parametrize(
    "changes, stops",
    [({}, True), ({"utility": {"rounds": 1}}, False), ({"seeds": 2}, False), ({"stop_on_leak": False}, False)],
)
def test_a_study_runs_all_of_its_scenarios(changes: dict[str, Any], stops: bool) -> None:
    assert AuditSpec.parse({"model": "logistic", "data": "tiles", **changes}).stops_on_leak == stops
    on = {**changes, "stop_on_leak": True}
    assert AuditSpec.parse({"model": "logistic", "data": "tiles", **on}).stops_on_leak


def test_findings_of_a_scenario_that_ended_are_not_missing(tmp_path: Path) -> None:
    done, _ = events_of(tmp_path, defenses=None, findings=True)
    assert done.findings == []
    assert not any("findings" in reason.code for reason in done.verdict.reasons)
    page = done.report().read_text()
    assert "not run because the policy was exceeded before" in page


@pytest.mark.slow
def test_a_worker_on_a_job_that_nobody_needs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers, one on an attack that sleeps for ten minutes when the other one finds the leak."""
    from leakscope.audit.executors import base

    monkeypatch.setattr(base, "START_SECONDS", 0.5)
    attacks = [doubles.Proved(), doubles.Trouble(how="sleep")]
    data = doubles.examples()
    done, _ = events_of(
        *(tmp_path,), attacks=attacks, defenses=None, examples=2, data=data, executor="processes", workers=2
    )
    assert done.verdict.outcome == "leaks"
    assert not [row for row in done.rows if row.status == "failed"]


def test_a_leak_among_many_rows_is_not_overlooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judging waits for more rows, and does not forget what it waits with."""
    from leakscope.audit import exceeded

    monkeypatch.setattr(exceeded, "GROWTH", 0.9)
    done, events = events_of(tmp_path, attacks=[Memory(), doubles.Proved()], defenses=None, controls=False)
    assert done.verdict.outcome == "leaks"
    assert any(event["event"] == "exceeded" for event in events)
    assert len(done.rows) < 6
