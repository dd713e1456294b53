"""Counting free directions: exact where small, estimated where large, and open where the products do not tell."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakscope.equations.determinacy import INVISIBLE, SMALL, count_free_directions, free_inputs_of_dense

EXAMPLES, EACH = 2, 300


def system(sizes: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A'A with these singular values in a random basis, and A."""
    draws = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(torch.randn(len(sizes), len(sizes), generator=draws, dtype=torch.float64))
    matrix = sizes[:, None] * basis
    return matrix.T @ matrix, matrix


def count(sizes: Tensor, shape: tuple[int, ...], limit: int = 2000, **options: object) -> tuple[int | None, ...]:
    gram, matrix = system(sizes)
    root = len(sizes) ** 0.5

    def change(row: Tensor) -> float:
        return float((matrix @ row).norm()) / root

    return count_free_directions(lambda row: gram @ row, change, shape, sizes, limit=limit, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("free", [0, 1, 3])
def test_small_systems_are_counted_exactly(free: int) -> None:
    sizes = torch.linspace(0.1, 1, SMALL, dtype=torch.float64)
    sizes[:free] = 0
    assert count(sizes, (1, SMALL)) == (free,)


@pytest.mark.parametrize("free", [3, 30, 300])
def test_large_systems_are_estimated(free: int) -> None:
    sizes = torch.linspace(0.1, 1, EXAMPLES * EACH, dtype=torch.float64)
    sizes[:free] = 0
    counts = count(sizes, (EXAMPLES, EACH))
    assert None not in counts
    # Half of the directions belongs to each example; the estimate's standard deviation is the root of twice of these.
    total = sum(one or 0 for one in counts)
    assert total > 0
    assert abs(total - free) <= 3 * (2 * free) ** 0.5


def test_a_system_of_full_rank_has_no_free_direction() -> None:
    sizes = torch.linspace(0.05, 1, EXAMPLES * EACH, dtype=torch.float64)
    assert count(sizes, (EXAMPLES, EACH)) == (0, 0)


def test_directions_belong_to_the_example_that_they_move() -> None:
    seen = torch.ones(EXAMPLES * EACH, dtype=torch.float64)
    seen[EACH : EACH + 40] = 0
    counts = count_free_directions(
        lambda row: seen * row, lambda row: float((seen * row).norm()), (EXAMPLES, EACH), seen, limit=100
    )
    assert counts[0] == 0
    assert counts[1] is not None
    assert 20 <= counts[1] <= 60


@pytest.mark.parametrize(("share", "free"), [(0.5, True), (2.0, False)])
def test_a_direction_is_free_below_the_threshold_and_seen_above(share: float, free: bool) -> None:
    sizes = torch.ones(SMALL, dtype=torch.float64)
    sizes[0] = share * INVISIBLE
    # ``change`` of a unit direction that is stretched to root mean square one is its singular value.
    assert count(sizes, (1, SMALL)) == (int(free),)


def test_too_few_products_leave_it_open() -> None:
    sizes = torch.logspace(-2, 0, EXAMPLES * EACH, dtype=torch.float64)
    assert count(sizes, (EXAMPLES, EACH), limit=20) == (None, None)


def test_a_preconditioner_changes_the_effort_and_not_the_answer() -> None:
    sizes = torch.logspace(-2, 0, EXAMPLES * EACH, dtype=torch.float64)
    gram, _ = system(sizes)
    inverse = torch.linalg.inv(gram + 1e-6 * torch.eye(len(gram), dtype=torch.float64))
    assert count(sizes, (EXAMPLES, EACH), limit=60, precondition=lambda row: inverse @ row) == (0, 0)


def test_a_preconditioner_does_not_change_the_count() -> None:
    sizes = torch.linspace(0.1, 1, EXAMPLES * EACH, dtype=torch.float64)
    sizes[:100] = 0
    gram, _ = system(sizes)
    inverse = torch.linalg.inv(gram + 1e-3 * torch.eye(len(gram), dtype=torch.float64))
    plain = count(sizes, (EXAMPLES, EACH))
    assert count(sizes, (EXAMPLES, EACH), precondition=lambda row: inverse @ row) == plain


def test_dense_inputs_are_free_where_signals_are_alike() -> None:
    draws = torch.Generator().manual_seed(0)
    signals, inputs = (torch.randn((4, size), generator=draws).double() for size in (20, 50))
    assert free_inputs_of_dense(signals, inputs) == (0, 0, 0, 0)
    signals[2] = -3 * signals[0]
    assert free_inputs_of_dense(signals, inputs) == (50, 0, 50, 0)
    assert free_inputs_of_dense(signals[:, :2], inputs) == (50, 50, 50, 50), "four examples, two units"
