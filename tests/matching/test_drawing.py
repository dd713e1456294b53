"""The network that draws, features that lead a search, tensors that count by size, and restarts pulled together."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from leakscope.contracts.inputs import Box, ValueRange
from leakscope.federation import FedSGD
from leakscope.matching import (
    Adam,
    Cosine,
    Drawing,
    FeatureMatching,
    Matcher,
    Pixels,
    Reweighted,
    SquaredL2,
    TotalVariation,
    Victim,
)
from leakscope.matching.canvas import PLANS, UNet
from leakscope.matching.loop import GroupConsistency, group_mean
from leakscope.matching.priors import Scene, assignment, misdirection, outside_span
from leakscope.matching.search import search
from leakscope.models import build_model
from matching_problems import problem

UNIT = ValueRange(0.0, 1.0)


def drawn(canvas: Drawing, inputs: Box, count: int = 2, seed: int = 0) -> torch.Tensor:
    row = canvas.initial(count, inputs, torch.Generator().manual_seed(seed), torch.zeros(()))
    assert row.shape == (canvas.variables(count, inputs),)
    return canvas.draw(row, count, inputs)


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (3, 64, 64), (4, 15, 11), (2, 65), (13,), (2, 3, 9, 9)])
def test_any_shape_is_drawn_in_the_unit_box_and_near_grey(shape) -> None:
    picture = drawn(Drawing(), Box(shape, UNIT))
    assert picture.shape == (2, *shape)
    assert bool(((picture > 0) & (picture < 1)).all())
    assert 0.3 < float(picture.mean()) < 0.7
    assert float(picture.std()) < 0.25


def test_the_box_of_the_model_is_reached_and_without_one_nothing_is_squeezed() -> None:
    box = Box((1, 8, 8), ValueRange(-2.0, 6.0))
    assert float(Drawing().to_model(torch.ones(1, 1, 8, 8), box).max()) == 6.0
    assert float(drawn(Drawing(), Box((1, 8, 8))).min()) < 0


def test_the_same_generator_draws_the_same_and_no_global_state_is_used() -> None:
    before = torch.random.get_rng_state()
    inputs = Box((1, 8, 8), UNIT)
    assert torch.equal(drawn(Drawing(), inputs), drawn(Drawing(), inputs))
    assert not torch.equal(drawn(Drawing(), inputs), drawn(Drawing(), inputs, seed=1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_published_size_is_that_of_the_literature() -> None:
    with torch.device("meta"):
        net = UNet(PLANS["paper"], 3, 512)
    # Ho, Jain, Abbeel (2020) count 35.7 million with their embedding of the time step.
    assert 32e6 < sum(p.numel() for p in net.parameters()) < 38e6
    attentive = [name for name, module in net.named_modules() if type(module).__name__ == "Attention"]
    assert sum(name.startswith("down.1") for name in attentive) == 2
    assert not any(name.startswith(("down.0", "down.2", "down.3")) for name in attentive)
    assert len(PLANS["paper"].factors) == 4  # 32, 16, 8, 4


def test_features_reach_every_block() -> None:
    with torch.device("meta"):
        blocks = [m for m in UNet(PLANS["tiny"], 3, 5).modules() if type(m).__name__ == "Block"]
    assert blocks
    assert all(block.feature is not None for block in blocks)
    inputs, generator = Box((1, 8, 8), UNIT), torch.Generator().manual_seed(2)
    features = torch.randn(2, 5, generator=generator)
    canvas = Drawing(features=features)
    row = canvas.initial(2, inputs, generator, torch.zeros(()))
    unknowing = Drawing().initial(2, inputs, torch.Generator().manual_seed(2), torch.zeros(()))
    assert len(row) > len(unknowing)
    row = row + 0.1 * torch.randn(len(row), generator=generator)
    other = dataclasses.replace(canvas, features=torch.stack([features[0], -features[1]]))
    first, second = canvas.draw(row, 2, inputs), other.draw(row, 2, inputs)
    assert torch.equal(first[0], second[0])
    assert float((first[1] - second[1]).abs().max()) > 1e-3
    with pytest.raises(ValueError, match=r"^features.*3 examples, got 2"):
        canvas.draw(canvas.initial(3, inputs, generator, torch.zeros(())), 3, inputs)
    with pytest.raises(ValueError, match=r"^size.*'huge'"):
        Drawing(size="huge")


def test_the_noise_stays_and_the_weights_move() -> None:
    task = problem(canvas=Drawing(), dtype=torch.float32)
    start = task.start(torch.Generator().manual_seed(0), torch.zeros(()))
    _, _, gradient = task.evaluator_by("plain")(start[None], 0)
    noise = 3 * 8 * 8
    assert not gradient[0, :noise].any()
    assert float((gradient[0, noise:] != 0).float().mean()) > 0.99


def test_a_drawn_search_ends_near_the_truth_of_a_smooth_net() -> None:
    net = build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=4)
    ramp = torch.linspace(0.2, 0.8, 8)
    x = torch.stack([ramp[None].expand(8, 8), ramp[:, None].expand(8, 8)])[:, None].contiguous()
    y = torch.tensor([0, 1])
    seen = FedSGD().observe(net, x, y)
    matcher = Matcher(
        distance=Cosine(),
        priors=(TotalVariation(weight=1e-4),),
        canvas=Drawing(),
        optimiser=Adam(lr=5e-3),
        iterations=80,
    )
    match = matcher.run(
        Victim.of(seen),
        dict(seen.message.update),
        inputs=seen.inputs,
        count=2,
        targets=y,
        output_shape=seen.output_shape,
        generator=torch.Generator().manual_seed(0),
    )
    assert float((match.inputs - x).square().mean()) < 0.01  # of grey: 0.03
    assert match.info["evaluation"] == "plain"


# -- terms --------------------------------------------------------------------------------------------------------


def test_assignment_is_the_best_of_all_orders(generator) -> None:
    for _ in range(5):
        costs = torch.randn(4, 4, generator=generator)
        best = min(itertools.permutations(range(4)), key=lambda order: float(costs[range(4), order].sum()))
        assert assignment(costs).tolist() == list(best)
    assert sorted(assignment(torch.randn(3, 2, generator=generator)).tolist())[0] == -1
    assert assignment(torch.tensor([[torch.nan, 1.0], [0.0, 5.0]])).tolist() == [1, 0]
    batched = torch.func.vmap(assignment)(torch.stack([torch.eye(2), 1 - torch.eye(2)]))
    assert batched.tolist() == [[1, 0], [0, 1]]


def test_features_need_neither_order_nor_sign_nor_length(generator) -> None:
    own = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    known = own[[2, 0, 3, 1]] * torch.tensor([-2.0, 0.5, 3.0, -1.0])[:, None]
    assert float(misdirection(own, known)) < 1e-12
    prior = FeatureMatching(weight=2.0, layer="fc", features=known, form="span")
    assert float(prior(own, Scene(torch.zeros(()), {"fc": own}, {}))) < 1e-12
    other = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    assert 0 < float(prior(own, Scene(torch.zeros(()), {"fc": other}, {}))) < 2.0
    assert float(misdirection(other, known)) > 0.1
    # A random direction lies outside a span of 4 in 9 dimensions by 5/9 on average.
    many = torch.randn(4000, 9, generator=generator, dtype=torch.float64)
    basis = torch.linalg.qr(known.T).Q.T
    assert abs(float(outside_span(many, basis)) - 5 / 9) < 0.01


def test_a_feature_of_nothing_has_finite_derivatives() -> None:
    own = torch.zeros(2, 3, requires_grad=True)
    value = misdirection(own, torch.eye(3)[:2]) + outside_span(own, torch.eye(3)[:2])
    (slope,) = torch.autograd.grad(value, own)
    assert bool(torch.isfinite(slope).all())


def test_wrong_features_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^form.*'angle'"):
        FeatureMatching(weight=1.0, layer="fc", features=torch.eye(2), form="angle")
    with pytest.raises(ValueError, match=r"^features.*\(3,\)"):
        FeatureMatching(weight=1.0, layer="fc", features=torch.zeros(3))


def test_tensors_count_by_their_parameters_that_are_not_zero(generator) -> None:
    observed = {"a": torch.randn(6, generator=generator), "b": torch.randn(2, generator=generator)}
    flipped = {"a": observed["a"], "b": -observed["b"]}
    assert float(Reweighted()(observed, flipped)) == pytest.approx(2 * 2 / 8)
    assert float(Reweighted(counts=(1, 3))(observed, flipped)) == pytest.approx(2 * 3 / 4)
    assert float(Reweighted(counts=(5, 0))(observed, flipped)) == pytest.approx(0, abs=1e-6)
    with pytest.raises(ValueError, match=r"^counts.*2 tensors, got 1"):
        Reweighted(counts=(1,))(observed, flipped)
    root = Reweighted(power=0.5, counts=(9, 1))
    assert float(root(observed, flipped)) == pytest.approx(2 * 1 / 4)
    assert Reweighted().scale_free
    assert not Reweighted(distance=SquaredL2()).scale_free
    with pytest.raises(ValueError, match=r"^power.*0"):
        Reweighted(power=0)
    with pytest.raises(ValueError, match="not all zero"):
        Reweighted(counts=(0, 0))


# -- group consistency --------------------------------------------------------------------------------------------


def test_the_pull_is_the_derivative_of_the_distance_from_the_mean() -> None:
    task = problem(canvas=Pixels(clamp=False))
    rows = torch.rand(3, task.size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = task.evaluator_by("plain")
    pulled = GroupConsistency(task, plain, 0.7)(rows, 0)
    alone = plain(rows, 0)
    mean = group_mean(rows.reshape(3, *task.shape), task.targets).reshape(rows.shape)
    assert torch.allclose(pulled[0] - alone[0], 0.7 * (rows - mean).square().mean(1))
    assert torch.equal(pulled[1], alone[1])  # judged by the update alone
    assert torch.allclose(pulled[2] - alone[2], 2 * 0.7 * (rows - mean) / task.size)


def test_only_examples_of_equal_labels_change_places_and_lost_restarts_do_not_count() -> None:
    one = torch.tensor([[0.0], [1.0], [2.0]])
    swapped = torch.stack([one, one[[1, 0, 2]]])
    assert torch.equal(group_mean(swapped, torch.tensor([5, 5, 7])), swapped)
    assert torch.equal(group_mean(swapped, torch.tensor([5, 7, 7]))[0].flatten(), torch.tensor([0.5, 0.5, 2.0]))
    broken = torch.stack([one, torch.full_like(one, torch.nan)])
    assert torch.equal(group_mean(broken, None)[0], one)


def test_restarts_that_are_pulled_end_closer_together_and_explain_the_update_as_well() -> None:
    def spread(weight: float) -> tuple[float, float]:
        task = problem(canvas=Pixels(start="uniform"), consistency=weight)
        draws, like = torch.Generator().manual_seed(0), torch.zeros((), dtype=torch.float64)
        start = torch.stack([task.start(draws, like) for _ in range(3)])
        evaluate = GroupConsistency(task, task.evaluator_by("plain"), weight)
        found = search(evaluate, start, Adam(), project=task.project, iterations=60)
        return float(found.points.std(0).mean()), float(found.judged[:, 0].max())

    (apart, alone), (together, pulled) = spread(0.0), spread(1.0)
    assert together < 0.75 * apart
    assert pulled < 2 * alone + 1e-3
