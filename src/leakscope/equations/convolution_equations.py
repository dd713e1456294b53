"""The equations that weight gradients give for what convolutions read: how many, and which places they do not see."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from leakscope.network.gates import WeightedLayer, padding_of

#: Equations for each unknown below which a layer is not solved. What is not negative has half as many unknowns, so that
#: they may be scarce; at 1.0 wrong masks are not found, and minutes pass before that is clear.
LEAST_EQUATIONS = 1.1
#: The same for a batch whose images may be found first: which values are zero is then nearly known, and seconds do.
LEAST_FOR_BATCHES = 1.4


def equations(modules: Sequence[Any]) -> int:
    """Count the rows that weight gradients have for a channel of what convolutions read.

    A stride splits the places into lattices, each of which is seen through some offsets of the kernel only: the
    scarcest counts, as often as there are lattices.

    >>> from torch import nn
    >>> equations([nn.Conv2d(8, 16, 3, stride=2, padding=1)])
    64
    """
    lattices = _lattices(modules)
    return len(lattices) * min(lattices)


def told_share(modules: Sequence[Any], places: int) -> float:
    """Return the share of so many places that these rows determine, lattice by lattice.

    >>> from torch import nn
    >>> told_share([nn.Conv2d(8, 16, 3, stride=2, padding=1)], 128)
    0.875
    """
    lattices = _lattices(modules)
    return sum(min(1.0, rows * len(lattices) / places) for rows in lattices) / len(lattices)


def _lattices(modules: Sequence[Any]) -> list[int]:
    """Count the rows that each lattice of places has."""
    step = max(max(module.stride) for module in modules)
    lattices = dict.fromkeys(itertools.product(range(step), repeat=2), 0)
    for module in modules:
        offsets = [[(o * d - p) % step for o in range(k)] for k, d, p in _axes(module)]
        for place in itertools.product(*offsets):
            if module.stride == (step, step):
                lattices[place] += len(module.weight)
        if module.stride == (1, 1) != (step, step):
            lattices = {place: count + module.weight[:, 0].numel() // step**2 for place, count in lattices.items()}
    return list(lattices.values())


def _axes(module: Any) -> list[tuple[int, int, int]]:
    return list(zip(module.kernel_size, module.dilation, padding_of(module)[0], strict=True))


def gradient_rows(layer: WeightedLayer, signals: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the matrix (outputs and offsets, places) from a channel of what is read to the weight gradient."""
    module: Any = layer.module
    images, outputs, height, width = signals.shape
    rows, columns = module.kernel_size
    above, beside = padding_of(module)[0]
    matrix = signals.new_zeros(outputs, rows, columns, images, *shape[1:])
    by_output = signals.transpose(0, 1)
    for row in range(rows):
        for column in range(columns):
            y = torch.arange(height) * module.stride[0] + row * module.dilation[0] - above
            x = torch.arange(width) * module.stride[1] + column * module.dilation[1] - beside
            down, across = (y >= 0) & (y < shape[1]), (x >= 0) & (x < shape[2])
            inside = by_output[:, :, down][:, :, :, across]
            matrix[:, row, column][:, :, y[down][:, None], x[across][None]] = inside
    return matrix.reshape(outputs * rows * columns, -1)


def every_place_is_read(
    layers: Sequence[WeightedLayer], outputs: Sequence[tuple[int, ...]], shape: tuple[int, ...]
) -> bool:
    """Return whether layers read all places of maps of ``shape``: strides may leave out the last rows and columns."""
    ones = [torch.ones((1, 1, *size[1:])) for size in outputs]
    counts = [gradient_rows(layer, one, shape).sum(0) for layer, one in zip(layers, ones, strict=True)]
    return bool((torch.stack(counts).sum(0) > 0).all())


def unseen_lattices(
    layers: Sequence[WeightedLayer], outputs: Sequence[tuple[int, ...]], shape: tuple[int, ...]
) -> list[Tensor]:
    """List the places of maps of ``shape`` on which derivatives that sum to zero do not tell one constant a channel.

    These are lattices of a stride that each offset of the kernel reads in full or not at all. ``outputs`` are the
    shapes of what the ``layers`` give.
    """
    modules: list[Any] = [one.module for one in layers]
    step = max(max(module.stride) for module in modules)
    found = []
    for row, column in itertools.product(range(step), repeat=2):
        lattice = torch.zeros(shape[1:], dtype=torch.float64)
        lattice[row::step, column::step] = 1
        seen = False
        for one, size in zip(layers, outputs, strict=True):
            ones = torch.ones((1, 1, *size[1:]), dtype=torch.float64)
            counts = gradient_rows(one, ones, shape) @ lattice.flatten()
            seen = seen or bool(((counts > 0) & (counts < ones.numel())).any())
        if not seen:
            found.append(lattice > 0)
    return found
