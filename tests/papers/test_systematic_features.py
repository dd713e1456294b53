"""Table 2 of the systematic evaluation: every published cell, and that ours lies far below it."""

from __future__ import annotations

import pytest

from leakscope.papers.systematic.features import BATCHES, PUBLISHED, SCALES, Scale, run, trial

TINY = Scale(1, 24, 672)


def test_every_published_cell_is_there() -> None:
    assert sum(len(cells) for _, _, cells in PUBLISHED) == 48
    assert all(len(cells) == len(BATCHES) for _, _, cells in PUBLISHED)
    ratios = {size.units / size.features for size in SCALES.values()}
    assert ratios == {28.0}, "the error of moments depends on this ratio"


@pytest.mark.parametrize(
    ("defence", "strength", "most"),
    [("none", 0.0, 1e-6), ("clipping", 2.0, 1e-6), ("local steps", 3.0, 1e-6), ("pruning", 0.7, 0.05)],
)
def test_what_is_kept_beats_the_published_error(defence, strength, most) -> None:
    errors = trial(TINY, 2, defence, strength, seed=1)
    assert errors["kept"] <= most
    assert errors["stein"] > errors["kept"]


def test_noise_is_read_through() -> None:
    assert trial(TINY, 2, "noise", 0.01, seed=1)["kept"] < 0.05


def test_rows_are_two_for_each_cell(monkeypatch) -> None:
    monkeypatch.setattr("leakscope.papers.systematic.features.PUBLISHED", PUBLISHED[:1])
    told: list[tuple[int, int]] = []
    rows = run("smoke", 0, lambda done, total, value: told.append((done, total)))
    assert [row.setting for row in rows] == ["B=4, none, Stein as published", "B=4, none, kept"]
    assert rows[1].verdict == "below"
    assert told[-1] == (2, 2)
