"""Tables 3 and 6 of the systematic evaluation: every published cell as data, and that the smallest scale runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from leakscope.attacks import SystematicEvaluation
from leakscope.papers import reproduce
from leakscope.papers.systematic.batches import NO_JEON, SCALES, attacks, published

pytestmark = pytest.mark.slow


def _cells(table: int, **place: str) -> dict[tuple[str, str], tuple[float, float]]:
    rows = [row for row in published(table) if all(row[name] == value for name, value in place.items())]
    return {(row["batch"], row["measure"]): (float(row["mean"]), float(row["spread"])) for row in rows}


def test_published_numbers_are_those_of_the_paper() -> None:
    whole, without = (_cells(6, attack=name) for name in ("whole", "without features"))
    assert [whole[batch, "psnr"][0] for batch in ("4", "8", "16", "32")] == [23.59, 23.37, 21.90, 20.69]
    assert [without[batch, "psnr"][0] for batch in ("4", "8", "16", "32")] == [22.41, 23.21, 20.01, 19.84]
    assert _cells(6, attack="without reweighting and features", batch="32") == {
        ("32", "psnr"): (15.05, 4.05),
        ("32", "rmse_maxnorm"): (0.23, 0.06),
        ("32", "lpips"): (0.3, 0.12),
    }
    assert len(published(6)) == 36
    lpips = {(row["batch"], row["attack"]): (float(row["mean"]), float(row["spread"])) for row in published(3)}
    assert [lpips["16", name] for name in ("Geiping", "Jeon", "Ours")] == [(0.41, 0.09), (0.17, 0.12), (0.14, 0.11)]
    assert [lpips["32", name][0] for name in ("Geiping", "Jeon", "Ours")] == [0.45, 0.24, 0.15]


def test_the_paper_scale_has_the_published_settings() -> None:
    size = SCALES["paper"]
    assert (size.width, size.hidden) == (64, 16_384)
    assert all(batch * count >= 50 for batch, count in size.batches.items())
    names = ("without reweighting and features", "without features", "whole")
    bare, reweighted, whole = (attacks("paper")[name] for name in names)
    assert all(isinstance(attack, SystematicEvaluation) for attack in (bare, reweighted, whole))
    assert (whole.canvas, whole.iterations, whole.trained, whole.head) == ("paper", 10_000, 2048, "published")
    assert (bare.reweight, bare.features) == (False, "none")
    assert (reweighted.reweight, reweighted.features) == (True, "none")
    assert whole.reweight


@pytest.mark.parametrize("name", ["systematic/table3", "systematic/table6"])
def test_the_smallest_scale_runs(name: str, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_CACHE", str(tmp_path))
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    told: list[tuple[int, int, float]] = []
    result = reproduce(name, "smoke", lambda *args: told.append(args))
    assert told[-1][0] == told[-1][1]
    run = [row for row in result.rows if row.verdict != "not run"]
    assert len(run) == (2 if name == "systematic/table3" else 9)
    assert all(row.measured is not None and row.count in (4, 16) for row in run)
    assert [row.note for row in result.rows if row.verdict == "not run"] == (
        [f"not run: {NO_JEON}"] if name == "systematic/table3" else []
    )


def test_without_data_every_row_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(tmp_path))
    for name in ("systematic/table3", "systematic/table6"):
        with pytest.raises(ValueError, match="no row could be run"):
            reproduce(name)
