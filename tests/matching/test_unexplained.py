"""What inputs leave of an update: the truth nothing but rounding and noise, a wrong visiting order half and more."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.defenses import GradientNoise
from leakscope.federation import FedAvg, FedSGD
from leakscope.matching.unexplained import UNEXPLAINED_SHARE, _left, is_unexplained, noise_share, unexplained
from leakscope.models import build_model

ORDER_KNOWN = dataclasses.replace(Knowledge.adaptive_server, labels="yes", batch_order=True)
ORDER_HIDDEN = dataclasses.replace(ORDER_KNOWN, batch_order=False)
X = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2])


def seen(protocol: Any, knowledge: Knowledge = ORDER_KNOWN, defense: Any = None) -> Observation:
    net = build_model("convnet", input_shape=(1, 8, 8), num_classes=4)
    return protocol.observe(net, X, Y, defense, knowledge, torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "client", [{}, {"momentum": 0.5}, {"optimizer": "adam", "lr": 0.01}, {"batch_size": 2}, {"epochs": 1, "lr": 0.05}]
)
def test_the_truth_leaves_rounding_and_a_wrong_order_does_not(client: dict[str, Any]) -> None:
    observation = seen(FedAvg(**{"epochs": 2, "batch_size": 1, "lr": 0.2, **client}))
    order = observation.training.batch_order
    assert order is not None
    assert unexplained(observation, X, Y) < 1e-4
    assert unexplained(observation, X, Y, order=order) < 1e-4
    assert unexplained(observation, X, Y, order=order[::-1]) > UNEXPLAINED_SHARE
    assert unexplained(observation, 1 - X, Y) > UNEXPLAINED_SHARE


def test_a_hidden_order_is_found_among_few() -> None:
    observation = seen(FedAvg(epochs=1, batch_size=1, lr=0.2), ORDER_HIDDEN)
    assert unexplained(observation, X, Y) < 1e-4
    assert unexplained(observation, X, Y.flip(0)) > UNEXPLAINED_SHARE


def test_a_gradient_and_a_step_of_it_have_one_unit() -> None:
    wrong = 1 - X
    gradient, step = seen(FedSGD()), seen(FedAvg(epochs=1, batch_size=3, lr=0.2))
    assert unexplained(gradient, wrong, Y) == pytest.approx(unexplained(step, wrong, Y), rel=1e-3)
    assert unexplained(gradient, X, Y) < 1e-5


def test_without_a_recipe_the_length_of_the_update_says_nothing() -> None:
    hidden = dataclasses.replace(Knowledge.eavesdropper, labels="yes")
    observation = seen(FedAvg(epochs=1, batch_size=3, lr=0.2), hidden)
    assert unexplained(observation, X, Y) < 1e-4
    assert unexplained(observation, 1 - X, Y) > UNEXPLAINED_SHARE


@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(epochs=2, batch_size=1, lr=0.2)])
def test_known_noise_is_what_the_truth_leaves(protocol: Any) -> None:
    observation = seen(protocol, defense=GradientNoise(sigma=0.05))
    entries = sum(value.numel() for value in observation.message.update.values())
    left, noise = unexplained(observation, X, Y), noise_share(observation)
    assert left == pytest.approx(noise, rel=0.1)
    assert not is_unexplained(left, noise, entries)
    assert is_unexplained(1.5 * left, noise, entries)


@pytest.mark.parametrize(
    ("left", "least", "entries", "expected"),
    [
        (UNEXPLAINED_SHARE * 0.99, 0.0, 10**6, False),
        (UNEXPLAINED_SHARE * 1.01, 0.0, 10**6, True),
        (0.5, 0.5, 100, False),
        (0.3, 0.5, 100, False),
        (0.58, 0.5, 100, False),
        (0.62, 0.5, 100, True),
    ],
)
def test_both_sides_of_the_threshold(left: float, least: float, entries: int, expected: bool) -> None:
    assert is_unexplained(left, least, entries) is expected


@pytest.mark.parametrize(
    ("observed", "found", "alone"),
    [(1e-7, 1e-14, True), (1e-7, 1e-12, False), (1e-5, 0.0, False), (1e-7, 1e-7, False)],
)
def test_a_tensor_that_is_rounding_alone_does_not_count(observed: float, found: float, alone: bool) -> None:
    seen = {"weight": torch.ones(10), "key bias": torch.full((10,), observed)}
    left = _left(seen, {"weight": torch.ones(10), "key bias": torch.full((10,), found)}, False)
    assert (left == 0) == (alone or found == observed)
