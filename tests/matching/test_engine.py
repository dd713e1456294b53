"""The engine against independent oracles: published optimisers, one-by-one runs, the truth itself."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from scipy.optimize import minimize, rosen, rosen_der
from torch import Tensor, nn

from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.federation import FedAvg, FedSGD
from leakscope.matching import (
    L1,
    LBFGS,
    Adam,
    BatchNormStatistics,
    Cosine,
    DirectionL1,
    GaussianKernel,
    L2Norm,
    Matcher,
    Orthogonality,
    Pixels,
    Problem,
    RelativeSquaredL2,
    SoftRange,
    SquaredL2,
    TotalVariation,
    UnrolledSteps,
    Victim,
    steps_in_order,
    total_variation,
)
from leakscope.matching.distances import DISTANCES
from leakscope.matching.optimisers import RowAdam, schedule_factor
from leakscope.matching.priors import Scene
from leakscope.models import build_model

SCENE = Scene(torch.tensor(0.0), {}, {})


def smooth_net() -> nn.Module:
    return build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=4)


def look(net: nn.Module, batch: int = 2, protocol=None, **facts) -> tuple[Observation, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(batch, 1, 8, 8, generator=generator)
    y = torch.arange(batch) % 4
    return (protocol or FedSGD()).observe(net, x, y, **facts), x, y


def solve(matcher: Matcher, seen: Observation, targets: Tensor | None, seed: int = 0):
    return matcher.run(
        Victim.of(seen),
        dict(seen.message.update),
        inputs=seen.inputs,
        count=seen.num_examples,
        targets=targets,
        output_shape=seen.output_shape,
        generator=torch.Generator().manual_seed(seed),
    )


# -- distances ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DISTANCES)
def test_a_distance_is_zero_at_the_truth_positive_elsewhere_and_finite_at_zero(name: str, generator) -> None:
    g = {"a": torch.randn(4, 5, generator=generator), "b": torch.randn(3, generator=generator)}
    other = {k: v + torch.randn(v.shape, generator=generator) for k, v in g.items()}
    distance = DISTANCES[name]
    assert abs(float(distance(g, g))) < 1e-6
    assert float(distance(g, other)) > 0.01
    zero = {k: torch.zeros_like(v).requires_grad_() for k, v in g.items()}
    for observed in (g, {k: torch.zeros_like(v) for k, v in g.items()}):
        value = distance(observed, zero)
        grads = torch.autograd.grad(value, list(zero.values()), allow_unused=True)
        assert torch.isfinite(value)
        assert all(x is None or torch.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("distance", [Cosine(), Cosine(per="tensor"), DirectionL1()], ids=repr)
@pytest.mark.parametrize("factor", [1e-3, 7.0])
def test_directions_do_not_see_clipping_or_learning_rates(distance, factor, generator) -> None:
    g = {"a": torch.randn(30, generator=generator).double(), "b": torch.randn(20, generator=generator).double()}
    c = {k: v + torch.randn(v.shape, generator=generator).double() for k, v in g.items()}
    scaled = {k: factor * v for k, v in g.items()}
    assert abs(float(distance(scaled, c)) - float(distance(g, c))) < 1e-10


def test_weights_by_depth_change_the_sum_as_they_should() -> None:
    g = {"a.weight": torch.zeros(1), "b.weight": torch.zeros(1)}
    c = {"a.weight": torch.ones(1), "b.weight": 2 * torch.ones(1)}
    assert float(SquaredL2()(g, c)) == 5
    assert float(SquaredL2(weights="layers")(g, c)) == pytest.approx(1 + 4 * math.exp(-1))
    assert float(L1()({"a": torch.ones(1)}, {"a": torch.zeros(1)})) == 1
    assert float(RelativeSquaredL2()({"a": 2 * torch.ones(1)}, {"a": torch.zeros(1)})) == 1


def test_gaussian_kernel_is_bounded_quadratic_near_zero_and_alive_far_away(generator) -> None:
    g = {"a": torch.randn(50, generator=generator).double(), "b": torch.randn(9, generator=generator).double()}
    far = {k: (v + 1e6).requires_grad_() for k, v in g.items()}
    kernel = GaussianKernel()
    value = kernel(g, far)
    assert float(value.detach()) <= 1 + 1 / 2
    gradient = torch.autograd.grad(value, far["a"])[0]
    assert float(gradient.abs().max()) > 0  # an unguarded kernel underflows to exactly zero here
    plain = GaussianKernel(guard=0.0)
    assert float(torch.autograd.grad(plain(g, far), far["a"])[0].abs().max()) == 0
    near = {k: v + 1e-3 * v.std(unbiased=False) for k, v in g.items()}
    expected = sum(1e-6 / (depth + 1) for depth in range(2))
    assert float(plain(g, near)) == pytest.approx(expected, rel=0.01)


# -- priors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("variant", ["l1mean_sum", "l1mean_avg", "conv", "sq_roll", "l1sum", "joint"])
def test_total_variation_of_a_constant_is_zero_for_any_number_of_channels(variant, channels) -> None:
    flat = torch.full((2, channels, 5, 7), 0.3)
    value = float(total_variation(flat, variant))
    if variant == "conv":  # the zero border counts
        assert value == pytest.approx(0.3 * (1 / 5 + 1 / 7) / 2, rel=1e-5)
    elif variant == "sq_roll":
        assert value == pytest.approx(1e-7 * 35 * channels, rel=1e-3)
    else:
        assert value == pytest.approx(0, abs=1e-9)


def test_total_variation_variants_by_hand() -> None:
    x = torch.tensor([[[[0.0, 1.0], [2.0, 5.0]]]])
    horizontal, vertical = (1 + 3) / 2, (2 + 4) / 2
    assert float(total_variation(x, "l1mean_sum")) == horizontal + vertical
    assert float(total_variation(x, "l1mean_avg")) == (horizontal + vertical) / 2
    assert float(total_variation(x, "l1sum")) == 10
    assert float(total_variation(x, "sq_roll")) == pytest.approx(2 * (1 + 9) + 2 * (4 + 16), rel=1e-5)
    assert float(total_variation(x, "conv")) == pytest.approx((1 + 1 + 3 + 5 + 2 + 4 + 2 + 5) / 4 / 2)
    assert float(total_variation(torch.tensor([[[0.0, 2.0, 3.0]]]))) == 1.5  # signals
    assert float(total_variation(torch.rand(3, 5))) == 0  # tables have no neighbours
    with pytest.raises(ValueError, match="variant"):
        total_variation(x, "other")


def test_small_priors_by_hand() -> None:
    x = torch.tensor([[[1.0, 0.0]], [[3.0, 4.0]]])
    assert float(L2Norm(weight=2.0)(x, SCENE)) == 2 * (1 + 25) / 2
    assert float(L2Norm(weight=2.0, squared=False)(x, SCENE)) == pytest.approx(2 * (1 + 5) / 2)
    later = Scene(torch.tensor(250.0), {}, {})
    assert float(Orthogonality(weight=1.0, decay=0.9, every=100)(x, SCENE)) == 18  # both orders: 2 * 3^2
    assert float(Orthogonality(weight=1.0, decay=0.9, every=100)(x, later)) == pytest.approx(18 * 0.81)
    assert float(SoftRange(weight=1.0)(x, SCENE)) == (0 + 0 + 4 + 9) / 4
    inputs = torch.rand(3, 2, 4, 4)
    mean, variance = inputs.mean((0, 2, 3)), inputs.var((0, 2, 3), unbiased=False)
    known = Scene(torch.tensor(0.0), {"bn": inputs}, {"bn": (mean, variance)})
    assert float(BatchNormStatistics(weight=1.0)(x, known)) < 1e-5
    off = Scene(torch.tensor(0.0), {"bn": inputs}, {"bn": (mean + torch.tensor([3.0, 4.0]), variance)})
    assert float(BatchNormStatistics(weight=1.0, first=10.0)(x, off)) == pytest.approx(50, rel=1e-4)


# -- optimisers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["plain", "sign"])
def test_adam_takes_the_steps_of_torch(rule, generator) -> None:
    start = torch.randn(3, 10, generator=generator, dtype=torch.float64)
    target = torch.randn(3, 10, generator=generator, dtype=torch.float64)
    run = Adam(lr=0.1, gradient=rule, schedule="constant").begin(start, 50, lambda z: z)
    oracle = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([oracle], lr=0.1, eps=1e-16)
    alive = torch.ones(3, dtype=torch.bool)
    for step in range(50):
        gradient = 2 * (run.ask() - target)
        run.tell(gradient.square().sum(1), gradient, alive)
        oracle.grad = 2 * (oracle.detach() - target)
        if rule == "sign":
            oracle.grad = oracle.grad.sign()
        optimizer.step()
        if step == 0 and rule == "sign":
            moved = (run.ask() - start).abs()
            assert torch.allclose(moved, torch.full_like(moved, 0.1))
    assert torch.allclose(run.ask(), oracle.detach(), atol=1e-9)


def test_row_wise_adam_is_adam_for_rows_that_move_each_time_and_counts_by_row(generator) -> None:
    table, *gradients = torch.randn(6, 3, 4, generator=generator, dtype=torch.float64)
    mover, copy = RowAdam(table), torch.nn.Parameter(table.clone())
    optimiser = torch.optim.Adam([copy], lr=0.05, eps=1e-16)
    late = torch.nn.Parameter(table[1:2].clone())
    other = torch.optim.Adam([late], lr=0.05, eps=1e-16)
    every, mine = torch.arange(3), table.clone()
    second, single = RowAdam(table), table.clone()
    for step, gradient in enumerate(gradients):
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


def test_soft_sign_goes_from_sign_to_gradient() -> None:
    gradient = torch.tensor([[1e-6, -2e-6, 9e-6]], dtype=torch.float64)
    run = Adam(lr=1.0, gradient="soft_sign", schedule="constant", betas=(0.0, 0.0)).begin(
        torch.zeros(1, 3, dtype=torch.float64), 10, lambda z: z
    )
    run.tell(torch.zeros(1), gradient, torch.ones(1, dtype=torch.bool))
    assert torch.equal(run.ask().sign(), -gradient.sign())


def test_lbfgs_minimises_rosenbrock_as_scipy_does() -> None:
    starts = torch.tensor([[-1.2, 1.0, 0.5, 2.0], [0.0, 0.0, 0.0, 0.0], [2.0, -1.0, 1.0, 1.0]], dtype=torch.float64)
    run = LBFGS(history=10).begin(starts, 500, lambda z: z)
    alive = torch.ones(3, dtype=torch.bool)
    for _ in range(300):
        points = run.ask()
        values = torch.tensor([rosen(p.numpy()) for p in points])
        gradients = torch.stack([torch.from_numpy(rosen_der(p.numpy())) for p in points])
        run.tell(values, gradients, alive)
    for start, value in zip(starts, run.values, strict=True):
        oracle = minimize(rosen, start.numpy(), jac=rosen_der, method="L-BFGS-B")
        assert float(value) < max(1e-8, 10 * oracle.fun)


def test_lbfgs_solves_an_ill_conditioned_quadratic_and_survives_infinity() -> None:
    scale = torch.logspace(0, 4, 30, dtype=torch.float64)
    run = LBFGS(history=40).begin(torch.ones(2, 30, dtype=torch.float64), 500, lambda z: z)
    for step in range(320):  # scipy needs 316 evaluations for the same
        z = run.ask()
        values, gradients = (scale * z * z).sum(1), 2 * scale * z
        usable = torch.ones(2, dtype=torch.bool)
        if step == 3:
            values[0] = math.inf
            usable[0] = False
        run.tell(values, gradients, usable)
    assert float(run.values.max()) < 1e-12


def test_schedules() -> None:
    assert [schedule_factor("step", t, 1000) for t in (0, 373, 374, 624, 625, 874, 875, 999)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    )
    assert schedule_factor("cosine", 0, 10) == 1
    for make in (
        lambda: Adam(schedule="other"),
        lambda: Adam(lr=0),
        lambda: Adam(gradient="other"),
        lambda: LBFGS(lr=-1),
    ):
        with pytest.raises(ValueError, match="expected"):
            make()


# -- the loop -----------------------------------------------------------------------------------------------------


def test_objective_and_gradient_vanish_at_the_truth() -> None:
    seen, x, y = look(smooth_net())
    seen = seen.to(dtype=torch.float64)
    matcher = Matcher(distance=SquaredL2(), canvas=Pixels(space="model"))
    problem = Problem(matcher, Victim.of(seen), dict(seen.message.update), seen.inputs, len(x), y, (4,))
    value, _, gradient = problem.evaluator(1, False)(x.double().reshape(1, -1), 0)
    assert float(value) < 1e-12  # the update was made in single precision
    assert float(gradient.abs().max()) < 1e-5


def test_the_gradient_of_the_objective_is_right_by_finite_differences() -> None:
    seen, x, y = look(smooth_net())
    seen = seen.to(dtype=torch.float64)
    matcher = Matcher(distance=Cosine(), priors=(TotalVariation(weight=0.1), L2Norm(weight=0.1)))
    problem = Problem(matcher, Victim.of(seen), dict(seen.message.update), seen.inputs, len(x), y, (4,))
    evaluate = problem.evaluator(1, False)
    row = torch.rand(1, x.numel(), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    _, _, gradient = evaluate(row, 0)
    direction = torch.randn(row.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    plus, minus = evaluate(row + 1e-6 * direction, 0)[0], evaluate(row - 1e-6 * direction, 0)[0]
    assert float((plus - minus) / 2e-6) == pytest.approx(float((gradient * direction).sum()), rel=1e-5)


def test_restarts_in_one_batch_are_those_run_one_after_another() -> None:
    seen, x, y = look(smooth_net())
    seen = seen.to(dtype=torch.float64)
    matcher = Matcher(distance=Cosine(), iterations=5, restarts=3, canvas=Pixels(start="uniform"))
    problem = Problem(matcher, Victim.of(seen), dict(seen.message.update), seen.inputs, len(x), y, (4,))
    rows = torch.rand(3, x.numel(), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    together = problem.evaluator(3, False)(rows, 0)
    single = problem.evaluator(1, False)
    for number in range(3):
        alone = single(rows[number : number + 1], 0)
        for a, b in zip(together, alone, strict=True):
            assert torch.allclose(a[number], b[0], atol=1e-10)


def test_more_restarts_never_give_a_worse_objective() -> None:
    seen, _, y = look(smooth_net())
    few = Matcher(distance=Cosine(), iterations=20, restarts=1)
    many = dataclasses.replace(few, restarts=4)
    assert solve(many, seen, y).objective <= solve(few, seen, y).objective + 1e-9


class _Broken(nn.Module):
    """Logits that turn NaN once the input's first pixel leaves its starting side."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.inner = build_model("mlp", input_shape=(1, 8, 8), num_classes=4, hidden=[8])
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        bad = torch.where(x[:, 0, 0, 0] > self.limit, math.nan, 0.0)
        return self.inner(x) + bad[:, None]


def test_a_non_finite_value_ends_that_restart_with_a_flag_not_the_run() -> None:
    net = build_model("mlp", input_shape=(1, 8, 8), num_classes=4, hidden=[8])
    x = torch.zeros(1, 1, 8, 8)
    seen = FedSGD().observe(net, x, torch.tensor([1]))
    fragile = _Broken(0.5)
    fragile.inner = net
    update = {f"inner.{k}": v for k, v in seen.message.update.items()}
    seen = Observation.from_update(
        fragile, update, input_shape=(1, 8, 8), num_classes=4, num_examples=1, value_range=ValueRange()
    )
    matcher = Matcher(distance=Cosine(), iterations=10, restarts=6, canvas=Pixels(start="uniform"))
    match = solve(matcher, seen, torch.tensor([1]))
    assert "non-finite restart" in match.flags
    assert torch.isfinite(match.inputs).all()
    assert math.isfinite(match.objective)
    everywhere = _Broken(-1.0)
    everywhere.inner = net
    doomed = dataclasses.replace(seen, model=everywhere)
    assert solve(matcher, doomed, torch.tensor([1])).flags == ("non-finite objective",)


def test_the_best_iterate_is_kept_even_if_the_last_is_bad() -> None:
    seen, _, y = look(smooth_net())
    wild = Matcher(distance=SquaredL2(), optimiser=Adam(lr=0.5, schedule="constant"), iterations=40)
    match = solve(wild, seen, y)
    assert match.objective == pytest.approx(min(match.curves[0]), rel=1e-6)


def test_history_is_thinned_and_progress_told() -> None:
    seen, _, y = look(smooth_net(), batch=1)
    told: list[tuple[int, int, float]] = []
    matcher = Matcher(distance=DirectionL1(), iterations=250)
    match = matcher.run(
        Victim.of(seen),
        dict(seen.message.update),
        inputs=seen.inputs,
        count=1,
        targets=y,
        output_shape=(4,),
        generator=torch.Generator().manual_seed(0),
        progress=lambda *args: told.append(args),
    )
    assert [t[0] for t in told] == list(range(1, 251))
    assert len(match.curves[0]) == 200


def test_compiling_is_decided_by_counts_not_clocks() -> None:
    seen, x, _ = look(smooth_net())
    victim, like = Victim.of(seen), next(iter(seen.message.update.values()))
    assert not Matcher(distance=Cosine())._compiles(victim, x.shape, like)
    assert Matcher(distance=Cosine(), iterations=10**9)._compiles(victim, x.shape, like)
    assert not Matcher(distance=Cosine(), iterations=10**9, compile="never")._compiles(victim, x.shape, like)


# -- simulation ---------------------------------------------------------------------------------------------------


def test_unrolled_steps_are_the_clients_steps() -> None:
    protocol = FedAvg(epochs=2, batch_size=2, lr=0.1)
    seen, x, y = look(smooth_net(), batch=5, protocol=protocol, knowledge=Knowledge.full)
    victim = Victim.of(seen)
    simulated, _ = UnrolledSteps(0.1, seen.training.batch_order)(victim, victim.tensors, x, y, {})
    for name, value in seen.message.update.items():
        assert torch.allclose(simulated[name], value, atol=1e-5)
    assert steps_in_order(5, 2, 2) == ((0, 1), (2, 3), (4,), (0, 1), (2, 3), (4,))


@pytest.mark.parametrize("mode", ["eval", "train"])
@torch.random.fork_rng(devices=[])
def test_batchnorm_in_both_modes_is_simulated_as_the_client_has_it(mode) -> None:
    torch.random.default_generator.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Dropout(), nn.Flatten(), nn.Linear(144, 4))
    net(torch.rand(9, 1, 8, 8))
    seen, x, y = look(net, batch=3, protocol=FedSGD(batchnorm=mode), knowledge=Knowledge.full)
    victim = Victim.of(seen)
    gradient, recorded = victim.gradient(victim.tensors, x, y)
    for name, value in seen.message.update.items():
        assert torch.allclose(gradient[name], value, atol=1e-6)
    assert torch.allclose(recorded["1"].mean((0, 2, 3)), seen.message.batchnorm_statistics["1.mean"], atol=1e-6)
    matcher = Matcher(distance=Cosine(), priors=(BatchNormStatistics(weight=0.1),), iterations=5, restarts=2)
    assert math.isfinite(solve(matcher, seen, y).objective)
