"""The published tables: names, verdicts, and that the smallest scale runs."""

from __future__ import annotations

import dataclasses
import getpass
import json
import math
import os
import platform
from pathlib import Path

import pytest
import torch

from leakscope import papers
from leakscope.contracts.registry import Registry
from leakscope.data import Examples, load_data
from leakscope.papers import (
    PAPERS,
    Curves,
    Findings,
    PictureGrid,
    Reproduction,
    Row,
    base,
    idlg,
    reproduce,
    verdict,
)
from leakscope.papers.base import Line


def test_every_table_is_described_and_has_the_three_scales() -> None:
    sme = {f"sme/table{number}" for number in (1, 2, 3, 6, 7)}
    gradients = {f"gradients/{name}" for name in ("counting", "filters", "units")}
    cafe = {f"cafe/{name}" for name in ("table10", "table11", "faces")}
    systematic = {f"systematic/table{number}" for number in range(2, 9)}
    assert {"idlg/labels", "hybrid/table3", *systematic, *gradients, *cafe, *sme} == set(PAPERS)
    for name, table in PAPERS.items():
        assert table.name == name
        assert table.title
        assert table.summary
        assert table.source
        assert list(table.scales) == ["smoke", "small", "paper"]


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"idlg/labels, gradients/counting.*sme/table1.*did you mean idlg/labels\?"):
        reproduce("idlg/label")
    with pytest.raises(ValueError, match="smoke, small, paper"):
        reproduce("gradients/counting", scale="huge")
    with pytest.raises(ValueError, match="seed"):
        reproduce("gradients/counting", seed=-1)


@pytest.mark.parametrize(
    "published, interval, tolerance, expected",
    [
        (89.9, (87.0, 93.0), 5.0, "matches"),
        (89.9, (84.9, 94.9), 5.0, "matches"),
        (89.9, (80.0, 93.0), 5.0, "too few to tell"),  # holds the published number, and much else
        (89.9, (92.0, 100.0), 5.0, "too few to tell"),
        (84.9, (95.0, 100.0), 5.0, "above"),
        (100.0, (40.0, 80.0), 10.0, "below"),
        (100.0, None, 10.0, "too few to tell"),
        (100.0, (math.nan, math.nan), 10.0, "too few to tell"),
    ],
)
def test_the_interval_decides_or_nothing_does(
    published: float, interval: tuple[float, float] | None, tolerance: float, expected: str
) -> None:
    assert verdict(published, interval, tolerance) == expected


@pytest.mark.parametrize(
    "published, hits, count, expected",
    [
        (100.0, 3, 3, "too few to tell"),
        (89.9, 3, 3, "too few to tell"),
        (100.0, 20, 20, "too few to tell"),
        (100.0, 100, 100, "matches"),
        (89.9, 900, 1000, "matches"),
        (100.0, 0, 3, "below"),
        (10.0, 3, 3, "above"),
    ],
)
def test_few_hits_are_no_match(published: float, hits: int, count: int, expected: str) -> None:
    values = [100.0] * hits + [0.0] * (count - hits)
    row = Line("", "label accuracy (%)", published, kind="shares").measured(values)
    assert row.verdict == expected
    assert row.tolerance == pytest.approx(published / 10)
    assert row.interval is not None
    assert row.interval[0] < row.interval[1]


def test_one_value_or_two_decide_nothing_and_an_exact_one_does() -> None:
    assert Line("", "PSNR (dB)", 20.0).measured([20.0]).verdict == "too few to tell"
    assert Line("", "PSNR (dB)", 20.0).measured([18.0, 22.0]).verdict == "too few to tell"
    assert Line("", "PSNR (dB)", 20.0).measured([19.0, 20.0, 20.5, 20.0, 19.5, 20.5]).verdict == "matches"
    assert Line("", "PSNR (dB)", 20.0).measured([30.0, 31.0, 30.5, 29.0]).verdict == "above"
    assert Line("", "bound", 4.002, tolerance=0.0005, kind="exact").measured([4.0018]).verdict == "matches"


def test_a_table_says_how_it_was_made_and_names_nobody() -> None:
    result = reproduce("gradients/counting")
    assert result.command == "leakscope reproduce gradients/counting --scale smoke"
    assert "seed=3" in dataclasses.replace(result, seed=3).command
    assert result.machine == {"processors": str(os.cpu_count()), "threads of torch": str(torch.get_num_threads())}
    assert result.versions["torch"] == torch.__version__
    for told in (result.command, "10 %", "torch", "processors", "95 % interval"):
        assert told in result.caption
    facts = json.dumps(result.as_dict())
    for told in ("command", "versions", "machine", "tolerance"):
        assert f'"{told}"' in facts
    for secret in (platform.node(), getpass.getuser()):
        assert secret not in result.caption


@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
def test_counting_matches_everywhere(scale: str) -> None:
    result = reproduce("gradients/counting", scale)
    assert [row.published for row in result.rows] == [0.99, 1.992, 4.002, 8.045, 16.226]
    assert {row.verdict for row in result.rows} == {"matches"}
    assert "5 whole units" in result.rows[2].note


def test_idlg_smoke_on_real_data(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    calls: list[tuple[int, int, float]] = []
    result = reproduce("idlg/labels", progress=lambda *call: calls.append(call))
    assert [row.setting for row in result.rows] == [
        f"{data}, {method}" for data in ("MNIST", "CIFAR-100", "LFW") for method in ("DLG", "iDLG")
    ]
    assert [row.published for row in result.rows] == [89.9, 100.0, 83.3, 100.0, 79.1, 100.0]
    rule = [row for row in result.rows[:4] if row.setting.endswith("iDLG")]
    assert [(row.measured, row.verdict, row.count) for row in rule] == [(100.0, "too few to tell", 3)] * 2
    for row in result.rows[:4]:
        assert row.measured is not None
        assert row.interval is not None
        assert row.interval[0] <= row.measured <= row.interval[1]
        assert "3 of 1000 images" in row.note
    assert [row.note for row in result.rows[4:]] == ["not run: no data"] * 2
    assert [call[:2] for call in calls] == [(n, 6) for n in range(1, 7)]
    json.dumps(result.as_dict(), allow_nan=False)


def _tiles_for(names: set[str]) -> object:
    tiles = load_data("tiles").subset(range(9))

    def load(name: str, split: str = "test") -> Examples:
        if name not in names:
            raise ValueError(f"data {name!r}: no files")
        return tiles

    return load


def test_missing_data_is_a_row_that_says_so_and_the_rest_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "load_data", _tiles_for({"cifar100"}))
    monkeypatch.setattr(idlg, "SCALES", {**idlg.SCALES, "smoke": idlg.Scale(2, 3)})
    first, second = reproduce("idlg/labels"), reproduce("idlg/labels")
    assert first == second
    assert [row.verdict == "not run" for row in first.rows] == [True, True, False, False, True, True]
    assert first.rows[0].note == "not run: data 'mnist': no files"
    assert first.rows[0].measured is None


def test_nothing_to_run_is_an_error_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LEAKSCOPE_DATA", raising=False)
    with pytest.raises(ValueError, match=r"no row could be run(.|\n)*LEAKSCOPE_DATA"):
        reproduce("idlg/labels")


def test_a_wrong_rule_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The label of the largest row sum is never right: its row must read as below."""
    monkeypatch.setattr(base, "load_data", _tiles_for({"mnist"}))
    monkeypatch.setattr(idlg, "SCALES", {**idlg.SCALES, "smoke": idlg.Scale(2, 1)})
    monkeypatch.setattr(idlg, "idlg_label", lambda weight: int(weight.sum(dim=1).argmax()))
    row = reproduce("idlg/labels").rows[1]
    assert (row.setting, row.measured, row.verdict) == ("MNIST, iDLG", 0.0, "below")


def _found(monkeypatch: pytest.MonkeyPatch, found: list[Row] | Findings) -> Reproduction:
    table = dataclasses.replace(PAPERS["idlg/labels"], target=lambda scale, seed, progress: found)
    monkeypatch.setattr(papers, "PAPERS", Registry("table", [table]))
    return reproduce("idlg/labels")


def test_a_run_may_bring_rows_alone_or_pictures_and_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row("setting", "measure", 1.0, 2.0, (1.5, 2.5), 3, "above")]
    pixels = torch.rand(2, 1, 4, 4)
    grid = PictureGrid(title="faces", originals=pixels, recovered=pixels.flip(0), captions=("a", "b"))
    curves = Curves(title="loss", x_label="round", y_label="loss", lines={"one": (2.0, math.inf, 1.0)})
    alone = _found(monkeypatch, rows)
    more = _found(monkeypatch, Findings(rows, (grid,), (curves,)))
    assert (alone.pictures, alone.curves) == ((), ())
    assert more.pictures == (grid,)
    assert alone == more  # a table is its rows
    facts = json.loads(json.dumps(more.as_dict(), allow_nan=False))
    assert facts["pictures"] == [{"title": "faces", "captions": ["a", "b"], "private": True}]
    assert facts["curves"][0]["lines"] == {"one": [[0, 2.0], [1, None], [2, 1.0]]}
    assert facts["rows"][0]["interval"] == [1.5, 2.5]


def test_a_grid_needs_a_caption_and_a_recovered_picture_for_each_original() -> None:
    pixels = torch.rand(2, 1, 4, 4)
    with pytest.raises(ValueError, match="as many originals"):
        PictureGrid(title="", originals=pixels, recovered=pixels[:1], captions=("a", "b"))
    with pytest.raises(ValueError, match="and 1"):
        PictureGrid(title="", originals=pixels, recovered=pixels, captions=("a",))


def test_one_row_is_run_on_as_many_examples_as_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[tuple[int, int]] = []

    def trial(example: Examples, iterations: int, seed: int) -> dict[str, float]:
        run.append((len(example), iterations))
        return {"DLG": 100.0, "iDLG": 100.0}

    one = load_data("tiles")
    monkeypatch.setattr(idlg, "trial", trial)
    monkeypatch.setattr(idlg, "examples_or_reason", lambda name, **_: one)
    shown: list[tuple[int, int]] = []
    result = reproduce(
        "idlg/labels", progress=lambda done, total, _: shown.append((done, total)), row="mnist, idlg", count=7
    )
    assert shown[-1] == (7, 7), "the total is that of what is run"
    assert [(row.setting, row.count) for row in result.rows] == [("MNIST, iDLG", 7)]
    assert len(run) == 7, "trials of other rows are not run"
    assert result.command == "leakscope reproduce idlg/labels --scale smoke --row 'mnist, idlg' --n 7"
    assert "row='mnist, idlg', count=7" in reproduce("idlg/labels", row="mnist, idlg", count=7, seed=1).command


def test_a_selection_that_cannot_be_run_is_refused() -> None:
    with pytest.raises(ValueError, match="no row with 'imagenet'"):
        reproduce("gradients/counting", row="imagenet")
    with pytest.raises(ValueError, match="count: gradients/counting has no examples to count"):
        reproduce("gradients/counting", count=3)
    with pytest.raises(ValueError, match="count"):
        reproduce("idlg/labels", count=0)
    (row,) = reproduce("gradients/counting", row=reproduce("gradients/counting").rows[2].setting).rows
    assert row.published == 4.002


@pytest.mark.parametrize(("count", "each", "trials"), [(None, 4, 13), (50, 4, 13), (8, 4, 2), (1, 4, 1)])
def test_examples_fill_whole_trials(count: int | None, each: int, trials: int) -> None:
    with base.selecting(base.Selection("", count)):
        assert base.wanted(13, each) == trials
    assert base.wanted(5) == 5
