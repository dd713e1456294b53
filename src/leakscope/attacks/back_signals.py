"""Steps I and II of CAFE: what each sample sent into and got back from a dense layer, from sums over known batches.

With s_t the 0/1 vector of the samples in round t, the bias gradient of a dense layer is V' s_t and its weight gradient
V' diag(s_t) H: row n of V is the back-signal of sample n at the layer's output (the 1/K of the mean included), row n of
H the layer's input. As long as the model stands still both are linear least squares, one after the other, and are
solved outright; the paper approaches them batch by batch instead, which the classes below do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakscope.limits.index_alignment import index_matrix
from leakscope.observation import Message
from leakscope.vertical import FirstDense

#: Cut off in the eigenvalues of a system, relative to the largest: what is below was made by rounding.
CUTOFF = 1e-11
#: How near to 1 the share of a sample in what the equations determine must be to count as determined.
INSIDE = 1e-7


@dataclass(frozen=True, eq=False)
class Solution:
    """One row a sample, and how much of the observed gradients it leaves unexplained, relative to them.

    ``error`` is the error of the rows to be expected, relative to them, if what is left is independent noise.
    """

    rows: Tensor
    residual: float
    error: float


def solve_signals(matrix: Tensor, bias_gradients: Tensor) -> Solution:
    """Step I: the back-signals V (samples, units) with ``matrix`` V = ``bias_gradients`` (rounds, units).

    The shortest of the best ones where the batches do not determine all.
    """
    observed = bias_gradients.double()
    inverse = torch.linalg.pinv(matrix, rtol=CUTOFF)
    rows = inverse @ observed
    rows = rows + inverse @ (observed - matrix @ rows)  # once more for what rounding left
    rest = observed - matrix @ rows
    spare = len(matrix) - int(torch.linalg.matrix_rank(matrix))
    noise = float(rest.square().sum()) / spare if spare else 0.0
    error = _ratio(noise * float(inverse.square().sum()), float(rows.square().sum()))
    return Solution(rows, _ratio(float(rest.square().sum()), float(observed.square().sum())), error)


@dataclass(frozen=True, eq=False)
class InputSystem:
    """The normal equations of step II: A H = R with R_n = v_n' sum_t C_tn G_t, for back-signals of length one.

    Where step I leaves back-signals open, ``rounds`` (C) has the combinations of rounds that those samples do not
    enter: their guessed back-signals must not spoil the others. ``determined`` are the samples whose row follows.
    """

    unit: Tensor
    sizes: Tensor
    rounds: Tensor
    inverse: Tensor
    determined: Tensor
    complete: bool

    @classmethod
    def of(cls, messages: Sequence[Message], signals: Tensor, known: Tensor | None = None) -> InputSystem:
        """``known`` (samples,): whether step I determines the back-signal; None where it does for all."""
        tiny = torch.finfo(torch.float64).tiny
        sizes = torch.linalg.vector_norm(signals, dim=1)
        known = torch.ones_like(sizes, dtype=torch.bool) if known is None else known.cpu()
        told = known & (sizes > 0)
        unit = torch.where(told[:, None], signals / sizes.clamp_min(tiny)[:, None], 0.0)
        matrix = index_matrix([message.indices or () for message in messages], len(signals))
        rounds, vague = matrix * told, matrix[:, ~known & (matrix.sum(0) > 0)]
        if vague.shape[1]:
            rounds = rounds - vague @ (torch.linalg.pinv(vague, rtol=CUTOFF) @ rounds)
        values, vectors = torch.linalg.eigh((matrix.T @ rounds) * (unit @ unit.T))
        kept = values > CUTOFF * values[-1].clamp_min(tiny)
        inverse = (vectors[:, kept] / values[kept]) @ vectors[:, kept].T
        determined = told & (vectors[:, kept].square().sum(1) >= 1 - INSIDE)
        return cls(unit, sizes, rounds, inverse, determined, vague.shape[1] == 0)


def solve_inputs(messages: Sequence[Message], weight: str, signals: Tensor, known: Tensor | None = None) -> Solution:
    """Step II: the layer's inputs H (samples, inputs) from the gradients of ``weight`` (units, inputs).

    ``known`` (samples,): whether step I determines the back-signal; None where it does for all.

    The normal equations are (S'S o VV') H = R with R_n = sum over the rounds with n of v_n' G_t, so the gradients, by
    far the largest part, are read one at a time. Rows of V are scaled to length one first: then the system is
    conditioned no worse than S'S. Rows that are not determined are zero. Nothing is said of a residual or an error
    where step I leaves samples open, for they may explain anything.
    """
    system = InputSystem.of(messages, signals, known)
    unit = system.unit
    rows = torch.zeros((len(signals), messages[0].update[weight].shape[1]), dtype=torch.float64)
    left = total = 0.0
    for repeat in range(3):  # the first solves, the second takes back rounding, the third only looks
        right, left, total = torch.zeros_like(rows), 0.0, 0.0
        for message, combined in zip(messages, system.rounds, strict=True):
            batch = torch.tensor(message.indices)
            observed = message.update[weight].detach().cpu().double()
            rest = observed - unit[batch].T @ rows[batch] if repeat else observed
            used = batch if system.complete else torch.nonzero(combined).flatten()
            right[used] += combined[used, None] * (unit[used] @ rest)
            left, total = left + float(rest.square().sum()), total + float(observed.square().sum())
        if repeat < 2:
            rows = rows + system.inverse @ right
    spare = sum(message.update[weight].numel() for message in messages) - rows.numel()
    noise = left / spare if spare > 0 and system.complete else 0.0
    rows = torch.where(system.determined[:, None], rows / system.sizes[:, None], 0.0)
    # A sample that no round shows has neither a row nor an error.
    counted = system.determined & (system.sizes > CUTOFF * system.sizes.max())
    spread = float((system.inverse.diagonal() / system.sizes.square())[counted].sum()) * rows.shape[1]
    residual = _ratio(left, total) if system.complete else 0.0
    return Solution(rows, residual, _ratio(noise * spread, float(rows[counted].square().sum())))


def explained(
    messages: Sequence[Message],
    layers: Sequence[FirstDense],
    signals: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    complete: bool = True,
) -> float:
    """The larger share of the layers' bias or weight gradients that these rows leave unexplained.

    Of biases only where step I is not ``complete``: samples that it leaves open may explain any weight gradient.
    """
    shares = []
    for layer, rows, made in zip(layers, signals, inputs, strict=True):
        for name in (f"{layer.name}.bias", f"{layer.name}.weight")[: 1 + complete]:
            left = total = 0.0
            for message in messages:
                if name in message.update:
                    batch = torch.tensor(message.indices)
                    observed = message.update[name].detach().cpu().double()
                    told = rows[batch].sum(0) if observed.dim() == 1 else rows[batch].T @ made[batch]
                    left += float((observed - told).square().sum())
                    total += float(observed.square().sum())
            shares.append(_ratio(left, total))
    return max(shares)


def _ratio(part: float, whole: float) -> float:
    """Of two squared lengths, the ratio of the lengths."""
    return (part / whole) ** 0.5 if whole else 0.0


class RowAdam:
    """Adam that moves some rows of a table at a time; each row counts its own steps, for the bias correction."""

    def __init__(self, table: Tensor) -> None:
        self.mean, self.square = torch.zeros_like(table), torch.zeros_like(table)
        self.steps = torch.zeros(len(table), dtype=table.dtype, device=table.device)

    def move(self, rows: Tensor, gradient: Tensor, lr: float) -> Tensor:
        """How far to go from these rows; to be subtracted."""
        first, second = 0.9, 0.999
        shape = (-1,) + (1,) * (gradient.dim() - 1)
        self.steps[rows] += 1
        steps = self.steps[rows].reshape(shape)
        self.mean[rows] = first * self.mean[rows] + (1 - first) * gradient
        self.square[rows] = second * self.square[rows] + (1 - second) * gradient.square()
        length = (self.square[rows] / (1 - second**steps)).sqrt() + 1e-16
        return lr * self.mean[rows] / (1 - first**steps) / length


Steps = Literal["projection", "descent"]


@dataclass(eq=False)
class RunningSteps:
    """Steps I and II for one layer, one round at a time.

    "projection" goes all the way to the nearest tables that explain the round, which needs no learning rate and, where
    rounds agree, converges as fast as the rounds let it. "descent" is what the paper does: one step of gradient descent
    for V, one of row-wise Adam for H.
    """

    signals: Tensor
    inputs: Tensor
    steps: Steps
    signal_lr: float
    input_lr: float

    def __post_init__(self) -> None:
        self._adam = RowAdam(self.inputs)

    def see_bias(self, batch: Tensor, gradient: Tensor) -> None:
        rest = gradient - self.signals[batch].sum(0)
        share = 1 / len(batch) if self.steps == "projection" else 2 * self.signal_lr
        self.signals[batch] += share * rest

    def see_weight(self, batch: Tensor, gradient: Tensor) -> None:
        signals = self.signals[batch]
        rest = gradient - signals.T @ self.inputs[batch]
        if self.steps == "descent":
            self.inputs[batch] -= self._adam.move(batch, -2 * signals @ rest, self.input_lr)
            return
        gram = signals @ signals.T
        # A little damping: in the first rounds the back-signals are no more than a first guess.
        damping = 1e-6 * gram.diagonal().mean() + torch.finfo(gram.dtype).tiny
        gram.diagonal().add_(damping)
        self.inputs[batch] += torch.linalg.solve(gram, signals @ rest)
