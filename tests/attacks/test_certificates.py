"""No certificate where the update does not determine the input; those of determined networks hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.attacks import RGAP, CocktailParty, GaussNewton, HeadFirst, LinearLayer
from leakscope.contracts.attack import Attack
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.defenses import GradientPruning, GradientQuantisation, MixUp, Soteria
from leakscope.federation import FedSGD
from leakscope.limits import diagnose
from leakscope.metrics import psnr

pytestmark = pytest.mark.slow

SIDE, CLASSES = 12, 6
SHAPE = (3, SIDE, SIDE)


class PixelMask(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mask = torch.ones(1, SIDE, SIDE)
        mask[:, ::3, ::3] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


def body(activation: Callable[[], nn.Module], channels: int = 3, side: int = SIDE) -> tuple[nn.Module, ...]:
    return (
        *(nn.Conv2d(channels, 32, 3, padding=1), activation(), nn.Conv2d(32, 48, 3, 2, 1), activation()),
        *(nn.Flatten(), nn.Linear(48 * (-(-side // 2)) ** 2, CLASSES)),
    )


#: What stands in front, what it leaves for the network, and the least number of directions that it hides.
FRONTS: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    "average pooling": (lambda: nn.AvgPool2d(2), 3, SIDE // 2, 300),
    "stride": (lambda: nn.Conv2d(3, 8, 1, 2), 8, SIDE // 2, 280),
    "3-to-1": (lambda: nn.Conv2d(3, 1, 1), 1, SIDE, 270),
    "dead filters": (lambda: nn.Conv2d(3, 3, 1), 3, SIDE, 260),
    "pixel mask": (PixelMask, 3, SIDE, 35),
}


def image(seed: int = 0, count: int = 1) -> Tensor:
    x = torch.rand((count, *SHAPE), generator=torch.Generator().manual_seed(seed))
    return (x + x.roll(1, 2) + x.roll(1, 3)) / 3


def trained(net: nn.Module) -> nn.Module:
    """A few steps on images whose class is their mean colour."""
    draws, optimiser = torch.Generator().manual_seed(3), torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(40):
        y = torch.randint(CLASSES, (32,), generator=draws)
        x = torch.rand((32, *SHAPE), generator=draws) * 0.5 + y.reshape(-1, 1, 1, 1) / (2 * CLASSES)
        optimiser.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimiser.step()
    return net


def attacked(net: nn.Module, x: Tensor, y: Tensor) -> tuple[Observation, Reconstruction]:
    seen = FedSGD().observe(net, x, y)
    return seen, HeadFirst(iterations=120)(seen, seed=0)


@pytest.mark.parametrize("state", ["untrained", "trained"])
@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("front", FRONTS)
def test_what_the_update_does_not_determine_is_not_certified(
    front: str, activation: Callable[[], nn.Module], state: str
) -> None:
    torch.manual_seed(0)
    make, channels, side, least = FRONTS[front]
    net = nn.Sequential(make(), *body(activation, channels, side))
    net = trained(net) if state == "trained" else net
    if front == "dead filters":  # after training, which would wake them
        with torch.no_grad():
            net[0].weight[1:] = 0
    seen, result = attacked(net, image(), torch.tensor([2]))
    assert not result.certified
    told = diagnose(seen, result, thorough=True)
    if told.residual is None or told.residual < 0.1:  # elsewhere the search ended, and nothing is said
        assert told.outcome == "not identifiable"
        assert told.hidden is not None
        assert least <= told.hidden <= 3 * SIDE**2


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
@pytest.mark.parametrize("state", ["untrained", "trained"])
def test_what_it_determines_is(activation: Callable[[], nn.Module], state: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*body(activation))
    seen, result = attacked(trained(net) if state == "trained" else net, image(), torch.tensor([2]))
    assert result.certified == 1
    assert float(psnr(image(), result.inputs)) > 80
    assert diagnose(seen, result).outcome == "recovered"


def test_twins_in_a_batch_are_not_certified() -> None:
    torch.manual_seed(0)
    x = image().repeat(2, 1, 1, 1)
    for net in (nn.Sequential(*body(nn.ReLU)), nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 40), nn.ReLU())):
        whole = net if isinstance(net[-1], nn.Linear) else nn.Sequential(*net, nn.Linear(40, CLASSES))
        _, result = attacked(whole, x, torch.tensor([2, 2]))
        assert not result.certified or float(psnr(x, result.inputs).min()) > 80


def test_an_mlp_is_certified_by_every_attack_that_solves_it() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    seen = FedSGD().observe(net, image(), torch.tensor([1]))
    for attack in (HeadFirst(), LinearLayer(), CocktailParty(), GaussNewton(smooth_only=False)):
        result = attack(seen, seed=0)
        if not isinstance(attack, GaussNewton) or result.certificates:  # which may stall at a kink
            assert result.certified == 1, attack
            assert float(psnr(image(), result.inputs)) > 80


def softmax_regression(classes: int) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, classes))


def small_mlp(activation: Callable[[], nn.Module] = nn.ReLU, size: int = 3 * SIDE**2) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 64), activation(), nn.Linear(64, CLASSES))


class Averaged(nn.Module):
    """Reads the image and its mirror image by the same layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * SIDE**2, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return (self.fc(x.flatten(1)) + self.fc(x.flip(3).flatten(1))) / 2


class Centred(nn.Module):
    """Takes the mean brightness away: a single direction that the update does not see."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean((1, 2, 3), keepdim=True)


ALTERED = {
    "signs of two rows that differ by their sign": (softmax_regression(2), 1, GradientQuantisation(values="sign")),
    "eight bits": (softmax_regression(2), 1, GradientQuantisation(bits=8)),
    "a disturbed input": (softmax_regression(CLASSES), 1, Soteria()),
    "mixtures": (small_mlp(), 3, MixUp()),
    "pruned": (small_mlp(nn.Tanh), 1, GradientPruning(fraction=0.5)),
}


@pytest.mark.parametrize("case", ALTERED)
@pytest.mark.parametrize("attack", [LinearLayer(), RGAP(), GaussNewton(), HeadFirst(iterations=40), CocktailParty()])
def test_inputs_that_do_not_give_the_whole_update_are_not_certified(case: str, attack: Attack) -> None:
    net, count, defense = ALTERED[case]
    draws = torch.Generator().manual_seed(0)
    seen = FedSGD().observe(net, image(count=count), torch.arange(count), defense, None, draws)
    try:
        result = attack(seen, seed=0)
    except NotApplicable:
        return
    assert not result.certified


def test_a_number_of_examples_that_is_wrong_certifies_no_mixture() -> None:
    seen = FedSGD().observe(softmax_regression(2), image(count=2), torch.tensor([0, 1]))
    wrong = dataclasses.replace(seen, num_examples=1)
    for attack in (LinearLayer(), GaussNewton(), HeadFirst(iterations=40)):
        assert not attack(wrong, seed=0).certified


def test_a_layer_that_reads_the_image_twice_leaves_directions_free() -> None:
    torch.manual_seed(1)
    result = LinearLayer()(FedSGD().observe(Averaged(), image(), torch.tensor([1])), seed=0)
    (proof,) = result.certificates
    assert proof is not None
    assert proof.not_unique


def test_a_single_free_direction_is_seen_at_a_shape_where_the_first_probe_is_blind() -> None:
    x = torch.rand((1, 1, 32, 32), generator=torch.Generator().manual_seed(0))
    seen = FedSGD().observe(nn.Sequential(Centred(), *small_mlp(nn.Tanh, 1024)), x, torch.tensor([1]))
    result = GaussNewton()(seen, seed=0)
    assert not result.certified


def test_head_first_takes_batchnorm_of_single_numbers_in_train_mode() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * SIDE**2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, CLASSES))
    seen = FedSGD(batchnorm="train").observe(net, image(count=3), torch.tensor([0, 2, 4]))
    assert not HeadFirst(iterations=10)(seen, seed=0).certified


def test_a_smooth_network_is_certified_by_gauss_newton_and_not_behind_a_stride() -> None:
    torch.manual_seed(0)
    seen = FedSGD().observe(nn.Sequential(*body(nn.Tanh)), image(), torch.tensor([1]))
    assert GaussNewton()(seen, seed=0).certified == 1
    strided = nn.Sequential(nn.Conv2d(3, 8, 1, 2), *body(nn.Tanh, 8, SIDE // 2))
    result = GaussNewton()(FedSGD().observe(strided, image(), torch.tensor([1])), seed=0)
    assert not result.certified


def test_a_large_network_is_diagnosed_by_probes() -> None:
    torch.manual_seed(0)
    side = 32
    net = nn.Sequential(PixelMaskOf(side), nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Flatten())
    net.append(nn.Linear(8 * side * side, CLASSES))
    x = torch.rand((1, 3, side, side), generator=torch.Generator().manual_seed(0))
    seen = FedSGD().observe(net, x, torch.tensor([0]))
    result = Reconstruction(x, torch.tensor([0]), torch.zeros(1))
    told = diagnose(seen, result)
    assert told.outcome == "not identifiable"
    assert told.hidden is not None
    assert abs(told.hidden - 3 * side * side / 2) < 150


class PixelMaskOf(nn.Module):
    """Every other column is zero."""

    def __init__(self, side: int) -> None:
        super().__init__()
        mask = torch.ones(1, side, side)
        mask[:, :, ::2] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask
