"""The loops of CAFE: steps I and II one round at a time, Algorithms 3 and 4, and plain matching on the same rounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from leakscope.attacks import CAFE
from leakscope.attacks.cafe.rounds import RunningSteps, share_unexplained, solve_inputs, solve_output_gradients
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Message, Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.task import Regression
from leakscope.equations.index_matrix import index_matrix
from leakscope.federation import Vertical
from leakscope.models.split import Share
from leakscope.network.layers import FirstDense
from vertical_rounds import batches_of, biases, cnn, data, mlp, rows, sent

LAYER = FirstDense(worker=0, share=Share("all", (0,), (1,)), name="fc", inputs=1, units=1, bias=True)


# --- one round at a time ---------------------------------------------------------------------------------------------


def settle(table: RunningSteps, messages: list[Message], passes: int, part: str) -> None:
    for _ in range(passes):
        for message in messages:
            move = table.step_one if part == "bias" else table.step_two
            move(torch.tensor(message.indices), message.update[f"fc.{part}"])


def test_one_projection_explains_its_round() -> None:
    signals, reads = rows(5, 6, 1), rows(5, 4, 2)
    (message,) = sent([(0, 2, 3)], signals, reads)
    table = RunningSteps(rows(5, 6, 3), rows(5, 4, 4), "projection", 1.0, 1.0)
    before = table.output_gradients.clone()
    batch = torch.tensor([0, 2, 3])
    table.step_one(batch, message.update["fc.bias"])
    assert torch.allclose(table.output_gradients[batch].sum(0), message.update["fc.bias"], atol=1e-14)
    assert torch.equal(table.output_gradients[[1, 4]], before[[1, 4]])
    # The nearest one: all rows of the batch move alike.
    moved = (table.output_gradients - before)[batch]
    assert torch.allclose(moved, moved[:1].expand_as(moved), atol=1e-15)
    table.step_two(batch, message.update["fc.weight"])
    told = table.output_gradients[batch].T @ table.inputs[batch]
    rest = message.update["fc.weight"] - told
    # Three rows of six units cannot explain any matrix, but what they can explain is gone.
    assert float((table.output_gradients[batch] @ rest).abs().max()) < 1e-4 * float(rest.abs().max())


def test_projections_over_many_rounds_reach_the_direct_solution() -> None:
    batches = batches_of(8, 3, 30)
    signals, reads = rows(8, 5, 1), rows(8, 4, 2)
    messages = sent(batches, signals, reads)
    table = RunningSteps(torch.zeros_like(signals), torch.zeros_like(reads), "projection", 1.0, 1.0)
    settle(table, messages, 40, "bias")
    settle(table, messages, 40, "weight")
    direct = solve_output_gradients(index_matrix(batches, 8), biases(messages)).rows
    assert float((table.output_gradients - direct).abs().max()) < 1e-10
    assert float((table.inputs - solve_inputs(messages, "fc.weight", direct).rows).abs().max()) < 1e-8
    assert share_unexplained(messages, [LAYER], [table.output_gradients], [table.inputs]) < 1e-9


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
        return float((table.output_gradients - signals).norm()), float((table.inputs - reads).norm())

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
    guess = table.output_gradients.clone().requires_grad_(True)
    loss = (guess[[1, 3]].sum(0) - message.update["fc.bias"]).square().sum()
    (slope,) = torch.autograd.grad(loss, guess)
    table.step_one(torch.tensor([1, 3]), message.update["fc.bias"])
    assert torch.allclose(table.output_gradients, guess.detach() - 0.01 * slope, atol=1e-15)
    made = table.inputs.clone().requires_grad_(True)
    loss = (table.output_gradients[[1, 3]].T @ made[[1, 3]] - message.update["fc.weight"]).square().sum()
    (slope,) = torch.autograd.grad(loss, made)
    table.step_two(torch.tensor([1, 3]), message.update["fc.weight"])
    # Adam's first step goes the whole learning rate along the sign.
    assert torch.allclose(table.inputs, made.detach() - 0.1 * slope.sign(), atol=1e-9)


WITHOUT_RATE = Knowledge(batch_indices=True, normalisation=True)


def decibels(found: Reconstruction, x: Tensor) -> Tensor:
    """PSNR of each sample, in the box."""
    return -10 * (found.inputs.clamp(0, 1) - x).square().flatten(1).mean(1).clamp_min(1e-30).log10()


# --- loops -----------------------------------------------------------------------------------------------------------


def small(lr: float = 0.0, **how: Any) -> tuple[Observation, Tensor, Tensor]:
    model, (x, y) = mlp(features=6), data(6, (6,))
    return Vertical(batch_size=2, rounds=20, lr=lr).observe(model, x, y, **how), x, y


def test_the_nested_loop_settles_where_the_direct_solution_is() -> None:
    seen, x, y = small()
    # Full rank and nothing unexplained: there is one such pair of tables, and the direct one is another name for it.
    found = CAFE(method="nested", first_iterations=600, iterations=100, gradient=0.0)(seen)
    assert found.info["unexplained"] < 1e-12
    assert found.flags == ()
    assert float(decibels(found, x).min()) > 25
    assert torch.equal(found.labels, y)


def test_the_published_steps_explain_more_the_longer_they_run() -> None:
    seen, _, _ = small()
    left = [
        CAFE(method="nested", steps="descent", first_iterations=steps, iterations=1)(seen).info["unexplained"]
        for steps in (20, 200, 1000)
    ]
    assert left[2] < 0.3 * left[1] < 0.3 * left[0]


def test_the_single_loop_recovers_a_static_model() -> None:
    seen, x, y = small()
    found = CAFE(method="single-loop", iterations=150)(seen)
    assert float(decibels(found, x).min()) > 27
    assert found.info["unexplained"] < 1e-3
    assert found.flags == ()
    assert torch.equal(found.labels, y)
    (curve,) = found.history["objective"]
    assert sum(curve[-20:]) < 0.1 * sum(curve[:20])


def test_a_loop_that_ran_too_short_says_so_and_does_not_blame_the_rounds() -> None:
    seen, _, _ = small()
    found = CAFE(method="single-loop", iterations=3)(seen)
    assert found.info["unexplained"] > 0.4
    assert found.flags == ("did not converge",)


def test_a_model_that_moves_a_little_is_still_read() -> None:
    seen, x, y = small(lr=1e-3)
    direct = CAFE()(seen)
    assert float(decibels(direct, x).min()) > 40
    loop = CAFE(method="single-loop", iterations=150)(seen)
    assert float(decibels(loop, x).min()) > 27
    for found in (direct, loop):
        assert 1e-5 < found.info["unexplained"] < 0.1
        assert found.flags == ()
        assert torch.equal(found.labels, y)


def test_a_model_that_moves_far_is_noticed() -> None:
    seen, x, _ = small(lr=2.0)
    for attack in (CAFE(), CAFE(method="single-loop", iterations=60)):
        found = attack(seen)
        assert found.info["unexplained"] > 0.6
        assert "rounds disagree" in found.flags
        assert found.diagnosis.outcome == "undecided"
        assert any("not explained" in note for note in found.notes)
        assert float(decibels(found, x).mean()) < 20


def test_plain_matching_follows_a_moving_model_where_it_knows_the_learning_rate() -> None:
    """The weights of every round are known, so movement costs it nothing."""
    seen, x, _ = small(lr=1.0)
    found = CAFE(method="gradients", iterations=150)(seen)
    assert float(decibels(found, x).min()) > 18
    assert "steps not simulated" not in found.flags
    blind, _, _ = small(lr=1.0, knowledge=WITHOUT_RATE)
    lost = CAFE(method="gradients", iterations=150)(blind)
    assert "steps not simulated" in lost.flags
    assert float(decibels(lost, x).mean()) < float(decibels(found, x).mean()) - 5


# --- variants and presets --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def normalised() -> tuple[Observation, Tensor]:
    model = cnn(batchnorm=True, activation="tanh", pool="average", slices="strips", workers=2)
    x, y = data(4, (1, 8, 8))
    knowledge = dataclasses.replace(Knowledge.vertical_server, batchnorm_statistics=True)
    return Vertical(batch_size=2, rounds=6).observe(model, x.float(), y, knowledge=knowledge), x.float()


@pytest.mark.parametrize("name", ["dlg", "cosine", "sapag", "batchnorm", "group-consistency"])
def test_the_variants_run_on_the_same_rounds_and_bring_their_objective_down(name, normalised) -> None:
    seen, x = normalised
    attack = CAFE.preset(name, iterations=30)
    assert attack.method == "gradients"
    found = attack(seen)
    (curve,) = found.history["objective"]
    assert sum(curve[-6:]) < 0.7 * sum(curve[:6])
    assert found.inputs.shape == x.shape
    assert torch.isfinite(found.inputs).all()
    assert found.scores.shape == (4,)
    assert torch.isfinite(found.scores).all()
    assert found.flags == ()


def test_each_variant_is_a_different_search(normalised) -> None:
    seen, _ = normalised
    names = ("dlg", "cosine", "sapag", "batchnorm", "group-consistency")
    found = [CAFE.preset(name, iterations=2)(seen).inputs for name in names]
    assert all(not torch.equal(found[i], found[j]) for i in range(5) for j in range(i))


@pytest.mark.parametrize(
    "name, rates, threshold",
    [
        ("cifar10", (5e-3, 8e-3, 2e-2), 90),
        ("mnist", (1e-2, 1e-2, 1e-2), 25),
        ("linnaeus", (5e-3, 5e-3, 1e-2), 110),
        ("yale", (1e-2, 1e-2, 1e-2), 32),
    ],
)
def test_the_published_settings_are_those_of_table_9(name, rates, threshold) -> None:
    attack = CAFE.preset(name)
    assert (attack.signal_lr, attack.input_lr, attack.lr) == rates
    assert (attack.gradient, attack.tv, attack.representation, attack.threshold) == (1e-2, 1e-4, 1e-3, threshold)
    assert (attack.method, attack.steps, attack.iterations, attack.relative) == (
        "single-loop",
        "descent",
        20_000,
        False,
    )
    assert (attack.labels, attack.start, attack.schedule, attack.fade) == ("joint", "uniform", "constant", 1.0)


def test_the_published_settings_run_and_search_labels_along(normalised) -> None:
    seen, _ = normalised
    one, more = (CAFE.preset("mnist", iterations=steps)(seen) for steps in (6, 24))
    assert one.info["labels"] == "joint"
    assert one.labels.shape == (4,)
    assert more.info["unexplained"] < one.info["unexplained"]
    assert float(more.scores.mean()) < float(one.scores.mean())


# --- other tasks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["direct", "nested", "single-loop", "gradients"])
def test_targets_that_are_no_classes_are_searched_and_never_read_off_the_last_layer(method) -> None:
    model, (x, _) = mlp(), data(6)
    targets = torch.rand((6, 3), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = Vertical(batch_size=2, rounds=18).observe(model, x, targets, task=Regression())
    found = CAFE(method=method, iterations=5, first_iterations=400)(seen)
    assert any("Regression(distance='squared')" in note for note in found.notes)
    if method == "direct":
        assert found.labels is None
        assert float((found.inputs - x).abs().max()) < 1e-8
    else:
        assert found.labels is not None
        assert found.labels.shape == (6, 3)
