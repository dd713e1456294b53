"""The strength benchmark on embedded pictures: batches as they are named, rows that resume, tables that add up."""

from __future__ import annotations

import doctest
import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from leakscope.contracts.attack import Attack
from leakscope.contracts.certificate import Certificate
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.data import Examples, load_data

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def data() -> Examples:
    return load_data("tiles")


@pytest.fixture
def strength(monkeypatch: pytest.MonkeyPatch, data: Examples) -> ModuleType:
    """The script, reading embedded pictures in place of the data sets that it is meant for."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import strength
    import strength_models

    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)  # of the other tests
    monkeypatch.setattr(strength, "data_of", lambda models: {"cifar10": data})
    monkeypatch.setattr(strength_models, "load_data", lambda *_, **__: data)
    return strength


def _run(strength: ModuleType, folder: Path, *more: str) -> list[dict[str, Any]]:
    fixed = ["--models", "mlp", "--first", "0", "--images", "2", "--batches-per-cell", "1", "--cache", str(folder)]
    strength.main([*fixed, "--out", str(folder / "rows.jsonl"), *more])
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


def test_batches_have_the_labels_they_are_named_for(strength: ModuleType, data: Examples) -> None:
    labels = data.y.tolist()
    for kind, most in (("distinct", 1), ("repeated", 2), ("equal", 4)):
        batches = strength.draw(labels, kind, 4, 3, 10)
        counts = [sorted([labels[place] for place in batch].count(c) for c in set(labels)) for batch in batches]
        assert all(count[-1] == most for count in counts)
        assert kind != "repeated" or all(count[-2] == 1 for count in counts)
        assert len({place for batch in batches for place in batch}) == 12
        assert min(place for batch in batches for place in batch) >= 10
        assert strength.draw(labels, kind, 4, 1, 10) == batches[:1]  # a longer matrix begins with the same batches
    with pytest.raises(ValueError, match="expected more than 4 images"):
        strength.draw([0, 1, 2, 3], "equal", 2, 1)


@pytest.mark.slow
def test_rows_are_kept_and_another_run_adds_what_is_missing(strength: ModuleType, tmp_path: Path) -> None:
    some = ["--states", "untrained,1", "--batches", "1", "--attacks", "linear-layer"]
    first = _run(strength, tmp_path, *some)
    assert [(row["state"], row["number"]) for row in first] == [("untrained", 0), ("untrained", 1), ("1", 0), ("1", 1)]
    assert all(min(row["psnr"]) > 80 and row["settings"] for row in first)
    assert len(list(tmp_path.glob("mlp-*-1.safetensors"))) == 1
    assert _run(strength, tmp_path, *some) == first
    more = _run(strength, tmp_path, *some[:4], "--attack", "inverting-gradients:iterations=2")
    assert more[:4] == first
    assert len(more) == 8
    again = _run(strength, tmp_path, *some, "--images", "1", "--again")
    assert len(again) == 10
    assert len(strength.read_rows(tmp_path / "rows.jsonl")) == 8


def test_disturbed_updates_and_refusals_are_rows_too(strength: ModuleType, tmp_path: Path) -> None:
    some = ["--states", "untrained", "--batches", "1", "--images", "1", "--attacks", "linear-layer,rgap"]
    rows = _run(strength, tmp_path, *some, "--disturb", "none,noise:1e-2,clip:0.05,float16,prune:0.5")
    exact = {row["disturbance"]: row["psnr"][0] for row in rows if row["attack"] == "linear-layer"}
    assert exact["none"] > exact["float16"] > exact["noise:1e-2"]
    assert exact["none"] > exact["prune:0.5"]
    assert exact["clip:0.05"] > 80  # one example's clipped gradient is the same up to its length
    refused = [row for row in rows if row["refused"]]
    assert [row["attack"] for row in refused] == 5 * ["rgap"]
    assert all(row["psnr"] == [] for row in refused)
    assert "noise:1e-2" in strength.every_line(rows)


def test_local_steps_are_those_of_the_whole_batch_and_have_their_own_rival(strength: ModuleType) -> None:
    protocol, defense = strength.disturbed("fedavg:5", 4)
    assert (protocol.steps(4), defense) == (5, None)
    cell = strength.Cell("mlp", "untrained", 4, "equal", "fedavg:5")
    assert strength.wants_sme(cell, ["inverting-gradients"])
    assert not strength.wants_sme(cell, ["sme:iterations=3"])
    assert not strength.wants_sme(strength.Cell("mlp", "untrained", 4, "equal"), [])


def test_an_attack_that_breaks_costs_no_other_row(
    strength: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure = strength.measure

    def breaks(cell: Any, word: str, *rest: Any) -> dict[str, Any]:
        if word == "idlg":
            raise RuntimeError("the line search failed")
        return dict(measure(cell, word, *rest))

    monkeypatch.setattr(strength, "measure", breaks)
    some = ["--states", "untrained", "--batches", "1", "--attacks", "idlg,linear-layer"]
    with pytest.raises(SystemExit, match="2 of the attacks failed"):
        _run(strength, tmp_path, *some)
    assert "0 idlg FAILED: RuntimeError: the line search failed" in capsys.readouterr().out
    assert [row["attack"] for row in strength.read_rows(tmp_path / "rows.jsonl")] == 2 * ["linear-layer"]


def test_what_is_no_number_counts_as_nothing_recovered(
    strength: ModuleType, data: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    import strength_cells

    monkeypatch.setattr(strength_cells, "named_attack", lambda word: _Broken())
    cell, net = strength.Cell("mlp", "untrained", 1, "distinct"), strength.victim("mlp", "untrained", data, Path())
    row = strength.measure(cell, "broken", strength.observe(cell, net, data, [3], 0), data, [3], 0)
    assert (row["psnr"], row["certificate"]) == ([0.0], [None])


@pytest.mark.parametrize("name", ["strength", "strength_cells", "strength_table"])
def test_examples_in_the_docstrings_hold(strength: ModuleType, name: str) -> None:
    told = doctest.testmod(importlib.import_module(name))
    assert told.attempted
    assert not told.failed


@pytest.mark.parametrize(
    "words, message",
    [
        (["--models", "mlpp"], "--models: expected some of"),
        (["--labels", "same"], "--labels: expected some of"),
        (["--states", "six"], "whole numbers, got six"),
        (["--disturb", "jitter", "--attacks", "dlg"], "--disturb: expected none"),
        (["--attacks", "nonsense"], "unknown attack"),
    ],
)
def test_words_that_mean_nothing_are_told_before_anything_runs(
    strength: ModuleType, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        strength.main(words)
    assert message in capsys.readouterr().err


def test_without_data_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delenv("LEAKSCOPE_DATA", raising=False)
    import strength

    with pytest.raises(SystemExit, match="set LEAKSCOPE_DATA"):
        strength.main(["--models", "mlp", "--attacks", "linear-layer"])


class _Broken(Attack):
    """Ends in NaN, its certificate too."""

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        inputs = torch.full((1, *observation.input_shape), torch.nan)
        proof = Certificate.of_share(math.nan, None, "broken")
        return Reconstruction(inputs, None, torch.zeros(1), certificates=(proof,))


class _Claims(Attack):
    """Gives a certificate that falls with the seed, and the better a picture the smaller it is."""

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        shape = (observation.num_examples or 1, *observation.input_shape)
        late = generator.initial_seed() >= 1000
        claims = [1e-9, 1e-3] if late else [1e-2, 1e-2]
        inputs = torch.stack([torch.full(shape[1:], 0.9 if late else 0.4), torch.full(shape[1:], 0.1)])
        proofs = tuple(Certificate.of_share(claim, 0, "claimed") for claim in claims)
        return Reconstruction(inputs, None, torch.zeros(shape[0]), info={"residual": max(claims)}, certificates=proofs)


def test_certificates_follow_their_pictures_and_choose_among_seeds(
    strength: ModuleType, data: Examples, monkeypatch: pytest.MonkeyPatch
) -> None:
    import strength_cells

    monkeypatch.setattr(strength_cells, "named_attack", lambda word: _Claims())
    dark, bright = data.x[:2].flatten(1).mean(1).argsort().tolist()
    cell = strength.Cell("mlp", "untrained", 2, "distinct")
    net = strength.victim("mlp", "untrained", data, Path())
    seen = strength.observe(cell, net, data, [dark, bright], 0)
    once = strength.measure(cell, "claims", seen, data, [dark, bright], 0)
    assert once["certificate"] == [1e-2, 1e-2]
    twice = strength.measure(cell, "claims", seen, data, [dark, bright], 0, tries=3)
    assert (twice["certificate"], twice["tries"]) == ([1e-3, 1e-9], 3)


def _row(attack: str, number: int, psnr: list[float], certificate: list[float], seconds: float) -> dict[str, Any]:
    cell = {"model": "mlp", "state": "6", "batch": 2, "labels": "equal", "disturbance": "none"}
    cell |= {"knowledge": "honest_server", "known_labels": "no", "number": number, "attack": attack, "refused": None}
    return {**cell, "psnr": psnr, "certificate": certificate, "seconds": seconds, "pace": 1.0, "run": "a"}


def test_the_table_counts_exact_images_and_false_certificates(strength: ModuleType) -> None:
    import strength_table

    rows = [
        _row("inverting-gradients", 0, [20.0, 22.0], [], 4.0),
        _row("inverting-gradients", 1, [24.0, 26.0], [], 4.0),
        _row("head-first", 0, [100.0, 120.0], [1e-8, 1e-8], 2.0),
        _row("head-first", 1, [90.0, 60.0], [1e-5, 1e-7], 8.0),
    ]
    text = strength_table.tables(rows)
    assert "| 2, equal | 23.0 [21.0, 25.0] → 92.5 [75.0, 110.0]; exact 2/4, 1 false; time 1.00 |" in text
    assert "| batch | 6 epochs |" in text
    refused = [
        {**row, "refused": "NotApplicable: no", "psnr": []} if row["attack"] == "head-first" else row for row in rows
    ]
    assert "→ refused" in strength_table.tables(refused)
    assert strength_table.tables([]) == strength_table.summary([]) == strength_table.NOTHING
    single = [{**row, "batch": 1, "labels": "distinct", "state": "6"} for row in rows]
    assert "| mlp |  |  | 23.0 → 92.5 |  |  |  |" in strength_table.summary(single)


def test_the_committed_rows_are_of_the_matrix(strength: ModuleType) -> None:
    for row in strength.read_rows(BENCHMARKS / "strength.jsonl"):
        assert row["model"] in strength.VICTIMS
        assert row["labels"] in strength.LABELS
        assert min(row["images"]) >= strength.FIRST


@pytest.mark.slow
def test_the_floor_stands_beside_attacks_and_falls_with_noise(strength: ModuleType, tmp_path: Path) -> None:
    some = ["--states", "untrained", "--batches", "1", "--images", "1", "--attacks", "floor"]
    rows = _run(
        strength, tmp_path, *some, "--disturb", "none,noise:1e-4,noise:1e-3,float16,clip:0.05,prune:0.9,fedavg:2"
    )
    floor = {row["disturbance"]: row["psnr"][0] for row in rows if row["psnr"]}
    assert floor["noise:1e-4"] - floor["noise:1e-3"] == pytest.approx(20, abs=0.1)
    assert floor["none"] > floor["float16"] > floor["noise:1e-3"]
    refused = {row["disturbance"]: row["refused"] for row in rows if row["refused"]}
    assert "weight update" in refused["fedavg:2"]
    assert "| floor |" in strength.every_line(rows)
