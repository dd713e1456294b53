"""The one loop of every search, on functions whose minimum is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from leakscope.matching.optimisers import LBFGS, Adam
from leakscope.matching.search import search

TARGET = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
STARTS = torch.tensor([[0.0, 0.0, 0.0], [3.0, 3.0, 3.0]], dtype=torch.float64)


def anywhere(rows: Tensor) -> Tensor:
    return rows


def bowl(rows: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """The squared distance from the target, judged by it; twice that goes along."""
    values = (rows - TARGET).square().sum(1)
    return values, torch.stack([values, 2 * values], dim=1), 2 * (rows - TARGET)


@pytest.mark.parametrize("optimiser", [Adam(lr=0.2), LBFGS()], ids=["adam", "lbfgs"])
def test_finds_the_minimum_of_every_row(optimiser) -> None:
    result = search(bowl, STARTS, optimiser, project=anywhere, iterations=400)
    assert float((result.points - TARGET).abs().max()) < 1e-3
    values, others = result.judged.unbind(1)
    assert torch.equal(values, (result.points - TARGET).square().sum(1))
    assert torch.equal(others, 2 * values)
    assert bool(result.alive.all())


def test_rows_do_not_influence_each_other() -> None:
    together = search(bowl, STARTS, Adam(lr=0.1), project=anywhere, iterations=20)
    for row in range(2):
        alone = search(bowl, STARTS[row : row + 1], Adam(lr=0.1), project=anywhere, iterations=20)
        assert torch.equal(together.points[row], alone.points[0])


def test_the_best_point_is_kept_or_the_last() -> None:
    """A step so long that it only leads away."""
    wild = Adam(lr=50.0, schedule="constant")
    best = search(bowl, STARTS, wild, project=anywhere, iterations=3)
    assert torch.equal(best.points, STARTS)
    last = search(bowl, STARTS, wild, project=anywhere, iterations=1, keep="last")
    assert float((last.points - STARTS).abs().min()) == pytest.approx(50, rel=1e-6)
    assert torch.equal(last.judged, bowl(STARTS, 0)[1])


def test_one_more_evaluation_looks_at_where_the_last_step_led() -> None:
    steps: list[int] = []

    def watched(rows: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        steps.append(step)
        return bowl(rows, step)

    rule = Adam(lr=0.01, schedule="constant")
    result = search(watched, STARTS, rule, project=anywhere, iterations=4, evaluations=5)
    led = search(bowl, STARTS, rule, project=anywhere, iterations=4, keep="last")
    assert steps == [0, 1, 2, 3, 4]
    assert torch.equal(result.points, led.points)


def test_a_row_that_is_not_finite_stops_and_the_others_go_on() -> None:
    def broken(rows: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        values, judged, gradients = bowl(rows, step)
        if step == 2:
            gradients = gradients.clone()
            gradients[1, 0] = math.nan
        return values, judged, gradients

    result = search(broken, STARTS, Adam(lr=0.2), project=anywhere, iterations=400)
    assert result.alive.tolist() == [True, False]
    assert torch.isfinite(result.points).all()
    assert float((result.points[0] - TARGET).abs().max()) < 1e-2
    assert len(result.curves) == 400
    # A line search tries points that it may take back: that row goes on.
    survived = search(broken, STARTS, LBFGS(), project=anywhere, iterations=100)
    assert bool(survived.alive.all())
    assert float((survived.points - TARGET).abs().max()) < 1e-3


def test_all_rows_not_finite_end_the_search_at_the_start() -> None:
    def hopeless(rows: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        values = torch.full((len(rows),), math.nan, dtype=rows.dtype)
        return values, values[:, None], torch.zeros_like(rows)

    result = search(hopeless, STARTS, Adam(), project=anywhere, iterations=10)
    assert not bool(result.alive.any())
    assert torch.equal(result.points, STARTS)
    assert len(result.curves) == 1


def test_tolerance_and_patience_end_it() -> None:
    short = search(bowl, STARTS, Adam(lr=0.2), project=anywhere, iterations=500, tolerance=1e-2)
    assert len(short.curves) < 100
    assert float(short.judged[:, 0].max()) <= 1e-2

    def lifted(rows: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        values, judged, gradients = bowl(rows, step)
        return values + 1, judged + 1, gradients

    at_rest = search(lifted, STARTS, Adam(lr=0.2), project=anywhere, iterations=500, patience=10)
    assert len(at_rest.curves) < 100
    assert float(at_rest.judged[:, 0].max()) < 1.1


def test_points_stay_where_they_may_be() -> None:
    result = search(bowl, STARTS, Adam(lr=0.2), project=lambda rows: rows.clamp(0, 3), iterations=400)
    assert torch.allclose(result.points, TARGET.clamp(0, 3).expand(2, 3), atol=1e-2)


def test_every_step_is_told() -> None:
    told: list[tuple[int, Tensor, Tensor]] = []
    result = search(bowl, STARTS, Adam(lr=0.2), project=anywhere, iterations=7, watch=lambda *facts: told.append(facts))
    assert [done for done, _, _ in told] == list(range(1, 8))
    assert all(torch.equal(values, curve) for (_, values, _), curve in zip(told, result.curves, strict=True))
    assert torch.equal(told[-1][2], result.judged[:, 0])
