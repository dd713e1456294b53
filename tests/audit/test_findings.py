"""Findings: planned once, run once, a row of their own; and that all jobs on a client share its update."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
import torch
from audit_doubles import run, timeless

from leakscope.audit import FINDINGS, AuditSpec, SpecError, attempts, findings
from leakscope.audit import assess as assess_room
from leakscope.audit.findings import Finding, Subject
from leakscope.audit.plan import make_plan
from leakscope.audit.setup import build_setup
from leakscope.contracts.protocol import Protocol
from leakscope.federation import FedAvg, FedSGD, Vertical
from leakscope.models import build_model
from leakscope.results import FindingRow, Store

AVG = FedAvg(epochs=2, batch_size=1, lr=0.5)
NOISE = {"gradient-noise": {"sigma": 0.3}}
ATTACKS = [doubles.Quotient(), doubles.Guess(), doubles.Guess(nan=True)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Subject]]:
    """Every finding that is computed, in order."""
    calls: list[tuple[str, Subject]] = []

    def counted(finding: Finding) -> Finding:
        def tell(subject: Subject) -> Any:
            calls.append((finding.name, subject))
            return finding.tell(subject)

        return Finding(finding.name, finding.summary, finding.per, tell)

    patched = {name: counted(finding) for name, finding in FINDINGS.items()}
    monkeypatch.setattr(attempts, "FINDINGS", patched)
    return calls


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every client's update that is made: its protocol, its defence, and a sum of the weights it was sent."""
    updates: list[tuple[Any, ...]] = []
    observe = Protocol.observe

    def counting(self: Protocol, model: Any, x: Any, y: Any, defense: Any = None, *rest: Any, **options: Any) -> Any:
        sent = sum(float(p.detach().abs().sum()) for p in model.parameters())
        updates.append((type(self).__name__, type(defense).__name__, sent))
        return observe(self, model, x, y, defense, *rest, **options)

    monkeypatch.setattr(Protocol, "observe", counting)
    return updates


def after_rehearsal(made: list[tuple[Any, ...]], events: list[dict[str, Any]] | None = None) -> Any:
    """A progress callback that forgets what was made before the first job: settings are rehearsed, attacks timed."""

    def tell(event: dict[str, Any]) -> None:
        if event["event"] in ("planned", "estimated"):
            made.clear()
        if events is not None:
            events.append(event)

    return tell


def kinds(findings: list[FindingRow]) -> list[tuple[str, str]]:
    return [(row.kind, "none" if row.defense == "none" else "noise") for row in findings]


def test_once_for_a_setting_whatever_attacks_seeds_and_batches(asked: list[Any], tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    done = run(tmp_path, attacks=ATTACKS, seeds=2, progress=after_rehearsal(asked, events))
    assert Counter(name for name, _ in asked) == {"floor": 2, "embedding": 2}
    both = [(kind, defense) for kind in ("floor", "embedding") for defense in ("none", "noise")]
    assert kinds(done.findings) == both
    assert all((row.status, row.batch, row.seed) == ("done", 0, 0) for row in done.findings)
    assert {row.protocol for row in done.findings} == {repr(FedSGD())}
    assert all(row.content["unknowns"] == 16 for row in done.findings if row.kind == "floor")
    last = max(row.position for row in done.rows)
    assert [row.position for row in done.findings] == [last + place for place in (1, 2, 3, 4)]
    assert not {row.key for row in done.rows} & {row.key for row in done.findings}
    told = [e for e in events if e["event"] in ("started", "finished") and e["job"]["finding"]]
    assert [e["event"] for e in told] == ["started", "finished"] * 4
    assert {(e["job"]["finding"], e["job"]["attack_name"], e["job"]["control"]) for e in told} == {
        ("floor", "floor", None),
        ("embedding", "embedding", None),
    }
    assert all(e["status"] == "done" and e["psnr"] is None for e in told if e["event"] == "finished")
    assert events[0]["total"] == len(done.rows) + 4 == events[-1]["completed"]
    attempts = [e for e in events if e["event"] == "finished" and not e["job"]["finding"]]
    assert len(attempts) == len(done.rows)
    json.dumps(events)


def test_one_trajectory_a_client_however_many_attacks(asked: list[Any]) -> None:
    done = run(protocol=AVG, attacks=ATTACKS, seeds=2, examples=4, batch=2)
    assert Counter(name for name, _ in asked) == {"floor": 2, "trajectory": 2 * 2 * 2, "embedding": 2}
    paths = [row for row in done.findings if row.kind == "trajectory"]
    assert len({(row.defense, row.seed, row.batch) for row in paths}) == len(paths) == 8
    assert {row.status for row in done.findings} == {"done"}


def test_rounds_and_cost_once_for_a_setting_of_vertical_learning(asked: list[Any]) -> None:
    x = torch.rand(12, 10, generator=torch.Generator().manual_seed(1))
    model = build_model("vertical-mlp", input_shape=(10,), num_classes=3, workers=2, hidden=6)
    settings: dict[str, Any] = {"model": model, "data": (x, torch.arange(12) % 3), "examples": 12, "batch": 6}
    protocol = Vertical(batch_size=3, rounds=6, lr=0.1)
    done = run(**settings, protocol=protocol, attacks=[doubles.Vandal()], seeds=2)
    assert Counter(name for name, _ in asked) == {"rounds": 2, "cost": 2}
    assert kinds(done.findings) == [("rounds", "none"), ("rounds", "noise"), ("cost", "none"), ("cost", "noise")]
    assert {row.status for row in done.findings} == {"done"}


def test_findings_can_be_switched_off_or_chosen(asked: list[Any], tmp_path: Path) -> None:
    both: dict[str, Any] = {"protocols": [FedSGD(), AVG], "attacks": [doubles.Guess()], "examples": 1}
    off = run(tmp_path / "off", **both, findings=False)
    assert (off.findings, asked) == ([], [])
    some = run(tmp_path / "some", **both, findings=["floor"])
    assert [row.kind for row in some.findings] == ["floor"] * 4
    every = run(tmp_path / "every", **both, findings=True)
    assert Counter(row.kind for row in every.findings) == {"floor": 4, "trajectory": 2, "embedding": 4}
    assert timeless(off.rows) == timeless(some.rows) == timeless(every.rows)
    with pytest.raises(SpecError, match=r"findings: expected one of floor, trajectory, rounds, cost, embedding, got"):
        run(**both, findings=["flor"])


def test_findings_may_be_asked_for_later(asked: list[Any], tmp_path: Path) -> None:
    without = run(tmp_path, findings=False)
    later = run(tmp_path)
    assert later.rows == without.rows
    assert [row.kind for row in later.findings] == ["floor"] * 2 + ["embedding"] * 2
    assert later.store.meta("plan")["findings"] == 4


def test_a_finding_that_raises_is_a_failed_row_and_costs_no_attempt(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(subject: Subject) -> Any:
        raise RuntimeError("singular")

    broken_floor = dataclasses.replace(FINDINGS["floor"], tell=broken)
    monkeypatch.setattr(attempts, "FINDINGS", {**FINDINGS, "floor": broken_floor})
    failed = run(tmp_path, defenses=None, findings=["floor"])
    assert {row.status for row in failed.rows} == {"done"}
    (row,) = failed.findings
    assert (row.status, row.reason, dict(row.content)) == ("failed", "RuntimeError: singular", {})
    assert "test_findings.py" in str(row.error), "where it happened"
    assert failed.verdict.outcome == "leaks"
    assert not any(reason.code == "job-failed" for reason in failed.verdict.reasons)
    monkeypatch.setattr(attempts, "FINDINGS", FINDINGS)
    events: list[dict[str, Any]] = []
    again = run(tmp_path, defenses=None, findings=["floor"], progress=events.append)
    assert [e["job"]["finding"] for e in events if e["event"] == "finished"] == ["floor"], "only what failed"
    assert [row.status for row in again.findings] == ["done"]
    assert again.rows == failed.rows


def test_resume_does_not_run_a_finding_again(asked: list[Any], tmp_path: Path) -> None:
    first = run(tmp_path, attacks=ATTACKS)
    asked.clear()
    again = run(tmp_path, attacks=ATTACKS)
    assert asked == []
    assert again.findings == first.findings
    with Store.open(tmp_path) as store:
        assert store.findings() == first.findings
        assert store.meta("plan")["findings"] == 4


def test_a_finding_sees_the_client_that_the_attempts_were_on(asked: list[Any]) -> None:
    run(protocol=AVG, examples=4, batch=2, seeds=[3])
    for _, subject in asked:
        again = subject.protocol.observe(
            doubles.net(), subject.x, subject.y, subject.defense, generator=subject.draws()
        )
        sent, repeated = subject.observation.message.update, again.message.update
        assert all(torch.equal(sent[name], repeated[name]) for name in sent)


def test_keys_of_findings_follow_what_they_depend_on_and_not_the_attacks() -> None:
    def keys(**changes: Any) -> list[str]:
        base = {"model": doubles.net(), "data": doubles.examples(), "attacks": [doubles.Guess()], "protocols": [AVG]}
        jobs = make_plan(build_setup(AuditSpec.parse({**base, **changes})))
        return [job.key for job in jobs if job.finding is not None]

    assert keys() == keys(attacks=ATTACKS) == keys(controls=False)
    for change in ({"model": doubles.net(seed=1)}, {"seeds": [1]}, {"protocols": [FedAvg(lr=0.25)]}):
        assert not set(keys()) & set(keys(**change))


def test_a_clients_update_is_made_once_for_all_jobs_on_it(made: list[Any]) -> None:
    done = run(attacks=ATTACKS, examples=2, controls="noise", progress=after_rehearsal(made))
    assert len(done.rows) == 3 * (2 + 1) * 2
    assert len(done.findings) == 4
    # Two clients, bare and with noise; the controls and findings share the bare and the noisy ones.
    assert Counter(defense for _, defense, _ in made) == {"NoneType": 2, "GradientNoise": 2}
    made.clear()
    run(attacks=ATTACKS, examples=2, seeds=3, defenses=[NOISE], controls="noise", progress=after_rehearsal(made))
    assert Counter(defense for _, defense, _ in made) == {"GradientNoise": 6, "NoneType": 6}


def test_an_attack_that_chooses_the_model_has_clients_of_its_own(made: list[Any]) -> None:
    attacks = [doubles.Guess(), doubles.Malicious(), doubles.Quotient()]
    run(attacks=attacks, examples=2, controls="noise", knowledge="malicious_server", progress=after_rehearsal(made))
    ordinary = sum(float(p.detach().abs().sum()) for p in doubles.net().parameters())
    zero = [defense for _, defense, sent in made if sent == 0]
    assert Counter(zero) == {"NoneType": 2, "GradientNoise": 2}
    assert Counter(d for _, d, sent in made if sent == pytest.approx(ordinary)) == {"NoneType": 2, "GradientNoise": 2}
    assert len(made) == 8
    made.clear()
    # An honest server sends the same model whatever the attack would like.
    run(attacks=attacks, examples=2, controls="noise", progress=after_rehearsal(made))
    assert len(made) == 4


def test_what_is_kept_of_a_client_is_what_was_sent(tmp_path: Path) -> None:
    """Attacks that share an update get the rows they would have alone."""
    together = run(tmp_path / "all", attacks=ATTACKS)
    for attack in ATTACKS:
        alone = run(tmp_path / str(hash(attack)), attacks=[attack])
        own, mine = ([row for row in rows if row.job.attack == repr(attack)] for rows in (alone.rows, together.rows))
        assert [(row.job, row.examples) for row in own] == [(row.job, row.examples) for row in mine]


def test_theory_that_fails_costs_a_note_and_neither_a_row_nor_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ArithmeticError("no convergence\nin 30 sweeps")

    plain_verdict = run(attacks=[doubles.Quotient()]).verdict
    monkeypatch.setattr(assess_room, "diagnose", broken)
    monkeypatch.setattr(findings, "cramer_rao", broken)
    audit = run(attacks=[doubles.Quotient()])
    assert {row.status for row in audit.rows} == {"done"}
    counted = [row.result.diagnosis for row in audit.rows if row.counts and row.result is not None]
    assert {(d.outcome, d.reason) for d in counted if d is not None} == {
        ("undecided", "the diagnosis failed with ArithmeticError: no convergence")
    }
    assert {(row.kind, row.status, row.reason) for row in audit.findings if row.kind == "floor"} == {
        ("floor", "failed", "ArithmeticError: no convergence")
    }
    assert audit.verdict.outcome == plain_verdict.outcome
    assert audit.verdict.settings[0].reasons == plain_verdict.settings[0].reasons
    assert "no convergence" in audit.report().read_text()
