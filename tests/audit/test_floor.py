"""What theory says of a setting is told once, at the truth, and never reaches an attack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audit_doubles import subject
from torch import Tensor, nn

from leakscope.audit.findings import _local_steps, describe_floor
from leakscope.contracts.defense import Defense
from leakscope.defenses import GradientNoise, GradientPruning
from leakscope.federation import FedAvg, FedSGD, SecureAggregation
from leakscope.limits import affordable_floor
from leakscope.matching import GradientMap, UnrolledSteps
from leakscope.models import build_model
from leakscope.results.records import plain


def floor(
    model: nn.Module, x: Tensor, y: Tensor, defense: Defense | None = None, *, protocol: Any = None
) -> dict[str, Any]:
    """As the row of the finding holds it."""
    found: dict[str, Any] = plain(describe_floor(subject(protocol or FedSGD(), model, x, y, defense)))
    return found


@pytest.fixture
def client(generator):
    model = build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=4)
    return model, torch.rand(2, 1, 8, 8, generator=generator), torch.tensor([1, 3])


@pytest.mark.parametrize("defense", [None, GradientNoise(sigma=0.05), GradientPruning(fraction=0.5)])
def test_floors_of_the_defences(client, defense) -> None:
    model, x, y = client
    found = floor(model, x, y, defense)
    assert found["unknowns"] == 128
    assert found["rank"] == 128
    assert found["method"] == "exact"
    assert found["rounding_only"] == (not isinstance(defense, GradientNoise))
    if isinstance(defense, GradientNoise):
        assert found["sigma"] == 0.05
        assert found["psnr"] < 60
    else:
        assert found["psnr"] > 80


def test_more_noise_is_a_higher_floor_in_proportion(client) -> None:
    model, x, y = client
    small, large = (floor(model, x, y, GradientNoise(sigma=sigma))["rmse"] for sigma in (0.01, 0.1))
    assert large / small == pytest.approx(10)


def test_what_cannot_be_told_is_a_reason(client) -> None:
    model, x, y = client

    class Other(Defense):
        def protect_message(self, update, generator):
            return update

    assert "Other" in floor(model, x, y, Other())["reason"]
    cohort = SecureAggregation(clients=2, protocol=FedAvg(epochs=2, batch_size=1, lr=0.1))
    assert "steps of its training" in floor(model, x, y, protocol=cohort)["reason"]


def test_a_blind_model_has_an_infinite_floor(generator) -> None:
    model = torch.nn.Sequential(torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(16, 6))
    x, y = torch.rand(1, 1, 8, 8, generator=generator), torch.tensor([1])
    found = floor(model, x, y)
    assert found["infinite"]
    assert found["rmse"] is None
    assert found["rank"] == 16


def test_a_defence_without_noise_leaves_rounding(client) -> None:
    model, x, y = client
    bare = floor(model, x, y)
    silent = floor(model, x, y, GradientNoise(sigma=0.0))
    assert (silent["rounding_only"], silent["sigma"]) == (True, 0.0)
    assert silent["rmse"] == pytest.approx(bare["rmse"])
    each, whole = (floor(model, x, y, GradientPruning(fraction=0.9, scope=scope)) for scope in ("tensor", "global"))
    assert each["rounding_only"]
    assert whole["rounding_only"]
    assert each["rmse"] != pytest.approx(whole["rmse"]), "the scope of pruning reaches the calculation"


def test_rounding_is_in_proportion_to_each_layer(generator) -> None:
    """Gradients of early layers are far smaller, and so is their rounding: depth alone hides nothing."""
    model = build_model("mlp", input_shape=(1, 6, 6), num_classes=4, hidden=(40,) * 8, activation="sigmoid")
    x, y = torch.rand(1, 1, 6, 6, generator=generator), torch.tensor([1])
    assert floor(model, x, y)["psnr"] > 100


def test_one_step_of_all_examples_has_the_floor_of_the_gradient(client) -> None:
    model, x, y = client
    gradient = floor(model, x, y, GradientNoise(sigma=0.05))
    # The noise is on the message, a tenth of the gradient.
    step = floor(model, x, y, GradientNoise(sigma=0.005), protocol=FedAvg(epochs=1, batch_size=2, lr=0.1))
    assert step["rmse"] == pytest.approx(gradient["rmse"], rel=1e-6)
    assert step["rank"] == gradient["rank"]


@pytest.mark.parametrize("recipe", [{"momentum": 0.5}, {"optimizer": "adam", "lr": 0.01}, {}])
def test_the_floor_of_local_steps_is_that_of_their_jacobian(client, recipe) -> None:
    """Against differences: the update of a client whose examples are moved a little."""
    model, x, y = client
    model, x = model.double(), x.double()
    protocol = FedAvg(**{"epochs": 2, "batch_size": 1, "lr": 0.1, **recipe})
    found = floor(model, x, y, protocol=protocol)
    assert found["rounding_only"]
    assert found["rank"] == 128
    about = subject(protocol, model, x, y, None)
    steps = _local_steps(about)
    assert not isinstance(steps, str)
    mapping = GradientMap.of(about.observation, y, steps=steps)
    flat = mapping.flat(x)
    direction = torch.randn(len(flat), dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    moved = [
        subject(protocol, model, mapping.pictures(flat + side * 1e-5 * direction), y, None).observation.message.update
        for side in (1, -1)
    ]
    change = torch.cat([(moved[0][name] - moved[1][name]).flatten() / 2e-5 for name in mapping.names])
    assert torch.allclose(mapping.linearise(flat).forward(direction), change, rtol=1e-4, atol=1e-8)
    assert torch.allclose(direction @ mapping.jacobian(flat, exact=True), change, rtol=1e-4, atol=1e-8)


def test_what_takes_too_long_is_a_reason(client) -> None:
    model, x, y = client
    about = subject(FedAvg(epochs=1, batch_size=2, lr=0.1), model, x, y, None)
    few, many = (
        affordable_floor(GradientMap.of(about.observation, y, steps=UnrolledSteps(0.1, ((0, 1),) * steps)))
        for steps in (2, 10**7)
    )
    assert not isinstance(few, str)
    assert "the floor was not computed" in many
