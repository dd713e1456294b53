"""DP-SGD: clipping and noise are exactly what the promise is computed from, in every protocol."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.defense import Gradient
from leakscope.data import load_data
from leakscope.defenses import DEFENSES, DPSGD, epsilon_of
from leakscope.defenses.noise import clip_factors
from leakscope.federation import FedAvg, FedSGD
from leakscope.models import build_model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def example_gradients(examples: int = 6, size: float = 1.0) -> Gradient:
    draws = seeded(1)
    shapes = {"w": (5, 4), "b": (5,), "scale": ()}
    lengths = size * torch.logspace(-2, 2, examples)
    return {
        name: torch.randn(examples, *shape, generator=draws) * lengths.reshape(-1, *[1] * len(shape))
        for name, shape in shapes.items()
    }


def length(gradient: Gradient, example: int) -> float:
    return math.sqrt(sum(float(value[example].double().square().sum()) for value in gradient.values()))


def flat(update: Gradient) -> Tensor:
    return torch.cat([value.flatten() for value in update.values()])


def test_each_example_is_clipped_as_one_vector_over_all_tensors() -> None:
    gradients = example_gradients()
    before = {name: value.clone() for name, value in gradients.items()}
    clipped = DPSGD(clip=3.0, noise_multiplier=0.0).protect_example_gradients(gradients, seeded())
    kept = 0
    for example in range(6):
        old, new = length(gradients, example), length(clipped, example)
        assert new == pytest.approx(min(old, 3.0), rel=1e-6)
        kept += old <= 3.0
        for name, value in gradients.items():
            assert clipped[name].shape == value.shape
            assert torch.allclose(clipped[name][example], value[example] * min(1.0, 3.0 / old), rtol=1e-5)
            if old <= 3.0:
                assert torch.equal(clipped[name][example], value[example])
    assert 0 < kept < 6
    assert all(torch.equal(before[name], value) for name, value in gradients.items())


def test_clipping_survives_extremes() -> None:
    huge = {"w": torch.tensor([[1e30, 1e30], [0.0, 0.0]])}
    out = DPSGD(clip=1.0, noise_multiplier=0.0).protect_example_gradients(huge, seeded())["w"]
    assert out[0].norm() == pytest.approx(1.0)
    assert out[1].tolist() == [0.0, 0.0]
    half = {"w": torch.tensor([[60000.0, 60000.0]], dtype=torch.float16)}
    assert float(clip_factors(half, 1.0)) == pytest.approx(1 / math.hypot(60000, 60000))


def test_the_sum_over_examples_carries_the_stated_noise() -> None:
    zero = {"w": torch.zeros(7, 300, 200), "b": torch.zeros(7, 100)}
    noisy = DPSGD(clip=2.0, noise_multiplier=1.5).protect_example_gradients(zero, seeded())
    total = {name: value.sum(0) for name, value in noisy.items()}
    assert float(total["w"].std()) == pytest.approx(3.0, rel=0.01)
    assert abs(float(total["w"].mean())) < 0.05
    assert float(total["b"].std()) == pytest.approx(3.0, rel=0.25)
    again = DPSGD(clip=2.0, noise_multiplier=1.5).protect_example_gradients(zero, seeded())
    other = DPSGD(clip=2.0, noise_multiplier=1.5).protect_example_gradients(zero, seeded(1))
    assert torch.equal(noisy["w"], again["w"])
    assert not torch.equal(noisy["w"], other["w"])
    double = DPSGD(clip=2.0, noise_multiplier=1.5).protect_example_gradients({"b": zero["b"].double()}, seeded())
    assert double["b"].dtype == torch.float64


@pytest.fixture(scope="module")
def client() -> tuple[nn.Module, Tensor, Tensor]:
    tiles = load_data("tiles", limit=6)
    return build_model("mlp", input_shape=tiles.shape, num_classes=9, hidden=(8,)), tiles.x, tiles.y


def sent(protocol, client, defense, seed: int = 0) -> Tensor:
    return flat(protocol.observe(*client, defense, generator=seeded(seed)).message.update)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_wide_clip_without_noise_is_the_bare_gradient(client, reduction) -> None:
    protocol = FedSGD(reduction=reduction)
    protected = sent(protocol, client, DPSGD(clip=1e6, noise_multiplier=0.0))
    assert torch.allclose(protected, sent(protocol, client, None), rtol=1e-4, atol=1e-6)
    tight = sent(protocol, client, DPSGD(clip=1e-3, noise_multiplier=0.0))
    assert float(tight.norm()) <= 1e-3 * (1 if reduction == "mean" else 6) * 1.0001


def test_noise_of_the_mean_is_that_of_the_sum_over_the_number_of_examples(client) -> None:
    noise = {}
    for reduction in ("mean", "sum"):
        protocol = FedSGD(reduction=reduction)
        clean = sent(protocol, client, DPSGD(clip=1.0, noise_multiplier=0.0))
        noise[reduction] = sent(protocol, client, DPSGD(clip=1.0, noise_multiplier=2.0)) - clean
    assert float(noise["sum"].std()) == pytest.approx(2.0, rel=0.02)
    assert torch.allclose(noise["sum"], 6 * noise["mean"], atol=1e-5)


def test_fedavg_clips_and_draws_noise_at_each_local_step(client) -> None:
    protocol = FedAvg(epochs=3, batch_size=2, lr=0.1)
    tight = sent(protocol, client, DPSGD(clip=1e-3, noise_multiplier=0.0))
    assert float(tight.norm()) <= 9 * 0.1 * 1e-3 * 1.001
    # Where clipping leaves next to nothing, only the noise of nine steps remains: each 4 x 0.001 / 2 on the mean.
    noisy = sent(protocol, client, DPSGD(clip=1e-3, noise_multiplier=4.0))
    assert float(noisy.std()) == pytest.approx(0.1 * 3 * 4e-3 / 2, rel=0.03)


def test_the_promise_and_the_noise_belong_together() -> None:
    rule = DPSGD()
    assert repr(rule) == "DPSGD(clip=3.0, epsilon=1.0, noise_multiplier=None, delta=1e-05, steps=1, sampling_rate=1.0)"
    assert epsilon_of(rule.noise) <= 1.0 < epsilon_of(0.999 * rule.noise)
    assert rule.promised == 1.0
    direct = DPSGD(noise_multiplier=rule.noise)
    assert direct.epsilon is None
    assert direct.promised == pytest.approx(1.0, rel=1e-4)
    assert DPSGD(noise_multiplier=0.0).promised == math.inf
    long = DPSGD(epsilon=1.0, steps=600, sampling_rate=0.05)
    assert epsilon_of(long.noise, 0.05, 600) == pytest.approx(1.0, rel=1e-3)
    assert DPSGD(clip=1.0).noise == rule.noise, "the multiplier does not depend on the clip"
    assert DPSGD() == DPSGD(epsilon=1.0), "one defence, one identity"


def test_a_spec_names_one_of_the_two() -> None:
    assert DEFENSES.target("dp-sgd").build({"noise_multiplier": 2.0}) == DPSGD(noise_multiplier=2.0)
    assert DEFENSES.target("DPSGD").build({}).epsilon == 1.0
    rule = DPSGD.build({"epsilon": 10, "steps": 30, "sampling_rate": 0.1})
    assert DEFENSES.name_of(type(rule)) == "dp-sgd"
    assert DPSGD.build(dataclasses.asdict(rule)) == rule


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"epsilon": 1.0, "noise_multiplier": 1.0}, r"only one, got 1\.0 and 1\.0"),
        ({"clip": 0.0, "epsilon": -1.0, "delta": 1.0}, r"(?s)clip: expected.*epsilon: expected.*delta: expected"),
        ({"noise_multiplier": -1.0, "steps": 0}, r"(?s)noise_multiplier: expected.*steps: expected"),
        ({"sampling_rate": math.nan}, "sampling_rate: expected"),
        ({"clip": math.inf}, "clip: expected"),
        ({"epsilon": 1e-9}, "epsilon: expected one that noise can reach"),
    ],
)
def test_all_bad_settings_are_told(bad, words) -> None:
    with pytest.raises(ValueError, match=words):
        DPSGD(**bad)
