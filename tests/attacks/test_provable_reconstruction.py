"""Provable reconstruction: a first layer of random units gives a batch away; deeper ones and other servers do not."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import make_attack
from leakscope.attacks.gaussian_neurons import head_constants, with_gaussian_neurons
from leakscope.attacks.provable_reconstruction import ProvableReconstruction
from leakscope.contracts.errors import MissingKnowledge, NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.federation import FedSGD
from leakscope.metrics import assign, psnr
from leakscope.models import build_model

SHAPE = (3, 8, 8)


def examples(count: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(3)
    return torch.rand((count, *SHAPE), generator=draws), torch.arange(count) % 5


def look(attack: ProvableReconstruction, count: int, **options) -> tuple[Observation, Tensor]:
    x, y = examples(count)
    net = build_model("mlp", input_shape=SHAPE, num_classes=5, **{"hidden": 3000, **options})
    return FedSGD().observe(attack.prepare(net, SHAPE), x, y, knowledge=Knowledge.malicious_server), x


def score(x: Tensor, found: Tensor) -> float:
    return float(psnr(x, found.clamp(0, 1)[assign(x, found)]).min())


@pytest.mark.parametrize("head", ["signs", "published"])
@pytest.mark.parametrize("count", [1, 4])
def test_a_batch_with_repeated_labels_comes_back_exactly(head, count) -> None:
    attack = ProvableReconstruction(head=head)
    seen, x = look(attack, count)
    found = attack(seen, dtype=torch.float64)
    assert score(x, found.inputs.float()) > 60
    assert found.flags == ()


def test_trained_units_stay() -> None:
    attack = ProvableReconstruction(trained=200)
    seen, x = look(attack, 3)
    assert score(x, attack(seen, dtype=torch.float64).inputs.float()) > 60


def test_without_a_bias_lengths_are_open_and_a_note_says_so() -> None:
    attack = ProvableReconstruction()
    seen, x = look(attack, 2, bias=False)
    found = attack(seen, dtype=torch.float64)
    assert any("lengths" in note for note in found.notes)
    assert score(x, found.inputs.float()) > 20


def test_weights_that_were_not_sent_confirm_nothing() -> None:
    """Activation patterns need no weights and may tell examples apart all the same; only nobody can know it."""
    seen, _ = look(ProvableReconstruction(), 4)
    other = dataclasses.replace(seen, model=ProvableReconstruction(seed=9).prepare(seen.model, SHAPE))
    found = ProvableReconstruction()(other)
    assert "mixture" in found.flags
    assert not found.info["signed"]


def test_refusals() -> None:
    attack = make_attack("provable-reconstruction")
    x, y = examples(2)
    deep = build_model("mlp", input_shape=SHAPE, num_classes=5, hidden=(32, 64))
    sent = attack.prepare(deep, SHAPE)
    seen = FedSGD().observe(sent, x, y, knowledge=Knowledge.malicious_server)
    with pytest.raises(NotApplicable, match="recover_features"):
        attack(seen)
    with pytest.raises(NotApplicable, match="dense layer"):
        attack.prepare(build_model("logistic", input_shape=SHAPE, num_classes=5), SHAPE)
    with pytest.raises(MissingKnowledge, match="choose_weights"):
        attack(FedSGD().observe(deep, x, y))
    with pytest.raises(ValueError, match=r"trained: expected 0\.\.63"):
        ProvableReconstruction(trained=64).prepare(deep, SHAPE)
    with pytest.raises(NotApplicable, match="expected 'fc2'"):
        with_gaussian_neurons(deep, SHAPE, layer="fc1")


def test_pairs_of_units_leave_the_outputs_as_they_were() -> None:
    net = build_model("mlp", input_shape=SHAPE, num_classes=5, hidden=100)
    with torch.no_grad():
        net.fc1.weight[40:].zero_()
        net.fc1.bias[40:].zero_()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    sent = with_gaussian_neurons(net, SHAPE, trained=40, size=1.0, seed=1)
    x, _ = examples(3)
    assert torch.allclose(sent(x), net(x), atol=1e-4)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())


def test_signs_hear_every_example_and_steps_do_not() -> None:
    """With an open softmax the coefficient of an example is its label's constant less the mean one."""
    draws = torch.Generator().manual_seed(0)
    for head, least in (("signs", 0.8), ("published", 0.0)):
        constants = head_constants(5, 1, head, draws, 1.0)[:, 0]
        coefficients = (constants.mean() - constants).abs() / constants.abs().mean()
        assert float(coefficients.min()) >= least
        assert isinstance(constants, Tensor)
    assert float(head_constants(5, 1, "published", draws, 1.0)[2, 0]) == 3.0


def test_an_activation_without_moments_leaves_mixtures() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.square()

    x, y = examples(3)
    net = nn.Sequential(nn.Flatten(), nn.Linear(192, 500), Square(), nn.Linear(500, 5))
    attack = ProvableReconstruction()
    seen = FedSGD().observe(attack.prepare(net, SHAPE), x, y, knowledge=Knowledge.malicious_server)
    found = attack(seen)
    assert torch.isfinite(found.inputs).all()
    assert "mixture" in found.flags, "its slopes fit any mixture, so nothing is told apart for certain"
