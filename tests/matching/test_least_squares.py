"""The numerics of Gauss-Newton against dense linear algebra."""

from __future__ import annotations

import dataclasses
import math
from itertools import pairwise

import pytest
import torch

from leakscope.federation import FedSGD
from leakscope.matching import GradientMap, LevenbergMarquardt, Linearisation, Preconditioner, Roughness
from leakscope.matching.least_squares import solve
from leakscope.models import build_model


@pytest.fixture
def matrix(generator) -> torch.Tensor:
    return torch.randn(40, 12, generator=generator, dtype=torch.float64)


def products(matrix: torch.Tensor) -> Linearisation:
    return Linearisation(matrix.sum(1), lambda v: matrix @ v, lambda w: matrix.T @ w)


def test_conjugate_gradients_solve_the_damped_equations(matrix, generator) -> None:
    right = torch.randn(12, generator=generator, dtype=torch.float64)
    wanted = torch.linalg.solve(matrix.T @ matrix + 0.3 * torch.eye(12, dtype=torch.float64), right)
    found = solve(products(matrix), right, 0.3, tolerance=1e-24, limit=50)
    assert found.met
    torch.testing.assert_close(found.step, wanted, rtol=1e-9, atol=1e-12)
    short = solve(products(matrix), right, 0.3, tolerance=1e-24, limit=3)
    assert (short.iterations, short.met) == (3, False)
    nothing = solve(products(matrix), torch.zeros(12, dtype=torch.float64), 0.3, tolerance=1e-9, limit=5)
    assert nothing.met
    assert not nothing.step.any()


def test_tiny_gradients_do_not_underflow(problem) -> None:
    """A gradient of 1e-26 is far from zero in double precision, and its square is none in single."""
    mapping, observed, truth, _ = problem
    tiny = dataclasses.replace(mapping, output_gradient=1e-26 * observed[-4:])
    helper = Preconditioner(tiny, truth, 0.0)
    near = tiny.linearise(truth)
    right = near.backward(torch.ones(mapping.entries, dtype=torch.float64))
    assert solve(near, right, 0.0, tolerance=1e-12, limit=500, preconditioner=helper).met
    blind = dataclasses.replace(mapping, output_gradient=0 * observed[-4:])
    assert torch.equal(Preconditioner(blind, truth, 0.0)(truth), truth)


def test_roughness_is_half_the_derivative_of_its_value(generator) -> None:
    prior = Roughness((2, 3, 4, 5), 0.7)
    flat = torch.rand(120, generator=generator, dtype=torch.float64)
    direction = torch.randn(120, generator=generator, dtype=torch.float64)
    slope = (prior.value(flat + 1e-5 * direction) - prior.value(flat - 1e-5 * direction)) / 2e-5
    assert 2 * float(prior.gradient(flat) @ direction) == pytest.approx(slope, rel=1e-6)
    both = prior.gradient(torch.stack([flat, direction]))
    torch.testing.assert_close(both[1], prior.gradient(direction))
    assert Roughness((2, 7), 1.0).value(torch.rand(14)) == 0.0


@pytest.fixture
def problem(generator):
    net = build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=4).double()
    x, y = torch.rand(1, 1, 8, 8, generator=generator, dtype=torch.float64), torch.tensor([2])
    seen = FedSGD().observe(net, x, y)
    mapping = GradientMap.of(seen, y)
    observed = torch.cat([value.flatten() for value in seen.message.update.values()])
    return mapping, observed, mapping.flat(x), torch.rand(64, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dense", [0, 5000])
def test_finds_the_truth_with_and_without_a_jacobian(problem, dense) -> None:
    mapping, observed, truth, start = problem
    fit = LevenbergMarquardt(dense=dense, steps=60).run(mapping, observed, start)
    assert fit.at_rest
    assert float((fit.x - truth).abs().max()) < 1e-8
    assert (fit.builds > 0) == (dense > 0)
    assert fit.curve == sorted(fit.curve, reverse=True)


def test_errors_are_squared_near_the_solution(problem) -> None:
    mapping, observed, _, start = problem
    curve = LevenbergMarquardt(steps=60).run(mapping, observed, start).curve
    late = [math.log10(value) for value in curve if 1e-24 < value < 1e-3]
    assert any(after < 1.6 * before for before, after in pairwise(late)), curve


def test_a_preconditioner_shortens_the_solve(problem) -> None:
    mapping, observed, truth, _ = problem
    near = mapping.linearise(truth)
    helper = Preconditioner(mapping, truth, 0.0)
    right = near.backward(observed)
    plain = solve(near, right, 0.0, tolerance=1e-16, limit=2000)
    helped = solve(near, right, 0.0, tolerance=1e-16, limit=2000, preconditioner=helper)
    assert plain.met
    assert helped.met
    assert helped.iterations < plain.iterations / 2
    torch.testing.assert_close(helped.step, plain.step, rtol=1e-4, atol=1e-6)
