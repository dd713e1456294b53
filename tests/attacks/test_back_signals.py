"""Steps I and II of CAFE on made-up back-signals and inputs: sums over batches, and what follows from them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakscope.attacks.back_signals import RowAdam, RunningSteps, explained, solve_inputs, solve_signals
from leakscope.limits import identify
from leakscope.limits.index_alignment import index_matrix
from leakscope.observation import Message
from leakscope.vertical import FirstDense, Share, draw_batches

Batches = list[tuple[int, ...]]


def batches_of(samples: int, batch: int, rounds: int, seed: int = 0) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(b.tolist()) for b in draw_batches(samples, batch, rounds, "uniform", generator)]


def rows(samples: int, width: int, seed: int) -> Tensor:
    return torch.randn((samples, width), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sent(batches: Batches, signals: Tensor, inputs: Tensor) -> list[Message]:
    """What a layer sends: plain sums, sample by sample."""
    messages = []
    for batch in batches:
        bias = sum(signals[n] for n in batch)
        weight = sum(torch.outer(signals[n], inputs[n]) for n in batch)
        messages.append(Message(update={"fc.bias": bias, "fc.weight": weight}, indices=batch))
    return messages


def biases(messages: list[Message]) -> Tensor:
    return torch.stack([message.update["fc.bias"] for message in messages])


LAYER = FirstDense(worker=0, share=Share("all", (0,), (1,)), name="fc", inputs=1, units=1, bias=True)


@pytest.mark.parametrize("units, inputs", [(20, 7), (3, 7), (1, 2)], ids=["N<d2", "N>d2", "one unit"])
def test_full_rank_batches_give_both_tables_exactly(units, inputs) -> None:
    """E5: theorem 2 of the paper asks for N < d2; that is not needed."""
    batches = batches_of(12, 4, 20)
    assert identify(batches, 12).identifiable
    signals, reads = rows(12, units, 1), rows(12, inputs, 2)
    messages = sent(batches, signals, reads)
    first = solve_signals(index_matrix(batches, 12), biases(messages))
    assert float((first.rows - signals).abs().max()) < 1e-12
    assert first.residual < 1e-14
    second = solve_inputs(messages, "fc.weight", first.rows)
    assert float((second.rows - reads).abs().max()) < 1e-10
    assert second.residual < 1e-13


def test_the_sizes_of_back_signals_do_not_matter() -> None:
    """A sample that is nearly learnt sends back a millionth of the others."""
    batches = batches_of(10, 3, 25)
    signals, reads = rows(10, 6, 1), rows(10, 5, 2)
    signals[4] *= 1e-6
    messages = sent(batches, signals, reads)
    found = solve_inputs(messages, "fc.weight", solve_signals(index_matrix(batches, 10), biases(messages)).rows)
    assert float((found.rows - reads).abs().max()) < 1e-7


def test_a_sample_without_a_back_signal_does_not_spoil_the_others() -> None:
    batches = batches_of(10, 3, 25)
    signals, reads = rows(10, 6, 1), rows(10, 5, 2)
    signals[[2, 7]] = 0
    messages = sent(batches, signals, reads)
    first = solve_signals(index_matrix(batches, 10), biases(messages))
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
    first = solve_signals(index_matrix(batches, 8), biases(messages))
    assert float((first.rows - signals)[known].abs().max()) < 1e-13
    assert float((first.rows - signals)[~known].abs().max()) > 0.1
    found = solve_inputs(messages, "fc.weight", first.rows, known)
    assert float((found.rows - reads)[known].abs().max()) < 1e-10
    assert torch.isfinite(found.rows).all()
    assert float(found.rows.abs().max()) < 10


def test_batches_of_everybody_give_the_mean_back_signal_and_finite_inputs() -> None:
    batches: Batches = [tuple(range(5))] * 8
    signals, reads = rows(5, 6, 1), rows(5, 4, 2)
    messages = sent(batches, signals, reads)
    first = solve_signals(index_matrix(batches, 5), biases(messages))
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
    first = solve_signals(index_matrix(batches, 10), biases(messages))
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
    first = solve_signals(index_matrix(batches, 10), biases(messages))
    second = solve_inputs(messages, "fc.weight", first.rows)
    assert 1e-8 < float((first.rows - signals).abs().max()) < 1e-5
    assert 1e-8 < float((second.rows - reads).abs().max()) < 1e-4
    assert 1e-8 < second.residual < 1e-5


def test_a_layer_that_sends_nothing_is_solved_by_nothing() -> None:
    batches = batches_of(6, 2, 12)
    messages = sent(batches, torch.zeros(6, 3, dtype=torch.float64), rows(6, 4, 2))
    first = solve_signals(index_matrix(batches, 6), biases(messages))
    second = solve_inputs(messages, "fc.weight", first.rows)
    assert (first.residual, second.residual) == (0, 0)
    assert not first.rows.any()
    assert not second.rows.any()


# --- one round at a time ---------------------------------------------------------------------------------------------


def settle(table: RunningSteps, messages: list[Message], passes: int, part: str) -> None:
    for _ in range(passes):
        for message in messages:
            see = table.see_bias if part == "bias" else table.see_weight
            see(torch.tensor(message.indices), message.update[f"fc.{part}"])


def test_one_projection_explains_its_round() -> None:
    signals, reads = rows(5, 6, 1), rows(5, 4, 2)
    (message,) = sent([(0, 2, 3)], signals, reads)
    table = RunningSteps(rows(5, 6, 3), rows(5, 4, 4), "projection", 1.0, 1.0)
    before = table.signals.clone()
    batch = torch.tensor([0, 2, 3])
    table.see_bias(batch, message.update["fc.bias"])
    assert torch.allclose(table.signals[batch].sum(0), message.update["fc.bias"], atol=1e-14)
    assert torch.equal(table.signals[[1, 4]], before[[1, 4]])
    # The nearest one: all rows of the batch move alike.
    moved = (table.signals - before)[batch]
    assert torch.allclose(moved, moved[:1].expand_as(moved), atol=1e-15)
    table.see_weight(batch, message.update["fc.weight"])
    told = table.signals[batch].T @ table.inputs[batch]
    rest = message.update["fc.weight"] - told
    # Three rows of six units cannot explain any matrix, but what they can explain is gone.
    assert float((table.signals[batch] @ rest).abs().max()) < 1e-4 * float(rest.abs().max())


def test_projections_over_many_rounds_reach_the_direct_solution() -> None:
    batches = batches_of(8, 3, 30)
    signals, reads = rows(8, 5, 1), rows(8, 4, 2)
    messages = sent(batches, signals, reads)
    table = RunningSteps(torch.zeros_like(signals), torch.zeros_like(reads), "projection", 1.0, 1.0)
    settle(table, messages, 40, "bias")
    settle(table, messages, 40, "weight")
    direct = solve_signals(index_matrix(batches, 8), biases(messages)).rows
    assert float((table.signals - direct).abs().max()) < 1e-10
    assert float((table.inputs - solve_inputs(messages, "fc.weight", direct).rows).abs().max()) < 1e-8
    assert explained(messages, [LAYER], [table.signals], [table.inputs]) < 1e-9


def test_the_published_steps_come_nearer() -> None:
    batches = batches_of(8, 3, 30)
    signals, reads = 1e-3 * rows(8, 5, 1), rows(8, 4, 2).abs()
    messages = sent(batches, signals, reads)
    generator = torch.Generator().manual_seed(5)
    table = RunningSteps(
        8e-4 * (2 * torch.rand((8, 5), generator=generator).double() - 1),
        0.08 * torch.rand((8, 4), generator=generator).double(),
        "descent",
        5e-3,
        8e-3,
    )

    def errors() -> tuple[float, float]:
        return float((table.signals - signals).norm()), float((table.inputs - reads).norm())

    start = errors()
    settle(table, messages, 20, "bias")
    settle(table, messages, 20, "weight")
    middle = errors()
    settle(table, messages, 20, "bias")
    settle(table, messages, 20, "weight")
    end = errors()
    assert end[0] < 0.5 * middle[0] < 0.5 * start[0]
    assert end[1] < 0.5 * middle[1] < 0.5 * start[1]


def test_one_published_step_is_the_gradient_step() -> None:
    signals, reads = rows(4, 3, 1), rows(4, 2, 2)
    (message,) = sent([(1, 3)], signals, reads)
    table = RunningSteps(rows(4, 3, 3), rows(4, 2, 4), "descent", 0.01, 0.1)
    guess = table.signals.clone().requires_grad_(True)
    loss = (guess[[1, 3]].sum(0) - message.update["fc.bias"]).square().sum()
    (slope,) = torch.autograd.grad(loss, guess)
    table.see_bias(torch.tensor([1, 3]), message.update["fc.bias"])
    assert torch.allclose(table.signals, guess.detach() - 0.01 * slope, atol=1e-15)
    made = table.inputs.clone().requires_grad_(True)
    loss = (table.signals[[1, 3]].T @ made[[1, 3]] - message.update["fc.weight"]).square().sum()
    (slope,) = torch.autograd.grad(loss, made)
    table.see_weight(torch.tensor([1, 3]), message.update["fc.weight"])
    # Adam's first step goes the whole learning rate along the sign.
    assert torch.allclose(table.inputs, made.detach() - 0.1 * slope.sign(), atol=1e-9)


def test_row_wise_adam_is_adam_for_rows_that_move_each_time_and_counts_by_row() -> None:
    table = rows(3, 4, 1)
    mover, copy = RowAdam(table), torch.nn.Parameter(table.clone())
    optimiser = torch.optim.Adam([copy], lr=0.05, eps=1e-16)
    late = torch.nn.Parameter(table[1:2].clone())
    other = torch.optim.Adam([late], lr=0.05, eps=1e-16)
    every, mine = torch.arange(3), table.clone()
    second, single = RowAdam(table), table.clone()
    for step in range(5):
        gradient = rows(3, 4, 10 + step)
        mine[every] -= mover.move(every, gradient, 0.05)
        copy.grad = gradient.clone()
        optimiser.step()
        which = torch.tensor([1]) if step % 2 else torch.tensor([0, 2])
        single[which] -= second.move(which, gradient[which], 0.05)
        if step % 2:  # this row moves in two of the five steps only
            late.grad = gradient[1:2].clone()
            other.step()
    assert torch.allclose(mine, copy.detach(), atol=1e-12)
    assert torch.allclose(single[1:2], late.detach(), atol=1e-12)
    assert second.steps.tolist() == [3, 2, 3]
