"""What rounds give away, against exact fractions, least squares, simulations, and a read-out of the gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leakscope.contracts.task import Classification
from leakscope.equations.index_matrix import identify
from leakscope.federation.vertical import Sampling
from leakscope.limits import determined_inputs, distinct_columns, inputs_given_signals, rounds_needed, separable
from leakscope.models import build_model
from leakscope.models.split import VerticalModel
from leakscope.network.layers import first_dense

Batches = list[list[int]]


def draw(samples: int, batch: int, rounds: int, generator: torch.Generator, epochs: bool = False) -> Batches:
    drawn: Batches = []
    order: list[int] = []
    for _ in range(rounds):
        if not epochs or len(order) < batch:
            order = torch.randperm(samples, generator=generator).tolist()
        drawn.append(order[:batch])
        order = order[batch:]
    return drawn


def zeros_and_ones(indices: Sequence[Sequence[int]], samples: int) -> Tensor:
    return torch.tensor([[float(n in batch) for n in range(samples)] for batch in indices], dtype=torch.float64)


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def exact_rank(rows: list[list[int]]) -> int:
    """By elimination in fractions."""
    left = [[Fraction(entry) for entry in row] for row in rows]
    rank = 0
    for column in range(len(left[0])):
        pivot = next((row for row in left[rank:] if row[column]), None)
        if pivot is None:
            continue
        left.remove(pivot)
        left.insert(rank, pivot)
        for place in range(rank + 1, len(left)):
            factor = left[place][column] / pivot[column]
            left[place] = [a - factor * b for a, b in zip(left[place], pivot, strict=True)]
        rank += 1
    return rank


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.data())
def test_rank_and_determined_samples_are_those_of_exact_elimination(samples: int, data: st.DataObject) -> None:
    batches = st.lists(st.integers(0, samples - 1), min_size=1, max_size=samples, unique=True)
    indices = data.draw(st.lists(batches, min_size=1, max_size=9))
    rows = [[int(n in batch) for n in range(samples)] for batch in indices]
    found = identify(indices, samples)
    rank = exact_rank(rows)
    assert found.rank == rank
    assert found.identifiable == (rank == samples)
    units = [[int(n == m) for m in range(samples)] for n in range(samples)]
    assert found.determined.tolist() == [exact_rank([*rows, unit]) == rank for unit in units]
    assert found.absent == tuple(n for n in range(samples) if not any(row[n] for row in rows))
    assert (found.smallest > 0) == found.identifiable == (found.condition < float("inf"))


def test_rank_and_condition_of_a_paper_sized_plan_come_at_once(generator: torch.Generator) -> None:
    indices = draw(800, 40, 1000, generator)
    start = time.perf_counter()
    found = identify(indices, 800)
    assert time.perf_counter() - start < 20
    values = torch.linalg.svdvals(zeros_and_ones(indices, 800))
    assert found.identifiable
    assert found.smallest == pytest.approx(float(values[-1]))
    assert found.condition == pytest.approx(float(values[0] / values[-1]))
    assert bool(found.determined.all())


@pytest.mark.parametrize(
    ("indices", "samples", "words"),
    [
        ([[0, 1, 2]] * 9, 3, "only their sum is seen"),
        ([[0, 1], [1, 2]], 3, "2 rounds have 2 independent batches, but there are 3 samples"),
        ([[0, 1], [0], [1]], 3, "1 of them in no round"),
        ([[0], [0, 1], [1, 2]], 3, "3 rounds have 3 independent batches, as many as there are samples"),
    ],
)
def test_the_reason_is_told_in_words(indices: Batches, samples: int, words: str) -> None:
    assert words in identify(indices, samples).reason


def test_step_one_gives_the_determined_output_gradients_and_no_others(generator: torch.Generator) -> None:
    samples, indices = 6, [[0, 1], [1, 2], [0, 2], [3, 4, 5], [3, 4]]
    found = identify(indices, samples)
    assert found.determined.tolist() == [True, True, True, False, False, True]
    matrix, signals = zeros_and_ones(indices, samples), normal(generator, samples, 3)
    solved = torch.linalg.lstsq(matrix, matrix @ signals, driver="gelsd").solution
    errors = (solved - signals).norm(dim=1)
    assert float(errors[found.determined].max()) < 1e-12
    assert float(errors[~found.determined].min()) > 1e-3


def test_steps_one_and_two_are_least_squares_even_with_more_samples_than_units(generator: torch.Generator) -> None:
    samples, units, inputs = 24, 5, 7
    signals, reads = normal(generator, samples, units), normal(generator, samples, inputs)
    signals[3] = 0  # a dead sample
    indices = draw(samples, 6, 30, generator)
    found = identify(indices, samples)
    assert found.identifiable
    follows = determined_inputs(found, signals)
    assert follows.tolist() == [n != 3 for n in range(samples)]
    matrix = zeros_and_ones(indices, samples)
    solved = torch.linalg.lstsq(matrix, matrix @ signals).solution
    assert float((solved - signals).abs().max()) < 1e-12
    gradients = torch.einsum("tn,ni,nj->tij", matrix, reads, signals)
    system = torch.einsum("tn,nj->tjn", matrix, solved)[..., follows].flatten(0, 1)
    told = torch.linalg.lstsq(system, gradients.transpose(1, 2).flatten(0, 1)).solution
    assert float((told - reads[follows]).abs().max()) < 1e-11
    # Where all are determined, the exact criterion says the same.
    assert torch.equal(inputs_given_signals(indices, signals), follows)


def test_a_sample_that_step_one_isolates_follows_whatever_the_others(generator: torch.Generator) -> None:
    indices = [[0, 1, 2], [1, 2], [3, 4]]
    signals, reads = normal(generator, 5, 2), normal(generator, 5, 3)
    found = identify(indices, 5)
    assert determined_inputs(found, signals).tolist() == [True, False, False, False, False]
    gradients = torch.einsum("tn,ni,nj->tij", zeros_and_ones(indices, 5), reads, signals)
    assert torch.allclose(gradients[0] - gradients[1], torch.outer(reads[0], signals[0]))
    assert bool((inputs_given_signals(indices, signals) >= determined_inputs(found, signals)).all())


@pytest.mark.parametrize("units", [1, 2, 3, 8])
def test_known_output_gradients_make_few_rounds_enough(units: int, generator: torch.Generator) -> None:
    samples, indices = 7, [[0, 1, 2], [3, 4, 5], [0, 4]]
    signals, reads = normal(generator, samples, units), normal(generator, samples, 4)
    signals[5] = 0
    matrix = zeros_and_ones(indices, samples)
    follows = inputs_given_signals(indices, signals)
    gradients = torch.einsum("tn,ni,nj->tij", matrix, reads, signals)
    system = torch.einsum("tn,nj->tjn", matrix, signals).flatten(0, 1)
    solved = torch.linalg.lstsq(system, gradients.transpose(1, 2).flatten(0, 1), driver="gelsd").solution
    errors = (solved - reads).norm(dim=1)
    assert float(errors[follows].sum()) < 1e-10
    assert float(errors[~follows].min()) > 1e-3
    if units >= 3:  # independent output gradients in each batch: every sample that occurs and is not dead
        assert follows.tolist() == [True] * 5 + [False] * 2
    if units == 1:
        assert not bool(follows[:3].all())


def test_samples_that_are_always_together_can_be_mixed_without_a_trace(generator: torch.Generator) -> None:
    indices = [[0, 1, 2], [2, 3], [0, 1, 3]]
    assert distinct_columns(indices, 5).tolist() == [False, False, True, True, False]
    matrix = zeros_and_ones(indices, 5)
    signals = normal(generator, 5, 6)
    reads = torch.cat([normal(generator, 5, 8), torch.ones(5, 1, dtype=torch.float64)], dim=1)  # with the bias's input
    # Rows of the mix add up to 1, so that the input of the bias stays 1.
    mix = torch.tensor([[1.5, -0.5], [0.25, 0.75]], dtype=torch.float64)
    others, back = reads.clone(), signals.clone()
    others[:2] = mix @ reads[:2]
    back[:2] = torch.linalg.inv(mix).T @ signals[:2]
    assert float((others[:2] - reads[:2]).norm()) > 0.1
    assert torch.allclose(others[:, -1], torch.ones(5, dtype=torch.float64))
    same = torch.einsum("tn,ni,nj->tij", matrix, reads, signals)
    assert torch.allclose(torch.einsum("tn,ni,nj->tij", matrix, others, back), same, atol=1e-12)
    assert not bool(separable(indices, signals, reads)[:2].any())


def read_out(indices: Sequence[Sequence[int]], samples: int, gradients: Tensor) -> Tensor:
    """H from weight gradients (rounds, units, inputs + 1) whose last input is always 1, by what ``separable`` says."""
    matrix = zeros_and_ones(indices, samples)
    _, values, rows = torch.linalg.svd(gradients.flatten(0, 1), full_matrices=False)
    space = rows[values > 1e-9 * values[0]].T
    inside = gradients @ space
    columns, groups = torch.unique(matrix.T, dim=0, return_inverse=True)
    found, owners = [], []
    for group, column in enumerate(columns):
        if not bool(column.any()):
            continue
        mean = torch.einsum("t,tij->ij", column, inside) / column.sum()
        left = (inside - column[:, None, None] * mean).flatten(0, 1)
        size = int((groups == group).sum())
        found.append(torch.linalg.svd(left).Vh[-size:])
        owners += [torch.nonzero(groups == group).flatten()]
    dual = torch.linalg.pinv(torch.cat(found).T) @ space.T
    reads = gradients.new_full((samples, gradients.shape[2]), float("nan"))
    reads[torch.cat(owners)] = dual / dual[:, -1:]
    return reads[:, :-1]


def exactly_separable(indices: Sequence[Sequence[int]], signals: Tensor) -> list[bool]:
    """For independent inputs: whether G_t w = s_tn u has one solution w, by a Gram matrix without the direction s_n."""
    matrix = zeros_and_ones(indices, len(signals))
    together = matrix.T @ matrix
    answers = []
    for n in range(len(signals)):
        others = [m for m in range(len(signals)) if m != n]
        if not together[n, n]:
            answers.append(False)
            continue
        gram = (together - torch.outer(together[n], together[n]) / together[n, n]) * (signals @ signals.T)
        values = torch.linalg.eigvalsh(gram[others][:, others])
        answers.append(bool(values[0] > 1e-9 * values[-1]))
    return answers


@pytest.mark.parametrize("seed", range(8))
def test_fewer_rounds_than_samples_are_no_safety(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    samples, batch, inputs, units, rounds = 30, 5, 64, 16, 20
    indices = draw(samples, batch, rounds, generator)
    matrix = zeros_and_ones(indices, samples)
    signals = normal(generator, samples, units)
    reads = normal(generator, samples, inputs).relu()
    with_bias = torch.cat([reads, torch.ones(samples, 1, dtype=torch.float64)], dim=1)
    assert identify(indices, samples).rank <= rounds
    follows = separable(indices, signals, with_bias)
    assert int(follows.sum()) >= 24, "twenty rounds separate most of thirty samples"
    assert torch.equal(follows, distinct_columns(indices, samples))
    told = read_out(indices, samples, torch.einsum("tn,nj,ni->tji", matrix, signals, with_bias))
    assert float((told - reads)[follows].abs().max()) < 1e-8
    present = matrix.sum(0) > 0
    kept = [[int(present[:n].sum()) for n in batch] for batch in indices]
    if int(follows.sum()) == int(present.sum()):
        assert all(exactly_separable(kept, signals[present]))


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
def test_separable_is_never_said_wrongly(samples: int, units: int, rounds: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = int(torch.randint(1, samples + 1, (), generator=generator))
    indices = draw(samples, batch, rounds, generator)
    matrix = zeros_and_ones(indices, samples)
    signals, reads = normal(generator, samples, units), normal(generator, samples, 9)
    with_bias = torch.cat([reads, torch.ones(samples, 1, dtype=torch.float64)], dim=1)
    follows = separable(indices, signals, with_bias)
    assert not bool((follows & ~distinct_columns(indices, samples)).any())
    if bool(follows.any()):
        told = read_out(indices, samples, torch.einsum("tn,nj,ni->tji", matrix, signals, with_bias))
        assert float((told - reads)[follows].abs().max()) < 1e-5


def test_separable_needs_independent_inputs_and_batches(generator: torch.Generator) -> None:
    indices, signals = draw(12, 3, 12, generator), normal(generator, 12, 6)
    reads = normal(generator, 12, 12)
    assert bool(separable(indices, signals, reads).any())
    assert not bool(separable(indices, signals, reads[:, :10]).any()), "more samples than inputs"
    assert not bool(separable(indices, signals[:, :2], reads).any()), "more samples in a batch than units"
    dead = signals.clone()
    dead[4] = 0
    found = separable(indices, dead, reads)
    assert not bool(found[4])
    assert bool(found.any()), "a sample without a output gradient leaves the others as they are"


def test_real_gradients_of_a_vertical_model_give_private_features_in_fewer_rounds_than_samples() -> None:
    generator = torch.Generator().manual_seed(1)
    samples, batch, rounds = 24, 5, 18
    net = build_model("vertical-mlp", input_shape=(120,), num_classes=3, hidden=32, activation="tanh").double()
    assert isinstance(net, VerticalModel)
    x = torch.rand(samples, 120, generator=generator, dtype=torch.float64)
    y = torch.arange(samples) % 3
    indices = draw(samples, batch, rounds, generator)
    assert identify(indices, samples).rank < samples
    assert int(distinct_columns(indices, samples).sum()) >= 20
    parameters = dict(net.named_parameters())
    for dense in first_dense(net):
        names = [f"{dense.name}.weight", f"{dense.name}.bias"]
        gradients = []
        for rows in indices:
            loss = Classification().loss(net(x[rows]), y[rows])
            weight, bias = torch.autograd.grad(loss, [parameters[name] for name in names])
            gradients.append(torch.cat([weight, bias[:, None]], dim=1))
        told = read_out(indices, samples, torch.stack(gradients))
        follows = distinct_columns(indices, samples)
        assert float((told - dense.share.take(x))[follows].abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("samples", "batch", "sampling"),
    [
        *[(n, k, how) for n, k in ((12, 3), (12, 6), (20, 4), (13, 3), (7, 5)) for how in ("uniform", "epochs")],
        (12, 1, "epochs"),  # twelve draws of one of twelve are all different once in 18 000 times
        (1, 1, "uniform"),
    ],
)
def test_the_least_number_of_rounds_is_reached_and_never_undercut(samples: int, batch: int, sampling: Sampling) -> None:
    generator = torch.Generator().manual_seed(0)
    least = rounds_needed(samples, batch, sampling).least
    assert least is not None
    reached = 0
    for _ in range(60):
        indices = draw(samples, batch, least, generator, epochs=sampling == "epochs")
        assert least == 1 or not identify(indices[:-1], samples).identifiable
        reached += identify(indices, samples).identifiable
    assert reached


@pytest.mark.parametrize(("samples", "batch", "sampling"), [(10, 3, "uniform"), (10, 1, "uniform"), (10, 4, "epochs")])
def test_rounds_until_all_are_covered_and_apart_agree_with_simulations(samples: int, batch: int, sampling: str) -> None:
    generator = torch.Generator().manual_seed(0)
    needed = rounds_needed(samples, batch, sampling)  # type: ignore[arg-type]
    assert needed.apart is not None
    step = samples // batch if sampling == "epochs" else 1
    covered, pairs, earlier = [], 0, 0
    for _ in range(1500):
        indices = draw(samples, batch, 120, generator, epochs=sampling == "epochs")
        seen: set[int] = set()
        rounds = 0
        while len(seen) < samples:
            seen |= {n for batch_of in indices[rounds : rounds + step] for n in batch_of}
            rounds += step
        covered.append(float(rounds))
        pairs += always_together(indices[: needed.apart], samples)
        earlier += always_together(indices[: needed.apart - step], samples)
    mean = torch.tensor(covered)
    assert float(mean.mean()) == pytest.approx(needed.covered, abs=4 * float(mean.std()) / 1500**0.5)
    assert pairs / 1500 < 1.1
    assert earlier / 1500 > 0.9


def always_together(indices: Batches, samples: int) -> int:
    columns = [tuple(n in batch for batch in indices) for n in range(samples)]
    return sum(columns[n] == columns[m] for n in range(samples) for m in range(n))


def test_rounds_needed_at_the_ends() -> None:
    whole = rounds_needed(5, 5)
    assert (whole.least, whole.covered, whole.apart) == (None, 1.0, None)
    assert rounds_needed(800, 40, "epochs").covered == 20.0
    assert rounds_needed(6, 1).covered == pytest.approx(6 * sum(1 / n for n in range(1, 7)))
    assert rounds_needed(800, 40).apart == 127


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: identify([], 3), "at least one round"),
        (lambda: identify([[0, 3], [1, 1], []], 3), r"(?s)round 0: .*\[3\].*round 1: .*twice.*round 2: .*none"),
        (lambda: identify([[0.5]], 3), "round 0: expected sample numbers"),  # type: ignore[list-item]
        (lambda: identify([[9]] * 9, 3), "and 4 more"),
        (lambda: identify([[0]], 0), "samples"),
        (lambda: distinct_columns([[4]], 3), "round 0"),
        (lambda: determined_inputs(identify([[0]], 1), torch.ones(2, 2)), r"shape \(1, any\), got \(2, 2\)"),
        (lambda: inputs_given_signals([[0]], torch.ones(1, 2, dtype=torch.int64)), "int64"),
        (lambda: separable([[0]], torch.ones(1, 2), torch.ones(2, 2)), "inputs"),
        (lambda: rounds_needed(3, 4), "at most the 3 samples"),
        (lambda: rounds_needed(3, 2, "sometimes"), "'uniform' or 'epochs', got 'sometimes'"),  # type: ignore[arg-type]
    ],
)
def test_mistakes_are_told(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
