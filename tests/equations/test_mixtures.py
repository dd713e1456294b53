"""Mixtures of examples: soft labels from the head, shares from soft labels, examples from both."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.head_system import HeadProblem
from leakscope.equations.mixtures import Shares, outside, possible_shares, solve_mixed_head, take_apart


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def smooth_pictures(count: int, seed: int = 0) -> Tensor:
    """Pictures of a few soft edges that fill [0, 1]."""
    x = torch.rand((count, 1, 12, 12), generator=seeded(seed), dtype=torch.float64)
    for _ in range(3):
        for axis in (2, 3):
            x = (x + x.roll(1, axis) + x.roll(-1, axis)) / 3
    low, high = x.amin((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
    return (x - low) / (high - low)


def cycle(shares: list[float]) -> Tensor:
    """Each example with the next one, the last with the first."""
    own = torch.tensor(shares, dtype=torch.float64)
    return torch.diag(own) + torch.diag(1 - own).roll(1, 1)


def head_of(soft: Tensor, seed: int = 0, scale: float = 1.0) -> tuple[HeadProblem, Tensor]:
    """The gradient of a head of random weights on random features behind a ReLU with these targets."""
    n, classes = soft.shape
    draws = seeded(seed)
    weight = torch.randn((classes, 30), generator=draws, dtype=torch.float64) / 4
    features = torch.randn((n, 30), generator=draws, dtype=torch.float64).clamp_min(0)
    signal = scale * (torch.softmax(features @ weight.T, 1) - soft) / n
    problem = HeadProblem(
        weight,
        torch.zeros(classes, dtype=torch.float64),
        signal.T @ features,
        signal.sum(0),
        examples=n,
        nonnegative=True,
        unit=1 / n,
        scale=scale,
    )
    return problem, features


def soft_of(matrix: Tensor, labels: list[int], classes: int = 10) -> Tensor:
    return matrix @ torch.nn.functional.one_hot(torch.tensor(labels), classes).double()


def in_the_order_of(truth: Tensor, rows: Tensor) -> Tensor:
    order = torch.cdist(truth, rows).argmin(1)
    assert len(order.unique()) == len(truth)
    return order


@pytest.mark.parametrize("labels", [[3, 8, 0, 6], [3, 8, 3, 6], [5, 5, 5, 5]], ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_soft_labels_and_features_of_mixtures_follow_from_the_head(labels: list[int], seed: int) -> None:
    soft = soft_of(cycle([0.6, 0.45, 0.62, 0.38]), labels)
    problem, features = head_of(soft, seed)
    found = solve_mixed_head(problem, images=2)
    assert found.exact
    assert found.labels is not None
    assert found.features is not None
    order = in_the_order_of(features, found.features)
    assert float((found.labels[order] - soft).abs().max()) < 1e-6
    assert float((found.features[order] - features).abs().max()) < 1e-6


@pytest.mark.slow
def test_a_head_that_is_not_one_of_mixtures_of_two_is_refused() -> None:
    three = torch.tensor([[0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.25, 0.35, 0.4]], dtype=torch.float64)
    problem, _ = head_of(soft_of(three, [1, 4, 7]))
    assert solve_mixed_head(problem, images=3).exact
    with pytest.raises(NotApplicable, match="no 3 mixtures of 2 examples"):
        solve_mixed_head(problem, images=2)
    with pytest.raises(NotApplicable, match="no 3 mixtures"):  # classes that are not there
        solve_mixed_head(problem, images=3, present=torch.tensor([0, 2, 3]))


def test_too_few_classes_to_certify_anything_are_refused() -> None:
    problem, _ = head_of(soft_of(cycle([0.6, 0.45]), [0, 1], classes=3))
    with pytest.raises(NotApplicable, match="at most 1"):
        solve_mixed_head(problem, images=2)


def test_distinct_classes_give_the_shares_and_the_examples() -> None:
    matrix, x = cycle([0.6, 0.45, 0.62, 0.38]), smooth_pictures(4)
    (shares,) = possible_shares(soft_of(matrix, [3, 8, 0, 6]), 2)
    found = take_apart(torch.tensordot(matrix, x, dims=1), [shares], error=0.0)
    assert found.forced
    assert shares.labels.tolist() == [0, 3, 6, 8]
    assert float((found.pictures - x[[2, 0, 3, 1]]).abs().max()) < 1e-9


def test_a_wrong_division_is_refused_by_the_bounds_or_looks_less_like_pictures() -> None:
    matrix, labels, x = cycle([0.6, 0.45, 0.62, 0.38, 0.52]), [3, 8, 3, 6, 1], smooth_pictures(5)
    mixtures = torch.tensordot(matrix, x, dims=1)
    ways = possible_shares(soft_of(matrix, labels), 2)
    right = [way for way in ways if float((way.parts(mixtures) - x[[4, 0, 2, 3, 1]]).abs().max()) < 1e-9]
    right += [way for way in ways if float((way.parts(mixtures) - x[[4, 2, 0, 3, 1]]).abs().max()) < 1e-9]
    assert len(ways) == 3
    assert len(right) == 1
    wrong = [way for way in ways if way is not right[0]]
    assert all(outside(way.parts(mixtures)) > 0.01 for way in wrong if way.growth < 1e3)
    with pytest.raises(NotApplicable):
        take_apart(mixtures, wrong, error=0.0)
    found = take_apart(mixtures, ways, error=0.0)
    assert found.shares is right[0]


def test_shares_of_two_examples_of_one_class_are_searched_and_never_called_certain() -> None:
    matrix = torch.eye(3, dtype=torch.float64)
    matrix[0], matrix[1], matrix[2] = (
        torch.tensor(row, dtype=torch.float64) for row in ([0.6, 0.4, 0], [0, 0.45, 0.55], [0.4, 0, 0.6])
    )
    x, labels = smooth_pictures(3, seed=4), [5, 5, 2]
    ways = possible_shares(soft_of(matrix, labels), 2)
    assert any(way.certain for way in ways)  # one example alone would explain it too
    found = take_apart(torch.tensordot(matrix, x, dims=1), ways, error=0.0)
    assert not found.forced
    order = in_the_order_of(x.flatten(1), found.pictures.flatten(1))
    assert float((found.pictures[order] - x).square().mean().sqrt()) < 0.05


def test_equal_shares_in_an_even_cycle_have_no_way_back() -> None:
    even = Shares(cycle([0.5] * 4), torch.arange(4))
    assert even.growth == float("inf")
    with pytest.raises(NotApplicable, match="singular"):
        take_apart(torch.tensordot(even.matrix, smooth_pictures(4), dims=1), [even], error=0.0)
    odd = Shares(cycle([0.5] * 3), torch.arange(3))
    x = smooth_pictures(3)
    found = take_apart(torch.tensordot(odd.matrix, x, dims=1), [odd], error=0.0)
    assert float((found.pictures - x).abs().max()) < 1e-9


def test_errors_of_mixtures_do_not_grow_beyond_the_pictures() -> None:
    shares, x = Shares(cycle([0.51, 0.5, 0.5, 0.5]), torch.arange(4)), smooth_pictures(4)
    mixtures = torch.tensordot(shares.matrix, x, dims=1)
    mixtures = mixtures + 0.05 * torch.randn(mixtures.shape, generator=seeded(1), dtype=torch.float64)

    def left(error: float) -> float:
        return float((shares.parts(mixtures, error) - x).square().mean().sqrt())

    assert shares.growth > 30
    assert left(0.05) < 0.5 * left(0.0)


def test_shares_that_are_not_of_whole_examples_are_refused() -> None:
    with pytest.raises(NotApplicable, match="classes"):
        possible_shares(torch.full((2, 4), 0.25), 2)
    with pytest.raises(NotApplicable):
        possible_shares(torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]), 2)
