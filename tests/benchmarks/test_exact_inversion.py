"""The benchmark of exact inversion: its cells, rows that resume, errors against the truth, a table that adds up."""

from __future__ import annotations

import doctest
import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from leakscope.data import Examples, from_tensors
from leakscope.models.resnet import resnet18

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = (3, 16, 16)


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with a small network on small images in place of its own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import exact_inversion

    draws = torch.Generator().manual_seed(0)
    data = from_tensors(torch.rand((1004, *SHAPE), generator=draws), torch.arange(1004) % 10)

    def network(*_: Any) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = resnet18(input_shape=SHAPE, num_classes=10, width=32)
            net(data.x[:64])
        return net.eval()

    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of the other tests
    monkeypatch.setattr(exact_inversion, "load", lambda _: data)
    monkeypatch.setattr(exact_inversion, "network", network)
    return exact_inversion


def run(exact: ModuleType, file: Path, *more: str) -> list[dict[str, Any]]:
    exact.main(["--out", str(file), "--peel-only", *more])
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_features_are_compared_with_the_truth_and_rows_are_kept(exact: ModuleType, tmp_path: Path) -> None:
    file, cell = tmp_path / "rows.jsonl", ["--cell", "resnet18 1 eval 1", "--cell", "resnet18 1 train 2"]
    rows = run(exact, file, *cell, "--count", "1")
    assert [row["images"] for row in rows] == [[1000], [1000, 1001]]
    for row in rows:
        assert max(row["errors"]) <= row["worst"] < 1e-4
        assert (row["good"], row["psnr"]) == (1.0, [])
        assert row["exact"] == row["lowest"]
    assert run(exact, file, *cell, "--count", "1") == rows
    assert len(run(exact, file, *cell, "--count", "1", "--again")) == 4
    assert len(exact.read_rows(file)) == 2


def test_each_local_step_has_its_own_truth(exact: ModuleType, tmp_path: Path) -> None:
    (row,) = run(exact, tmp_path / "rows.jsonl", "--cell", "resnet18 1 eval 1 fedavg:2:.5", "--count", "1")
    assert row["local_steps"] == 2
    assert len(row["later"]) == 1
    assert max(row["errors"] + row["later"]) < 1e-3


def test_a_batch_that_takes_too_long_keeps_its_features(exact: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import exact_inversion_cells

    def recover(seen: Any) -> None:
        net, gradients, _ = exact_inversion_cells.convolutions._read(seen)
        exact_inversion_cells.convolutions.peel(net, gradients, 1)
        while True:
            pass

    monkeypatch.setattr(exact, "recover_at_convolution", recover)
    cell, data = exact.Cell.parse("resnet18 1 eval 1"), exact.load("resnet18")
    row = exact.measure(cell, exact.network(), data, [1000], 0, peel_only=True, limit=3.0)
    assert row["refused"] == "ended after 3 s"
    assert row["good"] == 1


def test_what_is_not_peeled_says_why(exact: ModuleType, tmp_path: Path) -> None:
    (row,) = run(exact, tmp_path / "rows.jsonl", "--cell", "resnet18 1 eval 1 gradient noise:1e-2", "--count", "1")
    assert row["lowest"] is None
    assert "stage" in row["ended"]


def test_a_wrong_image_has_errors(exact: ModuleType) -> None:
    from exact_inversion_cells import Watched, features

    net = exact.network()
    data: Examples = exact.load("resnet18")
    cell = exact.Cell.parse("resnet18 1 eval 1")
    with exact.watched() as seen:
        exact.recover_at_convolution(exact.observe(cell, net, data, [1000], 0))
    assert features(cell, seen, net, data, [1000])["good"] == 1
    assert features(cell, seen, net, data, [1001])["good"] == 0
    assert features(cell, seen, net, data, [1001])["exact"] is None
    assert features(cell, Watched(), net, data, [1000])["good"] is None


def test_the_matrix_has_the_cells_that_are_named(exact: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    cells = list(exact.matrix())
    assert len({cell.describe() for cell in cells}) == len(cells)
    assert all(exact.Cell.parse(cell.describe()) == cell for cell in cells)
    assert {cell.model for cell in cells} <= set(exact.SUBJECTS)
    exact.main(["--list", "--only", "resnet18 1 eval 1 gradient none", "--only", "resnet18 secure:4 train"])
    listed = capsys.readouterr().out.split("\n")
    assert listed[:-1] == ["resnet18 1 eval 1 gradient none", "resnet18 1 train 2 secure:4 none"]


@pytest.mark.parametrize("words", ["resnet18 1 eval", "resnet18 1 both 1", "nonsense 1 eval 1", "vgg11 1 eval 1 swarm"])
def test_a_cell_that_means_nothing_is_refused(
    exact: ModuleType, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        exact.main(["--cell", words])
    assert "--cell" in capsys.readouterr().err


def row(number: int, psnr: list[float], certified: list[bool], **more: Any) -> dict[str, Any]:
    cell = {"model": "resnet18", "state": "1", "mode": "eval", "batch": 2, "protocol": "gradient"}
    errors = [1e-6, 1e-3] if number else [1e-6, 1e-5]
    facts = {
        "lowest": "stage2",
        "ended": "it ended",
        "errors": errors,
        "good": sum(e <= 1e-4 for e in errors) / 2,
        "peel_only": not psnr,
    }
    false = sum(holds and level < 80 for holds, level in zip(certified, psnr, strict=True))
    row = {**cell, "disturbance": "none", "number": number, "images": [0, 1], "psnr": psnr, "certified": certified}
    return {**row, "false": false, **facts, "seconds": 2.0 + number, **more}


def test_the_table_counts_images_and_false_certificates(exact: ModuleType) -> None:
    rows = [row(0, [200.0, 90.0], [True, True]), row(1, [70.0, 20.0], [True, False])]
    assert "| 4 | 2/4 | 3/4, 1 false | 95.0 [20.0] | 3/4 | 1e-03 | `stage2` | 2.5 [3.0] |" in exact.tables(rows)
    late = row(2, [], [], peel_only=False)
    assert "| 6 | 2/6 | 3/6, 1 false | 95.0 [20.0], 2 without | 4/6 |" in exact.tables([*rows, late])
    peeled = [row(number, [], []) for number in (0, 1, 2)]
    assert "| 6 |  |  | not tried | 4/6 |" in exact.tables(peeled)
    assert "| 4 | 2/4 | 3/4, 1 false | 95.0 [20.0] | 4/6 |" in exact.tables(rows + peeled)
    nothing = {**peeled[0], "errors": [], "good": None}
    assert "not tried | 0/2 |  |  | 2.0" in exact.tables([nothing])
    assert "not tried |  |  |  | 2.0" in exact.tables([{**nothing, "ended": None}])
    assert exact.tables([]) == "Nothing has been measured yet."


def test_the_committed_rows_are_of_images_that_count(exact: ModuleType) -> None:
    for found in exact.read_rows(BENCHMARKS / "exact_inversion.jsonl"):
        assert found["model"] in exact.SUBJECTS
        assert exact.SUBJECTS[found["model"]].data != "cifar10" or min(found["images"]) >= exact.FIRST


@pytest.mark.parametrize("name", ["exact_inversion", "exact_inversion_cells", "exact_inversion_table"])
def test_examples_in_the_docstrings_hold(exact: ModuleType, name: str) -> None:
    told = doctest.testmod(importlib.import_module(name))
    assert told.attempted
    assert not told.failed


def test_the_network_of_others_reads_their_weights(exact: ModuleType) -> None:
    from exact_inversion_models import SUBJECTS, network

    for model in ("resnet20", "resnet18-imagenet", "vit-s16"):
        shape = (3, 32, 32) if model == "resnet20" else (3, 64, 64)
        assert SUBJECTS[model].make(shape, 10)(torch.rand(1, *shape)).shape == (1, 10)
    photos = from_tensors(torch.rand(3, 3, 64, 64), torch.arange(3), num_classes=10)
    nets = [network("resnet18-imagenet", "untrained", photos, Path(), places) for places in ([0], [1])]
    means = [net.get_submodule("1").get_buffer("running_mean") for net in nets]
    assert not torch.equal(*means)  # the statistics are those of the photos that are not attacked
