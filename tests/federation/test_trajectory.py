"""The recorded way of a client's training is the way that made the observed update, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import LocalTraining
from leakscope.contracts.protocol import Protocol
from leakscope.federation import FedAvg
from leakscope.federation.fedavg import chosen_steps


class Noisy(nn.Module):
    """Draws random numbers of its own in every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x + 0.1 * torch.randn_like(x))
        return out


@dataclass(frozen=True, kw_only=True)
class Jitter(Defense):
    """Draws from the client's generator at every step."""

    def protect_gradient(self, gradient: Gradient, generator: torch.Generator) -> Gradient:
        return {name: g + 0.01 * torch.randn(g.shape, generator=generator) for name, g in gradient.items()}


@dataclass(frozen=True, kw_only=True)
class Halved(Defense):
    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return {name: value / 2 for name, value in update.items()}


@pytest.fixture
def scene() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(0)
        net = Noisy()
    x = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return net, x, torch.tensor([0, 1, 2, 1, 0])


def seeded(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


PROTOCOLS = [
    FedAvg(epochs=2, batch_size=2, lr=0.1),
    FedAvg(epochs=1, batch_size=5, lr=0.1),
    FedAvg(epochs=3, batch_size=2, lr=0.05, momentum=0.9, batchnorm="train", shuffle=False),
    FedAvg(epochs=2, batch_size=3, lr=0.01, optimizer="adam"),
]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=repr)
@pytest.mark.parametrize("defense", [None, Jitter()], ids=repr)
@pytest.mark.parametrize("knowledge", [Knowledge.honest_server, Knowledge.full], ids=["server", "full"])
def test_ends_where_the_observed_update_ends(protocol, defense, knowledge, scene) -> None:
    net, x, y = scene
    seen = protocol.observe(net, x, y, defense, knowledge, seeded()).message.update
    path = protocol.trajectory(net, x, y, defense, seeded())
    start = dict(net.named_parameters())
    assert path.steps == protocol.epochs * -(-5 // protocol.batch_size)
    assert path.kept == tuple(range(path.steps))
    assert set(path.after) == set(seen)
    for name, value in seen.items():
        assert torch.equal(path.weights[0][name], start[name])
        assert torch.equal(path.weights[0][name] - path.after[name], value)


def test_a_defence_of_the_message_leaves_the_way_alone(scene) -> None:
    net, x, y = scene
    protocol = FedAvg(epochs=2, batch_size=2, lr=0.1)
    seen = protocol.observe(net, x, y, Halved(), generator=seeded()).message.update
    path = protocol.trajectory(net, x, y, Halved(), seeded())
    assert all(torch.equal((path.weights[0][k] - path.after[k]) / 2, v) for k, v in seen.items())


def test_each_step_follows_its_gradient_and_tells_its_length(scene) -> None:
    net, x, y = scene
    path = FedAvg(epochs=2, batch_size=2, lr=0.1).trajectory(net, x, y, Jitter(), seeded())
    places = (*path.weights, path.after)
    for number, norm in enumerate(path.norms):
        moved = [places[number][k] - places[number + 1][k] for k in path.after]
        assert torch.cat([m.flatten() for m in moved]).norm() == pytest.approx(0.1 * norm, rel=1e-4)


def test_fewer_kept_steps_change_nothing_else(scene) -> None:
    net, x, y = scene
    protocol = FedAvg(epochs=4, batch_size=1, lr=0.1)
    whole = protocol.trajectory(net, x, y, None, seeded())
    few = protocol.trajectory(net, x, y, None, seeded(), limit=3)
    assert few.kept == (0, 10, 19)
    assert few.steps == whole.steps == 20
    assert few.norms == whole.norms
    for step, weights in zip(few.kept, few.weights, strict=True):
        assert all(torch.equal(weights[k], whole.weights[step][k]) for k in weights)
    assert "weights" not in repr(few)


def test_the_model_the_data_and_the_global_draws_stay(scene) -> None:
    net, x, y = scene
    before = {k: v.clone() for k, v in net.state_dict().items()}
    data, globe = x.clone(), torch.random.get_rng_state()
    FedAvg(epochs=2, batch_size=2, lr=0.1, batchnorm="train").trajectory(net, x, y)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert torch.equal(data, x)
    assert torch.equal(globe, torch.random.get_rng_state())


def test_without_a_generator_it_is_the_one_of_observe(scene) -> None:
    net, x, y = scene
    protocol = FedAvg(epochs=1, batch_size=2, lr=0.1)
    seen, path = protocol.observe(net, x, y).message.update, protocol.trajectory(net, x, y)
    assert all(torch.equal(path.weights[0][k] - path.after[k], v) for k, v in seen.items())


def test_the_update_does_not_depend_on_what_the_adversary_knows(scene) -> None:
    net, x, y = scene
    protocol = FedAvg(epochs=1, batch_size=2, lr=0.1)
    one, other = (
        protocol.observe(net, x, y, knowledge=knowledge, generator=seeded()).message
        for knowledge in (Knowledge.honest_server, Knowledge.full)
    )
    assert other.batchnorm_statistics is not None
    assert all(torch.equal(one.update[k], v) for k, v in other.update.items())


@pytest.mark.parametrize("total", [1, 2, 3, 7, 50, 51, 1000])
@pytest.mark.parametrize("limit", [2, 3, 50])
def test_chosen_steps_are_distinct_even_and_have_both_ends(total: int, limit: int) -> None:
    steps = chosen_steps(total, limit)
    assert len(steps) == min(total, limit)
    assert (steps[0], steps[-1]) == (0, total - 1)
    gaps = [b - a for a, b in pairwise(steps)]
    assert all(gap > 0 for gap in gaps)
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_bad_input_is_refused(scene) -> None:
    net, x, y = scene
    for total, limit in ((0, 5), (5, 1)):
        with pytest.raises(ValueError, match="at least"):
            chosen_steps(total, limit)
    with pytest.raises(ValueError, match="expected class numbers, or probabilities"):
        FedAvg().trajectory(net, x, y.float())
    path = FedAvg(epochs=2, batch_size=2).trajectory(net, x, y)
    assert len(path.weights) == len(path.kept)
    assert (path.kept[0], path.kept[-1]) == (0, path.steps - 1)


def test_a_protocol_must_say_what_its_clients_send() -> None:
    for facts in ({}, {"kind": "rumour"}):
        silent = type("Silent", (Protocol,), {"_exchange": lambda *_: ((), LocalTraining()), **facts})
        with pytest.raises(ValueError, match="Silent: expected a class attribute kind"):
            silent()
