"""How a candidate becomes an update: replays against the client, checkpoints against one graph, beta against IG."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from leakscope.contracts.inputs import Box, ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.federation import FedAvg, FedSGD
from leakscope.matching import (
    DISTANCES,
    LBFGS,
    Adam,
    BatchNormStatistics,
    Cosine,
    EpochAgreement,
    L2Norm,
    Matcher,
    Orthogonality,
    Pixels,
    Problem,
    Ramp,
    SegmentGradient,
    SingleGradient,
    SoftRange,
    SquaredL2,
    TotalVariation,
    UnrolledSteps,
    Victim,
    as_distance,
    steps_in_order,
)
from leakscope.matching.priors import Scene
from leakscope.matching.simulations import LocalOptimiser, compiled_step, without_idle_convolutions
from leakscope.models import build_model

SCENE = Scene(torch.tensor(0.0), {}, {})


def trained(
    examples: int = 3, protocol: FedAvg | None = None, net: nn.Module | None = None
) -> tuple[Observation, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(examples, 1, 8, 8, generator=generator, dtype=torch.float64)
    y = torch.arange(examples) % 4
    net = net if net is not None else build_model("convnet", input_shape=(1, 8, 8), num_classes=4, activation="tanh")
    protocol = protocol or FedAvg(epochs=3, batch_size=2, lr=0.1)
    return protocol.observe(net.double(), x, y, None, Knowledge.full, generator), x, y


def problem(seen: Observation, x: Tensor, y: Tensor | None, **settings) -> Problem:
    matcher = Matcher(**{"distance": Cosine(), **settings})
    return Problem(matcher, Victim.of(seen), dict(seen.message.update), seen.inputs, len(x), y, (4,))


# -- replaying every step -----------------------------------------------------------------------------------------


CLIENTS = pytest.mark.parametrize(
    "client", [{}, {"momentum": 0.9}, {"optimizer": "adam"}], ids=["plain", "momentum", "adam"]
)


@CLIENTS
@pytest.mark.parametrize("checkpoint", [True, False])
def test_the_replayed_update_of_the_truth_is_the_clients(client, checkpoint) -> None:
    seen, x, y = trained(protocol=FedAvg(epochs=3, batch_size=2, lr=0.1, **client))
    victim = Victim.of(seen)
    replay = UnrolledSteps(0.1, seen.training.batch_order, checkpoint, **client)
    found, _ = replay(victim, victim.tensors, x, y, {})
    for name, value in seen.message.update.items():
        assert torch.allclose(found[name], value, atol=1e-12)
    task = problem(seen, x, y, distance=SquaredL2(), simulation=replay)
    value, _, gradient = task.evaluator(1, False)(x.reshape(1, -1), 0)
    assert float(value) < 1e-18
    if client.get("optimizer") != "adam":  # whose derivative is as large as one over its epsilon
        assert float(gradient.abs().max()) < 1e-12


@pytest.mark.parametrize("soft", [False, True], ids=["labels", "label logits"])
@pytest.mark.parametrize("restarts", [1, 3])
@pytest.mark.parametrize("make", ["tanh net", "batchnorm net"])
@torch.random.fork_rng(devices=[])
def test_checkpoints_give_the_gradients_of_one_graph(soft, restarts, make) -> None:
    net = None
    if make == "batchnorm net":
        torch.random.default_generator.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, 4))
    seen, x, y = trained(5, FedAvg(epochs=4, batch_size=2, lr=0.1), net)
    rows = torch.rand(restarts, x.numel() + 20 * soft, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    order = steps_in_order(5, 2, 4)
    both = [
        problem(seen, x, None if soft else y, simulation=UnrolledSteps(0.1, order, flag)).evaluator(restarts, False)
        for flag in (True, False)
    ]
    for a, b in zip(both[0](rows, 0), both[1](rows, 0), strict=True):
        assert torch.allclose(a, b, atol=1e-12, rtol=1e-9)
        assert float(b.abs().max()) > 0


@pytest.mark.parametrize("laid_out", ["in rows", "in columns"])
def test_steps_over_all_examples_in_order_and_others_replay_alike(laid_out) -> None:
    seen, x, y = trained(4, FedAvg(epochs=1, batch_size=4, lr=0.1))
    order = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0), (0, 1, 2, 3))
    if laid_out == "in columns":
        x = x.transpose(2, 3).contiguous().transpose(2, 3)
        assert not x.is_contiguous()
    victim, found = Victim.of(seen), []
    for checkpoint in (True, False):
        point = x.clone(memory_format=torch.preserve_format).requires_grad_()
        update, _ = UnrolledSteps(0.1, order, checkpoint)(victim, victim.tensors, point, y, {})
        found.append(torch.autograd.grad(sum(value.square().sum() for value in update.values()), point)[0])
    assert torch.allclose(*found, atol=1e-14, rtol=1e-9)
    assert float(found[0].abs().max()) > 0


def oracle(seen: Observation, x: Tensor, y: Tensor, cotangent: Tensor, client: dict) -> tuple[Tensor, Tensor]:
    """Before minus after in one graph by torch's own optimisers' published rules, and its derivative by ``x``."""
    x = x.clone().requires_grad_()
    start = {name: value.detach().requires_grad_() for name, value in seen.model.named_parameters()}
    weights, velocity = dict(start), {name: torch.zeros_like(value) for name, value in start.items()}
    mean, square = dict(velocity), dict(velocity)
    for step, rows in enumerate(steps_in_order(len(x), 2, 3), start=1):
        outputs = torch.func.functional_call(seen.model, weights, (x[list(rows)],))
        loss = nn.functional.cross_entropy(outputs, y[list(rows)])
        gradient = dict(zip(weights, torch.autograd.grad(loss, list(weights.values()), create_graph=True), strict=True))
        for name, g in gradient.items():
            if client.get("optimizer") == "adam":
                mean[name] = 0.9 * mean[name] + 0.1 * g
                square[name] = 0.999 * square[name] + 0.001 * g**2
                divisor = (square[name] / (1 - 0.999**step)).sqrt() + 1e-8
                weights[name] = weights[name] - 0.01 * mean[name] / (1 - 0.9**step) / divisor
            else:
                velocity[name] = client.get("momentum", 0.0) * velocity[name] + g
                weights[name] = weights[name] - 0.01 * velocity[name]
    moved = torch.cat([(start[name] - value).flatten() for name, value in weights.items()])
    return moved.detach(), torch.autograd.grad(moved, x, cotangent)[0]


@pytest.mark.slow
@CLIENTS
@pytest.mark.parametrize("outer", ["autograd", "func", "compiled"])
def test_the_derivative_of_a_replay_is_that_of_one_graph(client, outer) -> None:
    if outer == "compiled" and client.get("optimizer") != "adam":
        pytest.skip("one optimiser is enough for a compiler")
    seen, x, y = trained(4)
    victim, replay = (
        Victim.of(seen),
        UnrolledSteps(0.01, steps_in_order(4, 2, 3), **client, compiled=outer == "compiled"),
    )
    cotangent = torch.randn(
        sum(value.numel() for value in seen.message.update.values()),
        generator=torch.Generator().manual_seed(1),
        dtype=torch.float64,
    )

    def moved(x: Tensor) -> Tensor:
        return torch.cat([value.flatten() for value in replay(victim, victim.tensors, x, y, {})[0].values()])

    expected, slopes = oracle(seen, x, y, cotangent, client)
    if outer == "func":
        value, pull = torch.func.vjp(moved, x)
        found = pull(cotangent)[0]
    else:
        leaf = x.clone().requires_grad_()
        value = moved(leaf)
        found = torch.autograd.grad(value, leaf, cotangent)[0]
    assert torch.allclose(value, expected, atol=1e-12)
    # Compiled sums are in another order, and Adam divides what is left of them by its epsilon.
    assert float((found - slopes).norm() / slopes.norm()) < (1e-8 if outer == "compiled" else 1e-10)


@torch.random.fork_rng(devices=[])
def test_weights_that_see_no_gradient_do_not_spoil_adam() -> None:
    torch.random.default_generator.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 4)).double()
    with torch.no_grad():
        net[1].weight[0] = -1.0  # a dead unit, for no pixel is negative
    seen, x, y = trained(3, FedAvg(epochs=2, batch_size=2, lr=0.01, optimizer="adam"), net)
    replay = UnrolledSteps(0.01, steps_in_order(3, 2, 2), optimizer="adam")
    for flag in (True, False):
        row = torch.rand(1, x.numel(), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        simulation = dataclasses.replace(replay, checkpoint=flag)
        gradient = problem(seen, x, y, simulation=simulation).evaluator(1, False)(row, 0)[2]
        assert torch.isfinite(gradient).all()
        assert float(gradient.abs().max()) > 0


def test_convolutions_leave_out_what_nobody_reads() -> None:
    x, w = torch.rand(2, 3, 6, 6), torch.rand(4, 3, 3, 3)

    def slope(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        no = [0, 0]
        all_three = torch.ops.aten.convolution_backward(
            g, x, w, [4], [1, 1], no, [1, 1], False, no, 1, [True, True, True]
        )
        return all_three[1]

    arguments = (x, w, torch.rand(2, 4, 4, 4))
    graph = without_idle_convolutions(make_fx(slope)(*arguments))
    (node,) = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
    assert node.args[10] == [False, True, False]
    assert torch.equal(graph(*arguments), slope(*arguments))


def test_a_step_that_cannot_be_traced_stays_eager() -> None:
    def peeks(x: Tensor) -> tuple[Tensor, ...]:
        return (x + 1 if float(x.sum()) > 0 else x - 1,)

    step = compiled_step(peeks, peeks)
    assert step(torch.ones(2))[0].tolist() == [2, 2]
    assert step(-torch.ones(2))[0].tolist() == [-2, -2]


def test_bad_optimisers_are_refused() -> None:
    for settings in ({"name": "rmsprop"}, {"momentum": 1.0}, {"name": "adam", "momentum": 0.9}):
        with pytest.raises(ValueError, match="expected"):
            LocalOptimiser(rate=0.1, **settings)
    with pytest.raises(ValueError, match="checkpoint=True"):
        UnrolledSteps(0.1, ((0,),), checkpoint=False, compiled=True)


def test_the_gradient_of_a_replay_is_right_by_finite_differences() -> None:
    seen, x, y = trained()
    evaluate = problem(seen, x, y, simulation=UnrolledSteps(0.1, steps_in_order(3, 2, 3))).evaluator(1, False)
    generator = torch.Generator().manual_seed(1)
    row = torch.rand(1, x.numel(), generator=generator, dtype=torch.float64)
    direction = torch.randn(row.shape, generator=generator, dtype=torch.float64)
    plus, minus = evaluate(row + 1e-6 * direction, 0)[0], evaluate(row - 1e-6 * direction, 0)[0]
    slope = float((evaluate(row, 0)[2] * direction).sum())
    assert float((plus - minus) / 2e-6) == pytest.approx(slope, rel=1e-5)


def test_one_epoch_of_one_batch_is_gradient_matching() -> None:
    """E = 1, B = N: the replayed update is the learning rate times the gradient, so directions agree exactly."""
    seen, x, y = trained(protocol=FedAvg(epochs=1, batch_size=3, lr=0.1))
    row = torch.rand(1, x.numel(), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    replayed = problem(seen, x, y, simulation=UnrolledSteps(0.1, steps_in_order(3, 3, 1))).evaluator(1, False)(row, 0)
    plain = problem(seen, x, y).evaluator(1, False)(row, 0)
    for a, b in zip(replayed, plain, strict=True):
        assert torch.allclose(a, b, atol=1e-12)


# -- a point between both ends --------------------------------------------------------------------------------------


def test_a_fixed_point_at_the_start_is_the_single_gradient() -> None:
    seen, x, y = trained()
    row = torch.rand(1, x.numel(), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = problem(seen, x, y).evaluator(1, False)(row, 0)
    fixed = problem(seen, x, y, simulation=SegmentGradient(beta=0.0, step=0.0)).evaluator(1, False)(row, 0)
    for a, b in zip(plain, fixed, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_surrogate_is_the_model_at_that_point(beta) -> None:
    seen, x, y = trained()
    victim = Victim.of(seen)
    found, _ = SegmentGradient()(victim, victim.tensors, x, y, {"beta": torch.tensor(beta, dtype=torch.float64)})
    net = seen.model
    with torch.no_grad():
        for name, value in net.named_parameters():
            value.sub_(beta * seen.message.update[name])
    loss = nn.functional.cross_entropy(net(x), y)
    oracle = torch.autograd.grad(loss, list(net.parameters()))
    for value, name in zip(oracle, found, strict=True):
        assert torch.allclose(found[name], value, atol=1e-12)


@pytest.mark.parametrize("restarts", [1, 2])
def test_the_derivative_by_beta_is_the_inner_product_of_the_paper(restarts) -> None:
    """<dL/dw, w_T - w_0>, taken independently: dL/dw by autograd at the surrogate."""
    seen, x, y = trained()
    simulation = SegmentGradient(beta=0.4, step=1e-3)
    task = problem(seen, x, y, simulation=simulation, optimiser=Adam(lr=0.1))
    row = torch.cat([x.flatten() * 0.9, torch.tensor([0.4 / 1e-2], dtype=torch.float64)]).repeat(restarts, 1)
    found = task.evaluator(restarts, False)(row, 0)[2][0, -1]
    victim = Victim.of(seen)
    surrogate = {n: (w - 0.4 * seen.message.update[n]).requires_grad_() for n, w in victim.tensors.weights.items()}
    loss, _ = victim.loss(victim.tensors._replace(weights=surrogate), x * 0.9, y)
    gradient = torch.autograd.grad(loss, list(surrogate.values()), create_graph=True)
    distance = Cosine()(dict(seen.message.update), dict(zip(surrogate, gradient, strict=True)))
    slopes = torch.autograd.grad(distance, list(surrogate.values()))
    expected = -sum((s * seen.message.update[n]).sum() for s, n in zip(slopes, surrogate, strict=True))
    # The row holds beta in units of its learning rate over the optimiser's: 1e-3 / 0.1.
    assert float(found) == pytest.approx(float(expected) * 1e-2, rel=1e-9)


def test_beta_moves_at_its_own_pace_and_stays_in_the_segment() -> None:
    seen, x, y = trained()
    for step, start in ((1e-3, 0.5), (0.3, 0.9)):
        matcher = Matcher(
            distance=Cosine(),
            simulation=SegmentGradient(beta=start, step=step),
            optimiser=Adam(lr=0.1, schedule="constant"),
            iterations=4,
        )
        match = matcher.run(
            Victim.of(seen), dict(seen.message.update), inputs=seen.inputs, count=len(x), targets=y,
            output_shape=(4,), generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
        assert 0 <= match.numbers["beta"] <= 1
        assert abs(match.numbers["beta"] - start) <= 4 * step + 1e-9


def test_a_kept_derivative_is_renewed_at_every_so_many_steps() -> None:
    seen, x, y = trained()
    lazy = problem(seen, x, y, simulation=SegmentGradient(every=3)).evaluator(1, False)
    eager = problem(seen, x, y, simulation=SegmentGradient(every=1)).evaluator(1, False)
    generator = torch.Generator().manual_seed(0)
    kept = None
    for iteration in range(7):
        row = torch.rand(1, x.numel() + 1, generator=generator, dtype=torch.float64)
        a, b = lazy(row, iteration), eager(row, iteration)
        assert torch.equal(a[0], b[0])
        assert torch.allclose(a[2][:, :-1], b[2][:, :-1], atol=1e-12)
        kept = b[2][0, -1] if iteration % 3 == 0 else kept
        assert float(a[2][0, -1]) == pytest.approx(float(kept), rel=1e-9)


@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("optimiser", [Adam(lr=0.1), LBFGS()], ids=["adam", "lbfgs"])
@pytest.mark.parametrize(
    "canvas", [Pixels(), Pixels(space="model", start="normal", clamp=False)], ids=["unit", "model"]
)
def test_the_segment_goes_with_every_distance_prior_canvas_and_optimiser(distance, optimiser, canvas) -> None:
    seen, x, _ = trained()
    matcher = Matcher(
        distance=as_distance(distance),
        priors=(
            TotalVariation(weight=0.1),
            L2Norm(weight=0.01),
            Orthogonality(weight=0.01),
            SoftRange(weight=0.1),
            BatchNormStatistics(weight=0.1),
        ),
        canvas=canvas,
        optimiser=optimiser,
        simulation=SegmentGradient(beta=0.2, step=0.01),
        iterations=4,
        restarts=2,
    )
    match = matcher.run(
        Victim.of(seen), dict(seen.message.update), inputs=seen.inputs, count=len(x), targets=None,
        output_shape=(4,), generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert torch.isfinite(match.inputs).all()
    assert match.label_logits is not None
    assert 0 <= match.numbers["beta"] <= 1
    assert match.objective <= match.curves[match.info["best_restart"]][0]


def test_bad_segments_are_refused() -> None:
    for settings in ({"beta": 1.5}, {"beta": -0.1}, {"step": -1.0}, {"every": 0}):
        with pytest.raises(ValueError, match="expected"):
            SegmentGradient(**settings)
    with pytest.raises(ValueError, match="Ramp"):
        Ramp(first=0.0)
    assert SingleGradient().unknowns == SegmentGradient(step=0.0).unknowns == ()


# -- priors and weights that replays need --------------------------------------------------------------------------


@pytest.mark.parametrize("statistic, norm, features", list(itertools.product(["mean", "max"], ["l1", "l2"], [0, 8])))
def test_epochs_that_are_permutations_of_each_other_agree(statistic, norm, features) -> None:
    first = torch.rand(4, 3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    prior = EpochAgreement(weight=7.0, copies=3, statistic=statistic, norm=norm, features=features)
    same = torch.cat([first, first[[2, 0, 3, 1]], first.flip(0)])
    assert float(prior(same, SCENE)) == pytest.approx(0, abs=1e-12)
    other = torch.cat([first, first, first + 0.1])
    assert float(prior(other, SCENE)) > 1e-3


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_epoch_agreement_is_the_mean_over_all_pairs(norm) -> None:
    pictures = torch.rand(6, 1, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    groups = pictures.reshape(3, 2, 9).mean(1)
    power = 1 if norm == "l1" else 2
    pairs = [((a - b).abs() ** power).mean() for a in groups for b in groups]
    expected = 2.0 * sum(pairs) / 9
    assert float(EpochAgreement(weight=2.0, copies=3, norm=norm)(pictures, SCENE)) == pytest.approx(float(expected))
    with pytest.raises(ValueError, match="EpochAgreement"):
        EpochAgreement(weight=1.0, copies=0)
    with pytest.raises(ValueError, match="EpochAgreement"):
        EpochAgreement(weight=1.0, copies=2, norm="l3")


def test_layers_share_a_weight_that_falls_with_depth() -> None:
    observed = {n: torch.zeros(2) for n in ("conv.weight", "conv.bias", "fc.weight")}
    ones = {n: torch.ones(2) for n in observed}
    assert float(SquaredL2(weights="layers")(observed, ones)) == pytest.approx(2 + 2 + 2 * math.exp(-1))
    assert float(SquaredL2(weights="layers", scale=3.0)(observed, ones)) == pytest.approx(3 * (4 + 2 * math.exp(-1)))


def test_a_soft_box_is_in_pixel_space_whatever_the_models() -> None:
    box = ValueRange(low=(-2.0,), high=(2.0,))
    scene = dataclasses.replace(SCENE, inputs=Box((2, 2), box))
    picture = torch.tensor([[[-2.0, 2.0], [0.0, 6.0]]])  # 0, 1, 0.5 and 2 in [0, 1] space
    assert float(SoftRange(weight=1.0)(picture, scene)) == pytest.approx(0.25)
    assert float(SoftRange(weight=1.0, total=True)(picture, scene)) == pytest.approx(1.0)


def test_emphasis_multiplies_the_distance_not_the_judgement() -> None:
    seen, x, y = trained()
    row = torch.rand(1, x.numel(), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    plain = problem(seen, x, y, canvas=Pixels(clamp=False)).evaluator(1, False)(row, 0)
    ramp = Ramp(first=2.0, last=8.0, steps=2)
    ramped = problem(seen, x, y, emphasis=ramp, canvas=Pixels(clamp=False)).evaluator(1, False)
    for iteration, factor in ((0, 2.0), (1, 4.0), (2, 8.0), (9, 8.0)):
        value, judged, _ = ramped(row, iteration)
        assert float(value) == pytest.approx(factor * float(plain[0]))
        assert judged[0].tolist() == pytest.approx([8 * float(plain[0]), float(plain[0])])


def test_a_gradient_has_no_movement() -> None:
    seen, x, _ = trained()
    sent = FedSGD().observe(seen.model, x, torch.tensor([0, 1, 2]))
    assert Victim.of(sent).tensors.movement == {}
    assert set(Victim.of(seen).tensors.movement) == set(seen.message.update)
