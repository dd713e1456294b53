"""Count the directions in which the inputs can move without a trace in the update, by its Jacobian at a solution."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from leakscope.contracts.certificate import EXPLAINED
from leakscope.equations.determinacy import count_free_directions
from leakscope.matching.gradient_map import GradientMap, Linearisation
from leakscope.matching.least_squares import Preconditioner, solve

#: Where an update that is off by what a certificate allows moves an example by more than this (80 dB), none is given.
ACCURATE = 1e-4
#: Units of a layer up to which its gradient is whitened, and the share of its largest singular value that is the least:
#: a trained ConvNet takes half as many products with it.
WHITENED_UNITS, LEAST = 1024, 3e-3


def free_directions(
    mapping: GradientMap, x: Tensor, preconditioner: Preconditioner | None = None, *, limit: int = 1000
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

    counts = count_free_directions(normal, change, mapping.shape, x, limit=limit, precondition=preconditioner)
    if preconditioner is None:
        return counts
    # A preconditioner makes weak directions as quick as strong ones, so that their weakness must be looked for.
    moved = movement(products, EXPLAINED * math.hypot(*sizes), mapping.shape, preconditioner)
    return tuple(None if count == 0 and move > ACCURATE else count for count, move in zip(counts, moved, strict=True))


def movement(
    products: Linearisation, noise: float, shape: tuple[int, ...], preconditioner: Preconditioner | None = None
) -> list[float]:
    """Return the root mean square by which each example moves, at least, with random noise of this length."""
    draws = torch.Generator().manual_seed(0)
    disturbance = torch.randn(products.value.shape, generator=draws, dtype=torch.float64).to(products.value)
    right = products.backward(disturbance * (noise / disturbance.norm()))
    moved = solve(products, right, 0.0, tolerance=1e-12, limit=200, preconditioner=preconditioner).step
    return moved.reshape(shape[0], -1).square().mean(1).sqrt().tolist()


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
