"""Guess images from the feature maps of a network: a linear decoder, fitted on random images that need no data.

Natural images have amplitudes that fall with frequency. Random fields of this kind are run through the network, and
ridge regression tells each block of pixels from the 3x3 features around it. CIFAR-10 images come back from the middle
of a ResNet18 with 20 to 25 dB in a second: near enough for least squares to go on, where a descent from grey takes
hundreds of steps and often ends elsewhere. No image of anybody enters: the guess knows nothing but the network.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from leakscope.contracts.inputs import InputSpace
from leakscope.network.gates import GatedNetwork

#: Power of the frequency by which amplitudes fall. With 1.2 decoded images are as good, with less they lose detail.
FALL = 1.5
#: Mean and standard deviation of random images in [0, 1], drawn evenly, and the share of it that their channels have
#: in common.
BRIGHTNESS, CONTRAST, COMMON = (0.25, 0.75), (0.1, 0.3), 0.85
#: Equations for each coefficient of the decoder, the least and the most images that are drawn for them, and how many
#: run through the network at a time.
EQUATIONS, IMAGES, AT_ONCE = 16, (64, 400), 16
#: Ridge, relative to the mean square of the features.
RIDGE = 1e-3
#: Side of the window of features that tells a block of pixels.
WINDOW = 3


def decode(network: GatedNetwork, step: int, values: Tensor, inputs: InputSpace) -> Tensor | None:
    """Guess inputs, as rows in [0, 1], from what one step of the network gave; None where these are no images.

    With BatchNorm in train mode the random images run in batches of as many as there are values.
    """
    fits = inputs.bounded and inputs.smooth and len(inputs.shape) == values.dim() - 1 == 3
    if not fits or any(side % own for side, own in zip(inputs.shape[1:], values.shape[2:], strict=True)):
        return None
    places = math.prod(values.shape[2:])
    needed = math.ceil(EQUATIONS * values.shape[1] * WINDOW**2 / places)
    count = min(max(needed, IMAGES[0]), IMAGES[1])
    size = len(values) if network.batched else AT_ONCE
    images = natural_images(math.ceil(count / size) * size, inputs.shape, torch.Generator().manual_seed(0)).to(values)
    front = GatedNetwork(network.steps[: step + 1], ())
    given = [front.run(inputs.from_unit(some)).features for some in images.split(size)]
    matrix, wanted = _windows(torch.cat(given)), _blocks(images, values.shape[2:])
    normal = matrix.T @ matrix
    normal.diagonal().add_(RIDGE * normal.diagonal().mean())
    coefficients = torch.linalg.solve(normal, matrix.T @ wanted)
    guess = _unblock(_windows(values) @ coefficients, len(values), inputs.shape, values.shape[2:])
    return inputs.project_unit(guess.flatten()).reshape(len(values), -1)


def natural_images(count: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw random images in [0, 1] whose amplitudes fall with frequency as those of natural images do.

    >>> natural_images(2, (3, 8, 8), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 8, 8])
    """
    channels, height, width = shape
    # Of twice the size, so that opposite edges are not alike.
    rows, columns = torch.fft.fftfreq(2 * height)[:, None], torch.fft.rfftfreq(2 * width)[None]
    frequency = (rows**2 + columns**2).sqrt()
    frequency[0, 0] = math.inf
    noise = torch.randn((count, channels, 2 * height, 2 * width), generator=generator)
    fields = torch.fft.irfft2(torch.fft.rfft2(noise) * frequency**-FALL, s=noise.shape[2:])[:, :, :height, :width]
    fields = fields - fields.mean((1, 2, 3), keepdim=True)
    fields = fields / fields.std((1, 2, 3), keepdim=True).clamp_min(1e-12)
    grey = fields.mean(1, keepdim=True) * channels**0.5
    fields = COMMON**0.5 * grey + (1 - COMMON) ** 0.5 * fields
    brightness, contrast = (
        low + (high - low) * torch.rand((count, 1, 1, 1), generator=generator) for low, high in (BRIGHTNESS, CONTRAST)
    )
    return (brightness + contrast * fields).clamp(0, 1)


def _windows(maps: Tensor) -> Tensor:
    """Return the features around each place, and a one, as rows."""
    rows = F.unfold(maps, WINDOW, padding=WINDOW // 2).transpose(1, 2).flatten(0, 1)
    return torch.cat([rows, rows.new_ones(len(rows), 1)], 1)


def _blocks(images: Tensor, size: torch.Size) -> Tensor:
    """Return the block of pixels at each place of a map of this size, as rows."""
    count, channels, height, width = images.shape
    parts = images.reshape(count, channels, size[0], height // size[0], size[1], width // size[1])
    return parts.permute(0, 2, 4, 1, 3, 5).flatten(0, 2).flatten(1)


def _unblock(rows: Tensor, count: int, shape: tuple[int, ...], size: torch.Size) -> Tensor:
    channels, height, width = shape
    parts = rows.reshape(count, *size, channels, height // size[0], width // size[1])
    return parts.permute(0, 3, 1, 4, 2, 5).reshape(count, *shape)
