"""The published orders against the formulas of the table, written out once more."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leakscope.limits import Order, order_bounds

NAMES = ["none", "local aggregation", "noise", "clipping", "DP-SGD", "dropout", "pruning"]


def rows(**facts: float) -> dict[str, Order]:
    found = order_bounds(batch=3, features=50, width=200, **facts)  # type: ignore[arg-type]
    assert [row.defense for row in found] == NAMES
    return {row.defense: row for row in found}


def test_every_row_has_its_formula() -> None:
    found = rows(sigma=0.2, noise=0.5, clip=2.0, gradient_norm=5.0, dropout=0.75, pruned=0.36)
    values = {name: (row.upper, row.lower) for name, row in found.items()}
    assert values["none"] == values["local aggregation"] == pytest.approx((1.5, 0.1))
    assert values["noise"] == pytest.approx((3.5 * 0.5, 0.1))
    assert values["clipping"] == pytest.approx((1.5, 0.2 * 2.5 * 0.5))
    assert values["DP-SGD"] == pytest.approx(((3 + 0.5 * 2.5) * 0.5, 0.2 * 2.5 * 0.5))
    assert values["dropout"] == pytest.approx((3.0, 0.2))
    assert values["pruning"][0] is None
    assert values["pruning"][1] == pytest.approx(0.1 / 0.8)
    assert found["pruning"].upper_formula is None
    assert all(row.lower_formula for row in found.values())


def test_what_is_not_given_is_not_guessed() -> None:
    found = rows()
    assert [name for name, row in found.items() if row.upper is not None] == ["none", "local aggregation", "clipping"]
    assert all(row.lower is None for row in found.values())
    assert rows(noise=0.1)["noise"].upper == pytest.approx(1.55)
    assert rows(noise=0.1, clip=1.0)["DP-SGD"].upper is None, "without the norm there is no factor"
    assert rows(sigma=0.1, clip=1.0)["clipping"].lower is None


def test_a_gradient_within_the_bound_is_not_clipped() -> None:
    found = rows(sigma=0.2, noise=0.5, clip=2.0, gradient_norm=1.0)
    assert found["clipping"].lower == found["none"].lower
    assert found["DP-SGD"].upper == found["noise"].upper


@given(
    sigma=st.floats(0.01, 1),
    noise=st.floats(0, 2),
    norm=st.floats(0.1, 50),
    p=st.floats(0, 0.95),
    hat=st.floats(0, 0.95),
)
def test_no_defence_lowers_an_order(sigma: float, noise: float, norm: float, p: float, hat: float) -> None:
    found = rows(sigma=sigma, noise=noise, clip=2.0, gradient_norm=norm, dropout=p, pruned=hat)
    plain = found["none"]
    assert plain.upper is not None
    assert plain.lower is not None
    for row in found.values():
        assert row.lower is not None
        assert row.lower >= plain.lower * (1 - 1e-12)
        assert row.upper is None or row.upper >= plain.upper * (1 - 1e-12)


def test_wrong_arguments_are_told_all_at_once() -> None:
    with pytest.raises(ValueError, match="order_bounds:") as caught:
        order_bounds(
            batch=0,
            features=True,
            width=-1,
            sigma=-1.0,
            noise=math.nan,
            clip=0.0,
            gradient_norm=math.inf,
            dropout=1.0,
            pruned=1.5,
        )
    for word in ("batch", "features", "width", "sigma", "noise", "clip", "gradient_norm", "dropout", "pruned"):
        assert f"{word}:" in str(caught.value)
