"""Steps I and II of CAFE on made-up output gradients and inputs: sums over batches, and what follows from them."""

from __future__ import annotations

import pytest
import torch

from leakscope.attacks.cafe.rounds import solve_inputs, solve_output_gradients
from leakscope.contracts.observation import Message
from leakscope.equations.index_matrix import identify, index_matrix
from vertical_rounds import Batches, batches_of, biases, rows, sent


@pytest.mark.parametrize("units, inputs", [(20, 7), (3, 7), (1, 2)], ids=["N<d2", "N>d2", "one unit"])
def test_full_rank_batches_give_both_tables_exactly(units, inputs) -> None:
    """E5: theorem 2 of the paper asks for N < d2; that is not needed."""
    batches = batches_of(12, 4, 20)
    assert identify(batches, 12).identifiable
    signals, reads = rows(12, units, 1), rows(12, inputs, 2)
    messages = sent(batches, signals, reads)
    first = solve_output_gradients(index_matrix(batches, 12), biases(messages))
    assert float((first.rows - signals).abs().max()) < 1e-12
    assert first.residual < 1e-14
    second = solve_inputs(messages, "fc.weight", first.rows)
    assert float((second.rows - reads).abs().max()) < 1e-10
    assert second.residual < 1e-13


def test_the_sizes_of_output_gradients_do_not_matter() -> None:
    """A sample that is nearly learnt sends back a millionth of the others."""
    batches = batches_of(10, 3, 25)
    signals, reads = rows(10, 6, 1), rows(10, 5, 2)
    signals[4] *= 1e-6
    messages = sent(batches, signals, reads)
    found = solve_inputs(
        messages, "fc.weight", solve_output_gradients(index_matrix(batches, 10), biases(messages)).rows
    )
    assert float((found.rows - reads).abs().max()) < 1e-7


def test_a_sample_without_a_output_gradient_does_not_spoil_the_others() -> None:
    batches = batches_of(10, 3, 25)
    signals, reads = rows(10, 6, 1), rows(10, 5, 2)
    signals[[2, 7]] = 0
    messages = sent(batches, signals, reads)
    first = solve_output_gradients(index_matrix(batches, 10), biases(messages))
    assert float(first.rows[[2, 7]].abs().max()) < 1e-14
    found = solve_inputs(messages, "fc.weight", first.rows).rows
    others = [n for n in range(10) if n not in (2, 7)]
    assert float((found[others] - reads[others]).abs().max()) < 1e-10


def test_samples_that_the_rounds_leave_open_do_not_spoil_those_they_determine() -> None:
    """Samples 0 to 3 follow from the first four rounds; 4 to 7 are mixed in with them and do not follow."""
    batches: Batches = [(0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3), (0, 4, 5), (1, 4, 6), (2, 5, 7)]
    known = identify(batches, 8).determined
    assert known.tolist() == [True] * 4 + [False] * 4
    signals, reads = rows(8, 6, 1), rows(8, 5, 2)
    messages = sent(batches, signals, reads)
    first = solve_output_gradients(index_matrix(batches, 8), biases(messages))
    assert float((first.rows - signals)[known].abs().max()) < 1e-13
    assert float((first.rows - signals)[~known].abs().max()) > 0.1
    found = solve_inputs(messages, "fc.weight", first.rows, known)
    assert float((found.rows - reads)[known].abs().max()) < 1e-10
    assert torch.isfinite(found.rows).all()
    assert float(found.rows.abs().max()) < 10


def test_batches_of_everybody_give_the_mean_output_gradient_and_finite_inputs() -> None:
    batches: Batches = [tuple(range(5))] * 8
    signals, reads = rows(5, 6, 1), rows(5, 4, 2)
    messages = sent(batches, signals, reads)
    first = solve_output_gradients(index_matrix(batches, 5), biases(messages))
    assert torch.allclose(first.rows, signals.mean(0).expand(5, -1), atol=1e-13)
    found = solve_inputs(messages, "fc.weight", first.rows, identify(batches, 5).determined)
    assert torch.isfinite(found.rows).all()
    assert float(found.rows.abs().max()) < 100


@pytest.mark.parametrize("harm", ["noise", "other indices"])
def test_what_does_not_fit_is_told_by_the_residual(harm) -> None:
    batches = batches_of(10, 3, 40)
    signals, reads = rows(10, 6, 1), rows(10, 5, 2)
    messages = sent(batches, signals, reads)
    if harm == "noise":
        generator = torch.Generator().manual_seed(3)
        messages = [
            Message(update={k: torch.randn(v.shape, generator=generator).to(v) for k, v in m.update.items()}, indices=i)
            for m, i in zip(messages, batches, strict=True)
        ]
    else:
        batches = batches[1:] + batches[:1]
        messages = [Message(update=m.update, indices=i) for m, i in zip(messages, batches, strict=True)]
    first = solve_output_gradients(index_matrix(batches, 10), biases(messages))
    second = solve_inputs(messages, "fc.weight", first.rows)
    assert first.residual > 0.5
    assert second.residual > 0.5
    assert float((first.rows - signals).abs().max()) > 0.5


def test_a_little_noise_gives_a_little_error() -> None:
    batches = batches_of(10, 3, 60)
    signals, reads = rows(10, 6, 1), rows(10, 5, 2)
    generator = torch.Generator().manual_seed(3)
    messages = [
        Message(
            update={k: v + 1e-6 * torch.randn(v.shape, generator=generator).to(v) for k, v in m.update.items()},
            indices=m.indices,
        )
        for m in sent(batches, signals, reads)
    ]
    first = solve_output_gradients(index_matrix(batches, 10), biases(messages))
    second = solve_inputs(messages, "fc.weight", first.rows)
    assert 1e-8 < float((first.rows - signals).abs().max()) < 1e-5
    assert 1e-8 < float((second.rows - reads).abs().max()) < 1e-4
    assert 1e-8 < second.residual < 1e-5


def test_a_layer_that_sends_nothing_is_solved_by_nothing() -> None:
    batches = batches_of(6, 2, 12)
    messages = sent(batches, torch.zeros(6, 3, dtype=torch.float64), rows(6, 4, 2))
    first = solve_output_gradients(index_matrix(batches, 6), biases(messages))
    second = solve_inputs(messages, "fc.weight", first.rows)
    assert (first.residual, second.residual) == (0, 0)
    assert not first.rows.any()
    assert not second.rows.any()
