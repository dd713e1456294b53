"""The permutation and not its inverse, the optimum and not a heuristic, and unequal numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leakscope.metrics import assign, cost_matrix, mse
from leakscope.metrics.assignment import hungarian

COSTS = ["mse", "psnr", "ssim", "cosine"]


def pictures(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, 1, 6, 6, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("method", ["hungarian", "greedy", "best"])
def test_a_three_cycle_is_undone_and_not_done_twice(cost: str, method: str) -> None:
    originals = pictures(3)
    shuffled = originals[[1, 2, 0]]  # a cycle of three differs from its inverse; a swap does not
    order = assign(originals, shuffled, cost, method)  # type: ignore[arg-type]
    assert order.tolist() == [2, 0, 1]
    assert torch.equal(shuffled[order], originals)


@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 9), columns=st.integers(1, 9), seed=st.integers(0, 10_000), ties=st.booleans())
def test_hungarian_uses_as_many_columns_as_it_can_each_once(rows: int, columns: int, seed: int, ties: bool) -> None:
    random = np.random.default_rng(seed)
    costs = random.integers(0, 3, (rows, columns)).astype(float) if ties else random.normal(size=(rows, columns))
    order = hungarian(costs)
    placed = order[order >= 0]
    assert len(placed) == len(set(placed.tolist())) == min(rows, columns)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 6), seed=st.integers(0, 1000), cost=st.sampled_from(COSTS))
def test_shuffling_reconstructions_does_not_change_what_each_original_gets(count: int, seed: int, cost: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    originals, guesses = pictures(count, seed), pictures(count, seed + 1)
    shuffle = torch.randperm(count, generator=generator)
    first = guesses[assign(originals, guesses, cost)]  # type: ignore[arg-type]
    second = guesses[shuffle][assign(originals, guesses[shuffle], cost)]  # type: ignore[arg-type]
    assert torch.equal(first, second)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 5), seed=st.integers(0, 1000))
def test_hungarian_beats_every_permutation_and_greedy(count: int, seed: int) -> None:
    originals, guesses = pictures(count, seed), pictures(count, seed + 1)
    best = mse(originals, guesses[assign(originals, guesses)]).sum().item()
    for permutation in itertools.permutations(range(count)):
        assert best <= mse(originals, guesses[list(permutation)]).sum().item() + 1e-12
    assert best <= mse(originals, guesses[assign(originals, guesses, method="greedy")]).sum().item() + 1e-12


def test_greedy_takes_the_cheapest_pair_first_where_the_optimum_would_not() -> None:
    originals, guesses = torch.tensor([[0.0], [0.3]]), torch.tensor([[0.25], [1.0]])
    assert assign(originals, guesses, method="greedy").tolist() == [1, 0]
    assert assign(originals, guesses, method="hungarian").tolist() == [0, 1]


def test_best_may_use_a_reconstruction_twice_and_none_keeps_the_order() -> None:
    originals, guesses = torch.tensor([[0.0], [0.1], [0.2]]), torch.tensor([[0.9], [0.1]])
    assert assign(originals, guesses, method="best").tolist() == [1, 1, 1]
    assert assign(originals, guesses, method="none").tolist() == [0, 1, -1]


@pytest.mark.parametrize("method", ["hungarian", "greedy"])
def test_missing_and_surplus_reconstructions(method: str) -> None:
    originals = torch.tensor([[0.0], [0.5], [1.0]])
    few = assign(originals, torch.tensor([[0.95], [0.45]]), method=method)  # type: ignore[arg-type]
    assert few.tolist() == [-1, 1, 0]
    many = assign(originals[:1], torch.tensor([[0.95], [0.45], [0.1]]), method=method)  # type: ignore[arg-type]
    assert many.tolist() == [2]
    assert assign(originals, torch.zeros(0, 1), method=method).tolist() == [-1, -1, -1]  # type: ignore[arg-type]


def test_non_finite_reconstructions_are_taken_last() -> None:
    originals = torch.tensor([[0.0], [1.0]])
    guesses = torch.tensor([[float("nan")], [0.2], [0.7]])
    assert assign(originals, guesses).tolist() == [1, 2]
    assert assign(originals, guesses, method="best").tolist() == [1, 2]
    assert assign(originals, torch.full((2, 1), float("inf"))).sort().values.tolist() == [0, 1]


def test_near_equal_pictures_keep_their_precision() -> None:
    x = pictures(2)
    assert cost_matrix(x, x + 1e-5)[0, 0].item() == pytest.approx(1e-10, rel=0.02)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="method"):
        assign(pictures(1), pictures(1), method="random")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cost"):
        assign(pictures(1), pictures(1), cost="nonsense")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="table"):
        assign(torch.zeros(1, 3), torch.zeros(1, 3), cost="ssim")
    with pytest.raises(ValueError, match="originals"):
        assign(torch.zeros(1, 3), torch.zeros(1, 4))


def test_a_copy_stays_with_its_original_whatever_the_others_are() -> None:
    """By the sum of squares alone the first guess would go to the second original, for the wild one fits that worse."""
    originals = torch.tensor([[0.0, 0.0], [0.1, 0.1]])
    guesses = torch.tensor([[0.0, 0.0], [-3.0, -3.0]])
    assert assign(originals, guesses).tolist() == [0, 1]
    assert cost_matrix(originals, guesses)[[0, 1], [1, 0]].sum() < cost_matrix(originals, guesses)[[0, 1], [0, 1]].sum()
