"""What batches that are announced by index give away of N samples in vertical federated learning.

Notation as in :mod:`leakscope.equations.index_matrix`. This file has what follows from the rounds that were played;
:mod:`leakscope.limits.index_bounds` the expectations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.equations.decomposition import rank_of
from leakscope.equations.index_matrix import (
    INSIDE,
    Identifiability,
    Indices,
    check_rows,
    check_sizes,
    index_matrix,
    seen_rows,
)
from leakscope.federation.batches import Sampling


def determined_inputs(index: Identifiability, signals: Tensor) -> Tensor:
    """Which samples' layer inputs steps I and II determine: output gradient determined, and not zero.

    If the combination w of rounds isolates sample n (S'w = e_n), it turns the weight gradients into h_n v_n'. A row of
    V counts as zero below the rounding of the longest.

    >>> from leakscope.equations.index_matrix import identify
    >>> determined_inputs(identify([[0], [1]], samples=2), torch.tensor([[1.0, 2.0], [0.0, 0.0]])).tolist()
    [True, False]
    """
    check_rows("determined_inputs: signals", signals, index.samples)
    return index.determined & seen_rows(signals).to(index.determined.device)


def inputs_given_signals(indices: Indices, signals: Tensor) -> Tensor:
    """Which samples' layer inputs step II determines where V is known however: exact, from (S'S) o (VV').

    One round with sample n is enough, if the output gradients of its batch are linearly independent; so with K <= d2
    as few rounds suffice as it takes to have every sample once.

    >>> inputs_given_signals([[0, 1]], torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])).tolist()
    [True, True, False]
    """
    matrix = index_matrix(indices, len(signals))
    check_rows("inputs_given_signals: signals", signals, len(signals))
    wide = torch.nn.functional.normalize(signals.detach().cpu().double(), dim=1)  # norms change no rank
    values, vectors = torch.linalg.eigh((matrix.T @ matrix) * (wide @ wide.T))
    nonzero = values > len(values) * torch.finfo(values.dtype).eps * float(values[-1])
    return (vectors[:, nonzero].square().sum(1) >= 1 - INSIDE) & seen_rows(signals).cpu()


def distinct_columns(indices: Indices, samples: int) -> Tensor:
    """Which samples are in some round and share their set of rounds with no other sample.

    The others are out of reach of steps I and II whatever the model: two samples that are always together can be mixed
    with each other without a change in any gradient of the layer.

    >>> distinct_columns([[0, 1, 2], [2, 3]], samples=5).tolist()
    [False, False, True, True, False]
    """
    matrix = index_matrix(indices, samples)
    _, group, sizes = torch.unique(matrix.T, dim=0, return_inverse=True, return_counts=True)
    return (sizes[group] == 1) & (matrix.sum(0) > 0)


def separable(indices: Indices, signals: Tensor, inputs: Tensor) -> Tensor:
    """Which samples follow from the layer's gradients alone, in however few rounds: a sufficient condition.

    This goes beyond the paper. Let the inputs of all samples be linearly independent, so N <= d1 (for the bias,
    ``inputs`` has a column of ones). Then there is a w_n with h_n'w_n = 1 and h_m'w_n = 0 for all others, and the
    weight gradients G_t (d2 x d1) give G_t w_n = s_tn v_n. Conversely an adversary who looks for w with G_t w = 0 in
    the rounds without n, and the same G_t w in all rounds with n, finds no other, if the output gradients of each batch
    are linearly independent (K <= d2), and so are those of the samples that occur in some rounds of n and in no other.
    From all w_n follow V and H, up to the norm of each h_n, which a bias fixes. Samples in no round and those whose
    output gradient is zero leave no trace and do not matter; where the condition fails for one sample, nothing is
    claimed of any.

    >>> separable([[0, 1], [0, 2]], torch.eye(4), torch.eye(4)).tolist()  # three samples in two rounds
    [True, True, True, False]
    """
    samples = len(signals)
    matrix = index_matrix(indices, samples)
    check_rows("separable: signals", signals, samples)
    check_rows("separable: inputs", inputs, samples)
    signals, inputs = signals.detach().cpu(), inputs.detach().cpu()
    there = (matrix.sum(0) > 0) & seen_rows(signals)
    none = torch.zeros(samples, dtype=torch.bool)
    batches = {tuple(row.tolist()) for row in (matrix > 0) & there}
    if not _independent(inputs[there]) or not all(_independent(signals[list(batch)]) for batch in batches):
        return none
    together = matrix.T @ matrix
    often = together.diagonal()
    # Sample m occurs in some rounds of n and in no other: together as often as m at all, but not as often as n.
    inside = (together == often[:, None]) & (often[:, None] < often) & there[:, None] & there
    if not all(_independent(signals[inside[:, n]]) for n in torch.nonzero(inside.any(0)).flatten().tolist()):
        return none
    alike = (together == often[:, None]) & (together == often) & there[:, None]
    return there & (alike.sum(0) == 1)


def _independent(rows: Tensor) -> bool:
    return len(rows) == 0 or (len(rows) <= rows.shape[1] and bool(rank_of(rows).full))


@dataclass(frozen=True, kw_only=True)
class RoundsNeeded:
    """``least`` rounds for step I to determine every sample; None where no number is enough.

    ``covered``: expected rounds until every sample was in a batch. ``apart``: rounds after which fewer than one pair
    of samples is expected to have always been together; it can be enough for an adversary (:func:`separable`).
    """

    least: int | None
    covered: float
    apart: int | None


def rounds_needed(samples: int, batch: int, sampling: Sampling = "uniform") -> RoundsNeeded:
    """How many rounds it takes; ``sampling`` "epochs" goes through all samples in shuffled order again and again.

    Step I needs N independent batches. The batches of an epoch add up to all samples, so each epoch after the first
    adds one fewer than it has batches; not so where K does not divide N and the rest of the epoch is dropped. Rounds
    until all were seen are those of a coupon collector who gets K different coupons at a time.

    >>> rounds_needed(4, 2), rounds_needed(800, 40, "epochs").least
    (RoundsNeeded(least=4, covered=3.8, apart=2), 841)
    """
    check_sizes("rounds_needed", samples, batch)
    if sampling not in ("uniform", "epochs"):
        raise UserError(f"rounds_needed: sampling: expected 'uniform' or 'epochs', got {sampling!r}")
    batches = samples // batch if sampling == "epochs" else 1
    rest = samples - batches * batch if sampling == "epochs" else samples - batch
    pairs = samples * (samples - 1)
    # The chance that two samples are together in one epoch, or round: in one batch, or in none.
    alike = (batches * batch * (batch - 1) + rest * (rest - 1)) / pairs if pairs else 0.0
    apart = None if alike == 1 else 1
    if 0 < alike < 1:
        apart = math.floor(math.log(pairs / 2) / -math.log(alike)) + 1
    least: int | None = samples
    if batch == samples > 1:
        least = None
    elif sampling == "epochs" and samples % batch == 0:
        least = next(t for t in range(samples, 2 * samples + 1) if t - max(0, t // batches - 1) >= samples)
    covered = batches * _expected_cover(samples, batches * batch)
    return RoundsNeeded(least=least, covered=covered, apart=None if apart is None else apart * batches)


def _expected_cover(samples: int, batch: int) -> float:
    """Rounds until every sample was drawn: sum_i (-1)^(i+1) C(N,i) / (1 - C(N-i,K) / C(N,K)), in whole numbers.

    The terms are astronomically large and alternate, so floating point would leave nothing of the sum.

    >>> _expected_cover(4, 2), round(_expected_cover(6, 1), 9)
    (3.8, 14.7)
    """
    bits = 64
    every = missing = math.comb(samples, batch)
    choices, total = 1, 0
    for i in range(1, samples + 1):
        left = samples - i + 1
        choices = choices * left // i
        missing = missing * (left - batch) // left if left > batch else 0
        term = (choices * every << bits) // (every - missing)
        total += term if i % 2 else -term
    return total / 2**bits
