"""Count the directions in which the inputs can move without a trace in the update, by its Jacobian at a solution."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from leakscope.equations.determinacy import count_free_directions
from leakscope.matching.gradient_map import GradientMap
from leakscope.matching.least_squares import Preconditioner

#: Products with the Jacobian that a count may take.
MOST_PROBES = 1000


def free_directions(
    mapping: GradientMap, x: Tensor, preconditioner: Preconditioner | None = None, *, limit: int = MOST_PROBES
) -> tuple[int | None, ...]:
    """Count the free directions of each example at the flat row ``x``; None where ``limit`` products do not tell.

    Every tensor of the update counts relative to its own size: a small one may be the only one to see a direction.
    """
    update = mapping.update(x)
    sizes = {name: float(value.norm()) for name, value in update.items()}
    seen = {name: value for name, value in sizes.items() if value > 0}
    if not seen:
        return (mapping.unknowns // mapping.shape[0],) * mapping.shape[0]
    products = mapping.linearise(x)
    weights = _row({name: 1 / sizes[name] if name in seen else 0.0 for name in update}, update)

    def normal(row: Tensor) -> Tensor:
        return products.backward(weights.square() * products.forward(row))

    def change(row: Tensor) -> float:
        moved = (weights * products.forward(row)).split([value.numel() for value in update.values()])
        return max(float(part.norm()) for part in moved)

    return count_free_directions(normal, change, mapping.shape, x, limit=limit, precondition=preconditioner)


def _row(numbers: Mapping[str, float], update: Mapping[str, Tensor]) -> Tensor:
    """One number for each entry of the update."""
    return torch.cat([torch.full_like(value, numbers[name]).flatten() for name, value in update.items()]).detach()
