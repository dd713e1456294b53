"""Inputs and derivatives of a convolution, from its weight gradient alone."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.convolution_factor import ConvolutionFactors, factor_convolution, visible_rank

Layer = tuple[Tensor, Tensor, Tensor]


def layer(
    images: int,
    channels: int,
    size: tuple[int, int],
    kernel: int = 3,
    padding: int | None = None,
    *,
    centred: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Layer:
    """Return what a convolution received, what came back to its output, and its weight gradient."""
    draws = torch.Generator().manual_seed(images + channels)
    padding = kernel // 2 if padding is None else padding
    x = torch.randn((images, channels, *size), generator=draws).to(dtype).relu()
    outputs = [side + 2 * padding - kernel + 1 for side in size]
    signals = torch.randn((images, channels + 3, *outputs), generator=draws).to(dtype)
    if centred:  # as BatchNorm in train mode leaves it
        signals = signals - signals.mean((0, 2, 3), keepdim=True)
    shape = (channels + 3, channels, kernel, kernel)
    return x, signals, torch.nn.grad.conv2d_weight(x, shape, signals, padding=padding)


def errors(found: Tensor, truth: Tensor) -> Tensor:
    """Return for each true image the distance to the nearest that was found, both of length one."""
    rows, wanted = (F.normalize(one.double().flatten(1), dim=1) for one in (found, truth))
    return torch.cdist(rows, wanted).amin(0)


def exact(found: ConvolutionFactors, x: Tensor, signals: Tensor) -> bool:
    most = 1e-5 if x.dtype == torch.float32 else 1e-7
    return float(errors(found.inputs, x).max()) < most and float(errors(found.signals, signals).max()) < most


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
    assert exact(found, x, signals)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize(("images", "dtype"), [(1, torch.float32), (2, torch.float64), (4, torch.float32)])
@pytest.mark.parametrize(
    ("size", "kernel", "padding"),
    [((4, 4), 3, 0), ((5, 7), 3, 0), ((6, 6), 5, 0), ((6, 5), 5, 1), ((5, 4), 5, 3), ((5, 4), 4, 1)],
)
def test_any_padding_tells_the_places(
    size: tuple[int, int], kernel: int, padding: int, images: int, dtype: torch.dtype, centred: bool
) -> None:
    channels = images * math.prod(size) + 10
    if padding == 3:  # more outputs than inputs
        channels *= 2
    x, signals, gradient = layer(images, channels, size, kernel, padding, centred=centred, dtype=dtype)
    found = factor_convolution(gradient, size, padding=(padding, padding))
    assert found.holds
    assert len(found.inputs) == images
    assert exact(found, x, signals)


@pytest.mark.parametrize(("kernel", "padding"), [(3, 0), (3, 1), (5, 0), (5, 2)])
def test_errors_do_not_grow_over_large_maps(kernel: int, padding: int) -> None:
    x, signals, gradient = layer(1, 150, (12, 11), kernel, padding, centred=True)
    found = factor_convolution(gradient, (12, 11), padding=(padding, padding))
    assert found.holds
    assert exact(found, x, signals)


@pytest.mark.parametrize(
    ("kernel", "padding"), [((3, 3), (2, 2)), ((3, 3), (0, 1)), ((1, 3), (0, 1)), ((3, 3), (1, 0))]
)
def test_kernels_that_do_not_tell_places_are_refused(kernel: tuple[int, int], padding: tuple[int, int]) -> None:
    with pytest.raises(NotApplicable, match="places"):
        factor_convolution(torch.ones(8, 60, *kernel), (4, 4), padding=padding)


@pytest.mark.parametrize("level", [1e-2, 1e-3])
def test_noise_never_holds_without_padding(level: float) -> None:
    _, _, gradient = layer(2, 60, (4, 4), 3, 0)
    noise = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(5))
    noisy = gradient + level * noise * gradient.norm() / noise.norm()
    with pytest.raises(NotApplicable):
        factor_convolution(noisy, (4, 4), padding=(0, 0), images=2)


@pytest.mark.parametrize(("right", "wrong"), [(0, 1), (1, 0)])
def test_another_padding_never_holds(right: int, wrong: int) -> None:
    _, _, gradient = layer(1, 60, (4, 4), 3, right)
    assert factor_convolution(gradient, (4, 4), padding=(right, right)).holds
    assert not factor_convolution(gradient, (4, 4), padding=(wrong, wrong)).holds


def test_factors_give_the_gradient() -> None:
    _, _, gradient = layer(2, 40, (4, 4))
    found = factor_convolution(gradient, (4, 4))
    again = torch.nn.grad.conv2d_weight(found.inputs, gradient.shape, found.signals, padding=1)
    assert torch.allclose(again, gradient.double(), atol=1e-4)


def test_too_many_places_are_refused() -> None:
    _, _, gradient = layer(2, 24, (4, 4))
    with pytest.raises(NotApplicable):
        factor_convolution(gradient, (4, 4), images=2)


@pytest.mark.parametrize(("outputs", "found"), [(12, True), (11, False)])
def test_few_outputs_do_not_tell_a_corner(outputs: int, found: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn((4, 70, 4, 4), generator=draws, dtype=torch.float64).relu()
    signals = torch.randn((4, outputs, 4, 4), generator=draws, dtype=torch.float64)
    gradient = torch.nn.grad.conv2d_weight(x, (outputs, 70, 3, 3), signals, padding=1)
    if found:
        assert exact(factor_convolution(gradient, (4, 4), images=4), x, signals)
    else:
        with pytest.raises(NotApplicable, match="3 images, not of 4"):
            factor_convolution(gradient, (4, 4), images=4)


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
    """Without a ReLU in front nothing separates the images."""
    draws = torch.Generator().manual_seed(0)
    x, signals = (torch.randn((2, 40, 4, 4), generator=draws) for _ in range(2))
    gradient = torch.nn.grad.conv2d_weight(x, (40, 40, 3, 3), signals, padding=1)
    with pytest.raises(NotApplicable, match="not negative"):
        factor_convolution(gradient, (4, 4))


@pytest.mark.parametrize("shape", [(6, 20_000, 1, 1), (20_000, 6, 1, 1)])
def test_rank_of_a_wide_layer_takes_the_squares_of_its_shorter_side(shape: tuple[int, int, int, int]) -> None:
    draws = torch.Generator().manual_seed(0)
    left, right = (torch.randn((n, 3), generator=draws) for n in shape[:2])
    assert visible_rank((left @ right.T).reshape(shape), 0.0) == 3  # the longer side's squares take 3 GB and an hour
