"""Counts of what each layer's gradient determines, against what the attack reaches."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from leakscope.equations.convolution_equations import LEAST_EQUATIONS
from leakscope.limits.reach import layer_reaches, lowest_layer
from leakscope.models import build_model


def test_resnet18_is_determined_by_its_last_stage() -> None:
    started = time.process_time()
    layers = layer_reaches(build_model("resnet18"), (3, 32, 32))
    assert time.process_time() - started < 2
    named = {layer.name: layer for layer in layers}
    assert named["stages.stage4.1.conv2"].alone == 512 // 16
    assert named["stages.stage3.1.conv2"].alone == 256 // 64
    assert named["stages.stage1.0.conv1"].alone == 0
    assert named["stages.stage1.0.conv1"].below == 0  # 576 equations, 1024 places
    assert named["stages.stage4.0.conv1"].below == int(4 * (512 + 512) / LEAST_EQUATIONS) // 64
    assert named["head.fc1"].alone == 9
    assert lowest_layer(layers, 1)[1].startswith("stages.stage2")
    assert lowest_layer(layers, 33) is None


@pytest.mark.parametrize(("dim", "alone"), [(64, 0), (68, 1)])
def test_a_patch_embedding_determines_one_image_with_fewer_tokens_than_units(dim: int, alone: int) -> None:
    layers = layer_reaches(build_model("vit", dim=dim), (3, 32, 32))
    assert layers[0].alone == alone
    assert "64 tokens" in layers[0].reason
    fixed = layer_reaches(build_model("vit", dim=dim, learned_positions=False), (3, 32, 32))
    assert fixed[0].alone == 0


def test_frozen_layers_tell_nothing() -> None:
    net = build_model("convnet")
    before = {layer.name: layer for layer in layer_reaches(net, (3, 32, 32))}
    net.get_submodule("fc").requires_grad_(False)
    after = layer_reaches(net, (3, 32, 32))[-1]
    assert (before["fc"].alone, after.alone, after.below, after.reason) == (9, 0, 0, "frozen")


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(64, 8, 3, 2, 1), nn.Conv2d(64, 8, 1), nn.Conv2d(64, 8, 3), nn.Conv2d(64, 64, 3, 1, 1, 1, 64)]
)
def test_convolutions_that_are_not_factored_say_why(layer: nn.Conv2d) -> None:
    net = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(layer.out_channels, 4))
    assert layer_reaches(net, (64, 4, 4))[0].alone == 0
    assert "stride 1" in layer_reaches(net, (64, 4, 4))[0].reason
    plain = nn.Sequential(nn.Conv2d(64, 8, 3, 1, 1), *net[1:-1], nn.Linear(8, 4))
    assert layer_reaches(plain, (64, 4, 4))[0].alone == 4


@pytest.mark.parametrize(("pooling", "lowest"), [(True, "3"), (False, "0")])
def test_a_peel_ends_behind_a_pooling(pooling: bool, lowest: str) -> None:
    between = nn.MaxPool2d(2) if pooling else nn.Identity()
    first, second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
    net = nn.Sequential(first, nn.ReLU(), between, second, nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    net(torch.zeros(1, 3, 8, 8))
    assert lowest_layer(layer_reaches(net, (3, 8, 8)), 1) == ("3", lowest)
