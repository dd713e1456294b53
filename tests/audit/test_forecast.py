"""One forecast: what plan says, what an audit announces and what its bar shows agree, and agree with what it takes."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import audit_doubles as doubles
import pytest
import torch
from audit_doubles import run

from leakscope.audit import AuditSpec, attempts
from leakscope.audit import estimate as estimate_module
from leakscope.audit.estimate import size_audit
from leakscope.audit.forecast import OVERDUE, START_SECONDS, Forecast
from leakscope.audit.progress import Tally
from leakscope.contracts.attack import Attack
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction

#: What the hand-wound clock shows.
CLOCK = SimpleNamespace(now=0.0)


@dataclass(frozen=True, kw_only=True)
class Timed(Attack):
    """Takes ``before`` seconds, then ``pace`` for each step and ``after``; tells its steps unless it is ``silent``."""

    before: float = 0.0
    pace: float = 0.0
    after: float = 0.0
    iterations: int = 1
    silent: bool = False
    refuses: bool = False

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        CLOCK.now += self.before
        if self.refuses:
            raise NotApplicable("not this one")
        for step in range(self.iterations):
            CLOCK.now += self.pace
            if progress is not None and not self.silent:
                progress(step + 1, self.iterations, 0.0)
        CLOCK.now += self.after
        return doubles.Guess().run(observation, generator)


#: What attacks are like on five kinds of models.
MODELS: dict[str, list[Attack]] = {
    "closed form and a search": [Timed(after=0.2), Timed(pace=0.1, iterations=300)],
    "slow steps": [Timed(refuses=True), Timed(before=1.0, pace=9.0, iterations=30)],
    "silent": [Timed(before=0.5), Timed(before=3.0, pace=0.1, iterations=20, silent=True)],
    "a solve before the search": [Timed(before=6.0, pace=0.5, iterations=100, after=2.0), Timed(before=0.1)],
    "many quick and one slow": [*(Timed(before=0.1 + n / 100) for n in range(6)), Timed(pace=2.0, iterations=60)],
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    CLOCK.now = 0.0
    hands = dict.fromkeys(("perf_counter", "process_time", "monotonic"), lambda: CLOCK.now)
    for module in (estimate_module, attempts):
        monkeypatch.setattr(module, "time", SimpleNamespace(**hands))
    return CLOCK


@pytest.mark.parametrize("attacks", MODELS.values(), ids=MODELS)
def test_plan_audit_and_bar_agree_within_a_factor_of_two(attacks: list[Attack], clock: Any) -> None:
    settings: dict[str, Any] = {
        **{"attacks": attacks, "defenses": None, "controls": ["noise"], "findings": False, "examples": 3},
        "stop_on_leak": False,
    }
    spec = AuditSpec.parse({"model": doubles.net(), "data": doubles.examples(), **settings, "defenses": "none"})
    planned = size_audit(spec).hours(1) * 3600 - START_SECONDS
    tally, seen = Tally(lambda: CLOCK.now), []
    begun = 0.0

    def watch(event: dict[str, Any]) -> None:
        nonlocal begun
        tally.take(event)
        if event["event"] == "estimated":
            begun = CLOCK.now
            seen.append((CLOCK.now, event["seconds"]))
        elif event["event"] == "finished" and tally.remaining is not None:
            seen.append((CLOCK.now, tally.remaining))

    run(**settings, progress=watch)
    took = CLOCK.now - begun
    assert 0.5 < planned / took < 2
    assert 0.5 < planned / seen[0][1] < 2
    for now, told in seen:
        if (left := begun + took - now) > 0.05 * took:
            assert 0.5 < told / left < 2, f"at {now - begun:.0f} of {took:.0f} s"


def test_what_follows_the_steps_is_counted(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of a search say nothing of a diagnosis that takes longer than the search."""
    room = importlib.import_module("leakscope.audit.assess")
    whole = room.diagnose

    def slow(*arguments: Any, **options: Any) -> Any:
        CLOCK.now += 10.0
        return whole(*arguments, **options)

    monkeypatch.setattr(room, "diagnose", slow)
    told: dict[str, float] = {}

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "estimated":
            told.update(seconds=event["seconds"], begun=CLOCK.now)

    run(attacks=[Timed(pace=0.1, iterations=50)], defenses=None, findings=False, controls=["noise"], progress=watch)
    assert told["seconds"] == pytest.approx(CLOCK.now - told["begun"], rel=0.05)


def job(attack: str = "DLG()", **changes: Any) -> dict[str, Any]:
    facts = {"protocol": "FedSGD()", "defense": "none", "attack": attack, "attack_name": attack.lower()}
    return {**facts, "control": None, "finding": None, **changes}


def forecast(*kinds: dict[str, Any], workers: int = 1) -> Forecast:
    CLOCK.now = 0.0
    return Forecast(kinds, workers, clock=lambda: CLOCK.now)


def test_a_job_that_is_overdue_is_not_about_to_end() -> None:
    made = forecast({**job(), "jobs": 1, "seconds": 10.0})
    made.started("a", job())
    CLOCK.now = 9.0
    assert made.remaining() == pytest.approx(max(1.0, OVERDUE * 9.0))
    CLOCK.now = 120.0
    assert made.remaining() == pytest.approx(OVERDUE * 120.0), "not five seconds for two minutes"


def test_a_kind_that_nobody_timed_makes_the_estimate_a_lower_bound() -> None:
    made = forecast({**job(), "jobs": 2, "seconds": 10.0}, {**job("Slow()"), "jobs": 2, "seconds": None})
    assert (made.remaining(), made.at_least) == (20.0, True)
    made.started("a", job("Slow()"))
    CLOCK.now = 5.0
    made.advanced("a", job("Slow()"), 1, 10)
    assert made.at_least is False, "its steps tell of the others, too"
    assert made.remaining() == pytest.approx(20.0 + 45.0 + 50.0)
    assert forecast({**job(), "jobs": 2, "seconds": None}).remaining() is None


def test_what_refuses_here_may_work_elsewhere() -> None:
    refused, works = job(defense="A()"), job(defense="B()")
    untimed = {**job(defense="C()"), "jobs": 1, "seconds": None}
    made = forecast({**refused, "jobs": 1, "seconds": 0.0}, {**works, "jobs": 1, "seconds": 7.0}, untimed)
    assert made.remaining() == pytest.approx(14.0)


def test_workers_share_what_can_be_shared() -> None:
    made = forecast({**job(), "jobs": 3, "seconds": 10.0}, workers=2)
    assert made.remaining() == pytest.approx(15.0)
    made.leave_out([{**job(), "jobs": 2}])
    assert made.remaining() == pytest.approx(10.0), "one job is not done in halves"
