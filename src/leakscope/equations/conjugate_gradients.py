"""Conjugate gradients on a positive definite matrix that is known by its products: one iteration for all solvers."""

import math
from collections.abc import Callable, Iterator
from itertools import islice

import torch
from torch import Tensor

Product = Callable[[Tensor], Tensor]


def conjugate_gradients(product: Product, right: Tensor, steps: int, tolerance: float = 1e-3) -> Tensor:
    """Solve A x = right from zero, until so little of ``right`` is left or for so many steps.

    >>> conjugate_gradients(lambda x: 2 * x, torch.tensor([2.0, 4.0]), steps=3).tolist()
    [1.0, 2.0]
    """
    solution = torch.zeros_like(right)
    for found, left in islice(iterate(product, right), steps):
        solution = found
        if left < tolerance**2:
            break
    return solution


def iterate(product: Product, right: Tensor, precondition: Product | None = None) -> Iterator[tuple[Tensor, float]]:
    """Yield solutions of A x = right, each with the squared share that it leaves, in the norm of ``precondition``.

    It ends where nothing is left, or where the matrix shows no positive curvature.
    """
    solution, rest = torch.zeros_like(right), right
    direction = turned = rest if precondition is None else precondition(rest)
    first = size = float((rest * turned).sum())
    while 0 < size < math.inf:
        image = product(direction)
        curvature = float((direction * image).sum())
        if not 0 < curvature < math.inf:
            return
        solution = solution + (size / curvature) * direction
        rest = rest - (size / curvature) * image
        turned = rest if precondition is None else precondition(rest)
        before, size = size, float((rest * turned).sum())
        yield solution, size / first
        direction = turned + (size / before) * direction
