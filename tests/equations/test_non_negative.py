"""Least squares for what is not negative, and robust ones where equations are scarce."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import nnls
from torch import Tensor

from leakscope.equations.non_negative import solve_non_negative
from leakscope.equations.robust_solve import SET_ASIDE, robust_solve, scarce_solve


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("seed", range(5))
def test_the_solution_is_that_of_lawson_and_hanson(seed: int) -> None:
    matrix, wanted = random(30, 20, seed=seed), random(30, 4, seed=seed + 100)
    normal, right = matrix.T @ matrix, matrix.T @ wanted
    found = solve_non_negative(normal, right, torch.linalg.solve(normal, right))
    for column in range(4):
        other, _ = nnls(matrix.numpy(), wanted[:, column].numpy())
        assert torch.allclose(found[:, column], torch.from_numpy(other), atol=1e-8)


def scarce(wrong: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1.1 equations for each unknown, in groups of four of which some are wrong, and the solution."""
    matrix, solution = random(176, 160, seed=1), random(160, 12, seed=2).relu()
    groups = torch.arange(44).repeat_interleave(4)
    wanted = matrix @ solution
    for group in wrong:
        wanted[groups == group] += random(4, 12, seed=3)
    return matrix, wanted, groups, solution


def test_wrong_groups_are_found_where_equations_are_scarce() -> None:
    matrix, wanted, groups, truth = scarce((5, 20))
    found, weights, residual = scarce_solve(matrix, wanted, groups, torch.zeros(44, dtype=torch.float64))
    assert torch.allclose(found, truth, atol=1e-6)
    assert residual < 1e-8
    assert set((weights < SET_ASIDE).nonzero()[:, 0].tolist()) >= {5, 20}
    plain, _, _ = robust_solve(matrix, wanted, groups)
    assert float((plain - truth).norm() / truth.norm()) > 1e-2


def test_too_many_wrong_groups_leave_a_residual() -> None:
    matrix, wanted, groups, _ = scarce(tuple(range(0, 44, 2)))
    _, _, residual = scarce_solve(matrix, wanted, groups, torch.zeros(44, dtype=torch.float64))
    assert residual > 1e-3
