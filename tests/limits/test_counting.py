"""The three propositions against hand-made numbers and against the counts they come from."""

from __future__ import annotations

import math

import pytest

from leakscope.limits import features_bound, filters, hidden_units, hidden_units_bound, single_example


@pytest.mark.parametrize("batch, bound", [(1, 0.99), (2, 1.992), (4, 4.002), (8, 8.045), (16, 16.226)])
def test_hidden_units_bound_has_the_known_values(batch: int, bound: float) -> None:
    assert round(hidden_units_bound(batch, 1024, 10), 3) == bound


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16])
def test_the_bound_is_where_the_counts_meet(batch: int) -> None:
    needed = math.ceil(hidden_units_bound(batch, 1024, 10))
    enough = hidden_units(batch, 1024, 10, needed)
    assert enough.met
    assert enough.equations >= enough.unknowns
    if needed > 1:
        fewer = hidden_units(batch, 1024, 10, needed - 1)
        assert not fewer.met
        assert fewer.equations < fewer.unknowns


def test_exact_bound_and_rule_of_thumb_are_reported_apart() -> None:
    four = hidden_units(4, 1024, 10, 4)
    assert (four.needed, four.rule, four.met, four.met_by_rule) == (5, 4, False, True)
    assert "4.002" in four.statement


def test_a_batch_beyond_the_validity_is_never_met() -> None:
    for hidden in (1, 10, 1000):
        found = hidden_units(batch=7, features=4, classes=2, hidden=hidden)
        assert found.bound == math.inf
        assert found.needed is None
        assert not found.met
        assert "No number" in found.statement


def test_single_example_needs_one_example_and_a_bias() -> None:
    assert single_example(1, 1).met
    assert not single_example(1, 5, bias=False).met
    assert not single_example(2, 5).met


@pytest.mark.parametrize("batch, needed", [(1, 12), (4, 48)])
def test_filters_of_the_published_example(batch: int, needed: int) -> None:
    settings = {"side": 32, "kernel": 5, "padding": 2, "stride": 2, "channels": 3, "classes": 100}
    enough = filters(batch=batch, filters=needed, **settings)
    assert (enough.output_side, enough.needed, enough.met) == (16, needed, True)
    assert not filters(batch=batch, filters=needed - 1, **settings).met


def test_filters_side_condition_fails_from_as_many_examples_as_classes() -> None:
    found = filters(batch=10, side=8, kernel=5, padding=2, stride=2, channels=1, classes=10, filters=1000)
    assert features_bound(10, 10) == math.inf
    assert found.filters >= found.bound
    assert not found.side_met
    assert not found.met


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_numbers_that_are_not_counts_are_refused(bad: object) -> None:
    with pytest.raises(ValueError, match="batch: expected an integer"):
        hidden_units_bound(bad, 4, 2)  # type: ignore[arg-type]
