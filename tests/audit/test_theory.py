"""What theory says of a setting is told once, at the truth, and never reaches an attack."""

from __future__ import annotations

import math

import pytest
import torch

from leakscope.audit.theory import channel_of, describe_limits
from leakscope.defenses import Defense, GradientNoise, GradientPruning
from leakscope.federation import FedAvg, FedSGD
from leakscope.models import build_model


@pytest.fixture
def client(generator):
    model = build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=4)
    return model, torch.rand(2, 1, 8, 8, generator=generator), torch.tensor([1, 3])


@pytest.mark.parametrize("defense", [None, GradientNoise(sigma=0.05), GradientPruning(fraction=0.5)])
def test_floors_of_the_defences(client, defense) -> None:
    model, x, y = client
    found = describe_limits(FedSGD().observe(model, x, y, defense), x, y, defense)
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
    small, large = (
        describe_limits(FedSGD().observe(model, x, y), x, y, GradientNoise(sigma=sigma))["rmse"]
        for sigma in (0.01, 0.1)
    )
    assert large / small == pytest.approx(10)


def test_what_cannot_be_told_is_a_reason(client) -> None:
    model, x, y = client

    class Other(Defense):
        pass

    assert "Other" in describe_limits(FedSGD().observe(model, x, y), x, y, Other())["reason"]
    update = FedAvg(epochs=2, batch_size=1, lr=0.1).observe(model, x, y)
    assert "weight update" in describe_limits(update, x, y, None)["reason"]
    # Inputs of another shape are somebody's mistake, but no reason to lose the attack's result.
    assert "Error" in describe_limits(FedSGD().observe(model, x, y), x[:, :, :5], y, None)["reason"]


def test_a_blind_model_has_an_infinite_floor(generator) -> None:
    model = torch.nn.Sequential(torch.nn.AvgPool2d(2), torch.nn.Flatten(), torch.nn.Linear(16, 6))
    x, y = torch.rand(1, 1, 8, 8, generator=generator), torch.tensor([1])
    found = describe_limits(FedSGD().observe(model, x, y), x, y, None)
    assert found["infinite"]
    assert found["rmse"] is None
    assert found["rank"] == 16


def test_a_defence_without_noise_leaves_rounding() -> None:
    assert channel_of(GradientPruning(fraction=0.9, scope="global"), 1e-8).prune_scope == "global"
    assert channel_of(Defense(), 1e-8).noise == 1e-8
    assert math.isclose(channel_of(GradientNoise(sigma=0.0), 1e-8).noise, 1e-8)


def test_rounding_is_in_proportion_to_each_layer(generator) -> None:
    """Gradients of early layers are far smaller, and so is their rounding: depth alone hides nothing."""
    model = build_model("mlp", input_shape=(1, 6, 6), num_classes=4, hidden=(40,) * 8, activation="sigmoid")
    x, y = torch.rand(1, 1, 6, 6, generator=generator), torch.tensor([1])
    assert describe_limits(FedSGD().observe(model, x, y), x, y, None)["psnr"] > 100
