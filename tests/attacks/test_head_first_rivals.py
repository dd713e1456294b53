"""Rivals of head-first: what matching the whole update finds where the head is of no use."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

import leakscope as ls
from leakscope.attacks import HeadFirst, InvertingGradients
from leakscope.attacks.candidates import Candidate
from leakscope.attacks.head_first.case import Case
from leakscope.attacks.head_first.stages import rivals_for
from leakscope.contracts.observation import Observation

pytestmark = pytest.mark.slow


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
    return [type(rival).__name__ for rival in rivals_for(Case(HeadFirst(), seen, torch.Generator()))]


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


def found(distance: float, rough: float = 0.1, **facts: float) -> Candidate:
    """A candidate whose neighbours differ by so much."""
    inputs = rough * torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])
    return Candidate(inputs=inputs, method="", distance=distance, **facts)


@pytest.mark.parametrize(
    "better, worse",
    [
        (found(0.2), found(0.3)),
        (found(0.2), found(float("nan"))),
        # Equations that are met but for a few masks tell more than the update; others do not.
        (found(0.3, residual=5e-5), found(0.2)),
        (found(0.2), found(0.3, residual=2e-4)),
        (found(0.3, residual=1e-7), found(0.2, residual=1e-6)),
        # The more probable one, whatever is left.
        (found(0.3, surprise=5.0), found(0.2, surprise=6.0)),
        # Least squares fit noise, and must gain what they lose in smoothness where they are far rougher.
        (found(0.9), found(0.88, fair=0.9)),
        (found(0.8, fair=0.9), found(0.9)),
        (found(0.25, 0.29, fair=0.99), found(0.5)),
        (found(0.5), found(0.25, 0.8, fair=0.99)),
        (found(0.1, 0.8, fair=0.99), found(0.5)),
    ],
)
def test_candidates_are_ranked_by_one_rule(better: Candidate, worse: Candidate) -> None:
    assert better.better_than(worse)
    assert not worse.better_than(better)
    assert worse.better_than(None)
