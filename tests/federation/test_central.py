"""Training in one place: epochs that go on where a checkpoint ended, and running statistics that move."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from leakscope.defenses import GradientNoise
from leakscope.federation import CentralTraining, cached_training


def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(96, 4, generator=torch.Generator().manual_seed(1))
    y = (x[:, 0] > 0).long()
    return [(x[:50], y[:50]), (x[50:], y[50:])]


def test_it_learns_moves_the_running_statistics_and_leaves_the_model_alone() -> None:
    model, before = net(), net().state_dict()
    run = CentralTraining(rounds=8, batch_size=16).run(model, clients(), at=[1, 9])
    assert run.losses[-1] < 0.3 < run.losses[0]
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not torch.equal(run.last[1].running_mean, model[1].running_mean)
    assert not run.last.training


def test_it_goes_on_from_a_checkpoint_as_in_one_go(tmp_path: Path) -> None:
    training = CentralTraining(rounds=3, batch_size=16, decay_every=2)
    whole = training.run(net(), clients(), seed=4)
    cached_training(training, net(), clients(), seed=4, at=[2], folder=tmp_path)
    parts = cached_training(training, net(), clients(), seed=4, folder=tmp_path)
    assert whole.losses == parts.losses
    for name, value in whole.last.state_dict().items():
        assert torch.equal(value, parts.last.state_dict()[name])


def test_the_step_size_falls_and_a_defence_is_refused() -> None:
    model, data = net(), clients()
    slow, _ = CentralTraining(decay_every=1).play_round(model, data, 3)
    fast, _ = CentralTraining(decay_every=0).play_round(model, data, 3)
    moved = [float((one[0].weight - model[0].weight).detach().norm()) for one in (slow, fast)]
    assert moved[0] < 0.1 * moved[1]
    with pytest.raises(ValueError, match="expected no defence"):
        CentralTraining().run(model, data, defense=GradientNoise(sigma=0.1))
