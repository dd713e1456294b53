"""The most probable pictures under noise of a known level."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import leakscope as ls
from leakscope.attacks import HeadFirst
from leakscope.attacks.head_first.noise import (
    MOST_PROBABLE,
    RATE,
    _differences,
    _leading,
    _Posterior,
    noise_channel,
    with_known_noise,
)
from leakscope.contracts.channel import Channel
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.defenses import GradientNoise
from leakscope.metrics import psnr

SIGMA = 0.01


def draws(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # torch's layers draw from no other generator
        layers = [nn.Conv2d(3, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 64, 9))


@pytest.fixture(scope="module")
def pictures() -> tuple[Tensor, Tensor]:
    data = ls.load_data("tiles")
    return nn.functional.avg_pool2d(data.x[:3], 2), data.y[:3]


def len_ratio(seen: Observation, x: Tensor) -> float:
    """What pictures leave that were not fitted, in the units of some that were."""
    entries = sum(value.numel() for value in seen.message.update.values())
    return entries / (entries - x.numel())


def observe(net: nn.Module, x: Tensor, y: Tensor, law: str = "gaussian", sigma: float = SIGMA) -> Observation:
    defense = GradientNoise(sigma=sigma, law=law)
    return ls.FedSGD().observe(net, x, y, defense, Knowledge.adaptive_server, draws(5))


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_knowing_the_level_helps(net: nn.Module, pictures: tuple[Tensor, Tensor], law: str) -> None:
    x, y = pictures[0][:1], pictures[1][:1]
    seen = observe(net, x, y, law)
    attack = HeadFirst(iterations=100, tries=1)
    knowing, ignoring = attack(seen), dataclasses.replace(attack, ignore_defense=True)(seen)
    assert knowing.info["way"] == MOST_PROBABLE
    assert knowing.info["noise_ratio"] < 1.2
    assert float(psnr(x, knowing.inputs)) > float(psnr(x, ignoring.inputs.clamp(0, 1))) + 1.5
    assert "noise_ratio" not in ignoring.info


def test_a_result_is_replaced_by_a_more_probable_one_only(net: nn.Module, pictures: tuple[Tensor, Tensor]) -> None:
    """The true picture, handed in as a result, stays: a few steps from grey do not come near it."""
    x, y = pictures[0][:1], pictures[1][:1]
    seen = observe(net, x, y, sigma=1e-3)
    true = Reconstruction(inputs=x, labels=y, scores=torch.zeros(1))
    kept = with_known_noise(true, seen, None, draws(0), iterations=1)
    assert torch.equal(kept.inputs, x)
    assert kept.info["noise_ratio"] == pytest.approx(len_ratio(seen, x), abs=0.03)
    grey = dataclasses.replace(true, inputs=torch.full_like(x, 0.5))
    better = with_known_noise(grey, seen, None, draws(0), iterations=60)
    assert better.info["way"] == MOST_PROBABLE
    assert float(psnr(x, better.inputs)) > float(psnr(x, grey.inputs)) + 6


def test_without_knowledge_of_noise_nothing_changes(net: nn.Module, pictures: tuple[Tensor, Tensor]) -> None:
    x, y = pictures[0][:1], pictures[1][:1]
    seen = observe(net, x, y)
    result = Reconstruction(inputs=x, labels=y, scores=torch.zeros(1))
    others = [
        seen.without_channel(),
        *(
            dataclasses.replace(seen, channel=channel)
            for channel in (
                Channel(),
                Channel(noise=0.1, prune=0.5),
                Channel(noise=0.1, rounding="sign"),
                Channel(noise={name: float("bias" in name) for name in seen.message.update}),
            )
        ),
        dataclasses.replace(seen, messages=(dataclasses.replace(seen.message, kind="weight_delta"),)),
    ]
    for other in others:
        assert noise_channel(other) is None
        assert with_known_noise(result, other, None, draws(0), iterations=1) is result
    assert noise_channel(seen) is seen.channel


def test_the_objective_is_the_prior_and_half_the_squares(net: nn.Module, pictures: tuple[Tensor, Tensor]) -> None:
    """At the truth of an update without noise only the prior is left; small residuals count by half their squares."""
    x, y = pictures[0][:2].double(), pictures[1][:2]
    clean = ls.FedSGD().observe(net.double(), x, y)
    net.float()
    posterior = _Posterior(clean, Channel(noise=1e3), y, None)
    prior = RATE * float(_differences(x))
    assert posterior.value(x) == pytest.approx(prior, rel=1e-6)
    moved = x + 0.01 * torch.randn(x.shape, generator=draws(1), dtype=x.dtype)
    gaps = sum(float((value - clean.message.update[n]).square().sum()) for n, value in posterior.sent(moved).items())
    likelihood = posterior.value(moved) - RATE * float(_differences(moved))
    assert likelihood == pytest.approx(gaps / 2e6, rel=1e-3)


def test_the_leading_singular_vector_is_the_output_gradient(net: nn.Module, pictures: tuple[Tensor, Tensor]) -> None:
    x, y = pictures[0][:1], pictures[1][:1]
    outputs = net(x).detach()
    true = torch.softmax(outputs, 1) - nn.functional.one_hot(y, 9)
    clean = _leading(ls.FedSGD().observe(net, x, y))
    assert clean is not None
    assert torch.allclose(clean.float(), true, atol=1e-5)
    noisy = observe(net, x, y)
    by_vector = _leading(noisy)
    assert by_vector is not None
    by_bias = noisy.message.update["5.bias"][None]
    assert (by_vector - true).norm() < (by_bias - true).norm()


def test_a_batch_is_searched_with_its_labels(net: nn.Module, pictures: tuple[Tensor, Tensor]) -> None:
    x, y = pictures
    seen = observe(net, x, y, sigma=1e-3)
    grey = Reconstruction(inputs=torch.full_like(x, 0.5), labels=y, scores=torch.zeros(3))
    found = with_known_noise(grey, seen, None, draws(0), iterations=100)
    assert found.info["way"] == MOST_PROBABLE
    assert float(psnr(x, found.inputs).mean()) > float(psnr(x, grey.inputs).mean()) + 3
