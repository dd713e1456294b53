"""Refine inputs that are known up to a Gaussian error, by one Gauss-Newton step on the whole update.

Given x = start + A c with c of standard normal numbers, and an update with noise of known levels, the most probable c
solves (1 + A'J'JA) c = A'J'r: a few conjugate gradients. What they leave of the error is found by a rehearsal: the same
iterations on an error and noise that were drawn, and are therefore known.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from leakscope.equations.conjugate_gradients import conjugate_gradients
from leakscope.matching.gradient_map import GradientMap

#: The noise that rounding to float32 leaves on a gradient behind some layers, relative to its tensor: 3e-7 to 5e-7 on
#: ViTs. More than that shows in the result, and counts.
ROUNDING_NOISE = 5e-7
#: Tensors below this share of the largest (root mean squares) are not counted on: their noise comes from larger ones.
SMALLEST = 1e-5

#: From flat unknowns to the change of flat inputs; linear.
Spread = Callable[[Tensor], Tensor]


class Refined(NamedTuple):
    """Flat inputs, and their expected error, root mean square."""

    x: Tensor
    error: float


def noise_levels(update: dict[str, Tensor]) -> dict[str, float]:
    """Return the level of rounding on the entries of each tensor, infinite for those that are too small.

    >>> noise_levels({"a": torch.tensor([2.0, -2.0]), "b": torch.tensor([1e-6])})
    {'a': 1e-06, 'b': inf}
    """
    sizes = {name: float(value.square().mean().sqrt()) for name, value in update.items()}
    least = SMALLEST * max(sizes.values())
    return {name: ROUNDING_NOISE * size if size > least else torch.inf for name, size in sizes.items()}


def refine(mapping: GradientMap, observed: Tensor, start: Tensor, spread: Spread, unknowns: int, steps: int) -> Refined:
    """Refine the flat inputs ``start``; ``mapping`` and ``observed`` are in units of the update's noise."""
    products = mapping.narrow().linearise(start.float())
    origin = start.new_zeros(unknowns)
    pull: Callable[[Tensor], tuple[Tensor]] = torch.func.vjp(spread, origin)[1]

    def forward(c: Tensor) -> Tensor:
        return products.forward(spread(c).float()).double()

    def backward(rows: Tensor) -> Tensor:
        return pull(products.backward(rows.float()).double())[0]

    def solve(rows: Tensor) -> Tensor:
        return conjugate_gradients(lambda c: c + backward(forward(c)), backward(rows), steps, tolerance=0.0)

    x = start + spread(solve(observed - mapping(start)))
    draws = torch.Generator().manual_seed(0)
    drawn = torch.randn(unknowns, generator=draws, dtype=torch.float64).to(start)
    noise = torch.randn(len(observed), generator=draws, dtype=torch.float64).to(start)
    left = drawn - solve(forward(drawn) + noise)
    # The residual of some tensor may be larger than rehearsed, and the error then is, too.
    sizes = [value.numel() for value in mapping.victim.tensors.weights.values()]
    residual, rehearsed = ((observed - mapping(x)).split(sizes), (forward(left) + noise).split(sizes))
    more = max(float(part.norm() / other.norm()) for part, other in zip(residual, rehearsed, strict=True))
    return Refined(x, float(spread(left).square().mean().sqrt()) * max(1.0, more))
