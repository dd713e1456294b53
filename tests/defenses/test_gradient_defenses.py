"""Clipping, dropout, quantisation, top-k and Laplace noise against their definitions, and where they change nothing."""

from __future__ import annotations

import math

import pytest
import torch

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense, Gradient
from leakscope.defenses import (
    Chain,
    GradientClipping,
    GradientDropout,
    GradientNoise,
    GradientPruning,
    GradientQuantisation,
    TopK,
)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def update() -> Gradient:
    return {"w": torch.randn(40, 30, generator=seeded()), "b": 10 * torch.randn(40, generator=seeded(1))}


def norm(update: Gradient) -> float:
    return math.sqrt(sum(float(value.double().square().sum()) for value in update.values()))


def through(defense: Defense, update: Gradient, seed: int = 0) -> Gradient:
    return defense.protect_message(defense.protect_gradient(update, seeded(seed)), seeded(seed))


@pytest.mark.parametrize(
    "defense",
    [
        GradientNoise(sigma=0.0),
        GradientNoise(sigma=0.0, law="laplace"),
        GradientClipping(norm=1e6),
        GradientPruning(fraction=0.0),
        TopK(share=1.0),
        GradientDropout(probability=0.0),
        GradientDropout(probability=0.0, scaled=True),
        GradientQuantisation(bits=32),
        Chain(parts=()),
    ],
    ids=repr,
)
def test_nothing_asked_for_is_nothing_done(defense: Defense, update: Gradient) -> None:
    same = through(defense, update)
    assert all(torch.equal(same[name], value) for name, value in update.items())
    channel = defense.channel()
    assert channel is not None
    assert channel.describe() in ("the gradient as it is", "clipped to 1e+06")


def test_clipping_shortens_the_whole_and_twice_is_once(update: Gradient) -> None:
    rule = GradientClipping(norm=5.0)
    once = rule.protect_gradient(update, seeded())
    assert norm(once) == pytest.approx(5.0, rel=1e-6)
    for name, value in update.items():
        assert torch.allclose(once[name], value * 5.0 / norm(update))
        assert torch.allclose(rule.protect_gradient(once, seeded())[name], once[name], rtol=1e-6)
    zero = {"w": torch.zeros(3)}
    assert torch.equal(rule.protect_gradient(zero, seeded())["w"], zero["w"])
    huge = {"w": torch.full((2,), 1e30)}
    assert norm(rule.protect_gradient(huge, seeded())) == pytest.approx(5.0, rel=1e-6)


@pytest.mark.parametrize(("law", "kurtosis"), [("gaussian", 3.0), ("laplace", 6.0)])
def test_noise_has_the_law_it_says(law: str, kurtosis: float) -> None:
    zero = {"w": torch.zeros(400_000, dtype=torch.float64)}
    noise = GradientNoise(sigma=0.5, law=law).protect_message(zero, seeded())["w"]
    assert abs(float(noise.mean())) < 0.005
    assert float(noise.std()) == pytest.approx(0.5, rel=0.01)
    assert float((noise / 0.5).pow(4).mean()) == pytest.approx(kurtosis, rel=0.05)
    # The median of |e| is sigma times 0.6745, or sigma / sqrt(2) times ln 2.
    median = 0.5 * (0.67449 if law == "gaussian" else math.log(2) / math.sqrt(2))
    assert float(noise.abs().median()) == pytest.approx(median, rel=0.01)


def test_top_k_sends_the_largest_and_is_pruning_said_otherwise(update: Gradient) -> None:
    sent = TopK(share=0.1).protect_message(update, seeded())
    pruned = GradientPruning(fraction=0.9).protect_message(update, seeded())
    assert all(torch.equal(sent[name], pruned[name]) for name in update)
    assert int((sent["w"] != 0).sum()) == 120
    assert TopK(share=0.1).channel() == GradientPruning(fraction=0.9).channel()


def test_dropout_zeroes_its_share_and_scaled_keeps_the_mean() -> None:
    ones = {"w": torch.ones(100_000)}
    plain = GradientDropout(probability=0.3).protect_message(ones, seeded())["w"]
    assert set(plain.tolist()) == {0.0, 1.0}
    assert float(plain.mean()) == pytest.approx(0.7, abs=0.01)
    scaled = GradientDropout(probability=0.3, scaled=True).protect_message(ones, seeded())["w"]
    assert torch.allclose(scaled, plain / 0.7)
    assert float(scaled.mean()) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_few_bits_are_few_even_values_and_the_nearest(bits: int, update: Gradient) -> None:
    for value, rounded in zip(
        update.values(), GradientQuantisation(bits=bits).protect_message(update, seeded()).values(), strict=True
    ):
        step = float(value.abs().max()) / (2 ** (bits - 1) - 1)
        assert len(rounded.unique()) <= 2**bits - 1
        assert float((rounded - value).abs().max()) <= step / 2 * 1.001
        assert torch.equal(rounded.abs().max(), value.abs().max())
        again = GradientQuantisation(bits=bits).protect_message({"w": rounded}, seeded())["w"]
        assert torch.allclose(again, rounded, rtol=1e-6)


def test_stochastic_rounding_keeps_the_mean() -> None:
    value = torch.full((200_000,), 0.3)
    value[0] = 1.0
    rounded = GradientQuantisation(bits=2, stochastic=True).protect_message({"w": value}, seeded())["w"]
    assert set(rounded.tolist()) == {0.0, 1.0}
    assert float(rounded.mean()) == pytest.approx(0.3, abs=0.005)


def test_signs_and_half_precision(update: Gradient) -> None:
    signs = GradientQuantisation(values="sign").protect_message(update, seeded())
    for name, value in update.items():
        assert torch.equal(signs[name].sign(), value.sign())
        assert torch.allclose(signs[name].abs(), value.abs().mean().expand_as(value))
        for half in ("float16", "bfloat16"):
            sent = GradientQuantisation(values=half).protect_message(update, seeded())[name]
            assert sent.dtype == value.dtype
            assert torch.equal(sent, value.to(getattr(torch, half)).float())
    out = GradientQuantisation(values="float16").protect_message({"w": torch.tensor([1e9, -1e9])}, seeded())["w"]
    assert out.tolist() == [65504.0, -65504.0]
    zero = {"w": torch.zeros(3)}
    for values in ("sign", "uniform", "float16"):
        assert torch.equal(GradientQuantisation(values=values).protect_message(zero, seeded())["w"], zero["w"])


def test_the_truth_fits_what_was_seen_through_each_channel(update: Gradient) -> None:
    """An adversary who simulates the true update sees nothing that does not fit."""
    for defense in (
        GradientClipping(norm=5.0),
        GradientPruning(fraction=0.9),
        GradientDropout(probability=0.5, scaled=True),
        GradientQuantisation(values="sign"),
        GradientQuantisation(bits=3),
        GradientQuantisation(bits=3, stochastic=True),
        Chain(parts=(GradientClipping(norm=5.0), GradientPruning(fraction=0.9), GradientQuantisation(bits=4))),
    ):
        seen, channel = through(defense, update), defense.channel()
        assert channel is not None
        simulated = channel.stand_in(update, channel.survivors(seen))
        if channel.rounds_evenly:
            simulated = channel.settled(simulated, seen)
        for name, value in seen.items():
            assert torch.allclose(simulated[name], value, rtol=1e-4, atol=1e-5), repr(defense)


def test_unreliable_tensors_are_zero_on_both_sides(update: Gradient) -> None:
    channel = Channel(unreliable=("w",))
    assert not bool(channel.reliable(update)["w"].any())
    assert torch.equal(channel.reliable(update)["b"], update["b"])
    assert not bool(channel.stand_in(update, channel.survivors(update))["w"].any())
