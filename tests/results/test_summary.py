"""Every measure with its interval and its baseline, against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from leakscope.metrics import interval
from leakscope.results import MeasureSummary, Row, judge, summarise

SGD, AVG, NOISE = "FedSGD()", "FedAvg(epochs=2)", "GradientNoise(sigma=0.1)"
WHY = "no weights file"
NAMES = ["mse", "rmse", "rmse_maxnorm", "psnr", "ssim", "lpips", "label_accuracy", "identification"]


def attempt(
    key: str,
    examples: list[dict[str, Any]],
    *,
    attack: str = "A()",
    control: str | None = None,
    status: str = "done",
    seed: int = 0,
    protocol: str = SGD,
    defense: str = "none",
    reasons: dict[str, str] | None = None,
) -> Row:
    job = {
        **{"protocol": protocol, "defense": defense, "control": control, "attack": attack},
        **{"attack_name": attack.lower(), "seed": seed, "batch": 0, "indices": [e["index"] for e in examples]},
    }
    result = {"examples": examples, "reasons": reasons or {}, "flags": []} if status == "done" else None
    return Row.read(key, int(key, 36), status, job, result)  # type: ignore[arg-type]


def numbers(index: int, psnr: float | None, **others: Any) -> dict[str, Any]:
    return {"index": index, "psnr": psnr, **others}


def measures(rows: list[Row], place: int = 0, policy: dict[str, Any] | None = None) -> dict[str, MeasureSummary]:
    return {m.name: m for m in summarise(rows, judge(rows, policy))[place].measures}


def test_the_strongest_attempt_gives_all_the_numbers_and_its_own_control_the_baseline() -> None:
    rows = [
        attempt("0", [numbers(0, 12, mse=0.06, ssim=0.9), numbers(1, 18, mse=0.02, ssim=0.4)]),
        # Stronger on example 0 by PSNR, though its SSIM is worse: the whole row counts, not the best of each.
        attempt("1", [numbers(0, 14, mse=0.04, ssim=0.2), numbers(1, 10, mse=0.1, ssim=0.8)], attack="B()"),
        attempt("2", [numbers(0, 7, mse=0.2, ssim=0.1), numbers(1, 8, mse=0.16, ssim=0.2)], control="noise"),
        attempt("3", [numbers(0, 7, mse=0.2, ssim=0.1), numbers(1, 6, mse=0.24, ssim=0.0)], control="noise", seed=1),
        attempt(
            "4", [numbers(0, 5, mse=0.3, ssim=0.3), numbers(1, 5, mse=0.3, ssim=0.3)], control="noise", attack="B()"
        ),
    ]
    found = measures(rows)
    assert list(found) == NAMES
    # Example 0 by B, example 1 by A; the controls of A are averaged over its two seeds.
    psnr, mse, ssim = found["psnr"], found["mse"], found["ssim"]
    assert (psnr.mean, psnr.baseline) == (16.0, 6.0)  # (14 + 18) / 2, (5 + (8 + 6) / 2) / 2
    assert mse.mean == pytest.approx(0.03)  # (0.04 + 0.02) / 2
    assert mse.baseline == pytest.approx(0.25)  # (0.3 + 0.2) / 2
    assert ssim.mean == pytest.approx(0.3)  # (0.2 + 0.4) / 2
    assert ssim.baseline == pytest.approx(0.2)  # (0.3 + 0.1) / 2
    # The mean of two resampled values is one of them in half of the cases, so the interval spans both.
    assert (psnr.interval, psnr.baseline_interval) == ((14.0, 18.0), (5.0, 7.0))
    assert (mse.interval, ssim.interval) == ((0.02, 0.04), (0.2, 0.4))
    assert (psnr.count, psnr.baseline_count, psnr.reason, psnr.baseline_reason) == (2, 2, None, None)
    verdict = judge(rows).settings[0]
    assert (psnr.mean, psnr.interval, psnr.baseline) == (
        verdict.mean_psnr,
        verdict.interval,
        verdict.baseline_psnr,
    )


def test_yes_and_no_become_shares() -> None:
    hits = [True, True, True, False]
    rows = [
        attempt("0", [numbers(i, 10, identified=hit, label_correct=hit or None) for i, hit in enumerate(hits)]),
        attempt("1", [numbers(i, 5, identified=i == 0, label_correct=False) for i in range(4)], control="noise"),
        attempt("2", [numbers(i, 5, identified=False, label_correct=True) for i in range(4)], control="noise", seed=1),
    ]
    found = measures(rows)
    identification, labels = found["identification"], found["label_accuracy"]
    assert (identification.mean, identification.count) == (0.75, 4)
    assert identification.interval == interval([1.0, 1.0, 1.0, 0.0])
    assert identification.baseline == 0.125  # one of four by one of two seeds
    assert identification.baseline_interval == interval([0.5, 0.0, 0.0, 0.0])
    assert (labels.mean, labels.count, labels.baseline) == (1.0, 3, 0.5)
    assert labels.reason == "the attack guesses no labels"


def test_what_was_not_measured_is_left_out_and_explained() -> None:
    blank = {"lpips": None, "ssim": None}
    rows = [
        attempt("0", [numbers(0, 10, lpips=None, ssim=0.5)], reasons={"lpips": WHY}),
        attempt("1", [numbers(1, 10, **blank)], reasons={"lpips": WHY, "ssim": "too small"}),
        attempt("2", [numbers(i, 5, **blank) for i in range(2)], control="noise", reasons={"lpips": WHY}),
    ]
    found = measures(rows)
    lpips, ssim = found["lpips"], found["ssim"]
    assert math.isnan(lpips.mean)
    assert all(map(math.isnan, (*lpips.interval, lpips.baseline, *lpips.baseline_interval)))
    assert (lpips.count, lpips.reason, lpips.baseline_reason) == (0, WHY, WHY)
    assert (ssim.mean, ssim.interval, ssim.count, ssim.reason) == (0.5, (0.5, 0.5), 1, "too small")
    assert ssim.baseline_reason == "not measured, and the job does not say why"


def test_without_its_own_control_the_lowest_of_the_others_counts() -> None:
    rows = [
        attempt("0", [numbers(0, 12, mse=0.05)]),
        attempt("1", [], control="noise", status="failed"),
        attempt("2", [numbers(0, 6, mse=0.3)], control="noise", attack="B()"),
        attempt("3", [numbers(0, 8, mse=0.2)], control="noise", attack="B()", seed=1),
        attempt("4", [numbers(0, 5, mse=0.1)], control="noise", attack="C()"),
        attempt("5", [numbers(0, 11, mse=0.01)], control="noise", protocol=AVG),
    ]
    found = measures(rows)
    assert found["psnr"].baseline == 5.0  # C; not the other protocol's
    assert found["mse"].baseline == 0.25  # B over its seeds: of an error the highest


def test_no_control_at_all() -> None:
    psnr = measures([attempt("0", [numbers(0, 12)])])["psnr"]
    assert (psnr.mean, psnr.baseline_count, psnr.baseline_reason) == (12.0, 0, "no control was measured")
    assert math.isnan(psnr.baseline)


def test_settings_are_apart_and_share_the_controls_of_their_protocol() -> None:
    rows = [
        attempt("0", [numbers(0, 30)]),
        attempt("1", [numbers(0, 9)], defense=NOISE),
        attempt("2", [], protocol=AVG, status="refused"),
        attempt("3", [numbers(0, 6)], control="noise"),
    ]
    assert [(s.protocol, s.defense) for s in summarise(rows)] == [(SGD, "none"), (SGD, NOISE), (AVG, "none")]
    assert [measures(rows, n)["psnr"].mean for n in (0, 1)] == [30.0, 9.0]
    assert [measures(rows, n)["psnr"].baseline for n in (0, 1)] == [6.0, 6.0]
    assert {(m.count, m.reason) for m in measures(rows, 2).values()} == {(0, "no attack gave a result")}
    assert summarise([]) == []


def test_the_policy_decides_which_attempt_is_strongest() -> None:
    rows = [
        attempt("0", [numbers(0, 26, ssim=0.1)]),  # painted by a prior: its control is as good
        attempt("1", [numbers(0, 22, ssim=0.7)], attack="B()"),
        attempt("2", [numbers(0, 25)], control="noise"),
        attempt("3", [numbers(0, 8)], control="noise", attack="B()"),
    ]
    assert (measures(rows)["psnr"].mean, measures(rows)["ssim"].mean) == (22.0, 0.7)
    assert measures(rows, policy={"max_psnr": 40.0})["psnr"].mean == 26.0


def test_what_is_better_for_the_adversary() -> None:
    lower = {m.name for m in measures([attempt("0", [numbers(0, 1)])]).values() if m.measure.better == "lower"}
    assert lower == {"mse", "rmse", "rmse_maxnorm", "lpips"}


def test_targets_of_regression_take_the_place_of_labels() -> None:
    rows = [
        attempt("0", [numbers(0, 12, target_error=0.5, label=[1.0]), numbers(1, 14, target_error=None, label=[2.0])]),
        attempt("1", [numbers(i, 5, target_error=2.0 + i) for i in range(2)], control="noise"),
        attempt("2", [numbers(i, 5, target_error=4.0) for i in range(2)], control="noise", seed=1),
    ]
    found = measures(rows)
    assert list(found) == ["target_error" if name == "label_accuracy" else name for name in NAMES]
    errors = found["target_error"]
    assert (errors.measure.better, errors.measure.key) == ("lower", "target_error")
    assert (errors.mean, errors.count, errors.reason) == (0.5, 1, "the attack guesses no labels")
    assert (errors.baseline, errors.baseline_count) == (3.25, 2)  # ((2 + 4) / 2 + (3 + 4) / 2) / 2
