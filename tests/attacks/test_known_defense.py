"""A defence that the adversary knows: attacks pass what they simulate through it (Kerckhoffs's principle)."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import DLG, GaussNewton, InvertingGradients
from leakscope.contracts.channel import Channel
from leakscope.contracts.errors import MissingKnowledge
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.data import Examples, load_data
from leakscope.defenses import DPSGD, GradientNoise, GradientPruning
from leakscope.federation import FedSGD
from leakscope.limits import cramer_rao
from leakscope.matching import GradientMap, SingleGradient, Victim
from leakscope.models import build_model

pytestmark = pytest.mark.slow

SHAPE = (1, 8, 8)


def pictures(count: int, generator: torch.Generator) -> Tensor:
    x = torch.rand(count, *SHAPE, generator=generator, dtype=torch.float64)
    return (x + x.roll(1, 2) + x.roll(1, 3)) / 3


def smooth_net() -> nn.Module:
    return build_model("dlg-lenet", input_shape=SHAPE, num_classes=6).double()


# --- pruning ---------------------------------------------------------------------------------------------------------


def mean_decibels(examples: Examples, knowledge: Knowledge) -> float:
    """Mean PSNR of Inverting Gradients on each example by itself, nine tenths of its update pruned."""
    model = build_model("convnet", input_shape=(3, 32, 32), num_classes=examples.num_classes, filters=32)
    levels = []
    for n in range(len(examples.x)):
        x, y = examples.x[n : n + 1], examples.y[n : n + 1]
        seen = FedSGD().observe(model, x, y, GradientPruning(fraction=0.9), knowledge)
        found = InvertingGradients(iterations=100)(seen, seed=0)
        levels.append(-10 * math.log10(float((found.inputs - x).square().mean())))
    return sum(levels) / len(levels)


@pytest.mark.slow
def test_pruning_that_is_known_protects_less() -> None:
    """Measured: 16.2 dB without and 25.3 dB with the knowledge."""
    tiles = load_data("tiles", limit=2)
    gain = mean_decibels(tiles, Knowledge.adaptive_server) - mean_decibels(tiles, Knowledge.honest_server)
    assert gain >= 6


@pytest.mark.slow
def test_pruning_that_is_known_protects_less_on_real_pictures(real_data: Path) -> None:
    cifar = load_data("cifar10", path=real_data / "cifar-10-batches-bin", split="test").subset([0, 1])
    gain = mean_decibels(cifar, Knowledge.adaptive_server) - mean_decibels(cifar, Knowledge.honest_server)
    assert gain >= 6


def test_at_the_truth_a_known_mask_leaves_no_residual(generator: torch.Generator) -> None:
    x, y = pictures(2, generator), torch.tensor([1, 4])
    for scope in ("tensor", "global"):
        defense = GradientPruning(fraction=0.8, scope=scope)
        told = FedSGD().observe(smooth_net(), x, y, defense, Knowledge.adaptive_server)
        assert residual(told, x, y) < 1e-10
        assert residual(told.without_channel(), x, y) > 0.05


# --- noise -----------------------------------------------------------------------------------------------------------


def test_known_noise_is_weighed_by_its_level_and_reaches_the_floor(generator: torch.Generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    model = smooth_net()
    errors, floors = [], []
    for draw in range(5):
        noise = torch.Generator().manual_seed(draw)
        seen = FedSGD().observe(model, x, y, GradientNoise(sigma=1e-3), Knowledge.adaptive_server, noise)
        assert seen.channel == Channel(noise=1e-3)
        found = GaussNewton()(seen, seed=draw)
        assert found.flags == ()
        # Known by the channel or given by hand, it is the same estimate.
        by_hand = GaussNewton(noise=1e-3)(seen.without_channel(), seed=draw)
        assert torch.equal(found.inputs, by_hand.inputs)
        errors.append(float((found.inputs - x).square().mean()))
        mapping = GradientMap.of(seen, y)
        floors.append(cramer_rao(mapping, mapping.flat(x), seen.channel).rmse ** 2)
    assert 0.8 < (sum(errors) / sum(floors)) ** 0.5 < 1.5


def test_noise_that_differs_by_tensor_is_weighed_by_tensor(generator: torch.Generator) -> None:
    """Much noise on one tensor and little on the others: one level for all would believe the noisy one too much."""
    x, y = pictures(1, generator), torch.tensor([3])
    model = smooth_net()
    names = [name for name, _ in model.named_parameters()]
    channel = Channel(noise={name: 0.05 if name == names[0] else 1e-4 for name in names})
    seen = FedSGD().observe(model, x, y, knowledge=Knowledge.adaptive_server)
    drawn = {
        n: v + channel.level(n) * torch.randn(v.shape, generator=generator) for n, v in seen.message.update.items()
    }
    told = dataclasses.replace(seen.with_update(drawn), channel=channel)
    flat = dataclasses.replace(told, channel=Channel(noise=1e-3))
    weighed, alike = ((GaussNewton()(each, seed=0).inputs - x).square().mean() for each in (told, flat))
    assert float(weighed) < 0.1 * float(alike)


# --- clipping of each example ----------------------------------------------------------------------------------------


def residual(seen: Observation, x: Tensor, y: Tensor) -> float:
    """How much of the update the true examples leave unexplained, relative to it."""
    victim = Victim.of(seen)
    simulated, _ = SingleGradient()(victim, victim.tensors, x, y, {})
    update = seen.message.update
    gap = sum(float((update[name] - value).square().sum()) for name, value in simulated.items())
    return math.sqrt(gap / sum(float(value.square().sum()) for value in update.values()))


def example_gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[dict[str, Tensor]]:
    """One by one, by autograd alone."""
    names = [name for name, _ in model.named_parameters()]
    rows = []
    for n in range(len(x)):
        loss = nn.functional.cross_entropy(model(x[n : n + 1]), y[n : n + 1])
        rows.append(dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True)))
    return rows


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_clipping_that_is_known_is_simulated_example_by_example(count, reduction, generator) -> None:
    x, y = pictures(count, generator), torch.tensor([1, 4])[:count]
    model = smooth_net()
    rows = example_gradients(model, x, y)
    norms = [math.sqrt(sum(float(value.square().sum()) for value in row.values())) for row in rows]
    # Between the norms where there are two, so that one example is clipped and the other is not.
    clip = 0.5 * (min(norms) + max(norms)) if count == 2 else 0.5 * norms[0]
    defense = DPSGD(clip=clip, noise_multiplier=1e-6)
    seen = FedSGD(reduction=reduction).observe(model, x, y, defense, Knowledge.adaptive_server, generator)
    victim = Victim.of(seen)
    found, _ = victim.gradient(victim.tensors, x, y)
    for name, value in found.items():
        total = sum(row[name] * min(1.0, clip / norm) for row, norm in zip(rows, norms, strict=True))
        assert torch.allclose(value, total / (count if reduction == "mean" else 1), atol=1e-12)
    assert residual(seen, x, y) < 1e-3
    assert residual(seen.without_channel(), x, y) > 0.05


def test_a_small_clip_makes_every_example_count_the_same(generator: torch.Generator) -> None:
    x, y = pictures(2, generator), torch.tensor([1, 4])
    defense = DPSGD(clip=1e-3, noise_multiplier=1e-6)
    seen = FedSGD().observe(smooth_net(), x, y, defense, Knowledge.adaptive_server, generator)
    assert residual(seen, x, y) < 1e-3
    assert residual(seen.without_channel(), x, y) > 10


# --- what is withheld ------------------------------------------------------------------------------------------------


class NeedsLabels(DLG):
    requires: ClassVar[tuple[str, ...]] = ("num_examples", "labels")


def test_an_attack_that_needs_labels_is_refused_where_they_are_withheld(generator: torch.Generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    attack = NeedsLabels(iterations=1)
    for labels in ("no", "counts"):
        knowledge = dataclasses.replace(Knowledge.adaptive_server, labels=labels)
        seen = FedSGD().observe(smooth_net(), x, y, knowledge=knowledge)
        with pytest.raises(MissingKnowledge, match=r"NeedsLabels.*labels"):
            attack(seen)
    granted = dataclasses.replace(Knowledge.adaptive_server, labels="yes")
    found = attack(FedSGD().observe(smooth_net(), x, y, knowledge=granted))
    assert found.labels is not None
    assert torch.equal(found.labels, y)


def test_an_honest_server_is_not_told_the_defence(generator: torch.Generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    seen = FedSGD().observe(smooth_net(), x, y, GradientNoise(sigma=1e-3), Knowledge.honest_server)
    assert seen.channel is None
    with pytest.raises(ValueError, match="channel"):
        dataclasses.replace(seen, channel=Channel(noise=1e-3))


# --- knowledge that is left out --------------------------------------------------------------------------------------


def test_an_attack_that_ignores_the_defence_does_what_one_that_never_knew_it_does(generator: torch.Generator) -> None:
    net, x, y = smooth_net(), pictures(1, generator), torch.tensor([2])
    knowing = FedSGD().observe(net, x, y, GradientPruning(fraction=0.7), Knowledge.adaptive_server, generator)
    attack = InvertingGradients(iterations=5, compile="never")
    blind = dataclasses.replace(attack, ignore_defense=True)(knowing, seed=0).inputs
    assert torch.equal(blind, attack(knowing.without_channel(), seed=0).inputs)
    assert not torch.equal(blind, attack(knowing, seed=0).inputs)
    assert "ignore_defense=True" in repr(dataclasses.replace(attack, ignore_defense=True))
