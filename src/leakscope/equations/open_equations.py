"""Linear equations for a step's values that are too few for a peel, kept for those who nearly know the values."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from leakscope.equations.robust_solve import DEAD, scarce_solve


@dataclass(frozen=True, eq=False, kw_only=True)
class OpenEquations:
    """Linear equations for what one ``step`` gives, where there are too few of them for the peel.

    Each row of ``matrix`` reads the places of all images, and each of its ``groups`` is an output channel. ``gradient``
    has a column for each channel of the value. ``share``: equations for each unknown, on the lattice that has fewest.
    """

    step: int
    share: float
    matrix: Tensor
    gradient: Tensor
    groups: Tensor

    def reordered(self, order: Tensor) -> OpenEquations:
        by_image = self.matrix.reshape(len(self.matrix), len(order), -1)
        return replace(self, matrix=by_image[:, order].flatten(1))

    def balanced(self) -> tuple[Tensor, Tensor]:
        """Return matrix and gradient with each output channel as loud as any other, but for those that are dead."""
        size = self.matrix.new_zeros(int(self.groups.max()) + 1).index_add(0, self.groups, self.matrix.square().sum(1))
        factor = torch.where(size > DEAD**2 * size.max(), size.clamp_min(1e-300).rsqrt(), 0.0)[self.groups, None]
        return factor * self.matrix, factor * self.gradient

    def solve(self, near: Tensor) -> tuple[Tensor, float]:
        """Solve for values behind a ReLU from values (images, channels, ...) near to them; return also what is left.

        Which of them are zero is nearly known then, so that half of the equations are enough.
        """
        start = near.to(self.matrix).permute(0, 2, 3, 1)
        doubts = self.matrix.new_zeros(int(self.groups.max()) + 1)
        solution, _, residual = scarce_solve(self.matrix, self.gradient, self.groups, doubts, start.flatten(0, 2))
        return solution.reshape(start.shape).permute(0, 3, 1, 2), residual
