"""Find which samples are determined by sums over batches that are announced by index.

Jin, Chen, Hsu, Yu, Chen, "CAFE: Catastrophic Data Leakage in Vertical Federated Learning", NeurIPS 2021. Each of T
rounds has a batch of K samples, the 0/1 vector s; all of them are the rows of S (T x N). The first dense layer of a
worker, with d1 inputs and d2 units, sends V's as the gradient of its bias and sum_n s_n h_n v_n' as that of its
weights. Step I solves the first for the output gradients V (N x d2, the 1/K of the mean loss included), step II the
second for the inputs H (N x d1). Both are linear least squares as long as the model does not move.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.checks import refuse, whole
from leakscope.contracts.errors import UserError
from leakscope.equations.decomposition import rank_of

Indices = Sequence[Sequence[int]]
#: How near to 1 the share of a sample in a row space must be to count as inside.
INSIDE = 1e-7


@dataclass(frozen=True, kw_only=True, eq=False)
class Identifiability:
    """Hold what step I can solve for: facts of S, which samples are ``determined``, and which are in no round."""

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

    >>> rounds = identify([[0, 1], [1, 2], [0, 2], [0, 1, 2]], samples=4)
    >>> rounds.rank, rounds.determined.tolist(), rounds.absent, rounds.identifiable
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
        determined=rows[:rank].square().sum(0) >= 1 - INSIDE,
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


def squared_lengths(rows: Tensor) -> Tensor:
    return rows.detach().double().square().sum(1)


def seen_rows(signals: Tensor) -> Tensor:
    lengths = squared_lengths(signals).sqrt()
    return lengths > torch.finfo(signals.dtype).eps * lengths.max()


def smallest_value(signals: Tensor) -> float:
    if signals.shape[0] > signals.shape[1]:
        return 0.0
    rank = rank_of(signals.detach())
    return float(rank.smallest or 0.0) if rank.full else 0.0


def index_matrix(indices: Indices, samples: int) -> Tensor:
    """S: a row a round, with ones at the samples of its batch."""
    refuse("indices", whole(samples=samples))
    problems = [] if len(indices) else ["expected at least one round, got none"]
    matrix = torch.zeros(len(indices), samples, dtype=torch.float64)
    for number, batch in enumerate(indices):
        try:
            places = [operator.index(place) for place in batch]
        except TypeError:
            problems.append(f"round {number}: expected sample numbers, got {batch!r}")
            continue
        wrong = [place for place in places if not 0 <= place < samples]
        if not places or wrong or len(set(places)) < len(places):
            got = f"{wrong[:5]}" if wrong else "a sample twice" if places else "none"
            problems.append(f"round {number}: expected different samples of 0 to {samples - 1}, got {got}")
        else:
            matrix[number, places] = 1
    refuse("indices", problems, 5)
    return matrix


def check_rows(name: str, rows: Tensor, samples: int, width: int | None = None) -> None:
    fits = rows.dim() == 2 and rows.shape[0] == samples and rows.shape[1] >= 1 and width in (None, rows.shape[1])
    if not fits or not rows.is_floating_point() or not bool(torch.isfinite(rows).all()):
        shape = f"({samples}, {width or 'any'})"
        raise UserError(f"{name}: expected finite numbers of shape {shape}, got {tuple(rows.shape)} of {rows.dtype}")


def check_sizes(where: str, samples: int, batch: int, **others: int) -> None:
    problems = whole(samples=samples, batch=batch, **others)
    if not problems and batch > samples:
        problems.append(f"batch: expected at most the {samples} samples, got {batch}")
    refuse(where, problems)
