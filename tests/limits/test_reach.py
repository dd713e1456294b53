"""Counts of what each layer's gradient determines, against what the attack reaches."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from leakscope.equations.convolution_equations import LEAST_EQUATIONS
from leakscope.equations.peeling import peel
from leakscope.limits import limits
from leakscope.limits.reach import layer_reaches, lowest_layer
from leakscope.models import build_model
from leakscope.network.gates import read_gated


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
    assert (layers[0].limit, layers[0].places, layers[0].units) == ("positions", 64, dim)
    fixed = layer_reaches(build_model("vit", dim=dim, learned_positions=False), (3, 32, 32))
    assert fixed[0].alone == 0


def test_frozen_layers_tell_nothing() -> None:
    net = build_model("convnet")
    before = {layer.name: layer for layer in layer_reaches(net, (3, 32, 32))}
    net.get_submodule("fc").requires_grad_(False)
    after = layer_reaches(net, (3, 32, 32))[-1]
    assert (before["fc"].alone, after.alone, after.below, after.limit) == (9, 0, 0, "frozen")


@pytest.mark.parametrize(
    ("layer", "limit", "alone"),
    [
        (nn.Conv2d(64, 64, 3, 1, 1), "places", 4),
        (nn.Conv2d(64, 64, 3), "places", 4),
        (nn.Conv2d(64, 64, 5, padding="same"), "places", 4),
        (nn.Conv2d(64, 11, 3, 1, 1), "places", 3),  # too few outputs for the corner of four
        (nn.Conv2d(15, 64, 3), "places", 0),
        (nn.Conv2d(64, 64, 3, 1, 2), "padding", 0),
        (nn.Conv2d(64, 64, 3, 2, 1), "stride", 0),
        (nn.Conv2d(64, 64, 2, 1, 0, 2), "dilation", 0),
        (nn.Conv2d(15, 64, 1), "kernel", 0),
        (nn.Conv2d(64, 64, 3, 1, 1, 1, 64), "groups", 0),
    ],
)
def test_convolutions_say_what_limits_them(layer: nn.Conv2d, limit: str, alone: int) -> None:
    end = nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(layer.out_channels, 4)
    net = nn.Sequential(nn.Conv2d(3, layer.in_channels, 3, 2, 1), nn.ReLU(), layer, *end)
    first, second, _ = layer_reaches(net, (3, 8, 8))
    assert (second.limit, second.alone) == (limit, alone)
    assert first.limit == ("model" if limit == "groups" else "stride")
    assert bool(first.reason) is (limit == "groups")


@pytest.mark.parametrize(("side", "limit", "alone"), [(4, "masks", 1), (5, "kernel", 0)])
def test_a_pointwise_top_tells_one_image_of_few_places(side: int, limit: str, alone: int) -> None:
    below = nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU()
    net = nn.Sequential(
        *below, nn.Conv2d(32, 48, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 4)
    )
    top = layer_reaches(net, (3, 2 * side, 2 * side))[1]
    assert (top.limit, top.alone, top.pooled) == (limit, alone, True)


@pytest.mark.parametrize(("side", "below"), [(9, 2), (10, 0)])
def test_rows_that_a_stride_leaves_out_are_not_told(side: int, below: int) -> None:
    end = nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 4)
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 64, 3, 2), *end)
    assert layer_reaches(net, (3, side, side))[1].below == below


def test_without_a_relu_in_front_nothing_separates_images() -> None:
    net = nn.Sequential(nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 4))
    assert [layer.limit for layer in layer_reaches(net, (64, 4, 4))] == ["relu", "head"]


def test_a_model_that_is_not_peeled_says_why() -> None:
    net = nn.Sequential(nn.Conv2d(3, 64, 3, 2, 1), nn.GELU(), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(256, 4))
    first, second, head = layer_reaches(net, (3, 8, 8))
    assert first.limit == second.limit == "model"
    assert "GELU" in second.reason
    assert (head.limit, head.alone) == ("head", 3)


@pytest.mark.parametrize("images", [1, 2])
def test_counts_are_what_the_attack_reaches(images: int) -> None:
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for inputs, outputs, stride in ((3, 32, 1), (32, 64, 2), (64, 96, 1), (96, 64, 1)):
            layers += [nn.Conv2d(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs), nn.ReLU()]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
        x, y = torch.rand(images, 3, 17, 17), torch.arange(images)
        net(torch.rand(32, 3, 17, 17))
        net.eval()
    names, weights = zip(*net.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(F.cross_entropy(net(x), y), weights), strict=True))
    found = peel(read_gated(net, (3, 17, 17), "14"), gradients, images)
    counted = lowest_layer(layer_reaches(net, (3, 17, 17)), images)
    assert counted is not None
    reader = next(layer for layer in found.network.layers if layer.step > found.cuts[-1].step)
    assert found.network.steps[reader.step].name == counted[1]


@pytest.mark.parametrize(("pooling", "lowest"), [(True, "3"), (False, "0")])
def test_a_peel_ends_behind_a_pooling(pooling: bool, lowest: str) -> None:
    between = nn.MaxPool2d(2) if pooling else nn.Identity()
    first, second = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
    net = nn.Sequential(first, nn.ReLU(), between, second, nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
    net(torch.zeros(1, 3, 8, 8))
    assert lowest_layer(layer_reaches(net, (3, 8, 8)), 1) == ("3", lowest)


@pytest.mark.parametrize(("classes", "conclusion"), [(3, "determines all 2 inputs"), (2, "sufficient.")])
def test_the_conclusion_names_the_lowest_layer_that_is_determined(classes: int, conclusion: str) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(2000, 64), nn.ReLU(), nn.Linear(64, classes))
    found = limits(net, (1, 40, 50), 2)
    assert found.lowest == (("3", "1") if classes == 3 else None)
    assert conclusion in found.conclusion
