"""Attacks by defences with the spread over seeds, from Python and the command line."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from fabricate import AVG, NOISE, PRUNING, SGD, fabricate
from typer.testing import CliRunner

import leakscope as ls
from leakscope.audit import SpecError
from leakscope.cli import app
from leakscope.report.attack_table import attack_table
from leakscope.results import Store

SPEC = """
model: {name: logistic}
data: tiles
examples: 1
defenses: [none, {gradient-noise: {sigma: 0.1}}]
attacks: [linear-layer]
controls: false
findings: false
seeds: [0, 1]
"""


def rows(folder: Path):
    settings = ((SGD, "none"), (SGD, PRUNING), (AVG, NOISE))
    made = fabricate(settings=settings, level=(0.03, 0.1, 0.2), failures=False).write(folder)
    with Store.open(made) as store:
        return store.rows()


def test_a_cell_is_the_mean_over_seeds_of_the_mean_over_examples(tmp_path: Path) -> None:
    found = rows(tmp_path / "a")
    table = attack_table(found)
    counted = [row for row in found if row.counts and row.status == "done"]
    assert len(table.cells) == len({(*row.job.scenario, row.job.attack) for row in counted})
    cell = next(one for one in table.cells if one.defense == "no defence")
    attack = next(row.job.attack for row in counted if row.job.attack_name.startswith(cell.attack.lower()[:4]))
    own = [row for row in counted if (*row.job.scenario, row.job.attack) == (SGD, "none", attack)]
    seeds = [
        mean(example.value("psnr") for row in own if row.job.seed == seed for example in row.examples)
        for seed in sorted({row.job.seed for row in own})
    ]
    assert (cell.seeds, cell.mean) == (len(seeds), pytest.approx(mean(seeds)))
    assert cell.deviation == pytest.approx(stdev(seeds))


def test_csv_and_latex_have_every_cell(tmp_path: Path) -> None:
    table = attack_table(rows(tmp_path / "a"))
    lines = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert len(lines) == len(table.cells)
    assert {"protocol", "defense", "attack", "seeds", "mean", "deviation"} <= lines[0].keys()
    latex = table.to_latex()
    assert latex.count(r"\multicolumn") == 2, "one head for each protocol"
    assert latex.count(r"\pm") == sum(math.isfinite(cell.deviation) for cell in table.cells)
    assert latex.count(r"\mathbf") == 3, "the strongest attack of each scenario"
    assert "--" in latex, "a defence that one protocol lacks"
    heads = [line for line in latex.splitlines() if line.startswith("attack")]
    assert [line.count("&") for line in heads] == [3]


def test_a_spec_is_run_from_python_and_its_table_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study.yaml").write_text(SPEC)
    done = ls.audit(spec="study.yaml", out="run", progress=False)  # type: ignore[operator]
    assert len(done.rows) == 4
    (bare, noisy) = done.attack_table().cells
    assert (bare.seeds, noisy.seeds) == (2, 2)
    assert bare.mean > noisy.mean
    fewer = ls.audit(spec=tmp_path / "study.yaml", defenses="none", seeds=[0], progress=False)  # type: ignore[operator]
    assert len(fewer.rows) == 1, "what is given stands in the place of the spec's own"
    told = CliRunner().invoke(app, ["report", "run", "--latex"])
    assert told.exit_code == 0, told.stderr
    assert (tmp_path / "run" / "attacks.tex").read_text() == done.attack_table().to_latex()
    assert (tmp_path / "run" / "attacks.csv").read_text() == done.attack_table().to_csv()


def test_an_audit_without_a_spec_needs_model_and_data() -> None:
    with pytest.raises(SpecError) as caught:
        ls.audit(model=torch.nn.Linear(2, 2))  # type: ignore[operator]
    assert caught.value.problems == ["data: expected one, or spec=..., got none"]
