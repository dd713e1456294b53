"""The page of a reproduced table, and the command that writes it."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import pytest
import torch
from fabricate import HOSTILE, HOSTILE_ATTRIBUTE
from typer.testing import CliRunner

from leakscope import papers
from leakscope.cli import app
from leakscope.contracts.registry import Registry
from leakscope.papers import PAPERS, Curves, Findings, PictureGrid, Reproduction, Row
from leakscope.report import render_reproduction, write_reproduction


def a_table(*, private: bool = False, text: str = "words") -> Reproduction:
    pixels = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    grid = PictureGrid(
        title=text, originals=pixels, recovered=1 - pixels, captions=("12.3 dB", text, "-"), private=private
    )
    losses = {f"{text} {n}": tuple(2.0 / (n + step) for step in range(1, 200)) for n in range(2)}
    curves = Curves(title=text, x_label=text, y_label="loss", lines={**losses, "broken": (1.0, math.inf, math.nan)})
    rows = (
        Row(text, "PSNR (dB)", 18.9, 19.24, (18.0, 20.4), 40, "matches", text, 1.89),
        Row("three of three", "label accuracy (%)", 100.0, 100.0, (29.2, 100.0), 3, "too few to tell", "", 10.0),
        Row("DP", "loss", 2.69, 5147994882048.0, (1e12, 9e12), 2, "above"),
        Row("one", "loss", None, -0.5, (-0.5, -0.5), 1, "measured"),
        Row("absent", "loss", 1.0, None, None, 0, "not run", "not run: no data"),
    )
    return Reproduction(text, text, text, "smoke", 7, rows, 3.25, (grid,), (curves,))


def test_page_has_the_rows_the_curves_and_the_pictures() -> None:
    page = render_reproduction(a_table())
    assert page.count("data:image/png;base64,") == 6
    assert "19.24</b><small>18 to 20.4</small>" in page
    assert "5.148e+12" in page
    assert "−0.5</b><small></small>" in page  # one value has no spread
    assert "1 matches, 1 above, 1 too few to tell, 1 measured, 1 not run." in page
    assert "18.9<small>± 1.89</small>" in page
    assert "100</b><small>29.2 to 100</small>" in page
    assert page.count("<polyline") == 6  # three curves, each in the legend too
    assert "words 1, ends at 0.01" in page
    assert "12.3 dB" in page
    assert "3.2 s" in page
    assert page == render_reproduction(a_table())


def test_page_and_printed_table_say_rule_command_versions_and_machine(run_here: Path) -> None:
    page = render_reproduction(dataclasses.replace(a_table(), seed=0))
    printed = " ".join(CliRunner().invoke(app, ["reproduce", "cafe/faces"]).output.split())
    for text, name in ((page, "words"), (printed, "cafe/faces")):
        assert f"leakscope reproduce {name} --scale smoke" in text
        assert "else 10 % of its number" in text
        assert torch.__version__ in text
        assert "threads of torch" in text


def test_no_guess_is_called_recovered() -> None:
    page = render_reproduction(a_table())
    assert "recovered" not in page
    assert "attack&#39;s guess of sample 2" in page


def test_everything_is_escaped_and_nothing_is_fetched() -> None:
    for text in (HOSTILE, HOSTILE_ATTRIBUTE):
        page = render_reproduction(a_table(text=text))
        assert text not in page
        assert page.count("<script>") == 1  # the page's own, named by its hash
        assert "onerror=alert(1)>" not in page
        assert "http://" not in page
        assert "https://" not in page


def test_private_pictures_are_shown_only_when_asked_for() -> None:
    public, private = a_table(), a_table(private=True)
    assert "data:image" in render_reproduction(public)
    assert "data:image" not in render_reproduction(private)
    assert "--pictures" in render_reproduction(private)
    assert "data:image" in render_reproduction(private, pictures=True)
    assert "data:image" not in render_reproduction(public, pictures=False)
    assert "left out on request" in render_reproduction(public, pictures=False)


def test_a_table_of_rows_alone_has_no_other_section(tmp_path: Path) -> None:
    bare = dataclasses.replace(a_table(), pictures=(), curves=())
    target = write_reproduction(bare, tmp_path / "deep" / "report.html")
    page = target.read_text(encoding="utf-8")
    assert "<h2>Curves" not in page
    assert "<h2>Pictures" not in page


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table with private pictures, run in an empty folder."""
    shown = a_table(private=True)
    found = Findings(list(shown.rows), shown.pictures, shown.curves)
    table = dataclasses.replace(PAPERS["cafe/faces"], target=lambda scale, seed, progress: found)
    others = [entry for name, entry in PAPERS.items() if name != table.name]
    monkeypatch.setattr(papers, "PAPERS", Registry("table", [table, *others]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_writes_a_page_where_there_is_something_to_see(run_here: Path) -> None:
    done = CliRunner().invoke(app, ["reproduce", "cafe/faces"])
    assert done.exit_code == 0, done.output
    page = Path("leakscope-reproduce") / "cafe-faces" / "report.html"
    assert done.output.rstrip().endswith(str(page))
    assert "Private pictures are left out of the page; --pictures shows them." in done.output
    assert "data:image" not in page.read_text(encoding="utf-8")
    assert os.listdir(page.parent) == ["report.html"]  # no picture beside it


def test_the_command_shows_private_pictures_on_request(run_here: Path) -> None:
    done = CliRunner().invoke(app, ["reproduce", "cafe/faces", "--pictures", "--out", "here"])
    assert "Private" not in done.output
    assert (run_here / "here" / "report.html").read_text(encoding="utf-8").count("data:image") == 6
    assert not (run_here / "leakscope-reproduce").exists()


def test_rows_alone_get_a_page_only_with_a_folder(run_here: Path) -> None:
    done = CliRunner().invoke(app, ["reproduce", "gradients/counting"])
    assert done.exit_code == 0
    assert os.listdir(run_here) == []
    done = CliRunner().invoke(app, ["reproduce", "gradients/counting", "--out", "counts"])
    assert "5 matches." in (run_here / "counts" / "report.html").read_text(encoding="utf-8")
    assert "Page:" in done.output
