"""Steps I and II of CAFE: what each sample sent into and got back from a dense layer, from sums over known batches.

With s_t the 0/1 vector of the samples in round t, the bias gradient of a dense layer is V' s_t and its weight gradient
V' diag(s_t) H: row n of V is the output gradient of sample n at the layer (the 1/K of the mean included), row n of H
the layer's input. As long as the model stands still both are linear least squares, one after the other, and are solved
outright; the paper approaches them batch by batch instead (attacks/cafe_rounds.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.observation import Message
from leakscope.equations.index_matrix import index_matrix
from leakscope.network.layers import FirstDense

#: Cut off in the eigenvalues of a system, relative to the largest: what is below was made by rounding.
CUTOFF = 1e-11
#: How near to 1 the share of a sample in what the equations determine must be to count as determined.
INSIDE = 1e-7


@dataclass(frozen=True, eq=False)
class Solution:
    """One row per sample, and how much of the observed gradients it leaves unexplained, relative to them.

    ``error`` is the error of the rows to be expected, relative to them, if what is unexplained is independent noise.
    """

    rows: Tensor
    residual: float
    error: float


@dataclass(frozen=True, eq=False)
class InputSolution(Solution):
    """``determined`` (samples,): whose row follows from the equations; the others are zero."""

    determined: Tensor


def solve_output_gradients(matrix: Tensor, bias_gradients: Tensor) -> Solution:
    """Step I: the output gradients V (samples, units) with ``matrix`` V = ``bias_gradients`` (rounds, units).

    Those of least norm where the batches do not determine all.
    """
    observed = bias_gradients.double()
    inverse = torch.linalg.pinv(matrix, rtol=CUTOFF)
    rows = inverse @ observed
    rows = rows + inverse @ (observed - matrix @ rows)  # once more for the error that rounding made
    rest = observed - matrix @ rows
    spare = len(matrix) - int(torch.linalg.matrix_rank(matrix))
    noise = float(rest.square().sum()) / spare if spare else 0.0
    error = _ratio(noise * float(inverse.square().sum()), float(rows.square().sum()))
    return Solution(rows, _ratio(float(rest.square().sum()), float(observed.square().sum())), error)


@dataclass(frozen=True, eq=False)
class InputSystem:
    """The normal equations of step II: A H = R with R_n = v_n' sum_t C_tn G_t, for output gradients of norm one.

    Where step I does not determine all output gradients, ``rounds`` (C) has the combinations of rounds that those
    samples do not enter: their guessed output gradients must not spoil the others. ``determined`` are the samples
    whose row follows.
    """

    unit: Tensor
    norms: Tensor
    rounds: Tensor
    inverse: Tensor
    determined: Tensor
    complete: bool

    @classmethod
    def of(cls, messages: Sequence[Message], output_gradients: Tensor, determined: Tensor | None = None) -> InputSystem:
        """``determined`` (samples,): whether step I determines the output gradient; None where it does for all."""
        tiny = torch.finfo(torch.float64).tiny
        norms = torch.linalg.vector_norm(output_gradients, dim=1)
        determined = torch.ones_like(norms, dtype=torch.bool) if determined is None else determined.cpu()
        visible = determined & (norms > 0)
        unit = torch.where(visible[:, None], output_gradients / norms.clamp_min(tiny)[:, None], 0.0)
        matrix = index_matrix([message.indices or () for message in messages], len(output_gradients))
        rounds, vague = matrix * visible, matrix[:, ~determined & (matrix.sum(0) > 0)]
        if vague.shape[1]:
            rounds = rounds - vague @ (torch.linalg.pinv(vague, rtol=CUTOFF) @ rounds)
        values, vectors = torch.linalg.eigh((matrix.T @ rounds) * (unit @ unit.T))
        nonzero = values > CUTOFF * values[-1].clamp_min(tiny)
        inverse = (vectors[:, nonzero] / values[nonzero]) @ vectors[:, nonzero].T
        follows = visible & (vectors[:, nonzero].square().sum(1) >= 1 - INSIDE)
        return cls(unit, norms, rounds, inverse, follows, vague.shape[1] == 0)


def solve_inputs(
    messages: Sequence[Message], weight: str, output_gradients: Tensor, determined: Tensor | None = None
) -> InputSolution:
    """Step II: the layer's inputs H (samples, inputs) from the gradients of ``weight`` (units, inputs).

    The normal equations are (S'S o VV') H = R with R_n = sum over the rounds with n of v_n' G_t, so the gradients, by
    far the largest part, are read one at a time. Rows of V are scaled to norm one first: then the system is
    conditioned no worse than S'S. Rows that are not determined are zero. Nothing is said of a residual or an error
    where step I does not determine all samples, for those may explain anything.
    """
    system = InputSystem.of(messages, output_gradients, determined)
    unit = system.unit
    rows = torch.zeros((len(output_gradients), messages[0].update[weight].shape[1]), dtype=torch.float64)
    unexplained = total = 0.0
    for repeat in range(3):  # the first solves, the second takes back rounding, the third only looks
        right, unexplained, total = torch.zeros_like(rows), 0.0, 0.0
        for message, combined in zip(messages, system.rounds, strict=True):
            batch = torch.tensor(message.indices)
            observed = message.update[weight].detach().cpu().double()
            rest = observed - unit[batch].T @ rows[batch] if repeat else observed
            used = batch if system.complete else torch.nonzero(combined).flatten()
            right[used] += combined[used, None] * (unit[used] @ rest)
            unexplained, total = unexplained + float(rest.square().sum()), total + float(observed.square().sum())
        if repeat < 2:
            rows = rows + system.inverse @ right
    spare = sum(message.update[weight].numel() for message in messages) - rows.numel()
    noise = unexplained / spare if spare > 0 and system.complete else 0.0
    rows = torch.where(system.determined[:, None], rows / system.norms[:, None], 0.0)
    # A sample that no round shows has neither a row nor an error.
    counted = system.determined & (system.norms > CUTOFF * system.norms.max())
    spread = float((system.inverse.diagonal() / system.norms.square())[counted].sum()) * rows.shape[1]
    residual = _ratio(unexplained, total) if system.complete else 0.0
    error = _ratio(noise * spread, float(rows[counted].square().sum()))
    return InputSolution(rows, residual, error, system.determined)


def share_unexplained(
    messages: Sequence[Message],
    layers: Sequence[FirstDense],
    output_gradients: Sequence[Tensor],
    inputs: Sequence[Tensor],
    *,
    complete: bool = True,
) -> float:
    """The larger share of the layers' bias or weight gradients that these rows leave unexplained.

    Of biases only where step I is not ``complete``: samples that it does not determine may explain any weight gradient.
    """
    shares = []
    for layer, v, h in zip(layers, output_gradients, inputs, strict=True):
        for name in (f"{layer.name}.bias", f"{layer.name}.weight")[: 1 + complete]:
            unexplained = total = 0.0
            for message in messages:
                if name in message.update:
                    batch = torch.tensor(message.indices)
                    observed = message.update[name].detach().cpu().double()
                    explained = v[batch].sum(0) if observed.dim() == 1 else v[batch].T @ h[batch]
                    unexplained += float((observed - explained).square().sum())
                    total += float(observed.square().sum())
            shares.append(_ratio(unexplained, total))
    return max(shares)


def _ratio(part: float, whole: float) -> float:
    """Of two squared norms, the ratio of the norms."""
    return (part / whole) ** 0.5 if whole else 0.0
