"""Visiting orders: each that an adversary can tell from the others once, and none twice."""

from __future__ import annotations

import itertools

import pytest
import torch

from leakscope.matching.orders import all_orders, candidate_orders, draw_orders, least_orders, same_order

CASES = [
    ([0, 1], 1, 2),
    ([0, 0], 1, 3),
    ([0, 1, 2], 2, 2),
    ([0, 0, 1], 2, 2),
    ([0, 0, 0, 0], 2, 2),
    ([0, 0, 1, 1], 2, 2),
    ([2, 0, 2, 1], 3, 2),
    ([0, 1, 2, 3], 4, 3),
]


def every(examples: int, batch_size: int, epochs: int) -> list[tuple[tuple[int, ...], ...]]:
    """All orders, examples told apart: the slow way."""
    one = {
        tuple(tuple(sorted(rows[i : i + batch_size])) for i in range(0, examples, batch_size))
        for rows in itertools.permutations(range(examples))
    }
    return [tuple(itertools.chain(*parts)) for parts in itertools.product(sorted(one), repeat=epochs)]


def orbits(labels: list[int], batch_size: int, epochs: int) -> int:
    """How many are left when examples of equal labels exchange their names."""
    exchanges = [
        names
        for names in itertools.permutations(range(len(labels)))
        if all(labels[row] == labels[name] for row, name in enumerate(names))
    ]
    return len(
        {
            min(tuple(tuple(sorted(names[row] for row in batch)) for batch in order) for names in exchanges)
            for order in every(len(labels), batch_size, epochs)
        }
    )


@pytest.mark.parametrize(("labels", "batch_size", "epochs"), CASES)
def test_each_order_once_and_none_twice(labels: list[int], batch_size: int, epochs: int) -> None:
    found = list(all_orders(labels, batch_size, epochs))
    assert len(found) == len(set(found)) == orbits(labels, batch_size, epochs)
    assert set(found) == {same_order(order, labels) for order in every(len(labels), batch_size, epochs)}
    least = least_orders(labels, batch_size, epochs)
    assert least == len(found) if batch_size == 1 or len(set(labels)) == len(labels) else least <= len(found)


def test_many_are_drawn_and_the_unshuffled_one_is_among_them() -> None:
    labels = [0, 1, 2, 0]
    found, complete = candidate_orders(labels, 1, 3, 8, torch.Generator().manual_seed(0))
    again, _ = candidate_orders(labels, 1, 3, 8, torch.Generator().manual_seed(0))
    assert not complete
    assert found == again
    assert len(set(found)) == 8
    assert found[0] == ((0,), (1,), (2,), (3,)) * 3
    assert all(same_order(order, labels) == order for order in found)
    assert least_orders(labels, 1, 3) == 24**3 // 2


def test_counting_takes_no_enumeration_and_drawing_ends_where_there_are_few() -> None:
    assert least_orders(range(50), 10, 20) > 10**100
    found, complete = candidate_orders([0] * 50, 10, 1, 8, torch.Generator().manual_seed(0))
    assert (len(found), complete) == (1, True)
    assert len(draw_orders([0, 1], 1, 1, 8, torch.Generator().manual_seed(0))) == 2
