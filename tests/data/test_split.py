"""How examples are divided among clients: nobody left out, nobody twice, and the shares that were asked for."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leakscope.contracts.inputs import ValueRange
from leakscope.data import Examples, split_by_group, split_dirichlet, split_iid


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def examples(group: list[int] | None) -> Examples:
    count = 6 if group is None else len(group)
    found = None if group is None else torch.tensor(group)
    return Examples(torch.zeros(count, 2), torch.zeros(count).long(), 1, ValueRange(), "demo", group=found)


def check_partition(parts: list[Tensor], count: int) -> None:
    assert all(rows.dtype == torch.int64 and rows.dim() == 1 and len(rows) >= 1 for rows in parts)
    assert all(bool((rows.diff() > 0).all()) for rows in parts)
    assert sorted(torch.cat(parts).tolist()) == list(range(count))


def test_groups_in_ascending_order_with_their_first_examples() -> None:
    data = examples([9, 4, 9, -1, 4, 9])
    assert [rows.tolist() for rows in split_by_group(data)] == [[3], [1, 4], [0, 2, 5]]
    assert [rows.tolist() for rows in split_by_group(data, limit=2)] == [[3], [1, 4], [0, 2]]
    assert [rows.tolist() for rows in split_by_group(data, limit=1)] == [[3], [1], [0]]
    assert all(rows.dtype == torch.int64 for rows in split_by_group(data))


def test_groups_of_bytes_are_groups_too() -> None:
    data = dataclasses.replace(examples([1, 0, 1]), group=torch.tensor([1, 0, 1], dtype=torch.uint8))
    assert [rows.tolist() for rows in split_by_group(data)] == [[1], [0, 2]]


def test_groups_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"to whom each example belongs(.|\n)*limit: expected .* got 0"):
        split_by_group(examples(None), limit=0)


@given(count=st.integers(1, 60), clients=st.integers(1, 60), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_iid_parts_are_a_partition_of_equal_sizes(count: int, clients: int, seed: int) -> None:
    clients = min(clients, count)
    parts = split_iid(count, clients, seeded(seed))
    check_partition(parts, count)
    assert len(parts) == clients
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    clients=st.integers(1, 20),
    alpha=st.sampled_from([1e-3, 0.1, 1.0, 10.0, 1e9]),
    seed=st.integers(0, 9),
)
@settings(max_examples=100, deadline=None)
def test_dirichlet_parts_are_a_partition_without_an_empty_client(
    labels: list[int], clients: int, alpha: float, seed: int
) -> None:
    clients = min(clients, len(labels))
    parts = split_dirichlet(torch.tensor(labels), clients, alpha, seeded(seed))
    assert len(parts) == clients
    check_partition(parts, len(labels))


@given(clients=st.integers(1, 8), seed=st.integers(0, 9))
@settings(max_examples=30, deadline=None)
def test_large_alpha_gives_everybody_an_equal_share_of_each_class(clients: int, seed: int) -> None:
    labels = torch.arange(5).repeat_interleave(40)
    counts = shares(split_dirichlet(labels, clients, 1e9, seeded(seed)), labels)
    assert bool(((counts - 40 / clients).abs() <= 1).all())


def shares(parts: list[Tensor], labels: Tensor) -> Tensor:
    return torch.stack([torch.bincount(labels[rows], minlength=int(labels.max()) + 1) for rows in parts]).double()


def test_skew_falls_as_alpha_grows_and_follows_the_law() -> None:
    """A share of Dirichlet(alpha) over C clients has variance (C - 1) / (C^2 (C alpha + 1))."""
    clients, each = 5, 200
    labels = torch.arange(300).repeat_interleave(each)
    for alpha in (0.1, 1.0, 10.0):
        found = shares(split_dirichlet(labels, clients, alpha, seeded()), labels) / each
        variance = float(found.var(unbiased=False))
        assert variance == pytest.approx((clients - 1) / (clients**2 * (clients * alpha + 1)), rel=0.15)
    one_owner = shares(split_dirichlet(labels, clients, 1e-4, seeded()), labels).max(0).values / each
    assert float((one_owner > 0.999).double().mean()) > 0.95


def test_classes_of_one_example_are_spread_over_the_clients() -> None:
    parts = split_dirichlet(torch.arange(100), 10, 1e9, seeded())
    assert max(map(len, parts)) <= 25


def test_the_generator_decides_alone() -> None:
    labels = torch.arange(60) % 4
    before = torch.random.get_rng_state()
    for split in (lambda g: split_dirichlet(labels, 5, 0.5, g), lambda g: split_iid(60, 5, g)):
        a, b, c = ([rows.tolist() for rows in split(seeded(s))] for s in (1, 1, 2))
        assert a == b
        assert a != c
    assert torch.equal(before, torch.random.get_rng_state())


def test_what_cannot_be_split_is_told_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"labels: expected class numbers(.|\n)*alpha: .* got -1(.|\n)*clients: .* got 0"
    ):
        split_dirichlet(torch.rand(3), 0, -1, seeded())
    with pytest.raises(ValueError, match="clients: expected at most 2, one example each, got 3"):
        split_dirichlet(torch.zeros(2).long(), 3, 1.0, seeded())
    for alpha in (0.0, float("inf"), float("nan"), True):
        with pytest.raises(ValueError, match="alpha: expected a positive number"):
            split_dirichlet(torch.zeros(2).long(), 1, alpha, seeded())
    with pytest.raises(ValueError, match=r"count: expected .* got 0(.|\n)*clients: expected .* got True"):
        split_iid(0, True, seeded())
    with pytest.raises(ValueError, match="clients: expected at most 4"):
        split_iid(4, 5, seeded())
