"""Image measures against scikit-image, against closed forms, and against a loop written out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from leakscope.metrics import mse, psnr, rmse, rmse_maxnorm, ssim


def pair(shape: tuple[int, ...], noise: float = 0.1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    original = torch.rand(shape, generator=generator)
    return original, (original + noise * torch.randn(shape, generator=generator)).clamp(0, 1)


@pytest.mark.parametrize("shape", [(3, 1, 16, 16), (2, 3, 32, 32), (2, 5, 11, 40), (2, 1, 12, 13)])
def test_ssim_agrees_with_scikit_image(shape: tuple[int, ...]) -> None:
    a, b = pair(shape)
    expected = [
        structural_similarity(
            x.double().numpy(), y.double().numpy(), channel_axis=0, gaussian_weights=True, sigma=1.5,
            use_sample_covariance=False, data_range=1.0,
        )
        for x, y in zip(a, b, strict=True)
    ]  # fmt: skip
    assert ssim(a, b).numpy() == pytest.approx(expected, abs=1e-10)


def test_ssim_of_signals_agrees_with_scikit_image() -> None:
    a, b = pair((2, 1, 64))
    expected = [
        structural_similarity(
            x[0].double().numpy(), y[0].double().numpy(), gaussian_weights=True, sigma=1.5,
            use_sample_covariance=False, data_range=1.0,
        )
        for x, y in zip(a, b, strict=True)
    ]  # fmt: skip
    assert ssim(a, b).numpy() == pytest.approx(expected, abs=1e-10)


def test_ssim_window_shrinks_to_the_largest_odd_size_that_fits() -> None:
    a, b = pair((1, 1, 8, 5))
    x, y = a[0, 0].double().numpy(), b[0, 0].double().numpy()
    window = np.exp(-(np.arange(-3, 4) ** 2) / 4.5)[:, None] * np.exp(-(np.arange(-2, 3) ** 2) / 4.5)[None]
    window /= window.sum()
    scores = []
    for top in range(2):  # a 7 x 5 window has two places in 8 x 5
        u, v = x[top : top + 7], y[top : top + 7]
        mean_u, mean_v = (window * u).sum(), (window * v).sum()
        var_u, var_v = (window * (u - mean_u) ** 2).sum(), (window * (v - mean_v) ** 2).sum()
        cov = (window * (u - mean_u) * (v - mean_v)).sum()
        light = (2 * mean_u * mean_v + 1e-4) / (mean_u**2 + mean_v**2 + 1e-4)
        scores.append(light * (2 * cov + 9e-4) / (var_u + var_v + 9e-4))
    assert ssim(a, b).item() == pytest.approx(np.mean(scores), abs=1e-12)


def test_ssim_of_a_single_pixel_is_luminance_alone() -> None:
    value = ssim(torch.full((1, 1, 1, 1), 0.5), torch.full((1, 1, 1, 1), 0.25)).item()
    assert value == pytest.approx((2 * 0.125 + 1e-4) / (0.25 + 0.0625 + 1e-4))


def test_ssim_of_a_table_is_nan() -> None:
    assert bool(ssim(*pair((3, 7))).isnan().all())


@pytest.mark.parametrize("data_range", [1.0, 255.0])
def test_psnr_agrees_with_scikit_image_and_is_per_example(data_range: float) -> None:
    a, b = pair((4, 3, 8, 8))
    expected = [
        peak_signal_noise_ratio(x.double().numpy(), y.double().numpy(), data_range=data_range)
        for x, y in zip(a, b, strict=True)
    ]
    assert psnr(a, b, data_range).numpy() == pytest.approx(expected, abs=1e-9)


def test_psnr_of_equal_pictures_is_infinite_or_the_cap() -> None:
    x = torch.rand(2, 1, 4, 4)
    assert psnr(x, x).tolist() == [math.inf, math.inf]
    assert psnr(x, x, cap=80.0).tolist() == [80.0, 80.0]


def test_rmse_maxnorm_of_a_gaussian_error_is_the_plateau_of_failed_attacks() -> None:
    generator = torch.Generator().manual_seed(0)
    error = torch.randn(400, 3, 32, 32, generator=generator)
    values = rmse_maxnorm(torch.zeros_like(error), error)
    assert values.mean().item() == pytest.approx(0.269, abs=0.002)
    assert rmse_maxnorm(error, error).abs().max().item() == 0
    # It does not see the size of the error, which is why it must not be read as an RMSE.
    assert torch.allclose(values, rmse_maxnorm(torch.zeros_like(error), 0.01 * error), atol=1e-6)


def test_errors_are_measured_per_example_in_double_precision() -> None:
    a = torch.zeros(3, 2, 5)
    b = torch.stack([torch.full((2, 5), value) for value in (0.0, 1e-4, 1.0)])
    assert mse(a, b).dtype == torch.float64
    assert mse(a, b).tolist() == pytest.approx([0, 1e-8, 1], rel=1e-6)
    assert rmse(a, b).tolist() == pytest.approx([0, 1e-4, 1], rel=1e-6)


@pytest.mark.parametrize("measure", [mse, rmse, rmse_maxnorm, psnr, ssim])
def test_shapes_must_agree(measure: object) -> None:
    with pytest.raises(ValueError, match="same shape"):
        measure(torch.zeros(1, 1, 4, 4), torch.zeros(2, 1, 4, 4))  # type: ignore[operator]
    with pytest.raises(ValueError, match="same shape"):
        measure(torch.zeros(4), torch.zeros(4))  # type: ignore[operator]
