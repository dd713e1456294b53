"""Layers that determine a batch, and updates in which they do not; what the diagnosis makes of it."""

from __future__ import annotations

import copy
import dataclasses
import time
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import InvertingGradients
from leakscope.audit.assess import assess
from leakscope.contracts.defense import Defense
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.task import Regression
from leakscope.defenses import DPSGD, GradientNoise, GradientPruning
from leakscope.federation import FedAvg, FedSGD
from leakscope.limits.determined import determined_by
from leakscope.limits.diagnosis import diagnose
from leakscope.models import build_model
from leakscope.models.resnet import resnet18

SHAPE = (3, 16, 16)


@cache
def net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = resnet18(input_shape=SHAPE, num_classes=10, width=32)
        model(torch.rand(64, *SHAPE))
    return model.eval()


def batch(images: int = 1) -> tuple[Tensor, Tensor]:
    return torch.rand((images, *SHAPE), generator=torch.Generator().manual_seed(5)), torch.arange(images) % 10


def seen(images: int = 1, defense: Defense | None = None, protocol: Any = None, **more: Any) -> Observation:
    protocol = FedSGD() if protocol is None else protocol
    return protocol.observe(net(), *batch(images), defense, generator=torch.Generator().manual_seed(1), **more)


def guess(images: int = 1, inputs: Tensor | None = None) -> Reconstruction:
    x, y = batch(images)
    return Reconstruction(inputs=torch.full_like(x, 0.5) if inputs is None else inputs, labels=y, scores=torch.zeros(1))


@pytest.mark.parametrize("images", [1, 4])
def test_a_resnets_batch_is_determined_and_a_search_that_misses_it_failed(images: int) -> None:
    observation = seen(images)
    found = determined_by(observation)
    assert found is not None
    assert found.whole
    assert "stage" in found.layer
    missed = diagnose(observation, guess(images))
    assert (missed.outcome, missed.layer, missed.lowest) == ("optimiser failed", found.layer, found.lowest)
    assert f"down to {found.lowest!r}" in missed.reason
    assert diagnose(observation, guess(images, batch(images)[0])).outcome != "optimiser failed"


def test_a_clipped_update_is_explained_by_its_direction() -> None:
    observation = seen(2, DPSGD(clip=0.1, noise_multiplier=0.0))
    assert diagnose(observation, guess(2, batch(2)[0])).outcome != "optimiser failed"
    assert diagnose(observation, guess(2)).outcome == "optimiser failed"


def test_a_batch_with_more_places_than_channels_is_not() -> None:
    assert determined_by(seen(65)) is None  # 256 channels, 4 places of each image


@pytest.mark.parametrize(
    "defense, determined",
    [
        (GradientNoise(sigma=1e-4), False),
        (GradientPruning(fraction=0.5), False),
        (DPSGD(clip=0.1, noise_multiplier=0.0), True),
        (DPSGD(clip=0.1, noise_multiplier=0.1), False),
    ],
)
@pytest.mark.parametrize("knowledge", [Knowledge.honest_server, Knowledge.adaptive_server])
def test_noise_and_zeros_end_it_whether_they_are_known_or_not(
    defense: Defense, determined: bool, knowledge: Knowledge
) -> None:
    observation = seen(2, defense, knowledge=knowledge)
    assert (determined_by(observation) is not None) is determined
    assert (diagnose(observation, guess(2)).layer is not None) is determined


@pytest.mark.parametrize(
    "settings, determined",
    [
        ({"epochs": 1, "batch_size": 2, "lr": 0.5}, True),
        ({"epochs": 2, "batch_size": 2, "lr": 0.5}, True),
        ({"epochs": 2, "batch_size": 2, "lr": 0.5, "batchnorm": "train"}, False),
        ({"epochs": 1, "batch_size": 1, "lr": 0.5}, False),
        ({"epochs": 2, "batch_size": 2, "lr": 0.5, "momentum": 0.9}, False),
    ],
)
def test_plain_local_steps_are_a_larger_batch(settings: dict[str, Any], determined: bool) -> None:
    assert (determined_by(seen(2, protocol=FedAvg(**settings))) is not None) is determined


def test_a_layer_with_dead_channels_gives_way_to_another() -> None:
    model = copy.deepcopy(net())
    before = determined_by(FedSGD().observe(model, *batch()))
    assert before is not None
    block, _, _ = before.layer.rpartition(".")
    assert before.layer.endswith("conv2")
    with torch.no_grad():
        model.get_submodule(f"{block}.norm1").bias.fill_(-9.0)
    after = determined_by(FedSGD().observe(model, *batch()))
    assert after is not None
    assert after.layer != before.layer


def test_layers_that_are_not_sent_tell_nothing() -> None:
    observation = seen()
    message = observation.message
    sent = {name: value for name, value in message.update.items() if "stage" not in name}
    partial = dataclasses.replace(observation, messages=(dataclasses.replace(message, update=sent, partial=True),))
    found = determined_by(partial)
    assert found is not None
    assert (found.layer, found.whole) == ("head.fc1", False)
    told = diagnose(partial, guess())
    assert (told.outcome, told.layer) == ("undecided", "head.fc1")
    assert "256 numbers of each example, whose input has 768" in told.reason


@pytest.mark.parametrize("options, whole", [({}, True), ({"learned_positions": False}, False), ({"dim": 16}, False)])
def test_a_vits_image_is_determined_by_its_positions(options: dict[str, Any], whole: bool) -> None:
    model = build_model("vit", input_shape=SHAPE, **{"dim": 32, "depth": 1, **options})
    found = determined_by(FedSGD().observe(model, *batch()))
    assert (found is not None and found.layer == "embedding" and found.whole) is whole
    noisy = FedSGD().observe(model, *batch(), GradientNoise(sigma=0.1), generator=torch.Generator().manual_seed(0))
    assert determined_by(noisy) is None


@pytest.mark.parametrize("images", [1, 2])
def test_no_convolution_behind_a_smooth_activation_determines_a_batch(images: int) -> None:
    layers = nn.Conv2d(3, 32, 3, 4, 1), nn.Softplus(), nn.Conv2d(32, 64, 3, padding=1), nn.Softplus()
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2))
    found = determined_by(FedSGD().observe(model, *batch(images)))
    assert found is None or found.layer != "2"


@pytest.mark.parametrize("pooled, whole", [(False, True), (True, False)])
def test_features_behind_a_narrow_place_are_not_the_input(pooled: bool, whole: bool) -> None:
    front = nn.AvgPool2d(2) if pooled else nn.Identity()
    stem = nn.Conv2d(3, 32, 5, 2 - pooled, 2), nn.ReLU()
    layers = [*stem, nn.Conv2d(32, 256, 3, 2, 1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(front, *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 2))
    found = determined_by(FedSGD().observe(model, *batch()))
    assert found is not None
    assert found.numbers >= found.size or found.lowest == "1"
    assert found.whole is whole


def test_models_of_other_kinds_are_left_alone() -> None:
    x, _ = batch()
    torch.manual_seed(0)  # with others no unit may be active
    line = nn.Sequential(nn.Flatten(), nn.Linear(768, 4), nn.ReLU(), nn.Linear(4, 2))
    assert determined_by(FedSGD().observe(line, x, torch.rand(1, 2), task=Regression())) is None
    text = nn.Sequential(nn.Flatten(), nn.Linear(768, 4), nn.ReLU(), nn.Linear(4, 2))
    found = determined_by(FedSGD().observe(text, x, torch.tensor([1])))
    assert found is not None  # the input of the first layer follows from the one above
    assert (found.layer, found.lowest, found.whole) == ("3", "1", True)
    unknown = dataclasses.replace(Knowledge.honest_server, num_examples=False)
    assert determined_by(FedSGD().observe(text, x, torch.tensor([1]), knowledge=unknown)) is None


def test_it_takes_well_under_a_second_at_full_width() -> None:
    model = build_model("resnet18").eval()
    observation = FedSGD().observe(model, torch.rand(1, 3, 32, 32), torch.tensor([1]))
    started = time.process_time()
    assert determined_by(observation) is not None
    assert time.process_time() - started < 1


def test_an_assessment_of_a_weak_attack_says_so() -> None:
    observation = seen(2)
    found = assess(observation, InvertingGradients(iterations=2), batch(2), controls=())
    assert found.reconstruction is not None
    assert found.reconstruction.diagnosis is not None
    assert found.reconstruction.diagnosis.outcome == "optimiser failed"
