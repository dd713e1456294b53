"""What a result leaves of the update reaches its row, and a flag says where the truth leaves less."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
import torch
from torch import Tensor

from leakscope.attacks import InvertingGradients, LinearLayer
from leakscope.audit import audit
from leakscope.audit.assess import FLAG, LOOKS_RIGHT, NOISE_LIKE, Assessment, Baseline, Ruler, Truth, assess
from leakscope.audit.attempts import Bench
from leakscope.audit.plan import make_plan
from leakscope.audit.setup import build_setup
from leakscope.audit.spec import AuditSpec
from leakscope.capture import observe_captured
from leakscope.capture.files import read_captured
from leakscope.capture.flower import Capture
from leakscope.capture.recordings import Origin, save_recording
from leakscope.contracts.attack import Attack
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Diagnosis, Reconstruction
from leakscope.federation import FedAvg, FedSGD
from leakscope.integrations.leakage import audit_recordings
from leakscope.metrics.image import grain
from leakscope.models import build_model
from leakscope.report.captured import confidence_words, diagnosis_words
from leakscope.results.records import AttemptRecord

X, Y = doubles.examples(6)
FEDAVG = {"fedavg": {"epochs": 2, "batch_size": 1, "lr": 0.2}}


@dataclass(frozen=True, kw_only=True)
class Oracle(Attack):
    """Returns the first examples, ``share`` of them black."""

    share: float = 0.0
    labelled: bool = True

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        count = observation.num_examples or 1
        labels = Y[:count] if self.labelled else None
        return Reconstruction((1 - self.share) * X[:count], labels, torch.zeros(count))


def record(attack: Attack, protocol: Any, defense: Any = "none", **changes: Any) -> AttemptRecord:
    spec = {"model": doubles.net(), "data": (X, Y), "attacks": [attack], "findings": False, "controls": False}
    setup = build_setup(
        AuditSpec.parse({**spec, "batch": 2, "protocols": [protocol], "defenses": [defense], **changes})
    )
    outcome = Bench(setup).run(next(job for job in make_plan(setup) if job.control is None and job.finding is None))
    assert outcome.status == "done", outcome.error
    assert outcome.result is not None
    return AttemptRecord.read(outcome.result)


@pytest.mark.parametrize("protocol", ["fedsgd", FEDAVG])
def test_the_truth_is_not_flagged_and_black_images_are(protocol: Any) -> None:
    right, wrong = record(Oracle(), protocol), record(Oracle(share=1.0), protocol)
    assert FLAG not in right.flags
    assert right.unexplained < 1e-4
    assert wrong.flags == (FLAG,)
    assert wrong.unexplained > 0.1 > 1e-4 > wrong.unexplained_by_truth


@pytest.mark.parametrize("protocol", ["fedsgd", FEDAVG])
@pytest.mark.parametrize("knowledge", ["honest_server", "adaptive_server"])
def test_a_guess_as_good_as_the_truth_is_not_flagged_under_noise(protocol: Any, knowledge: str) -> None:
    """Noise of several times the update: nothing tells black images from the true ones."""
    found = record(Oracle(share=1.0), protocol, {"gradient-noise": {"sigma": 20.0}}, knowledge=knowledge)
    assert FLAG not in found.flags
    assert found.unexplained == pytest.approx(found.unexplained_by_truth, rel=0.05)


def test_weak_noise_hides_no_failure() -> None:
    found = record(Oracle(share=1.0), FEDAVG, {"gradient-noise": {"sigma": 1e-3}})
    assert found.flags == (FLAG,)
    assert found.unexplained > 2 * found.unexplained_by_truth > 0


def test_what_cannot_be_computed_is_nan_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> float:
        raise ZeroDivisionError("of a user's model")

    monkeypatch.setattr("leakscope.audit.assess.unexplained", broken)
    found = record(Oracle(), FEDAVG)
    assert math.isnan(found.unexplained)
    assert math.isnan(found.unexplained_by_truth)
    assert found.flags == ()


def test_a_captured_update_is_judged_without_the_truth() -> None:
    observation = FedAvg(**FEDAVG["fedavg"]).observe(doubles.net(), X[:2], Y[:2])
    right, wrong = (assess(observation, Oracle(share=share), controls=()) for share in (0.0, 1.0))
    assert FLAG not in right.reconstruction.flags
    assert right.unexplained is not None
    assert right.unexplained < 1e-4
    assert FLAG in wrong.reconstruction.flags
    assert not wrong.one_gradient


def test_with_the_truth_a_captured_update_is_judged_by_what_the_truth_leaves() -> None:
    """The truth of another update leaves as much as a failed search: then nothing is flagged."""
    observation = FedSGD().observe(doubles.net(), X[:2], Y[:2])
    own, foreign = (
        assess(observation, Oracle(share=1.0), truth, controls=()) for truth in ((X[:2], Y[:2]), (X[4:], Y[4:]))
    )
    assert own.unexplained == foreign.unexplained
    assert own.unexplained_by_truth is not None
    assert own.unexplained_by_truth < 1e-4
    assert [FLAG in one.reconstruction.flags for one in (own, foreign)] == [True, False]


def test_a_file_flower_and_a_job_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One update, three ways in: the same residual, the same certificates, the same type."""
    net, attack = build_model("mlp", input_shape=(1, 4, 4), num_classes=4, seed=1), LinearLayer()
    x, y = torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([2])
    spec = {"model": net, "data": (x, y), "attacks": [attack], "findings": False, "controls": False, "batch": 1}
    setup = build_setup(AuditSpec.parse({**spec, "protocols": ["fedsgd"], "defenses": ["none"]}))
    (job,) = make_plan(setup)
    found: list[Assessment] = []

    def spied(*arguments: Any, **options: Any) -> Assessment:
        found.append(assess(*arguments, **options))
        return found[-1]

    monkeypatch.setattr("leakscope.audit.attempts.assess", spied)
    bench = Bench(setup)
    row = bench.run(job).result
    seen = bench.observe(job)

    torch.save(dict(seen.message.update), tmp_path / "update.pt")
    facts: dict[str, Any] = {"input_shape": (1, 4, 4), "num_classes": 4, "value_range": seen.value_range}
    content, _ = read_captured(tmp_path / "update.pt")
    captured = observe_captured(content, "gradient", None, net, {"num_examples": 1, **facts})
    found.append(assess(captured, attack))

    flower = Capture(folder=tmp_path / "flower", model=net, sends="gradient", **facts)
    before = {name: value.numpy() for name, value in net.state_dict().items()}
    recorded = flower.observation(before, {name: value.numpy() for name, value in seen.message.update.items()}, 1)
    save_recording(tmp_path / "flower", recorded, Origin(place="server", client="1", number=1))
    found += audit_recordings(tmp_path / "flower", model=net, attack=attack)

    job_side, file_side, flower_side = found
    assert {type(one) for one in found} == {Assessment}
    assert row is not None
    assert row["unexplained"] == job_side.unexplained == file_side.unexplained == flower_side.unexplained
    proofs = [one.reconstruction and one.reconstruction.certificates for one in found]
    assert proofs[0] == proofs[1] == proofs[2]
    assert row["examples"][0]["certificate"] == dataclasses.asdict(proofs[0][0])
    assert [one.certified for one in found] == [1, 1, 1]
    assert [one.standing for one in (file_side, flower_side)] == ["certified"] * 2
    assert [one.observation.made and one.observation.made.sign for one in found] == [None, "right", "right"]


@pytest.mark.slow
def test_a_shuffled_client_that_is_not_recovered_cannot_pass() -> None:
    """With eight steps of a search nothing is recovered; the flag, the floor and the planted steps all say so."""
    x = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    done = audit(
        model=build_model("convnet", input_shape=(1, 8, 8), num_classes=4, filters=8),
        data=(x, torch.arange(6) % 4),
        protocol=FedAvg(epochs=2, batch_size=1, lr=0.5),
        attacks=[InvertingGradients(iterations=8)],
        batch=2,
        examples=2,
        controls=["noise", "prior-mean", "planted"],
        findings=["floor"],
    )
    (row,) = [row for row in done.rows if row.job.control is None]
    assert row.result is not None
    assert FLAG in row.result.flags
    assert done.verdict.outcome == "inconclusive"
    (floor,) = done.findings
    assert floor.value("psnr") > 60


def judged(picture: Tensor, left: float | None, outcome: str = "undecided") -> Assessment:
    """Return what an attack made of an update, of which nothing known leaves all."""
    shape = tuple(picture.shape[1:])
    net = build_model("mlp", input_shape=shape, num_classes=4)
    seen = FedSGD().observe(net, picture, torch.tensor([1]), value_range=ValueRange((0.0,), (1.0,)))
    diagnosis = Diagnosis(outcome=outcome, reason="", unknowns=1)  # type: ignore[arg-type]
    made = Reconstruction(inputs=picture, labels=None, scores=torch.zeros(1), diagnosis=diagnosis)
    ruler, baselines = Ruler(seen.inputs, seen.task), (Baseline("grey", picture, 1.0),)
    facts: dict[str, Any] = {"reconstruction": made, "unexplained": left, "baselines": baselines}
    return Assessment(observation=seen, attack=LinearLayer(), ruler=ruler, **facts)


def mixed(noise: float) -> Tensor:
    """Return a ramp with this share of white noise: its grain is about noise^2 / (noise^2 + ramp^2)."""
    ramp = torch.linspace(0, 1, 24).expand(1, 3, 24, 24)
    return (1 - noise) * ramp + noise * torch.rand(ramp.shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("noise", "left", "diagnosis", "outcome"),
    [
        (0.0, 0.9 * LOOKS_RIGHT, "recovered", "looks recovered"),
        (0.0, 1.1 * LOOKS_RIGHT, "recovered", "cannot say"),
        (0.0, 0.9 * LOOKS_RIGHT, "not identifiable", "cannot say"),
        (0.0, 0.95, "undecided", "probably not recovered"),
        (0.0, 0.85, "undecided", "cannot say"),
        (0.0, None, "undecided", "cannot say"),
        (0.45, 0.9 * LOOKS_RIGHT, "recovered", "looks recovered"),
        (0.55, 0.9 * LOOKS_RIGHT, "recovered", "cannot say"),
        (0.55, 1.1 * LOOKS_RIGHT, "recovered", "probably not recovered"),
        (0.55, 0.85, "undecided", "probably not recovered"),
        (0.55, None, "undecided", "probably not recovered"),
    ],
)
def test_no_picture_of_noise_is_called_recovered(
    noise: float, left: float | None, diagnosis: str, outcome: str
) -> None:
    picture = mixed(noise)
    assert (float(grain(picture)) > NOISE_LIKE) == (noise > 0.5)
    result = judged(picture, left, diagnosis)
    assert result.outcome == outcome
    told = confidence_words(result), diagnosis_words(result)[0]
    assert told[0].startswith(outcome.capitalize())
    assert ("recovered" in told[1]) == (diagnosis == "recovered" and outcome == "looks recovered")


def test_with_the_truth_the_limits_of_the_policy_decide() -> None:
    picture = mixed(0.0)
    for shift, outcome in ((0.05, "looks recovered"), (0.2, "probably not recovered")):
        near = judged((picture + shift).clamp(0, 1), 1.0)
        evaluation = near.ruler.compare(Truth(picture, None), near.reconstruction.inputs, None)  # type: ignore[union-attr]
        grey = near.ruler.compare(Truth(picture, None), torch.full_like(picture, 0.5), None)
        baselines = (dataclasses.replace(near.baselines[0], evaluation=grey),)
        facts: dict[str, Any] = {"evaluation": evaluation, "baselines": baselines, "truth": Truth(picture, None)}
        assert dataclasses.replace(near, **facts).outcome == outcome
