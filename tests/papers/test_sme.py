"""The tables of Surrogate Model Extension: published numbers as data, clients, and that the smallest scale runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leakscope.data import load_data
from leakscope.papers import reproduce, sme
from leakscope.papers.base import Line

pytestmark = pytest.mark.slow


def test_published_numbers_are_those_of_the_paper() -> None:
    first, _, third, fourth, _, last = sme.TABLE_2
    assert (first.published["IG"], first.published["DLFA"], first.published["SME"]) == (27.8, 24.9, 30.3)
    assert (third.published["IG"], third.published["SME"]) == (17.0, 21.5)
    assert (fourth.published["IG"], fourth.published["DLFA"], fourth.published["SME"]) == (26.0, 26.7, 28.5)
    assert (last.published["IG"], last.published["SME"]) == (14.8, 21.7)
    assert sme.TABLE_1[0].published == {sme.COSINE: 0.997, sme.SHARE: 0.996}
    assert sme.TABLE_6[20] == 0.602
    assert all(cell.setting.batch_size == 10 for cell in sme.TABLE_2)
    assert {cell.setting.lr for cell in sme.TABLE_7} == {0.004, 0.4}


def test_a_cell_without_a_published_number_stands_alone() -> None:
    row = Line("setting", "PSNR (dB)", None).measured([20.0, 22.0])
    assert (row.verdict, row.measured, row.published, row.count) == ("measured", 21.0, None, 2)
    assert Line("setting", "PSNR (dB)", 30.0).measured([20.0, 22.0, 21.0]).verdict == "below"


def test_published_settings_are_the_presets() -> None:
    table = sme.attacks(sme.Setting(), "paper", ("IG", "SME", "SME, defaults", "DLFA"))
    assert (table["IG"].beta, table["IG"].beta_lr, table["IG"].iterations) == (0.0, 0.0, 1000)
    assert (table["SME"].beta, table["SME"].beta_every, table["SME"].lr) == (0.5, 1, 1.0)
    assert sme.attacks(sme.Setting(model="s3-vit"), "paper", ("IG", "SME"))["IG"].lr == 0.1
    assert sme.attacks(sme.Setting(), "smoke", ("DLFA",))["DLFA"].iterations == sme.SMOKE_STEPS


def test_clients_are_different_writers_and_the_same_for_the_same_seed(real_data: Path) -> None:
    examples = load_data("femnist", path=real_data / "femnist.npz", split="train")
    setting = sme.Setting(examples=10)
    several = list(sme.clients(setting, 5, 3, examples))
    again = list(sme.clients(setting, 5, 3, examples))
    assert len(several) == 5
    assert all(torch.equal(a.x, b.x) for a, b in zip(several, again, strict=True))
    assert len({client.x.sum().item() for client in several}) == 5
    assert not torch.equal(several[0].x, next(sme.clients(setting, 1, 4, examples)).x)


@pytest.mark.parametrize("name", ["sme/table1", "sme/table2", "sme/table3", "sme/table6", "sme/table7"])
def test_the_smallest_scale_runs(name: str, real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_CACHE", str(tmp_path))
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    told: list[tuple[int, int, float]] = []
    result = reproduce(name, "smoke", lambda *args: told.append(args))
    assert told
    assert told[-1][0] == told[-1][1]
    assert all(row.measured is not None for row in result.rows)
    compared = [row for row in result.rows if row.published is not None]
    assert all(row.verdict in ("matches", "above", "below", "too few to tell") for row in compared)
    assert bool(compared) == (name not in ("sme/table7", "sme/table6"))
    if name == "sme/table1":
        # The one measure that needs no search: it holds at any scale.
        assert next(row.measured for row in result.rows if row.measure == sme.COSINE) >= 0.99


def test_without_data_every_row_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(tmp_path))
    for name in ("sme/table1", "sme/table2", "sme/table3", "sme/table6", "sme/table7"):
        with pytest.raises(ValueError, match="no row could be run"):
            reproduce(name)
