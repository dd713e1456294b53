"""What batches announced by index give away of N samples: CAFE's theorems and bounds, as printed and put right.

Notation as in :mod:`leakscope.equations.index_matrix`. Theorems and bounds are about batches drawn evenly among all:
with a = K(N-K)/(N(N-1)) and b = K(K-1)/(N(N-1)) they have M = E[ss'] = a I + b 11', whose smallest eigenvalue is a.
The paper takes (K/N) I for it, right for K = 1 only. V, H are an estimate, V*, H* the truth, D = V - V* and A = H - H*.
phi1 = E|D's|^2 and phi2 = E|R(s)|^2, with R(s) = sum_n s_n (h_n v_n' - h*_n v*_n'), are the expected losses of steps I
and II at the estimate. Errors are measured in the Frobenius norm.

- Step I: phi1 = tr(D'MD) >= a |D|^2, so |D|^2 <= phi1 / a. Printed is N/K in place of 1/a, which is smaller.
- The sum over all samples, Delta = H'V - H*'V*: E[R(s)] = (K/N) Delta, so by Jensen |Delta|^2 <= (N/K)^2 phi2.
  Printed is N/K.
- Step II on the paper's way, for V and V* of rank N, with W = V^+ and W* = V*^+ their Moore-Penrose inverses:
  H' = (H*'V* + Delta) W and H*' = H*'V* W*, hence A' = H*'V* (W - W*) + Delta W. Wedin's inequality
  |W - W*| <= |W| |W*| |D| (spectral norms of W and W*) has no further factor here. For with P and P* the projections
  on the row spaces of V and V*, the part of W - W* inside the latter is -W* D P W, and the part outside is
  (I - P*) P W, where (I - P*) P is as large as (I - P) P* = (I - P) D' W*' up to sign; their squares add up to at most
  |W|^2 |W*|^2 (|D P|^2 + |D (I - P)|^2). With lambda_V = |W|^2, lambda_* = |W*|^2 and lambda_Theta = |H*'V*|^2
  (spectral) follows

      |A|^2 <= 2 [lambda_Theta lambda_V lambda_* phi1 / a + lambda_V (N/K)^2 phi2].

  Printed is N/K in place of both 1/a and (N/K)^2.
- Step II directly, for any N: R(s) = sum_n s_n (a_n v_n' + h*_n d_n'), a_n and d_n being rows of A and D. The mean
  square of its first part is tr(A'(M o VV')A) with M o VV' = a diag|v_n|^2 + b VV', so at least p |A|^2 with
  p = a min|v_n|^2 + b smin(V)^2; that of the second is at most q |D|^2 with q = a max|h*_n|^2 + b |H*|^2 (spectral). So

      |A|^2 <= (2/p) [phi2 + q phi1 / a]

  for K < N and V without a zero row. It never exceeds the bound before, as for V of rank N p >= (K/N) / lambda_V and
  q <= (K/N) lambda_Theta lambda_*. The same two inequalities show that the printed factor of phi2 is right although its
  proof is not; the printed factor of phi1 is too small.
"""

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
    smallest_value,
    squared_lengths,
)
from leakscope.federation.vertical import Sampling


def index_spectrum(samples: int, batch: int) -> tuple[tuple[float, int], ...]:
    """Return the eigenvalues of E[ss'] for batches drawn evenly among all, each with how often it occurs.

    >>> index_spectrum(5, 2)
    ((0.3, 4), (0.8, 1))
    """
    check_sizes("index_spectrum", samples, batch)
    total = (batch * batch / samples, 1)
    return (total,) if samples == 1 else ((_moments(samples, batch)[0], samples - 1), total)


def _moments(samples: int, batch: int) -> tuple[float, float]:
    if samples == 1:
        return 1.0, 0.0
    pairs = samples * (samples - 1)
    return batch * (samples - batch) / pairs, batch * (batch - 1) / pairs


@dataclass(frozen=True)
class Theorem:
    """A condition for a step of the attack to have one solution, as printed and as it is.

    ``modulus`` of strong convexity, of the expected squared loss without a factor 1/2; None where V is not known.
    """

    number: int
    printed: bool | None
    corrected: bool | None
    modulus: float | None
    statement: str


def theorem1(samples: int, batch: int) -> Theorem:
    """Step I has one solution for the output gradients if and only if K < N (or there is one sample only).

    >>> theorem1(5, 2).modulus, theorem1(5, 5).corrected
    (0.6, False)
    """
    check_sizes("theorem1", samples, batch)
    spread, _ = _moments(samples, batch)
    words = "step I is strongly convex if and only if the batch is smaller than the number of samples"
    return Theorem(1, spread > 0, spread > 0, 2 * spread, words)


def theorem2(samples: int, batch: int, units: int, signals: Tensor | None = None) -> Theorem:
    """Tell when step II has one solution for the inputs, V being known; ``signals`` (N, d2) where they are.

    Printed is N < d2 and V of rank N. That suffices, but K < N and no zero row of V is enough: the Hessian
    2 E[ss'] o VV' is then positive definite. For K = N it takes V of rank N. ``modulus`` is the lower bound 2 p.

    >>> theorem = theorem2(3, 2, 2, torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    >>> theorem.printed, theorem.corrected, round(theorem.modulus, 4)
    (False, True, 0.6667)
    """
    check_sizes("theorem2", samples, batch, units=units)
    printed: bool | None = None if samples < units else False
    corrected: bool | None = False if batch == samples > units else None
    modulus = None if corrected is None else 0.0
    if signals is not None:
        check_rows("theorem2: signals", signals, samples, units)
        printed, modulus = samples < units and smallest_value(signals) > 0, 2 * _strength(signals, batch)
        corrected = modulus > 0
    words = (
        "step II is strongly convex if the samples are fewer than the units and V has full rank (printed); "
        "already if the batch is smaller than the number of samples and no row of V is zero (corrected)"
    )
    return Theorem(2, printed, corrected, modulus, words)


def _strength(signals: Tensor, batch: int) -> float:
    """Return p of the module's docstring: at most the smallest eigenvalue of E[ss'] o VV', 0 only where that is."""
    spread, shared = _moments(len(signals), batch)
    if spread and not bool(seen_rows(signals).all()):
        return 0.0
    return spread * float(squared_lengths(signals).min()) + shared * smallest_value(signals) ** 2


@dataclass(frozen=True)
class RecoveryBound:
    """Bounds |V - V*|^2 <= ``signals`` phi1 and |H - H*|^2 <= ``inputs_phi1`` phi1 + ``inputs_phi2`` phi2.

    ``gradient`` phi2 bounds |H'V - H*'V*|^2, of the sum over all samples. Infinite where the bound does not apply.
    """

    name: str
    signals: float
    gradient: float
    inputs_phi1: float
    inputs_phi2: float


def recovery_bounds(
    batch: int, signals: Tensor, inputs: Tensor, true_signals: Tensor | None = None
) -> tuple[RecoveryBound, RecoveryBound, RecoveryBound]:
    """Return the bounds as printed, corrected on the paper's way, and for any number of samples.

    ``signals`` is the estimate V, ``inputs`` the true H*, ``true_signals`` V* where it is another. The first two need
    V and V* of rank N, and the first is no theorem. The last needs no zero row of V.

    >>> printed, corrected, general = recovery_bounds(2, torch.eye(4), torch.ones(4, 1))
    >>> printed.signals, corrected.signals, corrected.inputs_phi2, round(general.inputs_phi2, 6)
    (2.0, 3.0, 8.0, 4.0)
    """
    samples = len(signals)
    check_sizes("recovery_bounds", samples, batch)
    truth = signals if true_signals is None else true_signals
    check_rows("recovery_bounds: signals", signals, samples)
    check_rows("recovery_bounds: true_signals", truth, samples, signals.shape[1])
    check_rows("recovery_bounds: inputs", inputs, samples)
    spread, shared = _moments(samples, batch)
    rate, inverse = samples / batch, 1 / spread if spread else math.inf
    v, star = (1 / value**2 if value else math.inf for value in (smallest_value(signals), smallest_value(truth)))
    truth, inputs = truth.detach().double(), inputs.detach().double()
    theta = float(torch.linalg.matrix_norm(inputs.T @ truth, 2)) ** 2
    chain = theta * v * star if theta else 0.0
    strength = _strength(signals, batch)
    push = spread * float(squared_lengths(inputs).max()) + shared * float(torch.linalg.matrix_norm(inputs, 2)) ** 2
    general = 2 / strength if strength else math.inf
    by_chain, by_push = 2 * inverse * chain if chain else 0.0, general * push * inverse if push else 0.0
    return (
        RecoveryBound("as printed", rate, rate, 2 * rate * chain, 2 * rate * v),
        RecoveryBound("corrected", inverse, rate**2, by_chain, 2 * rate**2 * v),
        RecoveryBound("for any number of samples", inverse, rate**2, by_push, general),
    )


def determined_inputs(index: Identifiability, signals: Tensor) -> Tensor:
    """Tell which samples' layer inputs steps I and II determine: S'w = e_n turns the weight gradients into h_n v_n'.

    >>> from leakscope.equations.index_matrix import identify
    >>> determined_inputs(identify([[0], [1]], samples=2), torch.tensor([[1.0, 2.0], [0.0, 0.0]])).tolist()
    [True, False]
    """
    check_rows("determined_inputs: signals", signals, index.samples)
    return index.determined & seen_rows(signals).to(index.determined.device)


def inputs_given_signals(indices: Indices, signals: Tensor) -> Tensor:
    """Tell which samples' layer inputs step II determines where V is known however: exact, from (S'S) o (VV').

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
    """Tell which samples are in some round and share their rounds with no other, with which they could be mixed.

    >>> distinct_columns([[0, 1, 2], [2, 3]], samples=5).tolist()
    [False, False, True, True, False]
    """
    matrix = index_matrix(indices, samples)
    _, group, sizes = torch.unique(matrix.T, dim=0, return_inverse=True, return_counts=True)
    return (sizes[group] == 1) & (matrix.sum(0) > 0)


def separable(indices: Indices, signals: Tensor, inputs: Tensor) -> Tensor:
    """Tell which samples follow from the layer's gradients alone, in however few rounds: a sufficient condition.

    This goes beyond the paper. Let the inputs of all samples be linearly independent, so N <= d1 (for the bias,
    ``inputs`` has a column of ones). Then there is a w_n with h_n'w_n = 1 and h_m'w_n = 0 for all others, and the
    weight gradients G_t (d2 x d1) give G_t w_n = s_tn v_n. Conversely an adversary who looks for w with G_t w = 0 in
    the rounds without n, and the same G_t w in all rounds with n, finds no other, if the output gradients of each batch
    are linearly independent (K <= d2), and so are those of the samples that occur in some rounds of n and in no other.
    From all w_n follow V and H, up to the norm of each h_n, which a bias fixes. Samples that leave no trace do not
    matter; where the condition fails for one sample, nothing is claimed of any.

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
    of samples is expected to have always been together, which can be enough (:func:`separable`).
    """

    least: int | None
    covered: float
    apart: int | None


def rounds_needed(samples: int, batch: int, sampling: Sampling = "uniform") -> RoundsNeeded:
    """Count the rounds it takes; ``sampling`` "epochs" goes through all samples in shuffled order again and again.

    Step I needs N independent batches. The batches of an epoch add up to all samples, so each epoch after the first
    adds one fewer than it has batches, unless K does not divide N.

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
    """Sum sum_i (-1)^(i+1) C(N,i) / (1 - C(N-i,K) / C(N,K)) in whole numbers: huge terms alternate.

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
