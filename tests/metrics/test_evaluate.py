"""The whole comparison: matching, rows as the store wants them, and reasons instead of silence."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from leakscope.metrics import Lpips, evaluate, load_lpips
from leakscope.metrics.perceptual import FILE_NAME

DISTANCES = ("mse", "rmse", "rmse_maxnorm", "psnr", "ssim", "lpips")
NAN, INF = float("nan"), float("inf")


def pictures(count: int, shape: tuple[int, ...] = (3, 8, 8), seed: int = 0) -> torch.Tensor:
    return torch.rand(count, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 12, 9), (2, 30), (7,)])
def test_a_shuffled_batch_is_put_in_order_with_its_labels(shape: tuple[int, ...]) -> None:
    x, labels = pictures(3, shape), torch.tensor([4, 5, 6])
    cycle = [1, 2, 0]
    result = evaluate(x, labels, x[cycle] * 0.99, labels[cycle])
    assert result.order.tolist() == [2, 0, 1]
    assert torch.allclose(result.matched, x, atol=0.02)
    for row, label in zip(result.rows, (4, 5, 6), strict=True):
        assert set(row) == {*DISTANCES, "identified", "label", "label_guess", "label_correct"}
        assert (row["label"], row["label_guess"], row["label_correct"]) == (label, label, True)
        assert row["identified"] is True
        assert row["psnr"] == pytest.approx(10 * math.log10(1 / row["mse"]))
    assert ("ssim" in result.reasons) == (len(shape) == 1)
    assert "lpips" in result.reasons
    json.dumps(result.rows)


def test_equal_pictures_have_a_finite_psnr() -> None:
    x = pictures(2)
    assert [row["psnr"] for row in evaluate(x, torch.zeros(2), x, None).rows] == [200.0, 200.0]


def test_values_outside_the_box_are_clamped_before_comparison() -> None:
    x = torch.stack([torch.zeros(1, 4, 4), torch.ones(1, 4, 4)])
    result = evaluate(x, torch.tensor([0, 1]), x * 11 - 5, None)
    assert [row["mse"] for row in result.rows] == [0.0, 0.0]
    assert float(result.matched.min()) >= 0
    assert float(result.matched.max()) <= 1


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_diverged_reconstruction_is_never_good(bad: float) -> None:
    x = torch.stack([torch.ones(1, 4, 4), torch.zeros(1, 4, 4)])
    guesses = torch.stack([torch.full((1, 4, 4), 0.1), torch.ones(1, 4, 4)])
    guesses[1, 0, 0, 0] = bad
    result = evaluate(x, torch.tensor([1, 0]), guesses, torch.tensor([0, 1]))
    assert result.order.tolist() == [1, 0]
    assert all(math.isnan(result.rows[0][name]) for name in DISTANCES)
    assert result.rows[0]["identified"] is False
    assert result.rows[1]["psnr"] == pytest.approx(20, abs=1e-4)
    assert "non-finite reconstruction (1 of 2)" in result.reasons["psnr"]


def test_fewer_reconstructions_than_originals_leave_gaps_that_say_why() -> None:
    x = pictures(3)
    result = evaluate(x, torch.tensor([0, 1, 2]), x[2:], torch.tensor([2]))
    assert result.order.tolist() == [-1, -1, 0]
    assert [math.isnan(row["mse"]) for row in result.rows] == [True, True, False]
    assert [row["label_guess"] for row in result.rows] == [None, None, 2]
    assert [row["label_correct"] for row in result.rows] == [None, None, True]
    assert result.reasons["mse"] == "nothing reconstructed (2 of 3)"
    nothing = evaluate(x, torch.tensor([0, 1, 2]), x[:0], torch.zeros(0))
    assert all(math.isnan(row["ssim"]) and row["identified"] is False for row in nothing.rows)


def test_identification_needs_somebody_else() -> None:
    x = pictures(1)
    alone = evaluate(x, torch.tensor([0]), x, None)
    assert alone.rows[0]["identified"] is None
    assert "no other candidates" in alone.reasons["identified"]
    pool = torch.cat([x, pictures(5, seed=1)])  # the original itself in the pool is no rival
    assert evaluate(x, torch.tensor([0]), x, None, pool).rows[0]["identified"] is True
    assert evaluate(x, torch.tensor([0]), pool[3:4], None, pool).rows[0]["identified"] is False


def test_a_constant_grey_guess_identifies_nobody_reliably() -> None:
    x, pool = pictures(4), pictures(40, seed=1)
    rows = evaluate(x, torch.zeros(4), torch.full_like(x, 0.5), None, pool).rows
    assert sum(row["identified"] for row in rows) <= 1


def test_lpips_is_measured_with_weights(real_data: Path) -> None:
    if not (real_data / FILE_NAME).is_file():
        pytest.skip(f"no {FILE_NAME} in the data folder")
    lpips = load_lpips(real_data / FILE_NAME)
    x = pictures(2, (1, 32, 32))
    result = evaluate(x, torch.zeros(2), x.flip(0) * 0.9, None, lpips=lpips)
    assert "lpips" not in result.reasons
    assert all(row["lpips"] > 0 for row in result.rows)


def test_lpips_says_what_is_too_small() -> None:
    x = pictures(1)
    assert "at least 32" in evaluate(x, torch.zeros(1), x, None, lpips=Lpips({})).reasons["lpips"]


def test_the_caller_keeps_its_tensors() -> None:
    x, guesses = pictures(2), pictures(2, seed=1) * 3 - 1
    before = x.clone(), guesses.clone()
    evaluate(x, torch.zeros(2), guesses, None)
    assert torch.equal(x, before[0])
    assert torch.equal(guesses, before[1])


def test_all_mistakes_are_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"shapes.*NaN.*3 labels.*1 guessed") as caught:
        evaluate(torch.full((2, 4), NAN), torch.zeros(3), torch.zeros(2, 5), torch.zeros(1))
    assert str(caught.value).startswith("cannot evaluate")
