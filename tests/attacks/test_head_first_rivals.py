"""Rivals of head-first: what matching the whole update finds where the head is of no use."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import leakscope as ls
from leakscope.attacks import HeadFirst, InvertingGradients
from leakscope.attacks.head_first.rivals import rivals_for
from leakscope.contracts.observation import Observation


def smooth_picture(shape: tuple[int, ...], seed: int = 11) -> Tensor:
    x = torch.rand(1, *shape, generator=torch.Generator().manual_seed(seed))
    for axis in (2, 3):
        x = (x + x.roll(1, axis) + x.roll(-1, axis)) / 3
    return (x - x.min()) / (x.max() - x.min())


def observe(model: str, x: Tensor, noise: float) -> Observation:
    """The gradient of one picture with noise, a share of each tensor's root mean square."""
    net = ls.build_model(model, input_shape=tuple(x.shape[1:]), num_classes=4)
    exact, draws = ls.FedSGD().observe(net, x, torch.tensor([2])), torch.Generator().manual_seed(0)
    update = {
        name: value + noise * value.square().mean().sqrt() * torch.randn(value.shape, generator=draws)
        for name, value in exact.message.update.items()
    }
    return dataclasses.replace(exact, messages=(dataclasses.replace(exact.message, update=update),))


def names(seen: Observation) -> list[str]:
    return [type(rival).__name__ for rival in rivals_for(seen, 300)]


@pytest.mark.parametrize("noise, gain", [(1e-3, 6), (0.3, -1)])
def test_least_squares_count_where_they_explain_more_than_noise(noise: float, gain: float) -> None:
    """Under weak noise a search with a prior is the one that is lost, under strong noise least squares are."""
    x = smooth_picture((1, 12, 12))
    seen = observe("dlg-lenet", x, noise)
    assert names(seen) == ["InvertingGradients", "IDLG"]
    search, attack = InvertingGradients()(seen, seed=0), HeadFirst()(seen, seed=0)
    assert float(ls.metrics.psnr(x, attack.inputs.clamp(0, 1))) > float(ls.metrics.psnr(x, search.inputs)) + gain
    assert not attack.certificates


def test_a_network_with_kinks_has_one_rival() -> None:
    assert names(observe("convnet", smooth_picture((3, 16, 16)), 0.0)) == ["InvertingGradients"]


def test_several_local_steps_are_not_one_gradient() -> None:
    net = ls.build_model("dlg-lenet", input_shape=(1, 12, 12), num_classes=4)
    protocol = ls.FedAvg(epochs=3, batch_size=1, lr=0.1)
    seen = protocol.observe(net, smooth_picture((1, 12, 12)), torch.tensor([2]))
    assert names(seen) == ["InvertingGradients"]
