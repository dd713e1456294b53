"""What ``leakscope plan`` tells: jobs as they are planned, hours by its model, and how sure it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
from typer.testing import CliRunner

from json_schema import violations
from leakscope.audit import AuditSpec
from leakscope.audit.plan import count_plan, make_plan
from leakscope.audit.setup import build_setup
from leakscope.audit.sizing import ROW_SECONDS, START_SECONDS, Cell, Sizing, disk_bytes, size_audit, wall_seconds
from leakscope.cli import app
from leakscope.results.export import schema


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
    assert sizing.confidence == "Of the core-hours 100% from whole jobs."


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
    assert hasty.confidence == "Nothing could be timed."


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
