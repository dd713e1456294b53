"""Count the directions in which the inputs can move without a trace in the update, by its Jacobian at a solution."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leakscope.equations.determinacy import count_free_directions
from leakscope.matching.gradient_map import GradientMap
from leakscope.matching.least_squares import Preconditioner

#: Products with the Jacobian that a count may take.
MOST_PROBES = 1000
#: Units of a layer up to which its gradient is whitened, and the share of its largest singular value that is not gone
#: below: a trained ConvNet takes half as many products with it.
WHITENED_UNITS, LEAST = 1024, 3e-3


def free_directions(
    mapping: GradientMap, x: Tensor, preconditioner: Preconditioner | None = None, *, limit: int = MOST_PROBES
) -> tuple[int | None, ...]:
    """Count the free directions of each example at the flat row ``x``; None where ``limit`` products do not tell.

    Every tensor of the update counts relative to its own size: a small one may be the only one to see a direction.
    """
    update = {name: value.detach() for name, value in mapping.update(x).items()}
    if not any(bool(value.any()) for value in update.values()):
        return (mapping.unknowns // mapping.shape[0],) * mapping.shape[0]
    products = mapping.linearise(x)
    parts = [value.numel() for value in update.values()]
    sizes = [float(value.norm()) or 1.0 for value in update.values()]
    squares = [_square(value, size) for value, size in zip(update.values(), sizes, strict=True)]

    def normal(row: Tensor) -> Tensor:
        moved = products.forward(row).split(parts)
        return products.backward(torch.cat([turn(part) for turn, part in zip(squares, moved, strict=True)]))

    def change(row: Tensor) -> float:
        moved = products.forward(row).split(parts)
        return max(float(part.norm()) / size for part, size in zip(moved, sizes, strict=True))

    return count_free_directions(normal, change, mapping.shape, x, limit=limit, precondition=preconditioner)


def _square(value: Tensor, size: float) -> Callable[[Tensor], Tensor]:
    """Multiply a part of the update by W'W: one over its squared size or, of a layer's weights, half whitened.

    Units whose gradients are small or alike then count about as much as the others; what is free stays free.
    """
    if value.dim() < 2 or len(value) > WHITENED_UNITS or not bool(value.any()):
        return lambda part: part / size**2
    rows = value.flatten(1)
    squares, vectors = torch.linalg.eigh(rows @ rows.T)
    values = squares.clamp_min(0).sqrt()
    largest = values[-1]
    matrix = (vectors / ((values + LEAST * largest) * largest)) @ vectors.T
    return lambda part: (matrix @ part.reshape(rows.shape)).flatten()
