"""Networks other than basic residual blocks: max pooling, bottlenecks, pre-activation, zero-padded shortcuts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.equations import peeling
from leakscope.equations.peeling import Peel, peel
from leakscope.network.gates import GatedNetwork, read_gated

SHAPE = (3, 16, 16)


def chain(normalised: bool = True) -> nn.Sequential:
    """Return a VGG-like chain: two convolutions behind each of two max poolings."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in (16, 0, 32, 64, 0, 96, 96):
        if not outputs:
            layers.append(nn.MaxPool2d(2))
            continue
        layers.append(nn.Conv2d(inputs, outputs, 3, padding=1))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()] if normalised else [nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Block(nn.Module):
    """A residual block of one of three kinds; a zero-padded shortcut takes every second place."""

    def __init__(self, kind: str, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.kind, self.outputs, self.same = kind, outputs, stride == 1 and inputs == outputs
        inner = outputs // 4 if kind == "bottleneck" else outputs
        size = 1 if kind == "bottleneck" else 3
        self.conv1 = nn.Conv2d(inputs, inner, size, 1 if size == 1 else stride, size // 2, bias=False)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride if size == 1 else 1, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(inputs if kind == "early" else inner)
        self.norm2 = nn.BatchNorm2d(inner)
        if kind == "bottleneck":
            self.conv3, self.norm3 = nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        if not self.same and kind != "padded":
            self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "early":
            inner = F.relu(self.norm1(x))
            past = x if self.same else self.shortcut(inner)
            return past + self.conv2(F.relu(self.norm2(self.conv1(inner))))
        if self.same:
            past = x
        elif self.kind == "padded":
            past = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, self.outputs - x.shape[1]))
        else:
            past = self.shortcut(x)
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.kind == "bottleneck":
            y = self.norm3(self.conv3(F.relu(y)))
        return F.relu(y + past)


def residual(kind: str) -> nn.Sequential:
    last = 256 if kind == "bottleneck" else 64
    blocks = [Block(kind, 16, last // 2, 2), Block(kind, last // 2, last, 2), Block(kind, last, last, 1)]
    end = [nn.BatchNorm2d(last), nn.ReLU()] if kind == "early" else []
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, *end, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, 10))


def unpadded(normalised: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, stride, kernel in ((32, 1, 2), (64, 2, 3), (96, 1, 3), (64, 1, 3)):
        layers.append(nn.Conv2d(inputs, outputs, kernel, stride, "valid"))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()] if normalised else [nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


def attempt(
    build: Callable[[], nn.Sequential], images: int = 1, *, training: bool = False
) -> tuple[GatedNetwork, Peel, dict[int, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = build()
        net(torch.rand(64, *SHAPE))
        net.train(training)
        x, y = torch.rand(images, *SHAPE), torch.randint(0, 10, (images,))
    names, weights = zip(*net.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(F.cross_entropy(net(x), y), weights), strict=True))
    network = read_gated(net, SHAPE, str(len(net) - 1), training=training)
    return network, peel(network, gradients, images), network.onwards(0, x.double()).values


def worst(found: Peel, truth: dict[int, Tensor]) -> float:
    errors = []
    for step, value in found.values.items():
        rows = [F.normalize(one.flatten(1), dim=1) for one in (value, truth[step])]
        order = (rows[0] @ rows[1].T).argmax(0)
        errors.append(float((value[order] - truth[step]).norm() / truth[step].norm()))
    return max(errors)


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("normalised", [True, False])
def test_values_behind_a_max_pooling_are_exact(normalised: bool, images: int) -> None:
    network, found, truth = attempt(lambda: chain(normalised), images)
    lowest = found.cuts[-1].step
    assert network.steps[lowest].kind == "max"
    assert "maxima" in found.ended
    assert worst(found, truth) < 1e-4


@pytest.mark.parametrize(("apart", "told"), [(1e-3, True), (1.0, False)])
def test_an_image_that_is_nearly_right_leads_below_a_max_pooling(apart: float, told: bool) -> None:
    network, found, truth = attempt(chain)
    lowest = found.cuts[-1].step
    noise = torch.randn(truth[0].shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert found.go_on(network.onwards(0, truth[0] + apart * noise)) == told
    assert (min(found.values) < lowest) == told
    assert worst(found, truth) < 1e-4


@pytest.mark.parametrize("kind", ["bottleneck", "early", "padded"])
def test_values_of_residual_blocks_are_exact(kind: str) -> None:
    _, found, truth = attempt(lambda: residual(kind))
    assert len(found.values) > 1
    assert worst(found, truth) < 1e-4


def test_a_peel_that_begins_at_a_block_goes_on_inside_of_the_one_below(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forward pass from inside of a block ends at the sum, so that it tells no scale there."""

    def build() -> nn.Sequential:
        blocks = [Block("padded", 16, 32, 2), Block("padded", 32, 64, 2), *(Block("padded", 64, 64, 1) for _ in "12")]
        stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
        return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    every = peeling.startable
    monkeypatch.setattr(
        peeling, "startable", lambda *facts: [layer for layer in every(*facts) if layer.weight_name == "6.conv1.weight"]
    )
    _, found, truth = attempt(build)
    assert len(found.values) > 2
    assert worst(found, truth) < 1e-4


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize(("normalised", "training"), [(True, False), (True, True), (False, False)])
def test_values_of_convolutions_without_padding_are_exact(normalised: bool, training: bool, images: int) -> None:
    network, found, truth = attempt(lambda: unpadded(normalised), images, training=training)
    start = next(number for number, step in enumerate(network.steps) if step.name == found.started)
    assert found.cuts[-1].step < network.steps[start].sources[0]
    assert worst(found, truth) < 1e-3 if training else worst(found, truth) < 1e-4


def test_rows_that_a_stride_leaves_out_end_it() -> None:
    def build() -> nn.Sequential:
        net = unpadded()
        net[0] = nn.Conv2d(3, 32, 3)  # maps of 14x14, and a stride of two
        return net

    _, found, truth = attempt(build)
    assert "last rows" in found.ended
    assert worst(found, truth) < 1e-4


def test_derivatives_that_are_alike_at_all_places_tell_no_places() -> None:
    def build() -> nn.Sequential:
        first, second = nn.Conv2d(3, 200, 5, 3), nn.Conv2d(200, 64, 3)
        return nn.Sequential(first, nn.ReLU(), second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    with pytest.raises(NotApplicable, match="rank 9"):
        attempt(build)
