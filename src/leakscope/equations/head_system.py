"""The equations of a linear head for a batch, compressed to what they determine; float64.

With D (n, C) the derivatives of the loss at each example's logits and F (n, d) the head's inputs, the weight gradient
is G = D'F and the bias gradient D'1. G = U S W has rank n, so D = A U' and F = A^-T S W for some square A: n^2
unknowns, and each example's own row of D must be softmax minus one-hot of the logits that its own row of F gives.

Of examples with one label in an untrained network these equations hardly tell one rotation of A from another. Where
features come out of a ReLU, that none of them is negative does: a third of them are zero, in different places for each
example.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

#: What unknowns leave unexplained, and a function for the derivative of that.
Equations = Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]]


@dataclass(frozen=True, eq=False)
class HeadSystem:
    """The equations for one choice of labels; the unknowns are A, and with ``free_scale`` the log of a factor.

    ``left`` U (C, n), ``sizes`` S (n,), ``right`` W (n, d), ``weight`` and ``bias`` those of the head. ``targets``
    (n, C): one-hot or soft labels. ``sums`` is U' times the bias gradient, None without a bias. ``amplitude``: the
    factor before softmax minus targets, 1/n for a mean. ``noise``: standard deviation of the noise on an entry of G.
    ``rounding``: that of softmax minus one-hot.
    """

    left: Tensor
    sizes: Tensor
    right: Tensor
    weight: Tensor
    bias: Tensor
    targets: Tensor
    sums: Tensor | None
    amplitude: float
    free_scale: bool
    noise: float
    rounding: float

    def matrix(self, unknowns: Tensor) -> Tensor:
        n = len(self.sizes)
        return unknowns[: n * n].reshape(n, n)

    def factor(self, unknowns: Tensor) -> float:
        """The amplitude."""
        return self.amplitude * (math.exp(float(unknowns[-1].clamp(-50, 50))) if self.free_scale else 1.0)

    def features(self, unknowns: Tensor) -> Tensor:
        return (_inverse(self.matrix(unknowns)) * self.sizes) @ self.right

    def output_gradients(self, unknowns: Tensor) -> Tensor:
        return self.matrix(unknowns) @ self.left.T

    def start(self, output_gradients: Tensor) -> Tensor:
        """The unknowns whose output gradients are nearest to these."""
        flat = (output_gradients @ self.left).flatten()
        return torch.cat([flat, flat.new_zeros(1)]) if self.free_scale else flat

    def equations(self, unknowns: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Of the output gradients, then of their sum, both divided by the amplitude."""
        matrix, amplitude, n = self.matrix(unknowns), self.factor(unknowns), len(self.sizes)
        inverse, along = _inverse(matrix), (self.sizes[:, None] * self.right) @ self.weight.T
        softmax = torch.softmax(inverse @ along + self.bias, 1)
        shown = matrix @ self.left.T / amplitude
        rows = [(shown - softmax + self.targets).flatten()]
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
            return torch.cat([columns, -torch.cat([shown.flatten(), *rows[1:]])[:, None]], 1)

        return torch.cat(rows), derivative

    def signed(self, each: Tensor, feature: Tensor | None) -> Equations:
        """The equations, those of each example times ``each`` (n,), and its negative features times ``feature`` (n,).

        Negative features are many equations of few unknowns: of each example only the triangle of their orthogonal
        factors is kept, which has the same squares.
        """
        n, classes = len(self.sizes), len(self.bias)

        def weighted(unknowns: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
            rest, derivative = self.equations(unknowns)
            weights = torch.cat([each.repeat_interleave(classes), each.max().expand(len(rest) - n * classes)])
            if feature is None:
                return rest * weights, lambda: derivative() * weights[:, None]
            features = self.features(unknowns)
            negative = (features < 0) * feature[:, None]
            columns = torch.cat([-features.T.expand(n, -1, -1), features[:, :, None]], 2) * negative[:, :, None]
            if not bool(torch.isfinite(columns).all()):
                return rest * math.nan, derivative
            triangles = torch.linalg.qr(columns, mode="r").R

            def both() -> Tensor:
                inverse = _inverse(self.matrix(unknowns))
                signs = (triangles[:, :, :n, None] * inverse[:, None, None, :]).reshape(-1, n * n)
                if self.free_scale:
                    signs = torch.cat([signs, signs.new_zeros(len(signs), 1)], 1)
                return torch.cat([derivative() * weights[:, None], signs])

            return torch.cat([rest * weights, triangles[:, :, n].flatten()]), both

        return weighted

    def deviations(self, unknowns: Tensor) -> tuple[Tensor, Tensor]:
        """What noise and rounding make of an equation and of a feature, for each example: standard deviations (n,)."""
        matrix, amplitude = self.matrix(unknowns), self.factor(unknowns)
        feature = self.noise * _inverse(matrix).norm(dim=1)
        softmax = torch.softmax(self.features(unknowns) @ self.weight.T + self.bias, 1)
        # The gradient of the softmax by the features: p_k (V_k - sum_l p_l V_l).
        slopes = softmax * (self.weight[None] - (softmax @ self.weight)[:, None, :]).norm(dim=2)
        through = feature * slopes.square().mean(1).sqrt()
        direct = self.noise * (matrix / self.sizes).norm(dim=1) / amplitude
        return torch.sqrt(self.rounding**2 + direct**2 + through**2), feature

    def expected_error(self, unknowns: Tensor, nonnegative: bool) -> float:
        """The largest relative error of an example's features that noise and rounding let expect."""
        n = len(self.sizes)
        each, feature = self.deviations(unknowns)
        _, derivative = self.signed(1 / each, 1 / feature if nonnegative else None)(unknowns)
        columns = derivative()
        norms = columns.norm(dim=0).clamp_min(1e-300)
        triangle = torch.linalg.qr(columns / norms, mode="r").R
        inverse, features = _inverse(self.matrix(unknowns)), self.features(unknowns)
        # dF_i = - sum over p, q of A^-T_iq dA_pq F_p
        root = torch.linalg.qr(features.T, mode="r").R.T
        moved = (root[None, :, None, :] * inverse[:, None, :, None]).reshape(n, n * n, -1)
        if self.free_scale:
            moved = torch.cat([moved, moved.new_zeros(n, 1, moved.shape[2])], 1)
        spread = torch.linalg.solve_triangular(triangle.T, moved / norms[:, None], upper=False)
        own = feature.square() * features.shape[1]
        errors = torch.sqrt(spread.square().sum((1, 2)) + own) / features.norm(dim=1)
        return float(errors.max().nan_to_num(math.inf, math.inf))


def least_squares(equations: Equations, unknowns: Tensor, steps: int) -> tuple[Tensor, float]:
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
        if not math.isfinite(value) or not bool(torch.isfinite(columns).all()):
            return unknowns, math.inf
        norms = columns.norm(dim=0).clamp_min(1e-12 * float(columns.norm()) + 1e-300)
        # The triangle with the right-hand side beside it; the orthogonal factor itself is not needed.
        triangle, taken = torch.linalg.qr(torch.cat([columns / norms, rest[:, None]], 1), mode="r").R, False
        for _ in range(12):
            ridge = math.sqrt(damping) * torch.eye(len(norms), len(norms) + 1, dtype=rest.dtype)
            damped = torch.linalg.qr(torch.cat([triangle, ridge]), mode="r").R
            step = torch.linalg.solve_triangular(damped[: len(norms), :-1], damped[: len(norms), -1:], upper=True)[:, 0]
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
        if gain < 1e-9:
            break
    return unknowns, value


def _inverse(matrix: Tensor) -> Tensor:
    """The transpose of the inverse; not finite where there is none."""
    inverse: Tensor = torch.linalg.inv_ex(matrix).inverse.T
    return inverse
