"""Networks whose last convolution is 1x1, in front of a ReLU and a mean: one image, in eval mode."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.peeling import Peel, peel
from leakscope.network.gates import GatedNetwork, read_gated

SHAPE = (3, 16, 16)


def pointwise(kernel: int = 3, padding: int = 1, *, normalised: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, size, stride, edge in ((32, 3, 1, 1), (96, 3, 2, 1), (128, kernel, 2, padding), (192, 1, 1, 0)):
        layers.append(nn.Conv2d(inputs, outputs, size, stride, edge))
        layers += [nn.BatchNorm2d(outputs), nn.ReLU()] if normalised else [nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))


class Bottleneck(nn.Module):
    """One block of a stage, as the last stage of a small network may have it: no convolution of stride 1 but 1x1."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(inputs, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.second, self.norm2 = nn.Conv2d(inner, inner, 3, 2, 1, bias=False), nn.BatchNorm2d(inner)
        self.third, self.norm3 = nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.past = nn.Sequential(nn.Conv2d(inputs, outputs, 1, 2, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm2(self.second(F.relu(self.norm1(self.first(x))))))
        return F.relu(self.norm3(self.third(inner)) + self.past(x))


def bottlenecks() -> nn.Sequential:
    stem = nn.Conv2d(3, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()
    blocks = Bottleneck(32, 48, 128), Bottleneck(128, 128, 256)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def smooth(count: int) -> Tensor:
    return F.interpolate(torch.rand((count, 3, 6, 6)), SHAPE[1:], mode="bicubic").clamp(0, 1)


def attempt(
    net: nn.Sequential, seed: int = 0, *, training: bool = False
) -> tuple[GatedNetwork, Peel, dict[int, Tensor]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in net.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                module.reset_parameters()
        net(smooth(64))
        net.train(training)
        x, y = smooth(1), torch.randint(0, 10, (1,))
    names, weights = zip(*net.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(F.cross_entropy(net(x), y), weights), strict=True))
    network = read_gated(net, SHAPE, str(len(net) - 1), training=training)
    head = net[-1].weight.detach().double()
    adjoint = gradients[names[-1]].double()[None] @ head  # type: ignore[operator]
    return network, peel(network, gradients, 1, adjoint=adjoint), network.onwards(0, x.double()).values


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("normalised", [True, False])
def test_values_below_a_pointwise_top_are_exact(normalised: bool, seed: int) -> None:
    network, found, truth = attempt(pointwise(normalised=normalised), seed)
    assert found.started == ("9" if normalised else "6")
    assert network.steps[found.cuts[-1].step].shape[1:] in ((16, 16), (8, 8))
    for step, value in found.values.items():
        assert float((value - truth[step]).norm() / truth[step].norm()) < 1e-4


@pytest.mark.parametrize("seed", [0, 1])
def test_values_below_a_bottleneck_are_exact(seed: int) -> None:
    _, found, truth = attempt(bottlenecks(), seed)
    assert found.started == "4.third"
    assert len(found.values) > 2
    for step, value in found.values.items():
        assert float((value - truth[step]).norm() / truth[step].norm()) < 1e-4


def test_windows_that_do_not_overlap_tell_no_order() -> None:
    with pytest.raises(NotApplicable, match="overlap"):
        attempt(pointwise(2, 0))


def test_statistics_of_the_batch_end_it() -> None:
    with pytest.raises(NotApplicable, match="by itself"):
        attempt(pointwise(), training=True)
