"""Under a budget nothing is spent on what was recovered exactly; the verdict says so, and no setting passes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
from audit_doubles import run, timeless

from leakscope.audit import Audit
from leakscope.audit.plan import make_plan
from leakscope.audit.setup import Setup, build_setup
from leakscope.audit.spared import EXACT_PSNR, Spared
from leakscope.audit.spec import AuditSpec
from leakscope.results.records import AttemptRecord
from leakscope.results.verdict import judge

#: The closed form recovers every undefended example; the guess after it has nothing to add there. Noise stops both.
GRID: dict[str, Any] = {
    "attacks": [doubles.Quotient(), doubles.Guess()],
    "defenses": ["none", {"gradient-noise": {"sigma": 0.3}}],
    "examples": 2,
    "controls": ["noise", "prior-mean", "planted"],
    "findings": False,
}


def made(done: Audit, attack: str, control: str | None = None) -> list[tuple[str, int]]:
    rows = [row for row in done.rows if row.job.attack_name == attack and row.job.control == control]
    return sorted((row.job.defense.partition("(")[0], row.job.batch) for row in rows)


@pytest.mark.parametrize("executor", ["serial", "processes"])
def test_later_attacks_pass_over_what_was_recovered_exactly(executor: str, tmp_path: Path) -> None:
    done = run(tmp_path, **GRID, executor=executor, workers=1 if executor == "processes" else None, budget="1h")
    assert made(done, "quotient") == [("GradientNoise", 0), ("GradientNoise", 1), ("none", 0), ("none", 1)]
    assert made(done, "guess") == [("GradientNoise", 0), ("GradientNoise", 1)]
    assert made(done, "guess", "noise") == [("none", 0), ("none", 1)], "what is left has its controls"
    bare, noisy = done.verdict.settings
    assert bare.outcome == "leaks"
    assert bare.missing == noisy.missing == 0
    told = [str(reason) for reason in bare.reasons]
    assert told[-1] == (
        "2 attempts were not made, on examples that another attack had recovered exactly before. "
        "Run the same command without --budget to have them too."
    )
    assert not any("not made" in str(reason) for reason in noisy.reasons)
    every = [str(reason) for reason in done.verdict.reasons]
    assert not any("have not been run" in text or "ended before" in text for text in every)


def test_without_a_budget_everything_runs_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", **GRID)
    assert len(made(whole, "guess")) == 4
    run(tmp_path / "parts", **GRID, budget="1h")
    again = run(tmp_path / "parts", **GRID)
    assert timeless(again.rows) == timeless(whole.rows)
    assert str(again.verdict) == str(whole.verdict)
    assert again.store.meta("plan") == whole.store.meta("plan")


def test_another_run_knows_what_was_recovered_before(tmp_path: Path) -> None:
    first = run(tmp_path, **{**GRID, "attacks": [doubles.Quotient()]}, budget="1h")
    assert "not made" not in str(first.verdict.reasons)
    grown = run(tmp_path, **GRID, budget="1h")
    assert made(grown, "guess") == [("GradientNoise", 0), ("GradientNoise", 1)]


def test_an_attack_without_anything_left_needs_no_controls(tmp_path: Path) -> None:
    done = run(tmp_path, **{**GRID, "defenses": ["none"]}, budget="1h")
    assert made(done, "guess") == made(done, "guess", "noise") == made(done, "guess", "planted") == []
    assert len(made(done, "quotient", "noise")) == len(made(done, "quotient", "planted")) == 2
    plan = done.store.meta("plan")
    assert plan["spared"] == {
        "attempts": [{"protocol": done.rows[0].job.protocol, "defense": "none", "jobs": 2}],
        "controls": 4,
    }
    assert plan["total"] == len(done.rows) + 6
    assert [setting.missing for setting in done.verdict.settings] == [0]
    assert not any("have not been run" in str(reason) for reason in done.verdict.reasons)


def test_further_seeds_are_spared_too(tmp_path: Path) -> None:
    done = run(tmp_path, **{**GRID, "attacks": [doubles.Quotient()], "controls": False}, seeds=[4, 9], budget="1h")
    assert {(row.job.seed, row.job.defense) for row in done.rows if row.job.defense == "none"} == {(4, "none")}
    assert len(done.rows) == 2 + 4


def test_no_setting_passes_with_spared_attempts(tmp_path: Path) -> None:
    done = run(tmp_path, **{**GRID, "defenses": ["none"]}, budget="1h")
    lenient = judge(done.rows, {"max_psnr": 250.0}, done.store.meta("plan"))
    assert lenient.outcome == "inconclusive"
    assert any("not made" in str(reason) for reason in lenient.reasons)


def test_a_policy_that_tells_good_from_better_spares_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, **GRID, policy={"max_psnr": 250.0}, budget="1h")
    assert len(made(done, "guess")) == 4
    assert "spared" not in done.store.meta("plan")


def setup() -> Setup:
    return build_setup(AuditSpec.parse({**GRID, "model": doubles.net(), "data": doubles.examples(), "batch": 2}))


@pytest.mark.parametrize(
    "psnrs, spares",
    [
        ([EXACT_PSNR, 130.0], True),
        ([EXACT_PSNR - 0.1, 130.0], False),
        ([130.0, None], False),
        ([], False),
    ],
    ids=["all", "one is worse", "one is not known", "none"],
)
def test_every_example_of_a_client_must_be_recovered(psnrs: list[float | None], spares: bool) -> None:
    built = setup()
    jobs = make_plan(built)
    first, *rest = [job for job in jobs if job.control is None and job.defense == 0]
    spared = Spared(built, jobs)
    spared.learn(first, AttemptRecord.read({"examples": [{"index": n, "psnr": p} for n, p in enumerate(psnrs)]}))
    assert [spared.spares(job) for job in rest] == [spares] * len(rest)
    assert not any(spared.spares(job) for job in jobs if job.control is None and job.defense == 1)


def test_controls_and_findings_recover_nothing() -> None:
    built = setup()
    jobs = make_plan(built)
    spared = Spared(built, jobs)
    exact = AttemptRecord.read({"examples": [{"index": 0, "psnr": 200.0}, {"index": 1, "psnr": 200.0}]})
    for job in jobs:
        if job.control is not None:
            spared.learn(job, exact)
    assert not any(spared.spares(job) for job in jobs)
