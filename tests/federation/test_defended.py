"""Training by protected updates: it is SGD where nothing is protected, and the same batches for every defence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from leakscope.defenses import DPSGD, GradientNoise, GradientPruning
from leakscope.federation import DefendedTraining, Diverged, FedAvg, FedSGD


def _draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    with torch.no_grad():
        for number, p in enumerate(net.parameters()):
            p.copy_(0.5 * torch.randn(p.shape, generator=_draws(number), dtype=p.dtype))
    return net


@pytest.fixture
def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(20, 5, generator=_draws(9), dtype=torch.float64)
    return x, torch.arange(20) % 3


def _same(one: nn.Module, other: nn.Module, tolerance: float = 0.0) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(bool((a - b).abs().max() <= tolerance) for a, b in pairs)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_a_defence_it_is_plain_sgd(model: nn.Module, data: Any, reduction: Any) -> None:
    training = DefendedTraining(rounds=7, batch_size=6, lr=0.2, protocol=FedSGD(reduction=reduction))
    after = training.run(model, [data], seed=3).last
    oracle = copy.deepcopy(model)
    optimiser = torch.optim.SGD(oracle.parameters(), lr=0.2)
    for number in range(1, 8):
        rows = training.next_batch(20, number, seed=3, client=0)
        optimiser.zero_grad()
        nn.functional.cross_entropy(oracle(data[0][rows]), data[1][rows]).backward()
        optimiser.step()
    assert _same(after, oracle, 1e-12)


def test_clients_count_by_their_examples(model: nn.Module, data: Any) -> None:
    x, y = data
    parts = [(x[:4], y[:4]), (x[4:], y[4:])]
    after = DefendedTraining(rounds=1, batch_size=100, lr=0.5).run(model, parts).last
    together = DefendedTraining(rounds=1, batch_size=100, lr=0.5).run(model, [data]).last
    assert _same(after, together, 1e-12)


@pytest.mark.parametrize("nothing", [GradientNoise(sigma=0.0), GradientPruning(fraction=0.0)])
def test_a_defence_that_does_nothing_changes_nothing(model: nn.Module, data: Any, nothing: Any) -> None:
    training = DefendedTraining(rounds=5, batch_size=4)
    assert _same(training.run(model, [data]).last, training.run(model, [data], defense=nothing).last)


def test_every_epoch_holds_each_example_once() -> None:
    training = DefendedTraining(batch_size=5)
    for epoch in range(3):
        rows = [training.next_batch(20, 4 * epoch + n, seed=1, client=0) for n in (1, 2, 3, 4)]
        assert sorted(torch.cat(rows).tolist()) == list(range(20))
    assert DefendedTraining(rounds=9, batch_size=5).passes(20) == 3


def test_going_on_is_the_same_as_in_one_go(model: nn.Module, data: Any) -> None:
    noise = GradientNoise(sigma=0.1)
    training = DefendedTraining(rounds=6, batch_size=4)
    run = training.run(model, [data], seed=2, at=[4, 7], defense=noise)
    current = run.models[4]
    for number in (4, 5, 6):
        current, _ = training.play_round(current, [data], number, seed=2, defense=noise)
    assert _same(current, run.models[7])


def test_breaking_down_is_told_as_such(model: nn.Module, data: Any) -> None:
    deep = nn.Sequential(model, nn.ReLU(), nn.Linear(3, 3).double())
    with pytest.raises(Diverged, match="round"):
        DefendedTraining(rounds=50, batch_size=4, lr=1e250).run(deep, [data])


def test_weight_updates_are_subtracted_as_they_are(model: nn.Module, data: Any) -> None:
    protocol = FedAvg(epochs=1, batch_size=20, lr=0.3)
    after = DefendedTraining(rounds=1, batch_size=20, lr=1.0, protocol=protocol).run(model, [data]).last
    step = DefendedTraining(rounds=1, batch_size=20, lr=0.3).run(model, [data]).last
    assert _same(after, step, 1e-12)


def test_it_leaves_model_and_global_draws_alone(model: nn.Module, data: Any) -> None:
    before, state = copy.deepcopy(model), torch.random.get_rng_state()
    DefendedTraining(rounds=2, batch_size=4).run(model, [data], defense=DPSGD(noise_multiplier=0.5))
    assert _same(before, model)
    assert torch.equal(state, torch.random.get_rng_state())
