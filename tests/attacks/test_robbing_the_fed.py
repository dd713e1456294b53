"""Robbing the Fed: exact where an example is alone in its bin, honest where it is not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import leakscope as ls
from imprint_cases import SERVER, SHAPE, certified, draws, errors, look, net, pictures, truly_alone
from leakscope.attacks import RobbingTheFed
from leakscope.attacks.robbing_the_fed.imprint import read_bins
from leakscope.contracts.inputs import ValueRange
from leakscope.metrics import assign

# --- exact cases


@pytest.mark.parametrize("variant", ["relu", "sparse"])
@pytest.mark.parametrize("connection", ["add", "replace"])
def test_one_example_a_bin_is_exact_with_the_lowest_and_the_top_bin(variant: str, connection: str) -> None:
    attack = RobbingTheFed(bins=32, variant=variant, connection=connection)
    x = pictures([0.1, 0.3, 0.42, 0.5, 0.61, 0.93])
    seen = look(attack, x)
    assert truly_alone(x, seen.model) >= {0, 31}
    result = attack(seen, seed=0)
    assert float(errors(x, result.inputs).max()) < 1e-10
    assert result.flags == ()
    assert result.diagnosis is not None
    assert result.diagnosis.outcome == "recovered"
    assert result.labels is not None
    assert torch.equal(result.labels[assign(x, result.inputs)], torch.arange(6) % 4)


def test_no_picture_of_all_examples_appears() -> None:
    attack = RobbingTheFed(bins=32)
    x = pictures([0.3, 0.42, 0.5, 0.61])
    seen = look(attack, x)
    found = attack(seen).inputs
    reading = read_bins(seen, seen.model, attack.tolerance)
    assert len(reading.places) == 4
    update = seen.message.update
    everything = update["imprint.measure.weight"][0] / update["imprint.measure.bias"][0]
    assert float((found.flatten(1) - everything).norm(dim=1).min()) > 0.1


@pytest.mark.parametrize("size", [1, 5])
def test_float32_is_exact_to_far_beyond_sight(size: int) -> None:
    attack = RobbingTheFed(bins=64)
    x = pictures([0.25, 0.36, 0.45, 0.55, 0.7][:size]).float()
    result = attack(look(attack, x, model=net().float()))
    assert float(errors(x, result.inputs).max()) < 1e-3


def test_units_of_one_example_have_the_same_output_gradient_to_the_last_bit() -> None:
    attack = RobbingTheFed(bins=16)
    model: Any = attack.prepare(net().float(), SHAPE)
    x = pictures([0.4, 0.6]).float()
    measured = model.imprint.measure(x.flatten(1))
    number = model.imprint.combine(model.imprint.activation(measured))
    outputs = model.model(x + model.imprint.spread(number).reshape(x.shape))
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(outputs, torch.tensor([0, 1])), measured)
    for row in gradient:
        assert len(row[row != 0].unique()) == 1


def test_intervals_of_the_sparse_form_tile() -> None:
    attack = RobbingTheFed(bins=24, variant="sparse")
    model: Any = attack.prepare(net(), SHAPE)
    x = pictures(torch.linspace(0.02, 0.98, 200).tolist())
    measured = model.imprint.measure(x.flatten(1))
    inside = (measured > 0) & (measured < model.imprint.gain)
    assert bool((inside.sum(1) == 1).all())


# --- mixtures


@pytest.mark.parametrize("variant", ["relu", "sparse"])
def test_two_in_a_bin_are_their_weighted_mean_and_flagged(variant: str) -> None:
    attack = RobbingTheFed(bins=16, variant=variant)
    x = pictures([0.3, 0.5, 0.5, 0.7])
    seen = look(attack, x, y=torch.tensor([0, 2, 2, 1]))
    result = attack(seen)
    assert "mixture" in result.flags
    assert result.diagnosis is not None
    assert result.diagnosis.outcome == "undecided"
    assert result.inputs.shape == x.shape
    exact = errors(x, result.inputs) < 1e-9
    assert exact.tolist() == [True, False, False, True]
    assert certified(attack, seen) == truly_alone(x, seen.model)
    reading = read_bins(seen, seen.model, attack.tolerance)
    shared = reading.pictures[~reading.alone][0]
    basis = x[1:3].flatten(1)
    weights = torch.linalg.lstsq(basis.T, shared[:, None]).solution.flatten()
    assert float(weights.sum()) == pytest.approx(1, abs=1e-9)
    assert float((weights @ basis - shared).abs().max()) < 1e-9


@pytest.mark.parametrize("eight_bit", [True, False])
def test_never_certifies_a_mixture(eight_bit: bool) -> None:
    """Many crowded batches: what is called alone is alone, and nearly all that are alone are called so."""
    attack, alone, missed = RobbingTheFed(bins=16), 0, 0
    for seed in range(12):
        brightness = (0.47 + 0.1 * torch.randn(10, generator=draws(seed))).clamp(0.1, 0.9).tolist()
        x = pictures(brightness, seed=seed, eight_bit=eight_bit).float()
        seen = look(attack, x, y=torch.randint(4, (10,), generator=draws(seed + 50)), model=net(seed=seed).float())
        true, called = truly_alone(x, seen.model), certified(attack, seen)
        assert called <= true
        alone, missed = alone + len(true), missed + len(true - called)
    assert alone > 30
    assert missed <= 0.1 * alone


def test_as_many_bins_as_examples_is_a_proof_where_no_witness_is() -> None:
    """Without a known range, with batch statistics and a loss of another kind, the count alone tells."""
    attack = RobbingTheFed(bins=32)
    x = pictures([0.3, 0.45, 0.6])
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    targets = torch.randn(3, 2, generator=draws(1), dtype=torch.float64)
    knowledge = dataclasses.replace(SERVER, normalisation=False)
    task = ls.contracts.task.TASKS["regression"].target()
    seen = look(attack, x, targets, model=model, task=task, knowledge=knowledge, value_range=None)
    result = attack(seen)
    assert float(errors(x, result.inputs).max()) < 1e-10
    assert result.flags == ()
    assert result.labels is None


# --- whatever data


def test_normalised_pictures_with_fitted_quantiles() -> None:
    mean, std = torch.tensor([0.5, 0.4, 0.45]), torch.tensor([0.25, 0.2, 0.3])
    brightness = (0.47 + 0.1 * torch.randn(80, generator=draws(1))).clamp(0.1, 0.9).tolist()
    every = (pictures(brightness) - mean.reshape(3, 1, 1)) / std.reshape(3, 1, 1)
    attack = RobbingTheFed.fitted_to(every[:64], bins=256)
    space = ValueRange.normalised(tuple(mean.tolist()), tuple(std.tolist()))
    x = every[64:]
    seen = look(attack, x, value_range=space)
    result = attack(seen)
    alone = truly_alone(x, seen.model)
    assert len(alone) >= 12
    assert certified(attack, seen) == alone
    assert int((errors(x, result.inputs) < 1e-8).sum()) >= len(alone)


def test_thresholds_of_other_data_are_told() -> None:
    x = pictures([0.3, 0.5])
    for attack, space, told in (
        (RobbingTheFed(), ValueRange(0, 1), False),
        (RobbingTheFed(), ValueRange(-2, 2), True),
        (RobbingTheFed(placement="normal"), ValueRange(-2, 2), False),
    ):
        notes = attack(look(attack, 4 * x - 2 if space.low == (-2.0,) else x, value_range=space)).notes
        assert any("fitted_to" in note for note in notes) == told


@pytest.mark.parametrize("measurement", ["mean", "dct", "random"])
@pytest.mark.parametrize("shape", [(1, 9, 7), (4, 8, 8)])
def test_measurements_and_channels(measurement: str, shape: tuple[int, ...]) -> None:
    brightness = (0.47 + 0.1 * torch.randn(40, generator=draws(2))).clamp(0.1, 0.9).tolist()
    every = pictures(brightness, shape)
    attack = RobbingTheFed.fitted_to(every[:34], measurement=measurement, frequency=3, bins=128, seed=4)
    x = every[34:]
    seen = look(attack, x, model=net(shape))
    alone = truly_alone(x, seen.model)
    assert len(alone) >= 4
    assert certified(attack, seen) == alone


def test_rows_of_a_table() -> None:
    every = torch.randn(70, 12, generator=draws(3), dtype=torch.float64) + 3
    attack = RobbingTheFed.fitted_to(every[:60], bins=128)
    model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)).double()
    knowledge = dataclasses.replace(SERVER, normalisation=False)
    seen = look(attack, every[60:], model=model, knowledge=knowledge, value_range=None)
    result = attack(seen)
    alone = truly_alone(every[60:], seen.model)
    assert len(alone) >= 6
    assert int((errors(every[60:], result.inputs) < 1e-8).sum()) >= len(alone)


def test_models_that_ignore_a_constant_shift() -> None:
    attack = RobbingTheFed(bins=64)
    model = nn.Sequential(nn.InstanceNorm2d(3), nn.Flatten(), nn.Linear(192, 4)).double()
    x = pictures([0.3, 0.5, 0.6])
    assert float(errors(x, attack(look(attack, x, model=model)).inputs).max()) < 1e-8


@pytest.mark.parametrize("protocol", [ls.FedSGD(reduction="sum"), ls.FedSGD(batchnorm="train")], ids=repr)
def test_sums_and_batch_statistics(protocol: Any) -> None:
    attack = RobbingTheFed(bins=64)
    x = pictures([0.3, 0.45, 0.6, 0.7])
    result = attack(look(attack, x, protocol=protocol, model=net(name="resnet8")))
    assert float(errors(x, result.inputs).max()) < 1e-8
    assert result.flags == ()


# --- local training


def test_one_local_step_is_as_good_as_a_gradient() -> None:
    attack = RobbingTheFed(bins=64)
    x = pictures([0.3, 0.45, 0.6, 0.7]).float()
    protocol = ls.FedAvg(epochs=1, batch_size=4, lr=0.01)
    result = attack(look(attack, x, protocol=protocol, model=net().float()))
    assert float(errors(x, result.inputs).max()) < 1e-3
    assert result.labels is not None  # the rate is known, so that a label's gradient can be told


@pytest.mark.parametrize("rate", [0.1, 0.001])
@pytest.mark.parametrize("size", [4, 2])
def test_five_local_epochs_of_the_sparse_form(rate: float, size: int) -> None:
    attack = RobbingTheFed(bins=64, variant="sparse")
    x = pictures([0.3, 0.45, 0.6, 0.7]).float()
    protocol = ls.FedAvg(epochs=5, batch_size=size, lr=rate)
    result = attack(look(attack, x, protocol=protocol, model=net().float()))
    assert float(errors(x, result.inputs).max()) < 1e-4
    assert result.flags == ()


@pytest.mark.parametrize("variant", ["relu", "sparse"])
@pytest.mark.parametrize("brightness", [0.95, 0.5])
@pytest.mark.parametrize("epochs", [1, 3])
def test_steps_of_another_optimiser_are_never_certified(variant: str, brightness: float, epochs: int) -> None:
    """Adam's first step keeps the sign of the gradient only: a white picture, right in the top bin."""
    attack = RobbingTheFed(bins=16, variant=variant)
    protocol = ls.FedAvg(epochs=epochs, batch_size=1, lr=1e-3, optimizer="adam")
    result = attack(look(attack, pictures([brightness]).float(), protocol=protocol, model=net().float()))
    assert result.info["alone"] == 0
    assert result.flags != ()
    assert "optimiser" in " ".join(result.notes)


def test_several_steps_of_the_relu_form_are_told() -> None:
    attack = RobbingTheFed(bins=64)
    protocol = ls.FedAvg(epochs=3, batch_size=2, lr=0.01)
    result = attack(look(attack, pictures([0.3, 0.6]).float(), protocol=protocol, model=net().float()))
    assert "variant sparse" in " ".join(result.notes)
    assert result.flags != ()


def test_the_model_behind_the_block_trains_on() -> None:
    """As well as without it, nearly."""
    tiles = ls.load_data("tiles", limit=32)
    plain = ls.build_model("convnet", num_classes=9, filters=8)
    sent = RobbingTheFed(variant="sparse").prepare(ls.build_model("convnet", num_classes=9, filters=8), tiles.shape)
    fallen = []
    for model in (plain, sent):
        optimiser = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
        losses = []
        for _ in range(40):
            loss = nn.functional.cross_entropy(model(tiles.x), tiles.y)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(float(loss.detach()))
        fallen.append(losses[0] - losses[-1])
    assert fallen[0] > 1
    assert fallen[1] > 0.9 * fallen[0]
