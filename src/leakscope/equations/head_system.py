"""The equations of a linear head for a batch, compressed to what they determine, and their solution; float64.

With D (n, C) the derivatives of the loss at each example's logits and F (n, d) the head's inputs, the weight gradient
is G = D'F and the bias gradient D'1. G = U S W has rank n, so D = A U' and F = A^-T S W for some square A: n^2
unknowns, and each example's own row of D must be softmax minus one-hot of the logits that its own row of F gives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: Rounding of a gradient in single precision, relative to an entry of size one.
ROUNDING = 3e-8
#: Steps of a search from one start, and of the last refinement.
STEPS, REFINEMENTS = 60, 150


@dataclass(frozen=True, eq=False)
class HeadSystem:
    """The equations for one choice of labels; ``amplitude`` is the factor before softmax minus one-hot, 1/n for a mean.

    ``left`` U (C, n), ``sizes`` S (n,), ``right`` W (n, d), ``weight`` and ``bias`` those of the head, ``onehot`` (n,
    C). ``sums`` is U' times the bias gradient, None without a bias. ``free_scale``: the amplitude is unknown as well.
    """

    left: Tensor
    sizes: Tensor
    right: Tensor
    weight: Tensor
    bias: Tensor
    onehot: Tensor
    sums: Tensor | None
    amplitude: float
    free_scale: bool
    noise: float

    @property
    def along(self) -> Tensor:
        """The logits that each direction of the features gives (n, C)."""
        return (self.sizes[:, None] * self.right) @ self.weight.T

    def features(self, unknowns: Tensor) -> Tensor:
        return (torch.linalg.inv(self.split(unknowns)[0]).T * self.sizes) @ self.right

    def output_gradients(self, unknowns: Tensor) -> Tensor:
        return self.split(unknowns)[0] @ self.left.T

    def split(self, unknowns: Tensor) -> tuple[Tensor, float]:
        """The matrix A and the amplitude."""
        n = len(self.sizes)
        factor = math.exp(float(unknowns[-1])) if self.free_scale else 1.0
        return unknowns[: n * n].reshape(n, n), self.amplitude * factor

    def start(self, output_gradients: Tensor) -> Tensor:
        """The unknowns whose output gradients are nearest to these."""
        flat = (output_gradients @ self.left).flatten()
        return torch.cat([flat, flat.new_zeros(1)]) if self.free_scale else flat

    def equations(self, unknowns: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """What the unknowns leave unexplained, relative to the amplitude, and a function for its derivative."""
        matrix, amplitude = self.split(unknowns)
        inverse, along, n = torch.linalg.inv_ex(matrix).inverse.T, self.along, len(matrix)
        softmax = torch.softmax(inverse @ along + self.bias, 1)
        signal = softmax - self.onehot
        gap = matrix @ self.left.T / amplitude - signal
        rows = [gap.flatten()]
        if self.sums is not None:
            rows.append((matrix.sum(0) - self.sums) / amplitude)

        def derivative() -> Tensor:
            unit = torch.eye(n, dtype=matrix.dtype)
            slope = softmax[:, :, None] * (along.T - (softmax @ along.T)[:, None, :])
            moved = (slope @ inverse.T)[:, :, :, None] * inverse[:, None, None, :]
            blocks = [(moved + unit[:, None, :, None] * self.left[None, :, None, :] / amplitude).reshape(-1, n * n)]
            if self.sums is not None:
                blocks.append((unit / amplitude)[:, None, :].expand(n, n, n).reshape(n, n * n))
            columns = torch.cat(blocks)
            if not self.free_scale:
                return columns
            shares = [-(matrix @ self.left.T).flatten() / amplitude]
            shares += [] if self.sums is None else [-(matrix.sum(0) - self.sums) / amplitude]
            return torch.cat([columns, torch.cat(shares)[:, None]], 1)

        return torch.cat(rows), derivative


def least_squares(
    equations: Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]],
    unknowns: Tensor,
    steps: int,
    *,
    stop: float = 0.0,
) -> tuple[Tensor, float]:
    """Levenberg–Marquardt with columns of norm one: where it ended, and the sum of squares there.

    Each step is solved by orthogonal factors, not by normal equations, which would square a condition of 1e8.

    >>> across = torch.tensor([1.0, -1.0], dtype=torch.float64)
    >>> def circle(x):
    ...     return torch.stack([x @ x - 4, x @ across]), lambda: torch.stack([2 * x, across])
    >>> place, value = least_squares(circle, torch.tensor([3.0, 1.0], dtype=torch.float64), 20)
    >>> [round(float(v), 6) for v in place]
    [1.414214, 1.414214]
    """
    rest, derivative = equations(unknowns)
    value, damping = float(rest @ rest), 1e-2
    for _ in range(steps):
        columns = derivative()
        norms = columns.norm(dim=0).clamp_min(1e-12 * float(columns.norm()) + 1e-300)
        basis, triangle = torch.linalg.qr(columns / norms)
        goal, taken = basis.T @ rest, False
        for _ in range(12):
            damped = torch.cat([triangle, math.sqrt(damping) * torch.eye(len(norms), dtype=goal.dtype)])
            factor, small = torch.linalg.qr(damped)
            step = torch.linalg.solve_triangular(small, (factor.T[:, : len(goal)] @ goal)[:, None], upper=True)[:, 0]
            trial = unknowns - step / norms
            further, slope = equations(trial)
            reached = float(further @ further)
            if reached < value:
                taken = True
                break
            damping *= 5
        if not taken:
            break
        gain = 1 - reached / value
        unknowns, rest, derivative, value, damping = trial, further, slope, reached, max(damping / 6, 1e-20)
        if value <= stop or gain < 1e-9:
            break
    return unknowns, value
