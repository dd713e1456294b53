"""The trace of an inverse against matrices that are inverted outright."""

from __future__ import annotations

import math

import pytest
import torch

from leakscope.limits.jacobian import inverse_trace, signs


def test_the_trace_of_an_inverse_of_a_known_matrix() -> None:
    torch.manual_seed(0)
    basis = torch.linalg.qr(torch.randn(60, 60, dtype=torch.float64)).Q
    matrix = basis @ torch.diag(torch.logspace(-2, 1, 60, dtype=torch.float64)) @ basis.T
    wanted = float(torch.logspace(-2, 1, 60, dtype=torch.float64).reciprocal().sum())
    found = inverse_trace(lambda v: matrix @ v, signs(60, 200, seed=0), steps=300)
    assert abs(found.inverse - wanted) < 3 * found.standard_error
    assert found.converged == 1.0
    diagonal = torch.linspace(1, 2, 30, dtype=torch.float64)
    exact = inverse_trace(lambda v: diagonal * v, signs(30, 3, seed=0), steps=60)
    assert exact.inverse == pytest.approx(float(diagonal.reciprocal().sum()), rel=2e-3)
    assert exact.inverse <= float(diagonal.reciprocal().sum()) * (1 + 1e-12)
    singular = inverse_trace(lambda v: torch.cat([v[:5], 0 * v[5:]]), signs(8, 2, seed=0), steps=30)
    assert singular.inverse == math.inf


def test_estimates_are_unbiased_and_their_intervals_cover() -> None:
    torch.manual_seed(0)
    root = torch.randn(12, 30, dtype=torch.float64)
    matrix = root @ root.T
    exact = float(torch.linalg.inv(matrix).trace())
    found = [inverse_trace(lambda v: matrix @ v, signs(12, 8, seed=seed), steps=30) for seed in range(100)]
    assert sum(one.inverse for one in found) / 100 == pytest.approx(exact, rel=0.05)
    assert sum(one.interval[0] <= exact <= one.interval[1] for one in found) >= 85
