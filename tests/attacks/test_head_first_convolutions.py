"""Residual networks: convolutions are peeled, and the images found from the values that this tells."""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks.candidates import REPLAYED, certify
from leakscope.attacks.head_first import HeadFirst
from leakscope.attacks.head_first.case import Case
from leakscope.attacks.head_first.convolutions import (
    CLEAN,
    ENOUGH,
    NEARLY,
    SOLVABLE,
    SOLVABLE_FEW,
    InvertValues,
    PeelConvolutions,
    approach,
    find_example,
)
from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.defenses import GradientNoise, GradientPruning
from leakscope.federation import FedSGD
from leakscope.matching.unexplained import unexplained
from leakscope.models.resnet import resnet18

SHAPE = (3, 16, 16)


def picture(seed: int, count: int = 1) -> Tensor:
    """Return smooth images in whole bytes."""
    draws = torch.Generator().manual_seed(seed)
    small = torch.rand((count, 3, 6, 6), generator=draws)
    x = nn.functional.interpolate(small, SHAPE[1:], mode="bicubic").clamp(0, 1)
    return (255 * x).round() / 255


@cache
def network(width: int = 16) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = resnet18(input_shape=SHAPE, num_classes=10, width=width)
        net(picture(99, 64))
    return net.eval()


def observe(x: Tensor, y: Tensor, **options: object) -> Observation:
    return FedSGD(**{"batchnorm": "eval", **options}).observe(network(), x, y)  # type: ignore[arg-type]


def attack(observation: Observation) -> Reconstruction:
    return HeadFirst(rival=False)(observation, seed=0)


@pytest.mark.parametrize("seed", [1, 2])
def test_an_image_behind_a_resnet_is_exact_and_certified(seed: int) -> None:
    x, y = picture(seed), torch.tensor([seed])
    found = attack(observe(x, y))
    assert float((found.inputs - x).abs().max()) < 1e-3
    assert found.certificates
    assert all(one.holds for one in found.certificates)
    assert found.labels is not None
    assert found.labels.tolist() == [seed]


def test_statistics_of_the_batch_do_not_hide_an_image() -> None:
    """BatchNorm in train mode leaves the scale of the image open; whole bytes tell it."""
    x, y = picture(1), torch.tensor([1])
    found = attack(FedSGD(batchnorm="train").observe(network(32), x, y))
    assert torch.allclose(found.inputs, x, atol=1e-6)
    assert found.certificates
    assert all(one.holds for one in found.certificates)


def test_the_scale_of_an_image_that_is_not_made_of_bytes_stays_open() -> None:
    x, y = (0.8 * picture(1) + 0.001), torch.tensor([1])
    seen = observe(x, y, batchnorm="train")
    case = Case(HeadFirst(rival=False), seen, torch.Generator().manual_seed(0))
    case.take(PeelConvolutions())
    assert case.known is not None
    narrow = case.known.to(torch.float32)
    free = narrow.free_directions(x.flatten(), 1200)
    assert free != (0,)
    brighter = certify(seen, 1.1 * x, y, 0.0, free, "planted")
    assert not any(one.holds for one in brighter)


@pytest.mark.parametrize(("gain", "certified"), [(1.0, True), (4096.0, False)])
def test_bytes_prove_no_scale_that_the_update_does_not_show(gain: float, certified: bool) -> None:
    """With so loud a first layer BatchNorm's epsilon is rounding, and half of the image has the same update."""
    net = copy.deepcopy(network(32))
    with torch.no_grad():
        net.conv.weight.mul_(gain)  # type: ignore[union-attr, operator]
    x = picture(1) if certified else 0.5 * picture(1)
    found = HeadFirst(rival=False)(FedSGD(batchnorm="train").observe(net, x, torch.tensor([1])), seed=0)
    assert any(one is not None and one.holds for one in found.certificates) is certified


def test_values_of_scarce_equations_count_where_the_forward_pass_agrees() -> None:
    """Of this image the last layer that has equations enough is solved wrongly, and nothing above tells it."""
    x = picture(1)
    case = Case(HeadFirst(), FedSGD(batchnorm="eval").observe(network(32), x, torch.tensor([1])), torch.Generator())
    case.take(PeelConvolutions())
    assert case.known is not None
    truth = case.known.network.onwards(0, x.double()).values
    for step, value in case.known.known.items():
        assert float((value - truth[step]).norm() / truth[step].norm()) < 1e-4


@pytest.mark.parametrize("seed", [1, 2])
def test_an_image_behind_convolutions_without_padding_is_exact_and_certified(seed: int) -> None:
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for inputs, outputs, kernel, stride in ((3, 32, 2, 1), (32, 64, 3, 2), (64, 96, 3, 1), (96, 64, 3, 1)):
            layers += [nn.Conv2d(inputs, outputs, kernel, stride), nn.ReLU()]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    x, y = picture(seed), torch.tensor([seed])
    found = attack(FedSGD().observe(net, x, y))
    assert torch.allclose(found.inputs, x, atol=1e-6)
    assert found.certificates
    assert all(one is not None and one.holds for one in found.certificates)


@pytest.mark.parametrize("bias", [True, False])
def test_an_image_behind_a_pointwise_top_is_exact_and_certified(bias: bool) -> None:
    """The output gradient is read off the bias of the head: without one, the top is left alone."""
    layers: list[nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for inputs, outputs, kernel, stride in ((3, 32, 3, 1), (32, 96, 3, 2), (96, 128, 3, 2), (128, 192, 1, 1)):
            layers += [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2), nn.BatchNorm2d(outputs), nn.ReLU()]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(192, 10, bias=bias))
        net(picture(99, 64))
    x, y = picture(1), torch.tensor([1])
    case = Case(HeadFirst(rival=False), FedSGD(batchnorm="eval").observe(net, x, y), torch.Generator().manual_seed(0))
    case.take(PeelConvolutions())
    assert (case.known is not None) is bias
    if bias:
        found = attack(case.observation)
        assert torch.allclose(found.inputs, x, atol=1e-6)
        assert found.certificates
        assert all(one is not None and one.holds for one in found.certificates)


@pytest.mark.slow
def test_images_of_a_batch_are_found_one_by_one() -> None:
    x, y = picture(5, 2), torch.tensor([3, 7])
    found = attack(observe(x, y))
    assert found.labels is not None
    order = [found.labels.tolist().index(label) for label in y.tolist()]
    assert float((found.inputs[order] - x).square().mean()) < 1e-6


@pytest.mark.parametrize(("error", "left_out"), [(0.3 * CLEAN, False), (30 * CLEAN, True)])
def test_values_in_error_are_left_out(error: float, left_out: bool) -> None:
    x = picture(1)
    case = Case(HeadFirst(), observe(x, torch.tensor([1])), torch.Generator().manual_seed(0))
    case.take(PeelConvolutions())
    assert case.known is not None
    known = case.known.to(torch.float32)
    truth, lowest = known.network.onwards(0, x).values, min(known.known)
    values = {step: truth[step] for step in known.known}
    values[lowest] = values[lowest] * (1 + error * torch.randn(values[lowest].shape))
    found, left, _ = find_example(dataclasses.replace(known, known=values), known.start(), [100])
    assert (left > error / 3) is not left_out
    assert torch.allclose(found, x.flatten(), atol=1e-6)


def test_the_longest_descent_is_the_last() -> None:
    """Values of another image, channels exchanged, explain nothing: all lengths are tried, and the best is kept."""
    case = Case(HeadFirst(), observe(picture(1), torch.tensor([1])), torch.Generator().manual_seed(0))
    case.take(PeelConvolutions())
    assert case.known is not None
    known = case.known.to(torch.float32)
    wrong = {step: value.flip(1) for step, value in known.known.items()}
    _, left, _ = find_example(dataclasses.replace(known, known=wrong), known.start(), [3, 6])
    assert left > NEARLY


def test_an_image_that_was_found_leaves_nothing_to_search() -> None:
    case = Case(HeadFirst(), observe(picture(1), torch.tensor([1])), torch.Generator().manual_seed(0))
    for stage in (PeelConvolutions(), InvertValues()):
        case.take(stage)
    assert case.finished
    assert case.known is not None


def test_pixels_that_pooling_hides_are_free() -> None:
    """Pooling in front leaves three of four directions open: the right image must not be certified either."""
    shape = (3, 32, 32)
    net = nn.Sequential(nn.AvgPool2d(2), network())
    x = nn.functional.interpolate(picture(1), shape[1:])
    seen = FedSGD(batchnorm="eval").observe(net, x, torch.tensor([1]))
    case = Case(HeadFirst(), seen, torch.Generator().manual_seed(0))
    case.take(PeelConvolutions())
    assert case.known is not None
    narrow = case.known.to(torch.float32)
    free = narrow.free_directions(narrow.inputs.to_unit(x).flatten(), 1200)
    assert free == (pytest.approx(3 * 3 * 16 * 16, rel=0.05),)
    proofs = certify(seen, x, torch.tensor([1]), 0.0, free, "truth")
    assert not any(one.holds for one in proofs)


def plants(x: Tensor) -> list[Tensor]:
    """Return fifty results that are wrong by little: noise, a patch, another image's patch, another image, a shift."""
    draws = torch.Generator().manual_seed(4)
    found = []
    for size in (1e-3, 3e-3, 1e-2):
        found += [(x + size * torch.randn(x.shape, generator=draws)).clamp(0, 1) for _ in range(10)]
    for number in range(10):
        other = x.clone()
        other[:, :, number : number + 2, number : number + 2] = picture(50 + number)[:, :, :2, :2]
        found.append(other)
    return [*found, *(picture(70 + number) for number in range(8)), x.roll(1, 3), 1 - x]


@pytest.mark.parametrize("batchnorm", ["eval", "train"])
def test_no_planted_result_is_certified(batchnorm: str) -> None:
    x, y = picture(1), torch.tensor([1])
    seen = observe(x, y, batchnorm=batchnorm)
    wide = seen.to(dtype=torch.float64)
    shares = {number: unexplained(wide, one.double(), y) for number, one in enumerate([x, *plants(x)])}
    assert len(shares) == 51
    # The client computed the statistics of a batch in float32.
    rounding = EXPLAINED if batchnorm == "eval" else REPLAYED
    assert shares[0] < rounding < min(share for number, share in shares.items() if number)
    # Nor where the share is told to be small: the update is replayed.
    assert certify(seen, x, y, 0.0, (0,), "truth")
    assert not any(certify(seen, one, y, 0.0, (0,), "planted") for one in plants(x))


@pytest.mark.parametrize("batchnorm", ["eval", "train"])
def test_a_batch_with_one_image_of_another_is_not_certified(batchnorm: str) -> None:
    x, y = picture(5, 3), torch.tensor([3, 7, 7])
    seen = observe(x, y, batchnorm=batchnorm)
    assert certify(seen, x, y, 0.0, (0, 0, 0), "truth")
    other = torch.cat([x[:2], picture(6)])
    assert not certify(seen, other, y, 0.0, (0, 0, 0), "planted")
    assert not certify(seen, x[[1, 0, 2]], y, 0.0, (0, 0, 0), "swapped")


@pytest.mark.parametrize("defense", [GradientNoise(sigma=1e-5), GradientPruning(fraction=0.5)])
def test_a_defended_update_is_not_certified(defense: object) -> None:
    seen = FedSGD(batchnorm="eval").observe(network(), picture(1), torch.tensor([1]), defense)  # type: ignore[arg-type]
    case = Case(HeadFirst(rival=False, iterations=20), seen, torch.Generator().manual_seed(0))
    for stage in (PeelConvolutions(), InvertValues()):
        case.take(stage)
    assert case.best is None or not case.best.certificates


def test_values_of_another_image_do_not_explain_the_update() -> None:
    x, y = picture(1), torch.tensor([1])
    seen, other = observe(x, y), observe(picture(2), y)
    case, source = (Case(HeadFirst(), one, torch.Generator().manual_seed(0)) for one in (seen, other))
    for one in (case, source):
        one.take(PeelConvolutions())
    case.known = source.known
    case.take(InvertValues())
    assert case.best is not None
    assert not case.best.certificates
    assert not case.best.settles
    assert case.known is None  # searches go on


class Approached:
    """Known values that leave ``left`` after each descent; their equations are solved where they may be."""

    def __init__(self, share: float, left: float, count: int = 2) -> None:
        self.equations, self.left, self.count = SimpleNamespace(share=share), left, count
        self.steps: list[int] = []

    def __len__(self) -> int:
        return self.count

    def start(self) -> Tensor:
        return torch.zeros(self.count, 3)

    def descend(self, start: Tensor, steps: int) -> Tensor:
        self.steps.append(steps)
        return start

    def leaves(self, flat: Tensor) -> float:
        return self.left

    def solve_equations(self, near: Tensor) -> str:
        return "solved"


@pytest.mark.parametrize(
    ("share", "left", "solved"),
    [
        (1.01 * ENOUGH, 0.9 * SOLVABLE, True),
        (1.01 * ENOUGH, 1.1 * SOLVABLE, False),
        (0.99 * ENOUGH, 0.9 * SOLVABLE_FEW, True),
        (0.99 * ENOUGH, 1.1 * SOLVABLE_FEW, False),
    ],
)
def test_equations_are_solved_from_near_enough(share: float, left: float, solved: bool) -> None:
    known = Approached(share, left)
    found, _ = approach(known, [10, 30])  # type: ignore[arg-type]
    assert (found == "solved") is solved
    assert known.steps == ([10] if solved else [10, 30, 30])


def test_one_image_needs_no_equations_of_a_batch() -> None:
    known = Approached(2.0, 0.0, count=1)
    assert approach(known, [10])[0] is known  # type: ignore[arg-type]
    assert not known.steps
