"""How long it will take, from a few steps of each attack, as an audit announces it and ``leakscope plan`` tells it."""

from __future__ import annotations

import json
import sys
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
from typer.testing import CliRunner

from json_schema import violations
from leakscope.audit import AuditSpec
from leakscope.audit import estimate as module
from leakscope.audit.estimate import Cell, Sizing, disk_bytes, size_audit
from leakscope.audit.forecast import ROW_SECONDS, START_SECONDS, wall_seconds
from leakscope.audit.plan import count_plan, make_plan
from leakscope.audit.setup import build_setup
from leakscope.cli import app
from leakscope.contracts.attack import Attack
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.report.export import schema

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
    monkeypatch.setattr(
        module,
        "time",
        SimpleNamespace(**dict.fromkeys(("perf_counter", "process_time", "monotonic"), lambda: CLOCK.now)),
    )
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
    assert kinds[:7] == ["planned", *["timing"] * 4, "estimated", "started"], "two attacks, on updates and on noise"
    trials = clock.steps - 4 * (100 + 40)
    assert 0 < trials <= 4 * (module.STEPS + 1)


def test_a_long_audit_is_told_what_to_change(clock: Any, tmp_path: Path) -> None:
    told = estimated(events_of(tmp_path, attacks=[Plodding(pace=9.0, iterations=1000), doubles.Guess()]))
    assert told["seconds"] == pytest.approx(4 * 1001 * 9.0, rel=0.01)
    assert told["advice"].startswith("Most of it is plodding, 1000 steps of 9 s a job. To shorten it: fewer steps")
    for words in ("--attack plodding:iterations=", "--examples", "--workers"):
        assert words in told["advice"]
    assert "--no-findings" not in told["advice"]
    theory = estimated(events_of(tmp_path, attacks=[Plodding(pace=9.0, iterations=1000)], seeds=[1], findings=True))
    assert "--no-findings" in theory["advice"]


def test_an_attack_that_says_nothing_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AUDIT_PATIENCE", 0.1)
    CLOCK.steps = 0
    threads = threading.active_count()
    told = estimated(events_of(tmp_path, attacks=[Plodding(silent=True, iterations=40)], controls=False, examples=1))
    assert 0.1 <= told["by_attack"]["plodding"] < 0.4, "the time it took, and not once more for each of its steps"
    assert told["at_least"]
    assert 40 < CLOCK.steps < 80
    assert threading.active_count() <= threads, "nobody watches the memory of a trial that is over"


@dataclass(frozen=True, kw_only=True)
class Importing(Attack):
    """Loads a library when it is run, which takes longer than a trial may, and then goes on in silence."""

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        import slow_library  # type: ignore[import-not-found]

        time.sleep(0.3)
        CLOCK.now = slow_library.WHOLE
        return doubles.Guess().run(observation, generator)


def test_a_trial_is_not_stopped_in_the_middle_of_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_library.py").write_text("import time\nfor _ in range(30):\n    time.sleep(0.01)\nWHOLE = 7.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "AUDIT_PATIENCE", 0.1)
    setup = build_setup(spec(attacks=[Importing()], controls=False, findings=False, examples=1))
    trial = module.try_out(setup, make_plan(setup)[0])
    assert trial is not None
    assert (trial.at_least, trial.seconds >= 0.3) == (True, True)
    assert sys.modules["slow_library"].WHOLE == 7.0, "half a library would fail every job after the trial"


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


@pytest.mark.slow
def test_in_workers_a_trial_that_ends_its_process_costs_nothing(tmp_path: Path) -> None:
    attacks = [doubles.Trouble(how="exit"), doubles.Guess(), doubles.Quotient()]
    settings = {"attacks": attacks, "controls": False, "examples": 1, "executor": "processes", "workers": 2}
    events = events_of(tmp_path, **settings)
    kinds = [event["event"] for event in events]
    assert kinds.index("estimated") < kinds.index("started")
    assert list(estimated(events)["by_attack"]) == ["guess", "quotient"]
    fates = [event["status"] for event in sorted(events, key=lambda e: e.get("position", -1)) if "status" in event]
    assert fates == ["failed", "done", "done"]


def spec(**changes: Any) -> AuditSpec:
    x, y = doubles.examples(3)
    return AuditSpec.parse({**doubles.BASE, "model": doubles.net(), "data": (x, y), **changes})


def test_the_jobs_are_those_of_the_plan() -> None:
    asked = spec(seeds=2)
    setup = build_setup(asked)
    jobs = make_plan(setup)
    counted = list(count_plan(setup))
    assert [(j.protocol, j.defense, j.attack, j.control, j.finding, j.seed, j.batch) for j in counted] == [
        (j.protocol, j.defense, j.attack, j.control, j.finding, j.seed, j.batch) for j in jobs
    ]
    sizing = size_audit(asked, seconds=20)
    assert sizing.jobs == len(jobs)
    attempts = [cell for cell in sizing.cells if cell.kind == "attempt"]
    assert {(cell.setting, cell.attack): cell.jobs for cell in attempts} == {
        ("fedsgd, none", "quotient"): 6,
        ("fedsgd, none", "guess"): 6,
        ("fedsgd, gradient-noise", "quotient"): 6,
        ("fedsgd, gradient-noise", "guess"): 6,
    }
    assert all(cell.seconds is not None and cell.timed == "whole" for cell in attempts)


@pytest.mark.slow
def test_ten_thousand_clients_make_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0
    observe = AuditSpec.parse({"model": "logistic", "data": "tiles"}).protocols[0].instance.__class__.observe

    def counting(self: Any, *args: Any, **rest: Any) -> Any:
        nonlocal made
        made += 1
        return observe(self, *args, **rest)

    asked = spec(findings=False)
    monkeypatch.setattr(type(asked.protocols[0].instance), "observe", counting)
    sizing = size_audit(asked, clients=10_000, seconds=20, workers=100)
    assert made < 100
    assert sizing.clients == 10_000
    attempts = sum(cell.jobs for cell in sizing.cells if cell.kind == "attempt")
    assert attempts == 2 * 2 * 10_000
    assert any("LEAKSCOPE_MAX_JOBS" in note for note in size_audit(asked, clients=50_000, seconds=0.1).notes)


def test_what_was_not_timed_is_taken_over_or_said() -> None:
    attacks = [doubles.Quotient(), doubles.Trouble(how="refuse")]
    sizing = size_audit(spec(attacks=attacks, findings=False, controls=False), seconds=20)
    refused = [cell for cell in sizing.cells if cell.attack == "trouble"]
    assert [(cell.seconds, cell.timed, cell.core_hours) for cell in refused] == [(None, "not timed", 0.0)] * 2
    assert any(note.startswith("6 jobs could not be timed") for note in sizing.notes)
    hasty = size_audit(spec(findings=False, controls=False), seconds=1e-9)
    assert {cell.timed for cell in hasty.cells} == {"not timed"}


def test_hours_of_a_cluster() -> None:
    cell = Cell("fedsgd, none", "FedSGD()", "none", "dlg", "attempt", 36_000, 2.0, "steps")
    sizing = Sizing((cell,), clients=36_000, threads=2, memory_mb=500, disk_mb=10)
    assert sizing.core_hours == pytest.approx(40.0)  # two threads a job
    assert sizing.hours(1) == pytest.approx(20.0 + START_SECONDS / 3600)
    assert sizing.hours(10) == pytest.approx(2.0 + START_SECONDS / 3600)
    assert sizing.hours(10**6) == pytest.approx((36_000 * ROW_SECONDS + START_SECONDS) / 3600)
    assert wall_seconds(10.0, jobs=2, workers=2, longest=9.0) == 9.0 + START_SECONDS


def test_disk_beside_a_real_folder(tmp_path: Path) -> None:
    done = doubles.run(tmp_path, findings=False, pictures=True, data=doubles.examples(12), examples=12)
    setup = build_setup(spec(data=doubles.examples(12), examples=12, pictures=True))
    real = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    assert 0.5 < disk_bytes(setup, len(done.rows), 0) / real < 3


def test_the_command_and_its_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "model: logistic\ndata: tiles\nexamples: 2\nattacks: [linear-layer]\nfindings: false\n"
    text += "training: {rounds: 3, clients: 4}\nexecutor: {ray: {address: '10.0.0.1:6379'}}\n"
    Path("spec.yaml").write_text(text)
    done = CliRunner().invoke(app, ["plan", "spec.yaml", "--workers", "4", "--clients", "500", "--json"])
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert violations(told, schema("plan")) == []
    assert told["jobs"] == sum(cell["jobs"] for cell in told["cells"])
    assert told["hours"] > 0
    assert "100% from whole jobs" in told["confidence"]
    assert "The training before the audit is not counted" in told["notes"][0]
    said = CliRunner().invoke(app, ["plan", "spec.yaml", "--workers", "4"]).output
    for words in ("fedsgd, none", "Jobs: ", "Core-hours: ", "Memory of a worker: at least", "With 4 workers: about"):
        assert words in said
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]  # nothing is written


def test_a_wrong_spec_is_told(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("model: logistic\n")
    done = CliRunner().invoke(app, ["plan", str(tmp_path / "spec.yaml")])
    assert "data: expected a value, got nothing" in str(done.exception)
    assert CliRunner().invoke(app, ["plan", "--workers", "0"]).exit_code != 0
