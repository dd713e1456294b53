"""Growth of cost: the tables are what the rows say, and a measured axis replaces its own rows only."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scaling

    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of the other tests
    return scaling


def row(axis: str, point: Any, seconds: float, megabytes: float = 10.0) -> dict[str, Any]:
    return {"axis": axis, "point": point, "seconds": seconds, "megabytes": megabytes}


def test_exponents_leave_out_points_where_calls_cost_most(scaling) -> None:
    import scaling_table

    rows = [row("pixels", 28, 5.0), *(row("pixels", side, side**2 / 1000, side) for side in (64, 128, 224))]
    text = scaling_table.tables(rows)
    assert "From 64 on, time grows with the power 2.00 and memory with 1.00." in text
    assert "| 128 | 16.4 | 128 |" in text
    assert scaling_table.tables([]) == scaling_table.NOTHING
    photo = {**row("photo", 4, 100.0), "estimate": None, "psnr": 9.5}
    assert "| 4 | 100 | 10 |  | 9.5 |" in scaling_table.tables([photo])


def test_a_measured_axis_replaces_its_own_rows(scaling, monkeypatch, tmp_path) -> None:
    file = tmp_path / "scaling.jsonl"
    old = [row("batch", 1, 1.0), row("model", "convnet", 2.0)]
    file.write_text("".join(json.dumps(line) + "\n" for line in old))
    monkeypatch.setattr(scaling, "measure", lambda axis: [row(axis, point, point) for point in (4, 8)])
    scaling.main(["--axes", "batch", "--out", str(file)])
    found = [(line["axis"], line["point"]) for line in map(json.loads, file.read_text().splitlines())]
    assert found == [("batch", 4), ("batch", 8), ("model", "convnet")]


def test_a_point_is_one_line_of_seconds_and_megabytes(scaling, capsys) -> None:
    scaling.one("pixels", "28")
    found = json.loads(capsys.readouterr().out)
    assert found["seconds"] > 0
    assert found["megabytes"] >= 0


def test_every_axis_has_a_table(scaling) -> None:
    import scaling_table

    assert list(scaling.POINTS) == list(scaling_table.AXES)
