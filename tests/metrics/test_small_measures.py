"""Identification, label measures and bootstrap intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leakscope.metrics import chance, identified, interval, label_accuracy, label_correct


def test_blind_guesses_identify_at_the_chance_level() -> None:
    generator = torch.Generator().manual_seed(0)
    candidates = torch.rand(10, 8, generator=generator)
    truth = torch.randint(0, 10, (4000,), generator=generator)
    blind = candidates[torch.randint(0, 10, (4000,), generator=generator)] + 1e-3
    rate = identified(truth, blind, candidates).double().mean().item()
    assert rate == pytest.approx(chance(10), abs=4 * math.sqrt(0.09 / 4000))


def test_slight_noise_identifies_everybody() -> None:
    candidates = torch.rand(10, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    assert bool(identified(torch.arange(10), candidates + 0.01, candidates).all())


def test_ties_duplicates_and_non_finite_reconstructions() -> None:
    candidates = torch.tensor([[0.0], [1.0], [0.0]])
    index = torch.tensor([0, 0, 0, 0])
    guesses = torch.tensor([[0.5], [0.4], [float("nan")], [float("inf")]])
    assert identified(index, guesses, candidates).tolist() == [False, True, False, False]


def test_indices_out_of_range_are_refused() -> None:
    for place in (-1, 3):
        with pytest.raises(ValueError, match="original_index"):
            identified(torch.tensor([place]), torch.zeros(1, 1), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="same shape"):
        identified(torch.tensor([0]), torch.zeros(1, 2), torch.zeros(3, 1))
    with pytest.raises(ValueError, match="num_candidates"):
        chance(0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.lists(st.integers(0, 5), max_size=20))
def test_label_accuracy_is_the_multiset_overlap(true: list[int], guess: list[int]) -> None:
    left = list(guess)
    hits = 0
    for label in true:
        if label in left:
            left.remove(label)
            hits += 1
    measured = label_accuracy(torch.tensor(true), torch.tensor(guess, dtype=torch.long))
    assert measured == pytest.approx(hits / len(true))


def test_label_accuracy_is_not_fooled_by_the_complement() -> None:
    assert label_accuracy(torch.tensor([0, 1]), torch.tensor([2, 3])) == 0
    assert label_correct(torch.tensor([0, 1]), torch.tensor([1, 0])).tolist() == [False, False]
    with pytest.raises(ValueError, match="one guess"):
        label_correct(torch.tensor([0, 1]), torch.tensor([0]))


def test_interval_covers_the_mean_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        low, high = interval(random.normal(5, 2, 60), seed=trial, resamples=300)
        covered += low <= 5 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_interval_agrees_with_the_normal_interval() -> None:
    values = np.random.default_rng(1).normal(0, 1, 400)
    low, high = interval(values)
    half = 1.96 * values.std(ddof=1) / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.02)


def test_interval_corner_cases() -> None:
    assert interval([3.0, float("nan")]) == (3.0, 3.0)
    assert all(math.isnan(edge) for edge in interval([]))
    assert interval(torch.full((5,), 2.0), statistic="median") == (2.0, 2.0)
    assert interval([1.0, math.inf, math.inf])[1] == math.inf
    assert interval(range(9), seed=4) == interval(range(9), seed=4)
    with pytest.raises(ValueError, match="statistic"):
        interval([1.0, 2.0], statistic="mode")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="level"):
        interval([1.0, 2.0], level=95)
