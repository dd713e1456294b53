"""More in the same folder: only what is new runs, and the folder is that of one run of everything."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
from audit_doubles import run, timeless

from leakscope.audit import FINDINGS, Audit, attempts
from leakscope.audit.plan import Plan, make_plan
from leakscope.audit.setup import build_setup
from leakscope.audit.spec import AuditSpec
from leakscope.data import from_tensors
from leakscope.report.audited import audited_lines
from leakscope.results import Store, StoreError, StoreMismatch

NOISE = {"gradient-noise": {"sigma": 0.3}}
AVG = {"fedavg": {"batch_size": 1}}
SMALL: dict[str, Any] = {
    "protocols": ["fedsgd"],
    "attacks": [doubles.Quotient()],
    "defenses": ["none"],
    "seeds": [0],
    "examples": 2,
    "controls": ["noise"],
    "findings": False,
}
GROWTH: list[dict[str, Any]] = [
    {"seeds": [0, 1]},
    {"examples": 3},
    {"attacks": [doubles.Quotient(), doubles.Guess()]},
    {"defenses": ["none", NOISE]},
    {"protocols": ["fedsgd", AVG]},
    {"controls": True},
    {"findings": True},
]


def told(out: Path, **settings: Any) -> tuple[Audit, list[dict[str, Any]]]:
    events: list[dict[str, Any]] = []
    return run(out, **settings, progress=events.append), events


def finished(events: list[dict[str, Any]]) -> list[str]:
    return [event["key"] for event in events if event["event"] == "finished"]


@pytest.mark.slow
def test_a_folder_that_grew_is_that_of_one_run(tmp_path: Path) -> None:
    # Public data, for the keys of private data are salted in each folder.
    settings, ran = {**SMALL, "data": from_tensors(*doubles.examples(), private=False)}, []
    done = run(tmp_path / "grown", **settings)
    before = {row.key for row in done.rows}
    for change in GROWTH:
        settings |= change
        done, events = told(tmp_path / "grown", **settings)
        keys = {row.key for row in (*done.rows, *done.findings)}
        assert before < keys, change
        assert set(finished(events)) == keys - before, change
        assert next(e for e in events if e["event"] == "planned")["finished"] == len(before)
        before, ran = keys, [*ran, *finished(events)]
    assert len(ran) == len(set(ran))
    whole = run(tmp_path / "whole", **settings)
    assert timeless(done.rows) == timeless(whole.rows)
    assert timeless(done.findings) == timeless(whole.findings)
    every = [row.position for row in (*done.rows, *done.findings)]
    assert every == list(range(len(every)))
    for key in ("plan", "planned", "spec_hash", "identity", "spec", "audited"):
        assert done.store.meta(key) == whole.store.meta(key), key
    assert done.verdict.outcome == whole.verdict.outcome
    assert [str(reason) for reason in done.verdict.reasons] == [str(reason) for reason in whole.verdict.reasons]


def test_what_was_asked_for_before_stays_and_counts(tmp_path: Path) -> None:
    first = run(tmp_path, **SMALL)
    other, events = told(tmp_path, **{**SMALL, "attacks": [doubles.Guess()], "seeds": [1], "examples": 1})
    assert len(finished(events)) == 2, "one attempt and its control"
    assert {row.key for row in first.rows} < {row.key for row in other.rows}
    assert len(other.rows) == len(first.rows) + 2
    assert [row.position for row in other.rows] == list(range(len(other.rows)))
    assert other.store.meta("plan")["total"] == len(other.rows)
    assert not any(reason.code == "jobs-missing" for reason in other.verdict.reasons)
    assert other.verdict.outcome == "leaks", "by the attack of the first run"
    (setting,) = other.verdict.settings
    assert (setting.done, setting.missing) == (3, 0)
    spec = other.store.meta("spec")
    assert [part["name"] for part in spec["attacks"]] == ["quotient", "guess"]
    assert (spec["seeds"], spec["examples"]) == ([0, 1], 2)
    told_of = [
        line["text"] for line in audited_lines(other.store, other.rows, other.verdict) if "quotient" in line["text"]
    ]
    assert told_of == [
        "Attacks: 2 ran: quotient, guess; 2 seeds; 2 examples, 1 a client.",
        "From an earlier run in this folder, and counted: quotient (2 jobs).",
        "Not asked for this time: quotient. Choose another --out to leave them out.",
    ]
    page = other.report().read_text(encoding="utf-8")
    assert "quotient" in page
    assert "guess" in page


def test_asking_for_less_runs_nothing_and_loses_nothing(tmp_path: Path) -> None:
    settings = {**SMALL, **{key: value for change in GROWTH[:4] for key, value in change.items()}}
    first = run(tmp_path, **settings)
    again, events = told(tmp_path, **SMALL)
    assert finished(events) == []
    assert again.rows == first.rows
    assert again.store.meta("plan") == first.store.meta("plan")


def test_jobs_of_a_run_that_was_interrupted_are_still_missed(tmp_path: Path) -> None:
    attacks = [doubles.Quotient(), doubles.Trouble(how="interrupt")]
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **{**SMALL, "attacks": attacks, "controls": False})
    assert len(Audit(tmp_path).rows) == 1
    done = run(tmp_path, **{**SMALL, "attacks": [doubles.Guess()], "controls": False})
    assert len(done.rows) == 3
    (setting,) = done.verdict.settings
    assert setting.missing == 3
    assert any((reason.code, reason.count, reason.total) == ("jobs-missing", 3, 6) for reason in done.verdict.reasons)
    whole = run(tmp_path, **{**SMALL, "controls": False})
    assert whole.verdict.settings[0].missing == 2, "only those of the attack that nobody asks for any more"


def test_one_finding_a_setting_whichever_client_stands_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tmp_path, **{**SMALL, "findings": ["floor"]})
    second, events = told(tmp_path, **{**SMALL, "findings": ["floor"], "seeds": [7]})
    assert second.findings[0].key == first.findings[0].key
    assert len(second.findings) == 1
    assert len(finished(events)) == 4
    assert events[-1]["completed"] == events[-1]["total"] == 4, "what is not run is not waited for"

    def broken(_: Any) -> Any:
        raise RuntimeError("singular")

    with monkeypatch.context() as patch:
        patch.setattr(attempts, "FINDINGS", {**FINDINGS, "floor": dataclasses.replace(FINDINGS["floor"], tell=broken)})
        failed = run(tmp_path / "failed", **{**SMALL, "findings": ["floor"]})
    assert [row.status for row in failed.findings] == ["failed"]
    done = run(tmp_path / "failed", **{**SMALL, "findings": ["floor"], "seeds": [7]})
    assert [(row.status, row.seed) for row in done.findings] == [("done", 7)]
    assert done.store.meta("plan")["findings"] == 1


@pytest.mark.parametrize("harm", ["jobs", "axes", "numbers", "all"])
def test_a_damaged_plan_is_one_clear_error(harm: str, tmp_path: Path) -> None:
    run(tmp_path, **SMALL)
    with Store.open(tmp_path, write=True) as store:
        planned = store.meta("planned")
        if harm == "numbers":
            planned["jobs"][0][2] = 99
        else:
            planned[harm] = [[1]]
        store.set_meta("planned", {} if harm == "all" else planned)
    with pytest.raises(StoreError, match="list of planned jobs is damaged"):
        run(tmp_path, **SMALL)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"model": doubles.net(seed=3)}, "model.fingerprint: the store has "),
        ({"batch": 2}, "batch: the store has 1, now 2"),
        ({"knowledge": "full"}, "knowledge.defense: the store has "),
        ({"dtype": "float64"}, "dtype: the store has None, now 'float64'"),
        ({"threads": 2, "pictures": True}, "threads: the store has 1, now 2"),
    ],
    ids=str,
)
def test_what_cannot_grow_is_named(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    first = run(tmp_path, **SMALL)
    with pytest.raises(StoreMismatch) as caught:
        run(tmp_path, **{**SMALL, "seeds": [0, 1], **change})
    assert words in str(caught.value)
    assert "seeds" not in str(caught.value)
    assert Audit(tmp_path).rows == first.rows
    assert Audit(tmp_path).store.meta("plan") == first.store.meta("plan")


def test_a_plan_is_in_the_order_in_which_it_would_be_merged() -> None:
    settings = {**doubles.BASE, "protocols": [AVG, "fedsgd"], "seeds": [3, 1], "model": doubles.net()}
    setup = build_setup(AuditSpec.parse({**settings, "data": doubles.examples()}))
    plan = Plan.of(setup, make_plan(setup))
    assert plan.grown(plan, {}) == plan
