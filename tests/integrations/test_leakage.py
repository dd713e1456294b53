"""Certified examples are counted in what travels, without the truth and without a label."""

from __future__ import annotations

import dataclasses
import inspect
import io
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from leakscope.attacks import HeadFirst
from leakscope.audit import progress as progress_module
from leakscope.audit.assess import Assessment
from leakscope.audit.progress import Tally, Updates
from leakscope.capture import from_arrays
from leakscope.capture.observe import DROPOUT
from leakscope.capture.recordings import Origin, save_recording
from leakscope.cli import app
from leakscope.contracts.attack import Attack
from leakscope.contracts.certificate import Certificate
from leakscope.contracts.errors import MissingKnowledge, NotApplicable, Refusal, UserError
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.federation import FedSGD
from leakscope.integrations import leakage
from leakscope.integrations.flower_mod import worst_of_clients
from leakscope.integrations.flower_strategy import summary_of
from leakscope.integrations.leakage import QUICK, RecordedAudit, audit_recordings, measure, unassessed
from leakscope.integrations.opacus import DPReport, StepAudit
from leakscope.models import build_model

SHAPE = (1, 4, 4)


@dataclass(frozen=True, kw_only=True)
class Prover(Attack):
    """Grey inputs with certificates; ``free`` of each example, fewer than 0: none."""

    free: tuple[int, ...] = (0, 0)

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        count = len(self.free)
        proofs = tuple(
            None if free < 0 else Certificate(residual=0.4, tolerance=1.0, free_directions=free, method="quotient")
            for free in self.free
        )
        labels = torch.zeros(count, dtype=torch.long)
        return Reconstruction(torch.full((count, *SHAPE), 0.5), labels, torch.zeros(count), certificates=proofs)


def found(*free: int, place: Any = "server") -> Assessment:
    x, y = torch.rand(len(free), *SHAPE), torch.zeros(len(free), dtype=torch.long)
    seen = FedSGD().observe(build_model("logistic", input_shape=SHAPE, num_classes=3), x, y)
    origin = Origin(place=place, client="1", number=1, run="1", library="none")
    return measure(seen, origin, Prover(free=free), controls=False)


@pytest.mark.parametrize("free, certified", [((0, 0), 2), ((0, 7), 1), ((0, -1), 1), ((-1, -1), 0)])
def test_certified_examples_are_counted(free: tuple[int, ...], certified: int) -> None:
    one = found(*free)
    assert one.certified == certified
    assert one.metrics()["leakscope.server.certified"] == certified
    assert found(*free, place="raw").metrics()["leakscope.raw.certified"] == certified
    assert (f"{certified} of 2 examples: recovered, certified" in one.describe()) == (certified > 0)
    assert ("7 directions" in one.describe()) == (7 in free)


def test_what_was_not_attacked_is_not_certified() -> None:
    whole = found(0)
    assert whole.origin is not None
    one = unassessed(whole.observation, whole.origin, whole.attack, "not its turn")
    assert one.certified == 0
    assert math.isnan(one.metrics()["leakscope.server.certified"])
    assert summary_of([one, found(0)])["leakscope.server.certified"] == 1


def test_a_round_counts_them_over_its_clients() -> None:
    clients = [found(0, 0), found(0, 7), found(-1, -1)]
    told = summary_of(clients)
    assert (told["leakscope.server.audited"], told["leakscope.server.certified"]) == (3, 3)
    assert summary_of([])["leakscope.server.certified"] == 0
    records = [SimpleNamespace(metric_records={"m": found(*free, place="raw").metrics()}) for free in ((0, 0), (0, 7))]
    assert worst_of_clients(records)["leakscope.raw.certified.worst_client"] == 2


@dataclass(frozen=True, kw_only=True)
class Stepping(Prover):
    """Tells of ten steps, and takes ``pause`` seconds for each."""

    pause: float = 0.0

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        for number in range(10):
            time.sleep(self.pause)
            if progress is not None:
                progress(number + 1, 10, 0.5)
        return super().run(observation, generator)


def recordings(count: int) -> list[Any]:
    one = found(0)
    facts = {"observation": lambda model: one.observation, "truth": lambda: None, "origin": one.origin}
    return [SimpleNamespace(**facts) for _ in range(count)]


@pytest.mark.parametrize("controls, passes", [(False, 1), (True, 2)])
def test_progress_tells_each_update_and_how_long_the_others_take(controls: bool, passes: int) -> None:
    tally, left, events = Tally(), [], []

    def watch(event: dict[str, Any]) -> None:
        tally.take(event)
        events.append(event)
        left.append(tally.remaining)

    attack = Stepping(free=(0,), pause=0.005)
    audit_recordings(recordings(3), model=torch.nn.Identity(), attack=attack, controls=controls, progress=watch)
    kinds = [event["event"] for event in events]
    assert kinds[0] == "planned"
    assert [kind for kind in kinds if kind != "advanced"][1:] == ["started", "finished"] * 3
    steps = [(event["done"], event["total"]) for event in events if event["event"] == "advanced"]
    assert steps == [(n + 1, 10 * passes) for n in range(10 * passes)] * 3
    first = kinds.index("advanced")
    assert left[first] is not None, "the first step tells how long all of them take"
    assert left[first] > (left[-2] or 0.0)
    assert left[-1] is None


def test_a_log_is_not_silent_while_recordings_are_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress_module, "PAUSE", 0.05)
    attack = Stepping(free=(0,), pause=0.02)
    audit_recordings(recordings(2), model=torch.nn.Identity(), attack=attack, controls=False)
    assert "[1/2] 1 done; now stepping, step " in stream.getvalue()
    assert "work left: about " in stream.getvalue()
    monkeypatch.setattr(sys, "stderr", quiet := io.StringIO())
    audit_recordings(recordings(1), model=torch.nn.Identity(), attack=attack, controls=False, progress=False)
    assert quiet.getvalue() == ""


def test_the_search_of_recordings_is_short_unless_told() -> None:
    told = inspect.signature(audit_recordings).parameters["attack"].default
    assert told == inspect.signature(StepAudit.report).parameters["attack"].default == QUICK
    assert QUICK.iterations < HeadFirst().iterations


def test_steps_of_dp_sgd_count_them() -> None:
    facts: dict[str, Any] = {"steps": 2, "epsilon": 1.0, "delta": 1e-5, "noise_multiplier": 1.0, "clip": 1.0}
    report = DPReport(leakage=(found(0, 0), found(0, 7)), problems=(), skipped={}, **facts)
    assert report.certified == 3
    assert "3 examples certified" in report.describe()
    assert report.describe().startswith("Verdict: LEAKS")


@pytest.mark.parametrize(
    ("frees", "outcome"), [([(0, 0), (-1, -1)], "leaks"), ([(-1, -1)], "inconclusive"), ([], "nothing audited")]
)
def test_recorded_updates_end_in_a_verdict_and_a_page(frees, outcome: str, tmp_path: Path) -> None:
    whole = found(0)
    assert whole.origin is not None
    refused = unassessed(whole.observation, whole.origin, whole.attack, "not its <turn>")
    audit = RecordedAudit([*(found(*free) for free in frees), refused])
    assert audit.outcome == outcome, "never within policy: nothing shows that the attack is strong enough"
    assert audit.describe().startswith(f"Verdict: {outcome.upper()}\n")
    page = audit.report(tmp_path / "page.html").read_text()
    assert f'<h1 id="verdict">{outcome.capitalize()}</h1>' in page
    assert "not its &lt;turn&gt;" in page
    assert "<img" not in page, "what was recovered is private"
    if frees:
        assert "<img" in audit.report(tmp_path / "page.html", pictures=True).read_text()


def test_the_page_says_how_an_update_was_read(tmp_path: Path) -> None:
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.5), torch.nn.Linear(16, 3))
    update = FedSGD().observe(net, torch.rand(1, *SHAPE), torch.tensor([1])).message.update
    facts: dict[str, Any] = {"input_shape": SHAPE, "num_classes": 3, "num_examples": 1}
    seen = from_arrays(dict(update), model=net, kind="gradient", **facts)
    one = measure(seen, Origin(place="server", client="1", number=1), Prover(free=(0,)), controls=False)
    assert DROPOUT in RecordedAudit([one]).report(tmp_path / "page.html").read_text()


def test_a_folder_of_recordings_is_reported_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = build_model("logistic", input_shape=SHAPE, num_classes=3)
    for number in (1, 2):
        seen = FedSGD().observe(net, torch.rand(1, *SHAPE), torch.tensor([number]))
        save_recording(tmp_path / "rounds", seen, Origin(place="server", client="7", number=number))
    told = capsys.readouterr().err
    assert told.count("leakscope records updates in") == 1
    assert "rounds" in told
    command = ["report", str(tmp_path / "rounds"), "--attack", "linear-layer"]
    done = CliRunner().invoke(app, [*command, "--model", "logistic", "--at-most", "1"])
    assert done.exit_code == 0, done.stderr
    assert "Verdict: LEAKS" in done.stdout
    assert "1 of 1 update " in done.stdout
    assert "Leaks</h1>" in (tmp_path / "rounds" / "report.html").read_text()
    planned: list[int] = []

    def plan(tell: Any, name: str, count: int, **more: Any) -> Updates:
        planned.append(count)
        return Updates(tell, name, count, **more)

    monkeypatch.setattr(leakage, "Updates", plan)
    CliRunner().invoke(app, [*command, "--model", "logistic"])
    assert planned == [2], "one count, and one estimate, of all updates"
    missing = CliRunner().invoke(app, command)
    assert isinstance(missing.exception, UserError)
    assert "--model" in str(missing.exception)
    other = CliRunner().invoke(app, ["report", str(tmp_path), "--model", "logistic"])
    assert "expected with recorded updates only" in str(other.exception)


@pytest.mark.parametrize("refusal, other_attack", [(NotApplicable("no"), True), (MissingKnowledge("no"), False)])
def test_what_to_do_follows_from_why_nothing_was_attacked(refusal: Refusal, other_attack: bool) -> None:
    audit = RecordedAudit([dataclasses.replace(found(0), reconstruction=None, refusal=refusal)])
    assert audit.outcome == "nothing audited"
    assert ("leakscope list attacks" in audit.describe()) == other_attack
