"""What batches that are announced by index give away of N samples in vertical federated learning.

Jin, Chen, Hsu, Yu, Chen, "CAFE: Catastrophic Data Leakage in Vertical Federated Learning", NeurIPS 2021. Each of T
rounds has a batch of K samples, the 0/1 vector s; all of them are the rows of S (T x N). The first dense layer of a
worker, with d1 inputs and d2 units, sends V's as the gradient of its bias and sum_n s_n h_n v_n' as that of its
weights. Row n of V (N x d2) is the back-signal of sample n with the 1/K of the mean loss in it, row n of H (N x d1)
what the layer reads of it. Step I solves the first for V, step II the second for H. Both are linear least squares as
long as the model does not move. ``signals`` is V and ``inputs`` is H throughout.

This file has what follows from the rounds that were played; :mod:`leakscope.limits.index_bounds` the expectations.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.limits.jacobian import rank_of
from leakscope.vertical import Sampling

Indices = Sequence[Sequence[int]]
_TOLD = 5
#: How near to 1 the share of a sample in a row space must be to count as inside.
_INSIDE = 1e-7


@dataclass(frozen=True, kw_only=True, eq=False)
class Identifiability:
    """What step I can solve for, given these rounds.

    ``rank`` of S, ``smallest`` singular value and ``condition`` (0 and infinite where the rank is not full).
    ``determined``: for each sample, whether its back-signal follows; ``absent``: samples in no round.
    """

    samples: int
    rounds: int
    rank: int
    smallest: float
    condition: float
    determined: Tensor
    absent: tuple[int, ...]
    reason: str

    @property
    def identifiable(self) -> bool:
        return self.rank == self.samples


def identify(indices: Indices, samples: int) -> Identifiability:
    """Which samples step I determines: those whose unit vector is in the row space of S.

    >>> found = identify([[0, 1], [1, 2], [0, 2], [0, 1, 2]], samples=4)
    >>> found.rank, found.determined.tolist(), found.absent, found.identifiable
    (3, [True, True, True, False], (3,), False)
    >>> identify([[0, 1], [0, 1], [0, 1]], samples=2).reason
    'every round has the same samples, so that only their sum is seen'
    """
    matrix = index_matrix(indices, samples)
    rounds = len(matrix)
    # Where there are more rounds than samples, the triangle of a QR decomposition has the same row space.
    small = torch.linalg.qr(matrix, mode="r").R if rounds > samples else matrix
    _, values, rows = torch.linalg.svd(small, full_matrices=False)
    tolerance = max(rounds, samples) * torch.finfo(values.dtype).eps * float(values[0])
    rank = int((values > tolerance).sum())
    absent = tuple(torch.nonzero(matrix.sum(0) == 0).flatten().tolist())
    full = rank == samples
    return Identifiability(
        samples=samples,
        rounds=rounds,
        rank=rank,
        smallest=float(values[-1]) if full else 0.0,
        condition=float(values[0] / values[-1]) if full else math.inf,
        determined=rows[:rank].square().sum(0) >= 1 - _INSIDE,
        absent=absent,
        reason=_reason(matrix, rank, absent),
    )


def _reason(matrix: Tensor, rank: int, absent: tuple[int, ...]) -> str:
    rounds, samples = matrix.shape
    if rank == samples:
        return f"{rounds} rounds have {samples} independent batches, as many as there are samples"
    if rank == 1 and samples - len(absent) > 1:
        return "every round has the same samples, so that only their sum is seen"
    words = f"{rounds} rounds have {rank} independent batches, but there are {samples} samples"
    return f"{words}, {len(absent)} of them in no round" if absent else words


def determined_inputs(found: Identifiability, signals: Tensor) -> Tensor:
    """Which samples' layer inputs steps I and II determine: back-signal determined, and not zero.

    If the combination w of rounds isolates sample n (S'w = e_n), it turns the weight gradients into h_n v_n'. A row of
    V counts as zero below the rounding of the longest.

    >>> determined_inputs(identify([[0], [1]], samples=2), torch.tensor([[1.0, 2.0], [0.0, 0.0]])).tolist()
    [True, False]
    """
    check_rows("determined_inputs: signals", signals, found.samples)
    return found.determined & seen_rows(signals).to(found.determined.device)


def inputs_given_signals(indices: Indices, signals: Tensor) -> Tensor:
    """Which samples' layer inputs step II determines where V is known however: exact, from (S'S) o (VV').

    One round with sample n is enough, if the back-signals of its batch are linearly independent; so with K <= d2 as few
    rounds suffice as it takes to have every sample once.

    >>> inputs_given_signals([[0, 1]], torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])).tolist()
    [True, True, False]
    """
    matrix = index_matrix(indices, len(signals))
    check_rows("inputs_given_signals: signals", signals, len(signals))
    wide = torch.nn.functional.normalize(signals.detach().cpu().double(), dim=1)  # lengths change no rank
    values, vectors = torch.linalg.eigh((matrix.T @ matrix) * (wide @ wide.T))
    kept = values > len(values) * torch.finfo(values.dtype).eps * float(values[-1])
    return (vectors[:, kept].square().sum(1) >= 1 - _INSIDE) & seen_rows(signals).cpu()


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
    the rounds without n, and the same G_t w in all rounds with n, finds no other, if the back-signals of each batch
    are linearly independent (K <= d2), and so are those of the samples that occur in some rounds of n and in no other.
    From all w_n follow V and H, up to the length of each h_n, which a bias fixes. Samples in no round and those whose
    back-signal is zero leave no trace and do not matter; where the condition fails for one sample, nothing is claimed
    of any.

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
        raise ValueError(f"rounds_needed: sampling: expected 'uniform' or 'epochs', got {sampling!r}")
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
    return RoundsNeeded(
        least=least,
        covered=batches * _expected_cover(samples, batches * batch),
        apart=None if apart is None else apart * batches,
    )


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


def squared_lengths(rows: Tensor) -> Tensor:
    """Squared lengths."""
    return rows.detach().double().square().sum(1)


def seen_rows(signals: Tensor) -> Tensor:
    """Which rows are longer than the rounding of the longest."""
    lengths = squared_lengths(signals).sqrt()
    return lengths > torch.finfo(signals.dtype).eps * lengths.max()


def smallest_value(signals: Tensor) -> float:
    """The smallest of N singular values; 0 where the rank is not N."""
    if signals.shape[0] > signals.shape[1]:
        return 0.0
    found = rank_of(signals.detach())
    return float(found.smallest or 0.0) if found.full else 0.0


def index_matrix(indices: Indices, samples: int) -> Tensor:
    """S: a row a round, with ones at the samples of its batch."""
    problems = []
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 1:
        raise ValueError(f"samples: expected a whole number of at least 1, got {samples!r}")
    if not len(indices):
        problems.append("expected at least one round, got none")
    matrix = torch.zeros(len(indices), samples, dtype=torch.float64)
    for number, batch in enumerate(indices):
        try:
            places = [operator.index(place) for place in batch]
        except TypeError:
            problems.append(f"round {number}: expected sample numbers, got {batch!r}")
            continue
        wrong = [place for place in places if not 0 <= place < samples]
        if not places or wrong or len(set(places)) < len(places):
            got = f"{wrong[:_TOLD]}" if wrong else "a sample twice" if places else "none"
            problems.append(f"round {number}: expected different samples of 0 to {samples - 1}, got {got}")
        else:
            matrix[number, places] = 1
    if problems:
        more = [f"and {len(problems) - _TOLD} more"] if len(problems) > _TOLD else []
        raise ValueError("indices:\n  - " + "\n  - ".join(problems[:_TOLD] + more))
    return matrix


def check_rows(name: str, rows: Tensor, samples: int, width: int | None = None) -> None:
    fits = rows.dim() == 2 and rows.shape[0] == samples and rows.shape[1] >= 1 and width in (None, rows.shape[1])
    if not fits or not rows.is_floating_point() or not bool(torch.isfinite(rows).all()):
        wanted = f"({samples}, {width or 'any'})"
        raise ValueError(f"{name}: expected finite numbers of shape {wanted}, got {tuple(rows.shape)} of {rows.dtype}")


def check_sizes(where: str, samples: int, batch: int, **others: int) -> None:
    problems = []
    for name, value in {"samples": samples, "batch": batch, **others}.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            problems.append(f"{name}: expected a whole number of at least 1, got {value!r}")
    if not problems and batch > samples:
        problems.append(f"batch: expected at most the {samples} samples, got {batch}")
    if problems:
        raise ValueError(f"{where}:\n  - " + "\n  - ".join(problems))
