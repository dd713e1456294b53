"""The most probable pictures under noise of a known level."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

import leakscope as ls
from leakscope.attacks import HeadFirst
from leakscope.attacks.head_first.case import Case
from leakscope.attacks.head_first.noise import (
    MOST_PROBABLE,
    RATE,
    MostProbable,
    _differences,
    _leading,
    _Posterior,
    noise_channel,
)
from leakscope.contracts.channel import Channel
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.defenses import GradientNoise
from leakscope.metrics import psnr

pytestmark = pytest.mark.slow

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


def known(seen: Observation, x: Tensor, y: Tensor, iterations: int = 1) -> Case:
    """The case with a result, before known noise is looked at."""
    case = Case(HeadFirst(iterations=iterations), seen, draws(0))
    case.best = dataclasses.replace(case.candidate(x, "known", labels=y), distance=0.0)
    return case


def observe(net: nn.Module, x: Tensor, y: Tensor, law: str = "gaussian", sigma: float = SIGMA) -> Observation:
    defense = GradientNoise(sigma=sigma, law=law)
    return ls.FedSGD().observe(net, x, y, defense, Knowledge.adaptive_server, draws(5))


@pytest.mark.parametrize("law", ["gaussian", "laplace"])
def test_knowing_the_level_helps(net: nn.Module, pictures: tuple[Tensor, Tensor], law: str) -> None:
    x, y = pictures[0][:1], pictures[1][:1]
    seen = observe(net, x, y, law)
    attack = HeadFirst(iterations=100, tries=1)
    knowing, ignoring = attack(seen), dataclasses.replace(attack, ignore_defense=True)(seen)
    assert knowing.info["method"] == MOST_PROBABLE
    assert knowing.info["noise_ratio"] < 1.2
    assert float(psnr(x, knowing.inputs)) > float(psnr(x, ignoring.inputs.clamp(0, 1))) + 1.5
    assert "noise_ratio" not in ignoring.info


def test_a_result_is_replaced_by_a_more_probable_one_only(net: nn.Module, pictures: tuple[Tensor, Tensor]) -> None:
    """The true picture, handed in as a result, stays: a few steps from grey do not come near it."""
    x, y = pictures[0][:1], pictures[1][:1]
    seen = observe(net, x, y, sigma=1e-3)
    kept = known(seen, x, y)
    kept.take(MostProbable())
    assert torch.equal(kept.result().inputs, x)
    assert kept.result().info["noise_ratio"] == pytest.approx(len_ratio(seen, x), abs=0.03)
    better = known(seen, torch.full_like(x, 0.5), y, iterations=60)
    better.take(MostProbable())
    assert better.result().info["method"] == MOST_PROBABLE
    assert float(psnr(x, better.result().inputs)) > float(psnr(x, torch.full_like(x, 0.5))) + 6


def test_without_knowledge_of_noise_nothing_changes(net: nn.Module, pictures: tuple[Tensor, Tensor]) -> None:
    x, y = pictures[0][:1], pictures[1][:1]
    seen = observe(net, x, y)
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
        case = known(other, x, y)
        best = case.best
        case.take(MostProbable())
        assert case.best is best
        assert case.noise is None
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
    grey = torch.full_like(x, 0.5)
    case = known(seen, grey, y, iterations=100)
    case.take(MostProbable())
    found = case.result()
    assert found.info["method"] == MOST_PROBABLE
    assert float(psnr(x, found.inputs).mean()) > float(psnr(x, grey).mean()) + 3
