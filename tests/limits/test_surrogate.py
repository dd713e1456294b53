"""Diagnostics of weight updates against closed forms, a full SVD, and a curve for which no point fits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from leakscope.limits import cosine_profile, drift_bound, leading_shares, parallel_beta
from leakscope.limits import surrogate as module

NAN = math.nan


def svd_shares(matrix: Tensor, directions: int) -> Tensor:
    """The definition itself: project on the leading right singular vectors."""
    rows = matrix.double()
    leading = torch.linalg.svd(rows, full_matrices=False).Vh[:directions]
    return (rows @ leading.T).norm(dim=1) / rows.norm(dim=1)


@pytest.mark.parametrize("shape", [(1, 7), (2, 9), (6, 40), (12, 5), (9, 3000)], ids=str)
@pytest.mark.parametrize("directions", [1, 2, 3, 20])
def test_shares_are_those_of_the_singular_value_decomposition(shape: tuple[int, int], directions: int) -> None:
    generator = torch.Generator().manual_seed(shape[0])
    # Falling lengths, as in training, and no two equal singular values.
    matrix = torch.randn(shape, generator=generator) * 0.8 ** torch.arange(shape[0])[:, None]
    found = leading_shares(matrix, directions)
    assert found.dtype == torch.float64
    assert found == pytest.approx(svd_shares(matrix, directions), abs=1e-10)
    assert bool(((found >= 0) & (found <= 1)).all())


def test_shares_do_not_depend_on_how_the_columns_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(5, 101, generator=torch.Generator().manual_seed(0))
    whole = leading_shares(matrix)
    monkeypatch.setattr(module, "_COLUMNS", 7)
    assert torch.allclose(leading_shares(matrix), whole, atol=1e-14)


def test_shares_of_special_matrices() -> None:
    plane = torch.randn(8, 2, generator=torch.Generator().manual_seed(0)) @ torch.randn(
        2, 50, generator=torch.Generator().manual_seed(1)
    )
    assert leading_shares(plane.double()).tolist() == pytest.approx([1.0] * 8, abs=1e-12)
    assert leading_shares(torch.zeros(3, 4)).tolist() == [1.0] * 3
    with_zero = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 1.0]])
    assert leading_shares(with_zero).tolist() == pytest.approx([1.0, 1.0, 1.0, 0.0])
    scaled = torch.randn(5, 30, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(leading_shares(scaled * 1e-18), leading_shares(scaled), atol=1e-6), "tiny gradients"


@pytest.mark.parametrize(
    ("matrix", "directions", "words"),
    [
        (torch.zeros(3), 2, r"\(steps, parameters\)"),
        (torch.zeros(0, 3), 2, "neither of them 0"),
        (torch.zeros(2, 3, dtype=torch.int64), 2, "floating point"),
        (torch.zeros(2, 3), 0, "directions: expected a whole number"),
        (torch.zeros(2, 3), True, "directions"),
        (torch.tensor([[NAN, 1.0]]), 2, "finite"),
        (torch.tensor([1.0]), 0, r"(?s)gradients.*directions"),
    ],
)
def test_bad_gradients_are_refused(matrix: Tensor, directions: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        leading_shares(matrix, directions)


def quadratic(h: tuple[float, float], start: Tensor, update: Tensor) -> Callable[[float], dict[str, Tensor]]:
    return lambda beta: {"w": torch.tensor(h, dtype=torch.float64) * (start - beta * update)}


def cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other / (one.norm() * other.norm()))


CURVATURES = st.floats(0.2, 4.0)
PLACES = st.floats(0.1, 3.0) | st.floats(-3.0, -0.1)


@settings(max_examples=150, deadline=None)
@given(h1=CURVATURES, gap=st.floats(0.2, 3.0), x=PLACES, y=PLACES, time=st.floats(0.1, 2.0), swap=st.booleans())
def test_gradient_flow_in_the_plane_has_an_exactly_parallel_point(
    h1: float, gap: float, x: float, y: float, time: float, swap: bool
) -> None:
    """E10: the closed form gives cosine 1, lies on the segment, and the profile finds it."""
    h = (h1 + gap, h1) if swap else (h1, h1 + gap)
    start = torch.tensor([x, y], dtype=torch.float64)
    end = start * torch.exp(-torch.tensor(h, dtype=torch.float64) * time)
    update = start - end
    beta = parallel_beta(h, start.tolist(), end.tolist())
    assert 0.5 < beta < 1
    gradient_at = quadratic(h, start, update)
    assert cosine(update, gradient_at(beta)["w"]) == pytest.approx(1, abs=1e-12)
    found = cosine_profile({"w": update}, gradient_at)
    assert found.best_beta == pytest.approx(beta, abs=module.BETA_TOLERANCE)
    assert found.best_cosine <= 1
    # Where the end is near the minimum the peak is narrow, and even 3e-5 of beta shows in the cosine.
    assert found.best_cosine == pytest.approx(1, abs=1e-4)
    assert found.best_cosine >= max(found.cosines)


def test_parallel_point_also_between_a_valley_and_a_ridge() -> None:
    h, start, time = (2.0, -0.5), (1.0, 0.3), 0.7
    end = tuple(w * math.exp(-c * time) for w, c in zip(start, h, strict=True))
    beta = parallel_beta(h, start, end)
    assert 0 < beta < 1
    update = torch.tensor(start, dtype=torch.float64) - torch.tensor(end, dtype=torch.float64)
    at = quadratic(h, torch.tensor(start, dtype=torch.float64), update)(beta)["w"]
    assert cosine(update, at) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("h", "start", "end", "words"),
    [
        ((1.0, 1.0), (1.0, 1.0), (0.5, 0.5), "different curvatures"),
        ((1.0, 2.0), (1.0, 1.0), (1.0, 0.5), "both directions"),
        ((1.0,), (1.0, NAN), (0.5, 0.5), r"(?s)curvatures.*start"),
    ],
)
def test_no_single_parallel_point_is_an_error(h: tuple, start: tuple, end: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        parallel_beta(h, start, end)


def helix(w: Tensor) -> Tensor:
    """The gradient of -(angle + height), whose flow winds around the axis at constant radius."""
    x, y, _ = w.tolist()
    r2 = x * x + y * y
    return -torch.tensor([-y / r2, x / r2, 1.0], dtype=torch.float64)


def test_on_a_helix_no_point_of_the_segment_fits() -> None:
    start = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    # The flow is (cos t, sin t, t): its velocity is minus the gradient at every place.
    for t in (0.0, 0.4, 2.0, 5.0):
        place = torch.tensor([math.cos(t), math.sin(t), t], dtype=torch.float64)
        velocity = torch.tensor([-math.sin(t), math.cos(t), 1.0], dtype=torch.float64)
        assert torch.allclose(velocity, -helix(place))
    update = start - torch.tensor([1.0, 0.0, 2 * math.pi], dtype=torch.float64)
    found = cosine_profile({"w": update}, lambda beta: {"w": helix(start - beta * update)})
    assert found.cosines == pytest.approx([1 / math.sqrt(2)] * 21, abs=1e-14)
    assert found.best_cosine == pytest.approx(1 / math.sqrt(2), abs=1e-14)


def rising(beta: float) -> dict[str, Tensor]:
    return {"w": torch.tensor([1.0, 1.0 - beta])}


def test_the_profile_speaks_of_the_right_ends() -> None:
    update = {"w": torch.tensor([1.0, 0.0])}
    up = cosine_profile(update, rising, points=5)
    assert up.betas == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert up.cosines[0] == pytest.approx(1 / math.sqrt(2))
    assert (up.best_beta, up.best_cosine) == (1.0, 1.0), "a maximum at the end is found exactly"
    down = cosine_profile(update, lambda beta: rising(1 - beta), points=5)
    assert (down.best_beta, down.best_cosine) == (0.0, 1.0)
    against = cosine_profile(update, lambda beta: {"w": -torch.ones(2)})
    assert against.best_cosine == pytest.approx(-1 / math.sqrt(2))


def test_lengths_do_not_matter_and_several_tensors_are_one_vector() -> None:
    def parts(beta: float) -> dict[str, Tensor]:
        return {"a": torch.full((2, 2), 1e-20), "b": torch.tensor([1e-20 * beta])}

    found = cosine_profile({"a": torch.full((2, 2), 1e15), "b": torch.tensor([5e14])}, parts)
    assert found.best_beta == pytest.approx(0.5, abs=1e-3)
    assert found.best_cosine == pytest.approx(1, abs=1e-6)
    assert found.cosines[0] == pytest.approx(4 / math.sqrt(4 * 4.25))


def test_vanishing_gradients_have_no_cosine() -> None:
    update = {"w": torch.tensor([1.0, 0.0])}
    some = cosine_profile(update, lambda beta: {"w": torch.tensor([1.0, 0.0]) * (beta > 0.5)}, points=5)
    assert [math.isnan(value) for value in some.cosines] == [True, True, True, False, False]
    assert some.best_cosine == 1
    none = cosine_profile(update, lambda beta: {"w": torch.zeros(2)})
    assert math.isnan(none.best_cosine)
    assert math.isnan(none.best_beta)


def test_bad_profiles_are_refused() -> None:
    update = {"w": torch.tensor([1.0, 0.0])}
    with pytest.raises(ValueError, match="points"):
        cosine_profile(update, rising, points=1)
    for bad in (torch.zeros(2), torch.tensor([NAN, 0.0])):
        with pytest.raises(ValueError, match="expected a direction"):
            cosine_profile({"w": bad}, rising)
    for other in ({"v": torch.ones(2)}, {"w": torch.ones(3)}, {"w": torch.ones(2), "b": torch.ones(1)}):
        with pytest.raises(ValueError, match="names and shapes"):
            cosine_profile(update, lambda beta, other=other: other)  # type: ignore[misc]


BOUND = {
    **{"gradient_norm": 2.0, "lipschitz": 1.5, "smoothness": 3.0, "learning_rate": 0.1},
    **{"steps": 20, "loss_before": 2.5, "loss_after": 1.0},
}


def test_bound_is_the_printed_formula() -> None:
    squared = 2.0**2 * 0.1 / (1 - 0.1 * 3.0 / 2)
    assert drift_bound(**BOUND) == pytest.approx((2.0 + math.sqrt(20 * squared * 1.5**2 / 1.5)) ** 2)
    # A squared gradient: gradients twice as long, with time and weights scaled to match, make it four times as large.
    scaled = {**BOUND, "gradient_norm": 4.0, "lipschitz": 3.0, "smoothness": 6.0, "learning_rate": 0.05}
    assert drift_bound(**{**scaled, "loss_before": 5.0, "loss_after": 2.0}) == pytest.approx(4 * drift_bound(**BOUND))


def test_bound_grows_with_steps_and_as_the_loss_falls_less() -> None:
    assert drift_bound(**{**BOUND, "steps": 40}) > drift_bound(**BOUND)
    assert drift_bound(**{**BOUND, "loss_after": 2.0}) > drift_bound(**BOUND)
    assert drift_bound(**{**BOUND, "loss_after": 2.5}) == math.inf
    assert drift_bound(**{**BOUND, "loss_after": 3.0}) == math.inf
    assert drift_bound(**{**BOUND, "learning_rate": 2 / 3}) == math.inf
    assert drift_bound(**{**BOUND, "gradient_norm": 0.0}) == 0


def test_bad_constants_are_all_told() -> None:
    bad = {"gradient_norm": -1.0, "lipschitz": NAN, "smoothness": math.inf, "learning_rate": 0.0}
    with pytest.raises(ValueError, match=r"(?s)gradient_norm.*lipschitz.*smoothness.*learning_rate.*steps.*loss_after"):
        drift_bound(**bad, steps=0, loss_before=1.0, loss_after=NAN)
