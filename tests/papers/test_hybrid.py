"""Table 3 of Chen and Campbell: published numbers as data, settings, the training, and that the smallest scale runs."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from leakscope.attacks.hybrid import Hybrid
from leakscope.attacks.rgap import RGAP
from leakscope.data import load_data
from leakscope.network.chain import read_chain
from leakscope.papers import hybrid

pytestmark = pytest.mark.slow


def test_published_numbers_are_those_of_the_paper() -> None:
    numbers = {str(cell): cell.published for cell in hybrid.CELLS}
    assert [numbers[f"CNN2 V{n}"]["Hybrid"] for n in (1, 2)] == [0.0008, 0.0051]
    assert [numbers[f"CNN3 V{n}"]["Hybrid"] for n in (1, 2, 3, 4)] == [0.0478, 0.0322, 0.0020, 0.0417]
    assert numbers["CNN4 V1"] == {"R-GAP": 0.0547, "Hybrid": 0.0610}
    assert numbers["CNN4 V2 as cnn4-c2"]["Hybrid"] == numbers["CNN4 V2 as cnn4-c3"]["Hybrid"] == 0.0139
    assert [cell.published["Hybrid"] for cell in hybrid.CELLS if cell.pretrained] == [0.3449, 0.0288]
    assert [numbers[name]["R-GAP"] for name in ("CNN2 V1", "CNN2 V2", "CNN3 V1", "CNN3 V3")] == [0, 0.0346, 0.0531, 0]
    assert all("not certain" in cell.note for cell in hybrid.CELLS if cell.pretrained or "V2 as" in cell.title)


def test_every_network_of_the_table_is_a_chain() -> None:
    stages = {cell.model: len(read_chain(hybrid._network(cell.model, 0), (3, 32, 32)).stages) for cell in hybrid.CELLS}
    assert all(count == int(name[3]) for name, count in stages.items())


def test_published_settings_are_the_preset() -> None:
    table = hybrid.attacks("paper")
    assert table["Hybrid"] == Hybrid.preset("paper")
    assert table["Hybrid, defaults"] == Hybrid()
    assert isinstance(table["R-GAP"], RGAP)
    assert "Hybrid" not in hybrid.attacks("small")
    assert hybrid.attacks("smoke")["Hybrid"].iterations == (hybrid.SMOKE_STEPS,)


def test_the_smallest_scale_runs(real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_CACHE", str(tmp_path))
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    chosen = (hybrid.CELLS[1], dataclasses.replace(hybrid.CELLS[-1], model="cnn2-c2"))  # the quickest network
    monkeypatch.setattr(hybrid, "CELLS", chosen)
    told: list[tuple[int, int, float]] = []
    rows = hybrid.run("smoke", 0, lambda *args: told.append(args))
    assert [row.setting for row in rows] == [f"{cell}, {name}" for cell in chosen for name in hybrid.METHODS]
    assert told[-1][:2] == (2, 2)
    assert all(row.measured is not None and row.measured >= 0 for row in rows)
    assert all("our own training" in row.note for row in rows[3:])
    assert rows == hybrid.run("smoke", 0)


def test_a_determined_network_matches_the_published_zero(real_data: Path) -> None:
    example = load_data("cifar10", path=real_data / "cifar-10-batches-bin", split="test", limit=1)
    found = hybrid.error(RGAP(ranks=False), hybrid._network("cnn2-c1", 0), example, 0)
    assert found < hybrid.ROUNDING


def test_images_of_a_pretrained_network_are_of_its_classes(real_data: Path) -> None:
    examples = load_data("cifar10", path=real_data / "cifar-10-batches-bin", split="test", limit=100)
    plain, trained = hybrid.CELLS[0], hybrid.CELLS[-1]
    order = hybrid._order(examples, trained, 3)
    assert set(examples.y[torch.tensor(order)].tolist()) == set(hybrid.CLASSES)
    assert len(set(order)) == len(order) == int(torch.isin(examples.y, torch.tensor(hybrid.CLASSES)).sum())
    assert sorted(hybrid._order(examples, plain, 3)) == list(range(100))


def test_without_data_every_row_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(tmp_path))
    rows = hybrid.run("smoke", 0)
    assert len(rows) == len(hybrid.CELLS) * len(hybrid.METHODS)
    assert all(row.verdict == "not run" and row.note.startswith("not run: ") for row in rows)
