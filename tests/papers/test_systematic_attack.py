"""Tables 3 and 6 of the systematic evaluation: every published cell as data, and that the smallest scale runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from leakscope.papers import reproduce
from leakscope.papers.systematic import attack as systematic_attack
from leakscope.papers.systematic.attack import LPIPS, NO_JEON, PSNR, RMSE, SCALES, TABLE_3, TABLE_6

pytestmark = pytest.mark.slow


def test_published_numbers_are_those_of_the_paper() -> None:
    assert [TABLE_6[batch]["whole"][PSNR][0] for batch in (4, 8, 16, 32)] == [23.59, 23.37, 21.90, 20.69]
    assert [TABLE_6[batch]["without features"][PSNR][0] for batch in (4, 8, 16, 32)] == [22.41, 23.21, 20.01, 19.84]
    assert TABLE_6[32]["without reweighting and features"] == {
        PSNR: (15.05, 4.05),
        RMSE: (0.23, 0.06),
        LPIPS: (0.3, 0.12),
    }
    assert sum(len(row) for rows in TABLE_6.values() for row in rows.values()) == 36
    assert TABLE_3[16] == {"Geiping": (0.41, 0.09), "Jeon": (0.17, 0.12), "Ours": (0.14, 0.11)}
    assert [TABLE_3[32][name][0] for name in ("Geiping", "Jeon", "Ours")] == [0.45, 0.24, 0.15]


def test_the_paper_scale_has_the_published_settings() -> None:
    size = SCALES["paper"]
    assert (size.width, size.hidden) == (64, 16_384)
    assert all(batch * count >= 50 for batch, count in size.batches.items())
    bare, reweighted, whole = systematic_attack.variants("paper").values()
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
