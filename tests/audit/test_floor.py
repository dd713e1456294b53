"""What theory says of a setting is told once, at the truth, and never reaches an attack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from audit_doubles import subject
from torch import Tensor, nn

from leakscope.audit.floor import describe_floor
from leakscope.contracts.defense import Defense
from leakscope.defenses import GradientNoise, GradientPruning
from leakscope.federation import FedAvg, FedSGD
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
        pass

    assert "Other" in floor(model, x, y, Other())["reason"]
    assert "weight update" in floor(model, x, y, protocol=FedAvg(epochs=2, batch_size=1, lr=0.1))["reason"]


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
