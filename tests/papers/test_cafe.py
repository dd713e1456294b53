"""The tables of CAFE: published numbers as data, settings, controls, and that the smallest scale runs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from leakscope.attacks.cafe import CAFE
from leakscope.data import Examples, load_data
from leakscope.defenses import DPSGD, FakeGradients, accounting
from leakscope.equations.index_matrix import identify
from leakscope.federation.vertical import draw_batches
from leakscope.models import build_model
from leakscope.papers import base, cafe, reproduce
from leakscope.papers.cafe import RECONSTRUCTIONS, TABLE_11, TRAININGS, Reconstruction, Scene, Training

pytestmark = pytest.mark.slow

TINY = Scene(6, 2, (2, 4), 8)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Examples:
    """Embedded pictures in place of every data set, and scales of a second."""
    found = load_data("tiles")
    monkeypatch.setattr(base, "examples_or_reason", lambda name, **options: found)
    # The accountant takes seconds and has tests of its own; here any noise will do.
    monkeypatch.setattr(accounting, "_noise_multiplier", lambda epsilon, *_: 4 / epsilon)
    small = Reconstruction(TINY, {40: 2, 100: 3}, (100,), (1, 2), 3, (4, 2, 1))
    monkeypatch.setattr(cafe, "RECONSTRUCTIONS", {"smoke": small})
    monkeypatch.setattr(cafe, "FACES", {"smoke": (TINY, 2), "paper": (TINY, 9)})
    monkeypatch.setattr(cafe, "TRAININGS", {"smoke": Training(TINY, 3, 0.05), "paper": TRAININGS["paper"]})
    return found


def test_published_numbers_are_those_of_the_paper() -> None:
    assert [cafe.TABLE_10[k][100] for k in (10, 20, 40, 80, 100)] == [12.30, 14.76, 15.33, 11.84, 11.79]
    assert [cafe.TABLE_10[k][350] for k in (10, 20, 40, 80, 100)] == [24.86, 25.86, 22.62, 21.05, 18.90]
    assert list(TABLE_11.values()) == [0.46, 1.15, 2.69, 2.69, 2.69, 2.69]
    assert sorted(cafe.CONTEXT.values()) == [12.76, 30.96, 41.80, 43.31, 54.74, 57.20, 59.51]


def test_at_full_size_the_single_loop_has_the_published_settings() -> None:
    trials = {trial.setting: trial for trial in cafe.trials_10(RECONSTRUCTIONS["paper"])}
    for k, published in cafe.TABLE_10.items():
        for epoch, value in published.items():
            trial = trials[f"K={k} of 800, epoch {epoch}, single loop"]
            assert (trial.published, trial.scene.samples, trial.scene.batch) == (value, 800, k)
            assert trial.attack == CAFE.preset("cifar10", iterations=epoch * 800 // k)
            assert "cut" not in trial.note
            assert "CIFAR-10 in place of Linnaeus 5" in trial.note
            assert trial.scene.protocol().whole_rounds is None  # fewer rounds than samples leave the loop in the dark
        assert trials[f"K={k} of 800, direct"].attack == CAFE()
    assert (Scene(800, 40).filters, Scene(800, 40).hidden) == ((64, 128), 256)


@pytest.mark.parametrize("scale", ["smoke", "small"])
def test_smaller_scales_keep_the_share_of_a_batch_and_say_what_differs(scale: str) -> None:
    size = RECONSTRUCTIONS[scale]
    for published, ours in size.batches.items():
        assert ours / size.scene.samples == pytest.approx(published / 800)
    compared = [trial for trial in cafe.trials_10(size) if trial.published is not None]
    assert compared
    assert all(f"of {size.scene.samples}, " in trial.note for trial in compared)
    assert all(("search cut" in t.note) == (scale == "smoke") for t in compared if "single" in t.setting)


def test_rounds_determine_every_sample_and_each_is_in_a_whole_one() -> None:
    for scene in (Scene(40, 2), Scene(20, 5), Scene(160, 40), Scene(12, 3)):
        protocol = scene.protocol()
        assert protocol.whole_rounds == cafe.covering(scene.samples, scene.batch) <= (protocol.rounds or 0)
        for seed in range(10):
            generator = torch.Generator().manual_seed(seed)
            drawn = list(draw_batches(scene.samples, scene.batch, protocol.rounds or 0, "uniform", generator))
            assert len(torch.cat(drawn[: protocol.whole_rounds]).unique()) == scene.samples
            assert identify([tuple(batch.tolist()) for batch in drawn], scene.samples).identifiable


def test_weights_are_glorots_and_batchnorm_is_left_alone() -> None:
    net = build_model("cafe-cnn", input_shape=(1, 16, 16), num_classes=3, filters=(4, 8), hidden=16, batchnorm=True)
    cafe.glorot(net, torch.Generator().manual_seed(0))
    weights = dict(net.state_dict())
    bound = math.sqrt(6 / (4 * 25 + 8 * 25))
    assert 0.9 * bound < float(weights["workers.0.conv2.weight"].abs().max()) <= bound
    assert float(weights["workers.3.fc1.bias"].abs().max()) == 0
    assert float(weights["workers.0.norm1.weight"].min()) == 1
    assert not torch.equal(weights["workers.0.fc1.weight"], weights["workers.1.fc1.weight"])


def test_the_control_is_the_mean_of_the_others() -> None:
    x = torch.tensor([0.0, 0.5, 1.0]).reshape(3, 1, 1, 1).expand(3, 1, 2, 2)
    errors = [0.75, 0.0, 0.75]
    assert cafe.without_information(x) == [pytest.approx(-20 * math.log10(e)) if e else math.inf for e in errors]


def test_dp_promises_hold_for_all_rounds() -> None:
    table = cafe.defenses(TRAININGS["paper"])
    assert list(table) == list(TABLE_11)
    assert isinstance(table["fake gradients"], FakeGradients)
    private = [defense for defense in table.values() if isinstance(defense, DPSGD)]
    assert [d.epsilon for d in private] == [10, 5, 1, 0.1]
    assert {(d.clip, d.steps, d.sampling_rate) for d in private} == {(3.0, 8000, 0.05)}


def test_table_10_has_rows_pictures_and_context(tiles: Examples) -> None:
    told: list[tuple[int, int, float]] = []
    result = reproduce("cafe/table10", progress=lambda *call: told.append(call))
    settings = [row.setting for row in result.rows]
    assert settings[:4] == [
        "K=40 of 800, direct",
        *(f"K=100 of 800, {what}" for what in ("epoch 100, single loop", "epoch 350, single loop", "direct")),
    ]
    assert [row.published for row in result.rows[:4]] == [22.62, 11.79, 18.90, 18.90]
    assert [setting.rpartition(", ")[2] for setting in settings[4:10]] == ["direct", *cafe.RIVALS]
    assert {row.verdict for row in result.rows[4:11]} == {"measured"}
    context = [row for row in result.rows if row.setting in cafe.CONTEXT]
    assert len(context) == 7
    assert all(row.verdict == "not run" and "context only" in row.note for row in context)
    assert told[-1][:2] == (10, 10)
    assert [grid.title for grid in result.pictures] == [f"{name}, run with K=3 of 6" for name in settings[2:4]]
    assert not any(grid.private for grid in result.pictures)
    assert result.pictures[0].captions[0].endswith(" dB")


def test_faces_are_the_same_again_and_private_whatever_the_reader_says(tiles: Examples) -> None:
    assert not tiles.private
    first, second = reproduce("cafe/faces"), reproduce("cafe/faces")
    assert first == second
    assert len(first.pictures) == 2
    for grid, again in zip(first.pictures, second.pictures, strict=True):
        assert grid.private
        assert torch.equal(grid.recovered, again.recovered)
        # Originals and recovered belong together, and the caption is their PSNR.
        error = (grid.originals - grid.recovered).square().flatten(1).mean(1)
        assert list(grid.captions) == [f"{-10 * math.log10(float(value)):.1f} dB" for value in error]
        assert 0 <= float(grid.recovered.min()) <= float(grid.recovered.max()) <= 1


def test_table_11_keeps_every_loss(tiles: Examples) -> None:
    told: list[tuple[int, int, float]] = []
    result = reproduce("cafe/table11", progress=lambda *call: told.append(call))
    curves, trainable = result.curves
    assert dict(trainable.lines) == {name: curves.lines[name] for name in ("no defence", "fake gradients")}
    assert list(curves.lines) == [row.setting for row in result.rows] == list(TABLE_11)
    assert all(len(losses) == 3 for losses in curves.lines.values())
    means = [sum(losses) / 3 for losses in curves.lines.values()]  # the last five of three are three
    assert [row.measured for row in result.rows] == pytest.approx(means)
    assert len({losses[0] for losses in curves.lines.values()}) == 1  # the same start and the same first batch
    assert [call[:2] for call in told] == [(n, 18) for n in range(1, 19)]
    json.dumps(result.as_dict(), allow_nan=False)


def test_training_that_diverges_is_a_row_that_says_so(tiles: Examples, monkeypatch: pytest.MonkeyPatch) -> None:
    wild = Training(TINY, 12, 1e30)
    monkeypatch.setattr(cafe, "TRAININGS", {"smoke": wild, "paper": TRAININGS["paper"]})
    result = reproduce("cafe/table11")
    row = result.rows[0]
    assert (row.measured, row.interval, row.verdict) == (None, None, "above")
    assert row.note.startswith(("stopped in round", "the loss is not finite"))
    assert 1 <= len(result.curves[0].lines["no defence"]) <= 12
    json.dumps(result.as_dict(), allow_nan=False)


@pytest.mark.parametrize("name", ["cafe/table10", "cafe/table11", "cafe/faces"])
def test_without_data_every_row_says_why(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="no row could be run"):
        reproduce(name)
    rows = cafe.run_faces("smoke", 0).rows
    assert all(row.verdict == "not run" and "yale" in row.note for row in rows)


def test_faces_come_back(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    result = reproduce("cafe/faces")
    direct, _, control = result.rows
    assert direct.measured > 30
    assert direct.interval[0] > control.interval[1] + 10
    assert direct.count == 12


def test_smallest_trainings_are_in_the_published_order(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    result = reproduce("cafe/table11")
    losses = [row.measured for row in result.rows]
    assert losses == sorted(losses)
    assert losses[0] < losses[1] < result.curves[0].lines["no defence"][0] < losses[2]


def test_the_smallest_table_10_runs_on_its_data(real_data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_DATA", str(real_data))
    rows = {row.setting: row for row in reproduce("cafe/table10").rows}
    assert rows["K=100 of 800, epoch 350, single loop"].measured > rows["K=100 of 800, epoch 100, single loop"].measured
    control = rows["no information, mean of the other pictures"]
    assert rows["K=100 of 800, direct"].interval[0] > control.interval[1]
    compared = [rows[f"comparison, K=3 of 6, {name}"] for name in ("direct", *cafe.RIVALS)]
    assert max(compared, key=lambda row: row.measured) is compared[0]
