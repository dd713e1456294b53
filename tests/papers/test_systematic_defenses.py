"""Tables 4, 5, 7 and 8 of the systematic evaluation: every published cell as data, and that the smallest scale runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from leakscope.defenses import GradientClipping, GradientDropout, GradientNoise, GradientPruning
from leakscope.papers import reproduce
from leakscope.papers.systematic import batches
from leakscope.papers.systematic.batches import COURSES, SCALES, protection, published

pytestmark = pytest.mark.slow


def _number(table: int, column: str, **place: str) -> float:
    [cell] = [row for row in published(table) if all(row[name] == value for name, value in place.items())]
    return float(cell[column])


def test_published_numbers_are_those_of_the_paper() -> None:
    assert [len(published(table)) for table in (4, 5, 7, 8)] == [180, 45, 90, 90]
    last = {"batch": "4", "defence": "prune_0.99"}
    rmse = [_number(4, "mean", attack=name, **last) for name in ("Ours", "GradientInversion", "Robbing The Fed")]
    assert rmse == [0.27, 0.28, 0.42]
    losses = [
        _number(5, "final_training_loss", batch="4", defence=name) for name in ("noise_0.1", "prune_0.99", "clip_4")
    ]
    assert losses == [1.764, 0.935, 0.353]
    assert _number(7, "mean", batch="2", defence="none", measure="psnr") == 23.69
    assert _number(8, "mean", batch="2", defence="none", measure="psnr") == 22.51


def test_every_cell_names_a_defence_with_its_strength() -> None:
    names = {row["defence"] for table in (4, 5, 7, 8) for row in published(table)}
    made = {name: protection(name) for name in names}
    assert made["noise_0.05"] == (GradientNoise(sigma=0.05), None)
    assert made["prune_0.99"] == (GradientPruning(fraction=0.99), None)
    assert made["clip_8"] == (GradientClipping(norm=8.0), None)
    assert made["drop_0.9"] == (GradientDropout(probability=0.9), None)
    assert made["local_5"] == (None, 5)
    assert made["none"] == (None, None)


def test_the_paper_scale_has_at_least_fifty_images() -> None:
    assert all(batch * count >= 50 for batch, count in SCALES["paper"].defended.items())
    assert COURSES["paper"].width == 64


def test_what_a_defence_costs_is_measured_at_the_smallest_scale(
    real_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    monkeypatch.setattr(batches, "_SMOKE", ("clip_4", "noise_0.1"))
    result = reproduce("systematic/table5", "smoke")
    assert [row.setting for row in result.rows] == ["B=2, clip_4", "B=2, noise_0.1"]
    assert [row.published for row in result.rows] == [
        _number(5, "final_training_loss", batch="2", defence=d) for d in ("clip_4", "noise_0.1")
    ]
    assert all(row.count == 2 for row in result.rows)


def test_the_attack_is_measured_at_the_smallest_scale(
    real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAKSCOPE_CACHE", str(tmp_path))
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    monkeypatch.setattr(batches, "_SMOKE", ("prune_0.9",))
    result = reproduce("systematic/table8", "smoke")
    by_measure = {row.measure: row for row in result.rows}
    assert set(by_measure) == {"PSNR (dB)", "RMSE over largest error", "RMSE"}
    assert by_measure["RMSE"].published is None
    assert by_measure["RMSE"].verdict == "measured"
    assert by_measure["RMSE over largest error"].published == 0.28
    assert all(row.count == 2 and row.measured is not None for row in result.rows)


def test_without_data_every_row_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(tmp_path))
    for number in (4, 5, 7, 8):
        with pytest.raises(ValueError, match="no row could be run"):
            reproduce(f"systematic/table{number}")
