"""Defences of the network and the batch (mixup, dropout of units, Soteria, PRECODE), and attacks that know of them."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import make_attack
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import ClientSide, example_gradients
from leakscope.contracts.task import Classification
from leakscope.defenses import DPSGD, GradientQuantisation, MixUp, NetworkDropout, Precode, Soteria
from leakscope.federation import FedAvg, FedSGD
from leakscope.metrics import psnr
from leakscope.models import build_model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def net() -> nn.Sequential:
    layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        for p in layers.parameters():
            p.copy_(torch.randn(p.shape, generator=seeded(p.numel())) / 3)
    return layers


def batch(count: int = 4) -> tuple[Tensor, Tensor]:
    return torch.rand(count, 1, 4, 4, generator=seeded(1)), torch.arange(count) % 3


def test_mixtures_are_what_the_definition_says() -> None:
    x, y = batch(50)
    rule = MixUp(images=3, least=0.05, most=0.8).for_model(net(), (1, 4, 4), (3,))
    mixed, soft = rule.protect_batch(x, y, seeded())
    assert mixed.shape == x.shape
    assert soft.shape == (50, 3)
    assert torch.allclose(soft.sum(1), torch.ones(50))
    assert not Classification().problems_of(soft, 50, (3,))
    assert mixed.min() >= x.min()
    assert mixed.max() <= x.max()
    # What is linear in the examples is mixed as the labels are: here pictures that are their labels.
    same = nn.functional.one_hot(y, 3).float()
    assert torch.allclose(*rule.protect_batch(same, y, seeded()))
    drawn = rule._shares(20_000, seeded())
    assert float(drawn.min()) >= 0.05
    assert float(drawn.max()) <= 0.8
    assert torch.allclose(drawn.sum(1), torch.ones(20_000, dtype=torch.float64))
    free = MixUp(images=3, most=1.0)._shares(50_000, seeded())
    assert torch.allclose(free.mean(0), torch.tensor([0.6, 0.2, 0.2], dtype=torch.float64), atol=0.01)  # alpha / 5


def test_mixup_of_one_image_or_one_example_changes_nothing_and_regression_is_mixed_too() -> None:
    x, y = batch()
    assert MixUp(images=1).protect_batch(x, y, seeded()) == (x, y)
    assert MixUp().protect_batch(x[:1], y[:1], seeded())[0].equal(x[:1])
    targets = torch.rand(4, 2, generator=seeded())
    assert MixUp().protect_batch(x, targets, seeded())[1].shape == (4, 2)
    with pytest.raises(ValueError, match="one class an example"):
        MixUp().protect_batch(x, torch.zeros(4, 5, dtype=torch.int64), seeded())


def test_the_gradient_of_a_mixed_batch_is_that_of_soft_labels() -> None:
    x, y = batch()
    rule = MixUp().for_model(net(), (1, 4, 4), (3,))
    seen = FedSGD().observe(net(), x, y, rule, generator=seeded(5)).message.update
    draws = seeded(5)
    torch.randint(2**62, (1,), generator=draws)  # what the client seeds its network with
    mixed, soft = rule.protect_batch(x, y, draws)
    model = net()
    wanted = torch.autograd.grad(nn.functional.cross_entropy(model(mixed), soft), list(model.parameters()))
    assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(seen.values(), wanted, strict=True))


def test_dropped_units_leave_rows_and_columns_of_zeros_and_the_mean_is_the_plain_network() -> None:
    x, y = batch(1)
    rule = NetworkDropout(probability=0.5)
    fitted = rule.for_model(net(), (1, 4, 4), (3,))
    assert fitted.layers == ("3", "5")  # all but the one that reads the input
    update = FedSGD().observe(net(), x, y, rule, generator=seeded(3)).message.update
    off = update["3.weight"].abs().sum(0) == 0
    assert 0 < int(off.sum()) < 12
    assert bool((update["1.weight"].abs().sum(1)[off] == 0).all())
    linear = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Linear(12, 3))
    copies = rule.for_model(linear, (1, 4, 4), (3,)).protect_copy(copy.deepcopy(linear))
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        mean = torch.stack([copies(x) for _ in range(4000)]).mean(0)
    assert torch.allclose(mean, linear(x), atol=0.03)


def test_soteria_prunes_one_weights_gradient_and_nothing_else() -> None:
    x, y = batch(3)
    plain = FedSGD().observe(net(), x, y).message.update
    for layer in ("5", "3"):
        seen = FedSGD().observe(net(), x, y, Soteria(fraction=0.5, layer=layer), Knowledge.adaptive_server)
        for name, value in seen.message.update.items():
            assert torch.allclose(value, plain[name], atol=1e-6) == (name != f"{layer}.weight")
        assert seen.channel is not None
        assert seen.channel.unreliable == (f"{layer}.weight",)
    one = FedSGD().observe(net(), x[:1], y[:1], Soteria(fraction=0.5)).message.update["5.weight"]
    assert int((one.abs().sum(0) == 0).sum()) == 3  # half of six elements
    kept = one.abs().sum(0) > 0
    bare = FedSGD().observe(net(), x[:1], y[:1]).message.update["5.weight"]
    assert torch.allclose(one[:, kept], bare[:, kept], atol=1e-7)


def test_precode_is_shared_by_all_and_drawn_by_the_client() -> None:
    x, y = batch()
    rule = Precode(size=5)
    one, again, other = (
        FedSGD().observe(net(), x, y, rule, Knowledge.adaptive_server, seeded(seed)) for seed in (0, 0, 1)
    )
    states = [list(seen.model.state_dict().values()) for seen in (one, other)]
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
    assert "5.encoder.weight" in one.message.update
    assert one.model.get_submodule("5.encoder").out_features == 10  # type: ignore[union-attr]
    assert all(torch.equal(value, again.message.update[name]) for name, value in one.message.update.items())
    assert not torch.equal(one.message.update["1.weight"], other.message.update["1.weight"])
    assert torch.equal(one.model(x), one.model(x))  # the adversary's is the network of the mean
    twice = FedSGD().observe(one.model, x, y, rule, generator=seeded())
    assert list(twice.message.update) == list(one.message.update)
    delta = FedAvg(batch_size=2).observe(net(), x, y, rule, Knowledge.adaptive_server).channel
    assert delta is not None
    assert delta.inexact


def client(model: nn.Module, count: int) -> ClientSide:
    x, y = batch(count)
    return ClientSide(model.eval(), x, y, Classification(), Defense(), seeded(), model)


def alone(one: ClientSide) -> list[Gradient]:
    found = []
    for place in range(len(one.x)):
        loss = nn.functional.cross_entropy(one.model(one.x[place : place + 1]), one.y[place : place + 1])
        values = torch.autograd.grad(loss, list(one.trained.values()))
        found.append(dict(zip(one.trained, values, strict=True)))
    return found


class Stubborn(nn.Module):
    """Looks at its values, which vmap cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (2.0 if float(x.detach().sum()) > 8 else 1.0)


@pytest.mark.parametrize("model", [net(), Stubborn()], ids=["mapped", "one by one"])
def test_gradients_of_examples_are_those_of_each_alone(model: nn.Module) -> None:
    one = client(model, 5)
    stacked = example_gradients(one, one.x, one.y)
    for place, single in enumerate(alone(one)):
        for name, value in single.items():
            assert torch.allclose(stacked[name][place], value, atol=1e-6)


def test_chains_of_network_defences_with_dp_sgd_work() -> None:
    x, y = batch()
    for first in (NetworkDropout(), Soteria(fraction=0.5), Precode(size=3), MixUp()):
        seen = FedSGD().observe(net(), x, y, [first, DPSGD(clip=1.0, noise_multiplier=0.1)], generator=seeded())
        assert all(bool(torch.isfinite(value).all()) for value in seen.message.update.values())


# -- attacks that know the defence, and attacks that do not --


def smooth_picture(seed: int) -> Tensor:
    x = torch.rand(1, 1, 10, 10, generator=seeded(seed))
    for axis in (2, 3):
        x = (x + x.roll(1, axis) + x.roll(-1, axis)) / 3
    return (x - x.min()) / (x.max() - x.min())


def reached(model: str, defense: Defense, knows: bool, iterations: int, attack: str = "inverting-gradients") -> float:
    x, y = smooth_picture(0), torch.tensor([0])
    victim = build_model(model, input_shape=(1, 10, 10), num_classes=4)
    knowledge = dataclasses.replace(Knowledge.adaptive_server, defense=knows, labels="yes")
    seen: Observation = FedSGD().observe(victim, x, y, defense, knowledge, seeded())
    result = make_attack(attack, iterations=iterations)(seen, seed=0)
    assert ("defence approximated" in result.flags) == (knows and isinstance(defense, Precode))
    return float(psnr(x, result.inputs)[0])


def test_soteria_falls_to_an_attack_that_leaves_its_layer_out() -> None:
    assert reached("dlg-lenet", Soteria(), knows=False, iterations=150) < 20
    assert reached("dlg-lenet", Soteria(), knows=True, iterations=150) > 40
    assert reached("dlg-lenet", Soteria(), knows=True, iterations=150, attack="head-first") > 40


def test_precode_falls_to_an_attack_that_leaves_the_bottleneck_out() -> None:
    assert reached("convnet", Precode(size=8), knows=False, iterations=150) < 15
    assert reached("convnet", Precode(size=8), knows=True, iterations=150) > 25


@pytest.mark.parametrize("defense", [GradientQuantisation(values="sign"), GradientQuantisation(bits=3)], ids=repr)
def test_to_know_the_rounding_helps(defense: Defense) -> None:
    unknowing, knowing = (reached("convnet", defense, knows, iterations=100) for knows in (False, True))
    assert knowing > unknowing + 2
