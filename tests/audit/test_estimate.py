"""How long it will take, from a few steps of each attack; clocks are wound by hand."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import audit_doubles as doubles
import pytest
import torch
from audit_doubles import run

from leakscope.audit import estimate as module
from leakscope.contracts.attack import Attack
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction

#: What the hand-wound clock shows, and the steps that were made.
CLOCK = SimpleNamespace(now=0.0, steps=0)


@dataclass(frozen=True, kw_only=True)
class Plodding(Attack):
    """Every step takes ``pace`` seconds, the first one as long again, and a silent one says nothing of its steps."""

    pace: float = 1.0
    iterations: int = 100
    silent: bool = False

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        CLOCK.now += self.pace
        for step in range(self.iterations):
            CLOCK.now += self.pace
            CLOCK.steps += 1
            if self.silent:
                time.sleep(0.01)
            elif progress is not None:
                progress(step + 1, self.iterations, 0.0)
        return doubles.Guess().run(observation, generator)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    CLOCK.now, CLOCK.steps = 0.0, 0
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: CLOCK.now))
    return CLOCK


def events_of(out: Path, **changes: Any) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    settings = {"defenses": None, "controls": ["noise"], "findings": False, "examples": 2, **changes}
    run(out, **settings, progress=events.append)
    return events


def estimated(events: list[dict[str, Any]]) -> dict[str, Any]:
    (event,) = [event for event in events if event["event"] == "estimated"]
    return event


def test_an_estimate_beyond_the_budget_says_so_in_one_line(clock: Any, tmp_path: Path) -> None:
    told = estimated(events_of(tmp_path / "short", attacks=[Plodding(pace=0.5)], budget="3m"))
    assert (told["seconds"], told["budget"]) == (pytest.approx(4 * 101 * 0.5), 180.0)
    assert told["advice"].startswith("That is longer than the budget of 3 m: what is not begun by then is left")
    told = estimated(events_of(tmp_path / "long", attacks=[Plodding(pace=0.5)], budget="4m"))
    assert told["advice"] is None


def test_steps_times_jobs(clock: Any, tmp_path: Path) -> None:
    events = events_of(tmp_path, attacks=[Plodding(pace=0.5), Plodding(pace=0.25, iterations=40)])
    told = estimated(events)
    # 2 examples, each with a control; the first step is twice as long
    assert told["by_attack"] == {"plodding": pytest.approx(4 * (101 * 0.5 + 41 * 0.25))}
    assert told["seconds"] == pytest.approx(sum(told["by_attack"].values()))
    assert told["jobs"] == 8
    assert told["advice"] is None
    kinds = [event["event"] for event in events]
    assert kinds[:3] == ["planned", "estimated", "started"]
    trials = clock.steps - 4 * (100 + 40)
    assert 0 < trials <= 2 * (module.STEPS + 1)


def test_a_long_audit_is_told_what_to_change(clock: Any, tmp_path: Path) -> None:
    told = estimated(events_of(tmp_path, attacks=[Plodding(pace=9.0, iterations=1000), doubles.Guess()]))
    # One step is enough, with all that came before it, so the guess is on the long side.
    assert told["seconds"] == pytest.approx(4 * 1000 * 18.0, rel=0.01)
    assert told["advice"].startswith("Most of it is plodding, 1000 steps of 18 s a job. To shorten it: fewer steps")
    for words in ("--attack plodding:iterations=", "--examples", "--workers"):
        assert words in told["advice"]
    assert "--no-findings" not in told["advice"]
    theory = estimated(events_of(tmp_path, attacks=[Plodding(pace=9.0, iterations=1000)], seeds=[1], findings=True))
    assert "--no-findings" in theory["advice"]


def test_an_attack_that_says_nothing_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.1)
    CLOCK.steps = 0
    threads = threading.active_count()
    told = estimated(events_of(tmp_path, attacks=[Plodding(silent=True, iterations=40)], controls=False, examples=1))
    assert told["by_attack"] == {"plodding": pytest.approx(0.1 * 40)}
    assert 40 < CLOCK.steps < 80
    assert threading.active_count() <= threads, "nobody watches the memory of a trial that is over"


def test_nobody_to_tell_and_nothing_left_are_no_reasons_to_try(clock: Any, tmp_path: Path) -> None:
    settings = {"attacks": [Plodding()], "defenses": None, "controls": False, "findings": False, "examples": 1}
    run(tmp_path, **settings)
    assert clock.steps == 100
    again = events_of(tmp_path, **settings)
    assert [event["event"] for event in again] == ["planned"]


def test_what_fails_is_no_part_of_it(tmp_path: Path) -> None:
    attacks = [doubles.Trouble(how="raise"), doubles.Trouble(how="refuse"), doubles.Guess()]
    told = estimated(events_of(tmp_path, attacks=attacks))
    assert list(told["by_attack"]) == ["guess"]


def test_in_workers_a_trial_that_ends_its_process_costs_nothing(tmp_path: Path) -> None:
    attacks = [doubles.Trouble(how="exit"), doubles.Guess(), doubles.Quotient()]
    settings = {"attacks": attacks, "controls": False, "examples": 1, "executor": "processes", "workers": 2}
    events = events_of(tmp_path, **settings)
    kinds = [event["event"] for event in events]
    assert kinds.index("estimated") < kinds.index("started")
    assert list(estimated(events)["by_attack"]) == ["guess", "quotient"]
    fates = [event["status"] for event in sorted(events, key=lambda e: e.get("position", -1)) if "status" in event]
    assert fates == ["failed", "done", "done"]
