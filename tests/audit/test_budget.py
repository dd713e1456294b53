"""A time budget: what is begun, in which order, what the verdict says of the rest, and that another run goes on."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
from audit_doubles import run, timeless

from leakscope.audit import Audit, AuditSpec, SpecError
from leakscope.audit import run as run_module
from leakscope.audit.agenda import EXACT_PSNR, Budget, Spared, in_turn
from leakscope.audit.plan import Job, client_of, make_plan
from leakscope.audit.setup import Setup, build_setup
from leakscope.results.records import AttemptRecord
from leakscope.results.verdict import judge

pytestmark = pytest.mark.slow

#: Few enough jobs to run one of every length: two settings, two examples, a blind and a positive control.
SMALL: dict[str, Any] = {
    "attacks": [doubles.Quotient()],
    "examples": 2,
    "controls": ["noise", "prior-mean", "planted"],
    "findings": ["floor"],
}


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second passes with each look at the clock: a budget of n seconds is one of n jobs."""

    def make(seconds: float | None) -> Budget:
        return Budget(seconds, clock=functools.partial(next, itertools.count()))

    monkeypatch.setattr(run_module, "Budget", make)


def texts(done: Audit) -> list[str]:
    return [str(reason) for reason in done.verdict.reasons]


def setup(**changes: Any) -> Setup:
    base = {**doubles.BASE, "model": doubles.net(), "data": doubles.examples()}
    return build_setup(AuditSpec.parse({**base, **changes}))


def turns(built: Setup) -> list[Job]:
    return [job for group in in_turn(built, make_plan(built)) for job in group]


def test_every_job_has_its_turn_and_attempts_come_before_controls() -> None:
    built = setup(seeds=[5, 3], protocols=["fedsgd", {"fedavg": {"batch_size": 1}}])
    jobs = turns(built)
    assert {job.key for job in jobs} == {job.key for job in make_plan(built)}
    stages = [3 if j.finding else 0 if j.attack is None else 1 if j.control is None else 2 for j in jobs]
    assert stages == sorted(stages), "guesses, which take no time, attempts, controls, findings"
    assert set(stages) == {0, 1, 2, 3}


def test_the_jobs_of_a_group_are_on_one_client() -> None:
    built = setup(seeds=[5, 3], protocols=["fedsgd", {"fedavg": {"batch_size": 1}}])
    for group in in_turn(built, make_plan(built)):
        assert len({client_of(built, job) for job in group}) == 1


def test_every_setting_gets_its_first_example_before_any_gets_its_second() -> None:
    built = setup(seeds=[5, 3], protocols=["fedsgd", {"fedavg": {"batch_size": 1}}], controls=False)
    attempts = [job for job in turns(built) if job.finding is None]
    rounds = [([5, 3].index(job.seed), job.batch) for job in attempts]
    assert rounds == sorted(rounds)
    assert len({(job.protocol, job.defense) for job in attempts[:8]}) == 4, "two attacks on each"


def test_attacks_have_the_order_of_the_table_and_ones_own_are_last() -> None:
    table = ["gauss-newton", "inverting-gradients", "idlg"]
    built = setup(attacks=[doubles.Guess(), *reversed(table)], controls=False, findings=False)
    from leakscope.attacks import ATTACKS

    order = [built.spec.attacks[job.attack or 0].name for job in turns(built)]
    assert list(dict.fromkeys(order)) == [*sorted(table, key=list(ATTACKS).index), "guess"]


@pytest.mark.usefixtures("ticking")
def test_what_the_budget_leaves_is_said_and_the_same_command_goes_on(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", **SMALL)
    first = run(tmp_path / "parts", **SMALL, budget="5s")
    assert len(first.rows) + len(first.findings) == 5 + 1, "and the control that decides about the leak"
    assert "the budget of 5 s ended before" in str(first.verdict)
    assert "Run the same command without --budget, or again: what is done stays." in str(first.verdict)
    spent = [first]
    while len(spent[-1].rows) + len(spent[-1].findings) < len(whole.rows) + len(whole.findings):
        spent.append(run(tmp_path / "parts", **SMALL, budget=5))
    assert timeless(spent[-1].rows) == timeless(whole.rows), "a row is the same whatever the budget was"
    assert timeless(spent[-1].findings) == timeless(whole.findings)
    assert spent[-1].verdict.outcome == whole.verdict.outcome
    assert texts(spent[-1]) == texts(whole)
    assert spent[-1].store.meta("plan") == whole.store.meta("plan"), "nothing is left of the budget"


@pytest.mark.usefixtures("ticking")
def test_a_leak_that_was_seen_stays_one_however_long_the_budget(tmp_path: Path) -> None:
    known: set[tuple[str, str]] = set()
    outcomes = []
    policy = {"max_psnr": 25.0, "max_identification": 0.4, "max_label_accuracy": 0.4}
    for jobs in range(1, 14):
        done = run(tmp_path / str(jobs), **SMALL, policy=policy, budget=jobs)
        leaking = {(s.protocol, s.defense) for s in done.verdict.settings if s.outcome == "leaks"}
        assert known <= leaking
        known = leaking
        outcomes.append(done.verdict.outcome)
    assert outcomes[0] == "nothing audited"
    assert outcomes[-1] == "leaks"


@pytest.mark.usefixtures("ticking")
def test_no_setting_passes_because_of_a_budget(tmp_path: Path) -> None:
    lenient = {**SMALL, "defenses": None, "findings": True, "policy": {"max_psnr": 250.0, "waive": doubles.STANDARD}}
    whole = run(tmp_path / "whole", **lenient)
    assert whole.verdict.outcome == "within policy"
    jobs = len(whole.rows) + len(whole.findings)
    for budget in range(1, jobs):
        done = run(tmp_path / str(budget), **lenient, budget=budget)
        assert done.verdict.outcome != "within policy"
        assert all(setting.outcome != "within policy" for setting in done.verdict.settings)
    assert run(tmp_path / "enough", **lenient, budget=jobs).verdict.outcome == "within policy"
    assert "FedSGD(batchnorm='eval', dropout='eval', reduction='mean'), defence none: the budget" in texts(done)[0]
    assert "ended before 1 finding was made" in texts(done)[0]


@pytest.mark.usefixtures("ticking")
def test_attempts_are_counted_by_setting(tmp_path: Path) -> None:
    # two guesses come first, then the first example of both settings; the first one leaks, and its control says so
    done = run(tmp_path, **{**SMALL, "controls": ["noise", "prior-mean"]}, budget=4)
    told = texts(done)
    late = "the budget of 4 s ended before"
    assert sum(f"{late} 1 of 2 attempts were made" in text for text in told) == 2
    assert told[-1].startswith(f"{late} 3 of 8 jobs were run, controls included")
    assert not any("no attack gave a result" in text for text in told), "none was refused, none failed"


@pytest.mark.usefixtures("ticking")
def test_worker_processes_begin_no_more_and_end_what_is_under_way(tmp_path: Path) -> None:
    done = run(tmp_path, **SMALL, executor="processes", workers=2, budget=5)
    deciding = [row for row in done.rows if row.job.control == "noise"]
    assert 1 <= len(deciding) <= 2, "the control that decides about a leak, of each worker that found one in time"
    assert len(done.rows) + len(done.findings) == 5 + len(deciding)
    assert {row.status for row in done.rows} == {"done"}
    again = run(tmp_path, **SMALL)
    assert len(again.rows) + len(again.findings) == len(make_plan(setup(**SMALL)))
    assert "budget" not in str(again.verdict)


@pytest.mark.usefixtures("ticking")
def test_another_budget_makes_no_job_anew(tmp_path: Path) -> None:
    before = run(tmp_path, **SMALL, budget="1h30m")
    after = run(tmp_path, **SMALL, budget=2)
    assert [row.finished for row in before.rows] == [row.finished for row in after.rows]
    assert after.store.meta("spec")["budget"] == 2.0


@pytest.mark.parametrize("value", ["", "soon", "-5m", "10x", "1.2.3s", 0, -1, True, "1m1h", float("nan"), 10**9, [1]])
def test_what_is_no_time_is_told_in_one_line(value: Any) -> None:
    with pytest.raises(SpecError) as told:
        setup(budget=value)
    (problem,) = told.value.problems
    assert problem.startswith("budget: expected a time such as 90s, 10m or 1h30m, or seconds, up to 10,000,000 s, got ")


@pytest.mark.parametrize(
    "value, seconds", [("90s", 90), ("10m", 600), ("1h30m", 5400), ("45", 45), (1.5, 1.5), (None, None)]
)
def test_times_as_people_write_them(value: Any, seconds: float | None) -> None:
    assert setup(budget=value).spec.budget == seconds


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
    last = bare.reasons[-1]
    assert (last.code, last.count, last.remedy.kind) == ("spared", 2, "without-budget")
    assert not any(reason.code == "spared" for reason in noisy.reasons)
    assert not any("missing" in reason.code for reason in done.verdict.reasons)


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
    assert "spared" not in {reason.code for reason in first.verdict.reasons}
    grown = run(tmp_path, **GRID, budget="1h")
    assert made(grown, "guess") == [("GradientNoise", 0), ("GradientNoise", 1)]


def test_an_attack_without_anything_left_needs_no_controls(tmp_path: Path) -> None:
    done = run(tmp_path, **{**GRID, "defenses": ["none"]}, budget="1h")
    assert made(done, "guess") == made(done, "guess", "noise") == made(done, "guess", "planted") == []
    assert len(made(done, "quotient", "noise")) == len(made(done, "quotient", "planted")) == 2
    plan = done.store.meta("plan")
    assert plan["spared"] == {
        "attempts": [{"protocol": done.rows[0].job.protocol, "defense": "none", "jobs": 2, "findings": 0}],
        "controls": 4,
    }
    assert plan["total"] == len(done.rows) + 6
    assert [setting.missing for setting in done.verdict.settings] == [0]
    assert not any(reason.code == "jobs-missing" for reason in done.verdict.reasons)


def test_further_seeds_are_spared_too(tmp_path: Path) -> None:
    done = run(tmp_path, **{**GRID, "attacks": [doubles.Quotient()], "controls": False}, seeds=[4, 9], budget="1h")
    assert {(row.job.seed, row.job.defense) for row in done.rows if row.job.defense == "none"} == {(4, "none")}
    assert len(done.rows) == 2 + 4


def test_no_setting_passes_with_spared_attempts(tmp_path: Path) -> None:
    done = run(tmp_path, **{**GRID, "defenses": ["none"]}, budget="1h")
    lenient = judge(done.rows, {"max_psnr": 250.0}, done.store.meta("plan"))
    assert lenient.outcome == "inconclusive"
    assert any(reason.code == "spared" for reason in lenient.reasons)


def test_a_policy_that_tells_good_from_better_spares_nothing(tmp_path: Path) -> None:
    done = run(tmp_path, **GRID, policy={"max_psnr": 250.0}, budget="1h")
    assert len(made(done, "guess")) == 4
    assert "spared" not in done.store.meta("plan")


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
    built = setup(**GRID, batch=2)
    jobs = make_plan(built)
    first, *rest = [job for job in jobs if job.control is None and job.defense == 0]
    spared = Spared(built, jobs)
    spared.learn(first, AttemptRecord.read({"examples": [{"index": n, "psnr": p} for n, p in enumerate(psnrs)]}))
    assert [spared.spares(job) for job in rest] == [spares] * len(rest)
    assert not any(spared.spares(job) for job in jobs if job.control is None and job.defense == 1)


def test_controls_and_findings_recover_nothing() -> None:
    built = setup(**GRID, batch=2)
    jobs = make_plan(built)
    spared = Spared(built, jobs)
    exact = AttemptRecord.read({"examples": [{"index": 0, "psnr": 200.0}, {"index": 1, "psnr": 200.0}]})
    for job in jobs:
        if job.control is not None:
            spared.learn(job, exact)
    assert not any(spared.spares(job) for job in jobs)
