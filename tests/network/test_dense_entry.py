"""The first dense layer that reads each example once, and the derivatives of what lies behind it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leakscope.models import build_model
from leakscope.network.layers import DenseEntry, dense_entry, output_jacobian


def entry_of(model: nn.Module, shape: tuple[int, ...]) -> DenseEntry:
    entry = dense_entry(model, shape)
    assert isinstance(entry, DenseEntry)
    return entry


def test_finds_the_layer_and_the_map_it_reads() -> None:
    entry = entry_of(build_model("mlp", input_shape=(3, 8, 8), num_classes=4), (3, 8, 8))
    assert (entry.name, entry.weight_name, entry.bias_name) == ("fc1", "fc1.weight", "fc1.bias")
    assert entry.reads_input
    assert entry.shape == (3, 8, 8)
    entry = entry_of(build_model("femnist-cnn", input_shape=(1, 28, 28), num_classes=4), (1, 28, 28))
    assert not entry.reads_input
    assert entry.shape == (64, 7, 7)


def test_says_why_there_is_none() -> None:
    assert "no dense layer" in str(dense_entry(nn.Sequential(nn.Conv2d(1, 2, 4), nn.Flatten()), (1, 4, 4)))
    tokens = nn.Sequential(nn.Linear(4, 3), nn.Flatten())
    assert "no dense layer" in str(dense_entry(tokens, (5, 4)))
    shared = nn.Linear(4, 4)
    assert "more than once" in str(dense_entry(nn.Sequential(shared, nn.ReLU(), shared), (4,)))


@pytest.mark.parametrize("inplace", [False, True])
def test_derivatives_are_those_of_the_model_and_no_hook_is_left(inplace) -> None:
    draws = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    entry = entry_of(net, (3,))
    rows = torch.randn((6, 3), generator=draws, dtype=torch.float64)
    found = output_jacobian(net, entry, (3,), lambda x: x)(rows)
    for row, derivative in zip(rows, found, strict=True):
        inner = net[0](row[None]).detach()
        expected = torch.autograd.functional.jacobian(lambda z: net[1:](z.clone())[0], inner)[:, 0].T
        torch.testing.assert_close(derivative, expected)
    assert not any(module._forward_hooks for module in net.modules())
    assert all(parameter.requires_grad for parameter in net.parameters())
