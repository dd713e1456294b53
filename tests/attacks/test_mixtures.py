"""Attacks that know of MixUp take its mixtures apart; those that do not are left with mixtures."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import HeadFirst, InvertingGradients
from leakscope.attacks.mixtures import KnownShares, is_mixed, read_mixing
from leakscope.contracts.channel import Channel
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.defenses import GradientNoise, MixUp
from leakscope.equations.embedding import recover_embedding
from leakscope.federation import FedAvg, FedSGD, SecureAggregation
from leakscope.metrics import psnr
from leakscope.metrics.assignment import assign
from leakscope.models import build_model


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, seed: int = 0, channels: int = 1, side: int = 8) -> Tensor:
    x = torch.rand((count, channels, side, side), generator=seeded(seed))
    for axis in (2, 3):
        x = (x + x.roll(1, axis) + x.roll(-1, axis)) / 3
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    return (x - low) / (high - low)


def mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        return build_model("mlp", input_shape=(1, 8, 8), num_classes=10, hidden=40)


def mixed(x: Tensor, y: Tensor, seed: int = 3, net: nn.Module | None = None, **facts: object) -> Observation:
    known = dataclasses.replace(Knowledge.adaptive_server, **facts)  # type: ignore[arg-type]
    return FedSGD().observe(net or mlp(), x, y, MixUp(), known, seeded(seed))


def least_psnr(x: Tensor, guess: Tensor) -> float:
    return float(psnr(x, guess.clamp(0, 1)[assign(x.flatten(1), guess.flatten(1))]).min())


LABELS = torch.tensor([3, 8, 0, 6])


@pytest.mark.parametrize("seed", [0, 1])
def test_a_batch_of_four_classes_comes_back_and_not_to_who_does_not_know(seed: int) -> None:
    x = pictures(4, seed)
    seen = mixed(x, LABELS, seed)
    result = HeadFirst()(seen, seed=0)
    assert least_psnr(x, result.inputs) > 60
    order = assign(x.flatten(1), result.inputs.flatten(1))
    assert result.labels is not None
    assert result.labels[order].tolist() == LABELS.tolist()
    assert "defence approximated" not in result.flags
    assert all(proof is not None and proof.free_directions == 0 for proof in result.certificates)
    assert HeadFirst().knows_defense(seen)
    blind = InvertingGradients(ignore_defense=True, iterations=40)(seen, seed=0)
    assert least_psnr(x, blind.inputs) < 25


def test_a_search_looks_for_the_parts_themselves() -> None:
    x = pictures(4)
    seen = mixed(x, LABELS, 0)
    knowing, ignoring = (
        least_psnr(x, InvertingGradients(iterations=150, ignore_defense=ignore)(seen, seed=0).inputs)
        for ignore in (False, True)
    )
    assert knowing > ignoring + 3


def test_shares_mix_inputs_and_targets_alike() -> None:
    channel = KnownShares(shares=((0.6, 0.4), (0.5, 0.5)))
    x, soft = channel.mix(torch.tensor([[1.0], [0.0]]), torch.eye(2))
    assert x.flatten().tolist() == pytest.approx([0.6, 0.5])
    assert soft[0].tolist() == pytest.approx([0.6, 0.4])


def test_soft_labels_of_the_mixtures_are_those_the_client_trained_on() -> None:
    x = pictures(4)
    rule = MixUp(classes=10)
    draws = seeded(3)
    torch.randint(2**62, (1,), generator=draws)  # what the client seeds its network with
    _, soft = rule.protect_batch(x, LABELS, draws)
    mixing = read_mixing(mixed(x, LABELS), seeded())
    assert mixing.observation.labels is not None
    assert torch.cdist(soft, mixing.observation.labels).amin(1).max() < 1e-4
    assert not is_mixed(mixing.observation)


def test_known_labels_narrow_the_search_and_one_example_is_not_mixed() -> None:
    x = pictures(4)
    result = HeadFirst()(mixed(x, LABELS, labels="yes"), seed=0)
    assert least_psnr(x, result.inputs) > 60
    one = mixed(x[:1], LABELS[:1])
    assert one.channel == Channel()
    assert least_psnr(x[:1], HeadFirst()(one, seed=0).inputs) > 60


def test_where_the_head_tells_nothing_mixtures_are_called_so() -> None:
    x, y = pictures(12), torch.arange(12) % 10
    result = HeadFirst(iterations=10)(mixed(x, y), seed=0)
    assert "defence approximated" in result.flags
    assert any("mixtures" in note for note in result.notes)
    assert result.inputs.shape == x.shape


def test_the_embedding_of_mixtures_is_not_taken_for_that_of_examples() -> None:
    with pytest.raises(NotApplicable, match="mixtures"):
        recover_embedding(mixed(pictures(4), LABELS))


def test_channels_of_protocols_and_chains_say_that_examples_are_mixed() -> None:
    rule = MixUp()
    one_step, many = FedAvg(epochs=1, batch_size=4), FedAvg(epochs=2, batch_size=2)
    mixing = one_step.channel(rule, 4)
    assert mixing is not None
    assert mixing.mixed == 2
    assert many.channel(rule, 4) is None
    cohort = SecureAggregation(clients=2).channel(rule, 3)  # of two examples and of one
    assert cohort is not None
    assert cohort.mixed == 2
    assert cohort.beyond_theory is not None
    noisy = FedSGD().observe(
        mlp(), pictures(4), LABELS, [rule, GradientNoise(sigma=0.1)], Knowledge.adaptive_server, seeded()
    )
    assert noisy.channel == Channel(mixed=2, noise=0.1)
    assert "mixtures of 2" in noisy.channel.describe()
    result = HeadFirst(iterations=5)(noisy, seed=0)
    assert "defence approximated" in result.flags
