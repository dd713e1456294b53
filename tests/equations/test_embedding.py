"""The features in front of the last layers, from an observation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import leakscope as ls
from leakscope.network.recorder import inputs_of


def pictures(count: int, seed: int = 0) -> Tensor:
    return torch.rand((count, 3, 32, 32), generator=torch.Generator().manual_seed(seed))


def features_of(model: nn.Module, layer: str, x: Tensor) -> Tensor:
    with torch.no_grad():
        return inputs_of(model.get_submodule(layer), model, x).flatten(1).double()


def error_of(found: Tensor, truth: Tensor) -> float:
    return float(((found - truth).norm(dim=1) / truth.norm(dim=1)).max())


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_every_batch_below_the_number_of_classes_leaks_its_features(count: int) -> None:
    model, x, y = ls.build_model("convnet"), pictures(count), torch.arange(count)
    observation = ls.FedSGD().observe(model, x, y)
    found = ls.recover_embedding(observation, torch.Generator().manual_seed(0))
    assert found.exact
    assert found.layer == "fc"
    assert found.residual < 1e-6
    assert error_of(found.features, features_of(model, "fc", x)) < 1e-5
