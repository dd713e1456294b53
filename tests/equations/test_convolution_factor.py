"""Inputs and derivatives of a convolution, from its weight gradient alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.convolution_factor import factor_convolution

Layer = tuple[Tensor, Tensor, Tensor]


def layer(images: int, channels: int, size: tuple[int, int], kernel: int = 3, *, centred: bool = False) -> Layer:
    """Return what a convolution received, what came back to its output, and its weight gradient, in float32."""
    draws = torch.Generator().manual_seed(images + channels)
    x = torch.randn((images, channels, *size), generator=draws).relu()
    signals = torch.randn((images, channels + 3, *size), generator=draws)
    if centred:  # as BatchNorm in train mode leaves it
        signals = signals - signals.mean((0, 2, 3), keepdim=True)
    shape = (channels + 3, channels, kernel, kernel)
    return x, signals, torch.nn.grad.conv2d_weight(x, shape, signals, padding=kernel // 2)


def directions_apart(found: Tensor, truth: Tensor) -> Tensor:
    """Return for each true image the sine of the angle to the nearest that was found."""
    rows = [F.normalize(one.double().flatten(1), dim=1) for one in (found, truth)]
    return (1 - (rows[0] @ rows[1].T).amax(0) ** 2).clamp_min(0).sqrt()


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(
    ("images", "channels", "size", "kernel"),
    [(1, 24, (4, 4), 3), (4, 80, (4, 4), 3), (2, 90, (5, 7), 3), (1, 40, (5, 5), 5), (8, 48, (2, 2), 3)],
)
def test_whole_batch_follows_from_one_gradient(
    images: int, channels: int, size: tuple[int, int], kernel: int, centred: bool
) -> None:
    x, signals, gradient = layer(images, channels, size, kernel, centred=centred)
    found = factor_convolution(gradient, size)
    assert found.holds
    assert len(found.inputs) == images  # the rank tells it
    assert float(directions_apart(found.inputs, x).max()) < 1e-5
    assert float(directions_apart(found.signals, signals).max()) < 1e-5


def test_factors_give_the_gradient() -> None:
    _, _, gradient = layer(2, 40, (4, 4))
    found = factor_convolution(gradient, (4, 4))
    again = torch.nn.grad.conv2d_weight(found.inputs, gradient.shape, found.signals, padding=1)
    assert torch.allclose(again, gradient.double(), atol=1e-4)


def test_too_many_places_are_refused() -> None:
    _, _, gradient = layer(2, 24, (4, 4))
    with pytest.raises(NotApplicable):
        factor_convolution(gradient, (4, 4), images=2)


@pytest.mark.parametrize("wrong", [1, 3])
def test_wrong_number_of_images_never_holds(wrong: int) -> None:
    _, _, gradient = layer(2, 60, (4, 4))
    with pytest.raises(NotApplicable):
        factor_convolution(gradient, (4, 4), images=wrong)


@pytest.mark.parametrize("level", [1e-2, 1e-3])
def test_noise_never_holds(level: float) -> None:
    _, _, gradient = layer(2, 60, (4, 4))
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(5))
    noisy = gradient + level * noise * gradient.norm() / noise.norm()
    with pytest.raises(NotApplicable):
        factor_convolution(noisy, (4, 4), images=2)


def test_negative_inputs_are_no_images() -> None:
    """Without a ReLU in front nothing separates the images: the third certificate says so."""
    draws = torch.Generator().manual_seed(0)
    x, signals = (torch.randn((2, 40, 4, 4), generator=draws) for _ in range(2))
    gradient = torch.nn.grad.conv2d_weight(x, (40, 40, 3, 3), signals, padding=1)
    assert not factor_convolution(gradient, (4, 4)).holds
