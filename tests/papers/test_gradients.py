"""The tables of "What Can We Learn from Gradients?": published numbers, and that the smallest scale shows the point."""

from __future__ import annotations

from pathlib import Path

import pytest

from leakscope.data import load_data
from leakscope.papers import gradients, reproduce


def test_published_numbers_are_those_of_the_paper() -> None:
    assert dict(gradients.DISTANCES) == {1: 728.0, 5: 649.0, 8: 404.0, 11: 135.0, 12: 0.57}


def test_twelve_filters_give_an_image_away_and_one_does_not(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    calls: list[tuple[int, int, float]] = []
    rows = {row.setting: row for row in reproduce("gradients/filters", progress=lambda *c: calls.append(c)).rows}
    assert rows["12 filters, Gauss-Newton"].measured < 1e-6
    assert rows["1 filter, Gauss-Newton"].measured > 50
    assert all(row.verdict == "measured" for row in rows.values())  # images of 16x16 are none of the paper's
    assert [call[:2] for call in calls] == [(n, 4) for n in range(1, 5)]


def test_five_units_give_four_images_away_and_three_do_not(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    rows = {row.setting: row for row in reproduce("gradients/units").rows}
    assert rows["5 hidden units, Gauss-Newton"].measured == 100.0
    assert "enough" in rows["5 hidden units, Gauss-Newton"].note
    assert rows["3 hidden units, Gauss-Newton"].measured < 40
    assert "too few" in rows["3 hidden units, Gauss-Newton"].note


def test_batches_have_different_labels_and_share_no_image() -> None:
    tiles = load_data("tiles")
    batches = gradients._batches(tiles, 2, 3, seed=1)
    assert all(len({int(tiles.y[index]) for index in batch}) == 3 for batch in batches)
    assert not set(batches[0]) & set(batches[1])
    assert batches == gradients._batches(tiles, 2, 3, seed=1)
