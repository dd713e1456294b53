"""The attack that draws: what its features are worth, what it refuses, and that nothing of the truth reaches it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import SystematicEvaluation, make_attack
from leakscope.attacks.systematic_evaluation import dense_features, head_features
from leakscope.contracts.errors import MissingKnowledge, NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.defenses import GradientNoise
from leakscope.federation import FedAvg, FedSGD
from leakscope.matching import Cosine, DirectionL1, Drawing, FeatureMatching, Pixels, Reweighted
from leakscope.matching.priors import misdirection
from leakscope.metrics import psnr
from leakscope.models import build_model
from leakscope.network.recorder import record_layers

pytestmark = pytest.mark.slow

QUICK = {"iterations": 3}


def net(hidden: int = 64) -> nn.Module:
    return build_model("resnet18", input_shape=(1, 16, 16), num_classes=4, width=4, hidden=hidden).eval()


def batch(examples: int = 2) -> tuple[Tensor, Tensor]:
    x = torch.rand(examples, 1, 16, 16, generator=torch.Generator().manual_seed(2))
    return x, torch.arange(examples) % 4


def look(model: nn.Module | None = None, examples: int = 2, **facts) -> tuple[Observation, Tensor]:
    x, y = batch(examples)
    return FedSGD(batchnorm="eval").observe(model or net(), x, y, **facts), x


def features_of(model: nn.Module, x: Tensor, layer: str = "head.fc1") -> Tensor:
    inputs = record_layers(model, x, lambda name, _: name == layer).calls[0].inputs
    return nn.functional.normalize(inputs.double(), dim=1)


@pytest.mark.parametrize("source", [head_features, dense_features])
def test_features_of_both_sources_are_those_of_the_examples(source) -> None:
    seen, x = look()
    known = source(seen, torch.Generator().manual_seed(0))
    assert known.layer == "head.fc1"
    truth = features_of(seen.model, x)
    rows = known.directions.double()
    inside = truth @ torch.linalg.qr(rows.T).Q
    assert float(inside.norm(dim=1).min()) > 0.999
    if source is head_features:
        assert float((truth * rows).sum(1).min()) > 0.999  # in the order of the labels


def test_features_of_the_head_follow_known_labels_in_any_order() -> None:
    model, (x, y) = net(), batch(3)
    order = torch.tensor([2, 0, 1])
    knowledge = dataclasses.replace(Knowledge.honest_server, labels="yes")
    seen = FedSGD(batchnorm="eval").observe(model, x[order], y[order], knowledge=knowledge)
    known = head_features(seen, torch.Generator().manual_seed(0))
    assert float((features_of(model, x[order]) * known.directions.double()).sum(1).min()) > 0.999


def test_what_is_chosen_is_what_is_searched() -> None:
    seen, _ = look()
    attack = SystematicEvaluation()
    plain = attack.matcher(seen)
    counts = tuple(int(p.count_nonzero()) for p in seen.model.parameters())
    assert plain.distance == Reweighted(distance=DirectionL1(), counts=counts, power=0.5)
    published = SystematicEvaluation(distance="cosine")
    assert published.matcher(seen).distance == Reweighted(distance=Cosine(), counts=counts)
    assert isinstance(plain.canvas, Drawing)
    assert [prior.weight for prior in plain.priors] == [0.01, 0.001]
    assert dataclasses.replace(published, reweight=False).matcher(seen).distance == Cosine()
    assert isinstance(SystematicEvaluation(canvas="pixels").matcher(seen).canvas, Pixels)
    led = attack._led(plain, head_features(seen, torch.Generator().manual_seed(0)), 2)
    term = led.priors[-1]
    assert isinstance(term, FeatureMatching)
    assert (term.weight, term.form, led.record) == (0.1, "direction", ("head.fc1",))
    assert led.canvas.features is not None
    span = dataclasses.replace(attack, feature_form="span")
    assert span._led(plain, head_features(seen, torch.Generator().manual_seed(0)), 2).priors[-1].form == "span"
    paper = SystematicEvaluation.preset("paper")
    assert (paper.distance, paper.reweight) == ("cosine", True)
    assert (paper.canvas, paper.iterations, paper.lr, paper.schedule) == ("paper", 10_000, 1e-5, "step")


def test_the_result_says_where_features_came_from() -> None:
    seen, _ = look()
    assert make_attack("systematic", **QUICK)(seen).info["features"] == "the head"
    assert make_attack("systematic", features="recovered", **QUICK)(seen).info["features"] != "none"
    without = make_attack("systematic", features="none", **QUICK)(seen)
    assert without.info["features"] == "none"
    assert "features are not used" in without.notes
    weightless = make_attack("systematic", feature_weight=0.0, **QUICK)(seen)
    assert (weightless.info["features"], weightless.notes[-1]) == ("none", "features are not used")
    noisy, _ = look(defense=GradientNoise(sigma=0.05))
    assert make_attack("systematic", **QUICK)(noisy).info["features"] != "the head"


def test_features_that_cannot_be_had_are_refused_only_where_they_were_asked_for() -> None:
    noisy, _ = look(defense=GradientNoise(sigma=1.0))
    with pytest.raises(NotApplicable, match=r"features='head'"):
        make_attack("systematic", features="head", **QUICK)(noisy)
    alone, _ = look(net(hidden=0), defense=GradientNoise(sigma=1.0))
    with pytest.raises(NotApplicable, match=r"features='recovered'"):
        make_attack("systematic", features="recovered", **QUICK)(alone)
    result = make_attack("systematic", **QUICK)(alone)
    assert result.info["features"] == "none"
    assert any(note.startswith("no features: ") for note in result.notes)


def test_a_server_that_draws_units_must_be_allowed_to() -> None:
    attack = SystematicEvaluation(trained=16, **QUICK)
    assert attack.chooses_model
    assert not SystematicEvaluation().chooses_model
    model = net()
    assert SystematicEvaluation().prepare(model, (1, 16, 16)) is model
    sent = attack.prepare(model, (1, 16, 16))
    assert torch.equal(sent.head.fc1.weight[:16], model.head.fc1.weight[:16])
    assert 0.8 < float(sent.head.fc1.weight[16:].detach().std()) < 1.2
    with pytest.raises(MissingKnowledge, match="choose_weights"):
        attack(look(sent)[0])
    seen, x = look(sent, knowledge=Knowledge.malicious_server)
    assert attack(seen).inputs.shape == x.shape


def test_several_local_steps_are_taken_for_one_and_it_says_so() -> None:
    x, y = batch()
    seen = FedAvg(epochs=2, batch_size=1, lr=0.05, batchnorm="eval").observe(net(), x, y)
    assert "steps not simulated" in make_attack("systematic", **QUICK)(seen).flags


def test_restarts_can_be_pulled_together() -> None:
    seen, x = look()
    result = make_attack("systematic", restarts=2, consistency=0.1, **QUICK)(seen)
    assert result.inputs.shape == x.shape
    assert result.info["restarts"] == 2


def test_known_features_are_approached() -> None:
    seen, x = look()
    truth = features_of(seen.model, x)
    options = {"canvas": "pixels", "lr": 0.1, "iterations": 40, "reweight": False, "distance": "cosine"}
    led = make_attack("systematic", features="head", feature_weight=10.0, **options)(seen)
    alone = make_attack("systematic", features="none", **options)(seen)
    off = [float(misdirection(features_of(seen.model, result.inputs), truth)) for result in (led, alone)]
    assert off[0] < 0.5 * off[1]


def test_a_network_draws_nothing_from_noise() -> None:
    """The negative control of the drawn canvas: pictures come out, and explain nothing."""
    model = build_model("convnet", input_shape=(1, 8, 8), num_classes=4)
    ramp = torch.linspace(0, 1, 8)
    x = ramp[None, None, None].expand(1, 1, 8, 8).contiguous()
    seen = FedSGD().observe(model, x, torch.tensor([1]))
    draws = torch.Generator().manual_seed(1)
    noise = {name: torch.randn(value.shape, generator=draws) for name, value in seen.message.update.items()}
    fake = dataclasses.replace(seen, messages=(dataclasses.replace(seen.message, update=noise),))
    attack = SystematicEvaluation(iterations=60, lr=6e-3, tv=1e-3)
    real, control = attack(seen), attack(fake)
    assert real.info["distance"] < 0.3
    assert control.info["distance"] > 0.8
    gap = [float(psnr(x, result.inputs).mean()) for result in (real, control)]
    assert gap[0] > gap[1] + 8
