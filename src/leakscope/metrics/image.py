"""Distances between pictures (or signals, or table rows) in unit space, one number an example.

Every function takes two tensors of the same shape (B, ...) with values in [0, 1], clamps nothing and computes in double
precision.
"""

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError

SSIM_NEEDS_SPACE = "SSIM needs a neighbourhood, and rows of a table have none"
_WINDOW, _SIGMA, _K1, _K2 = 11, 1.5, 0.01, 0.03


def mse(original: Tensor, reconstruction: Tensor) -> Tensor:
    """Mean squared error.

    >>> mse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5)).item()
    0.25
    """
    return _error(original, reconstruction).square().mean(dim=1)


def rmse(original: Tensor, reconstruction: Tensor) -> Tensor:
    """Root of the mean squared error.

    >>> rmse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5)).item()
    0.5
    """
    return mse(original, reconstruction).sqrt()


def rmse_maxnorm(original: Tensor, reconstruction: Tensor) -> Tensor:
    """The error relative to its own largest entry, sqrt(mean(e^2 / max e^2)); 0 where there is no error.

    Published tables call this RMSE. It measures the shape of the error and not its size: a Gaussian error over 3072
    pixels gives about 0.27, a constant one 1.

    >>> rmse_maxnorm(torch.zeros(1, 4), torch.tensor([[0.1, 0.0, 0.0, 0.0]])).item()
    0.5
    """
    squared = _error(original, reconstruction).square()
    largest = squared.amax(dim=1, keepdim=True)
    return torch.where(largest > 0, squared / largest, squared).mean(dim=1).sqrt()


def grain(pictures: Tensor) -> Tensor:
    """Measure how much of each picture's variance is between neighbouring pixels: 0 is smooth, 1 is white noise.

    The channels are those of (B, channels, height, width); a blank picture has none.

    >>> noise = torch.rand((1, 3, 64, 64), generator=torch.Generator().manual_seed(0))
    >>> ramp = torch.linspace(0, 1, 64).expand(1, 1, 64, 64)
    >>> round(grain(noise).item(), 1), round(grain(ramp).item(), 1)
    (1.0, 0.0)
    """
    wide = pictures.double()
    steps = [wide.diff(dim=axis).square().flatten(1).mean(1) for axis in (2, 3) if wide.shape[axis] > 1]
    variance = wide.flatten(2).var(2, correction=0).mean(1)
    if not steps:
        return torch.zeros_like(variance)
    return torch.where(variance > 0, torch.stack(steps).mean(0) / (2 * variance), 0.0)


def psnr(original: Tensor, reconstruction: Tensor, data_range: float = 1.0, cap: float | None = None) -> Tensor:
    """Peak signal-to-noise ratio in dB, 10 log10(R^2 / MSE) with R = ``data_range``; infinite, or ``cap``, at MSE 0.

    >>> psnr(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.1)).item()  # doctest: +ELLIPSIS
    19.99999...
    >>> x = torch.ones(1, 3)
    >>> psnr(x, x).item(), psnr(x, x, cap=99.0).item()
    (inf, 99.0)
    """
    if data_range <= 0:
        raise UserError(f"data_range: expected a positive number, got {data_range}")
    value = 10 * torch.log10(data_range**2 / mse(original, reconstruction))
    return value if cap is None else value.clamp(max=cap)


def ssim(original: Tensor, reconstruction: Tensor, data_range: float = 1.0) -> Tensor:
    """Structural similarity: Gaussian window of 11, sigma 1.5, K1 = 0.01, K2 = 0.03; mean over whole windows.

    For signals (B, C, L) and pictures (B, C, H, W), averaged over channels. Where a side is shorter than 11 the window
    shrinks along it to the largest odd size that fits. Rows of a table (B, D) give NaN, see ``SSIM_NEEDS_SPACE``.

    >>> x = torch.linspace(0, 1, 256).reshape(1, 1, 16, 16)
    >>> round(ssim(x, x).item(), 6), round(ssim(x, 1 - x).item(), 3)
    (1.0, -0.826)
    """
    check_same_shape(original, reconstruction)
    a, b = original.detach().double(), reconstruction.detach().double()
    if a.dim() < 3:
        return torch.full((len(a),), torch.nan, dtype=torch.float64, device=a.device)
    c1, c2 = (_K1 * data_range) ** 2, (_K2 * data_range) ** 2
    mean_a, mean_b = _blur(a), _blur(b)
    variance_a, variance_b = _blur(a * a) - mean_a**2, _blur(b * b) - mean_b**2
    covariance = _blur(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1)
    structure = (2 * covariance + c2) / (variance_a + variance_b + c2)
    return (luminance * structure).flatten(1).mean(dim=1)


def _blur(x: Tensor) -> Tensor:
    """Gaussian mean over every window that lies wholly inside, along each axis after the channels."""
    for axis in range(2, x.dim()):
        length = x.shape[axis]
        size = min(_WINDOW, length if length % 2 else length - 1)
        position = torch.arange(size, dtype=x.dtype, device=x.device) - size // 2
        weights = torch.exp(-(position**2) / (2 * _SIGMA**2))
        x = x.unfold(axis, size, 1) @ (weights / weights.sum())
    return x


def _error(original: Tensor, reconstruction: Tensor) -> Tensor:
    check_same_shape(original, reconstruction)
    return (original.detach().double() - reconstruction.detach().double()).flatten(1)


def check_same_shape(original: Tensor, reconstruction: Tensor) -> None:
    if original.shape != reconstruction.shape or original.dim() < 2:
        got = f"{tuple(original.shape)} and {tuple(reconstruction.shape)}"
        raise UserError(f"expected an original and a reconstruction of the same shape (batch, ...), got {got}")
