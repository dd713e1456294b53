"""Robbing the Fed: exact where an example is alone in its bin, honest where it is not, nothing where nothing is."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import leakscope as ls
from leakscope.attacks import NotApplicable, RobbingTheFed
from leakscope.attacks.imprint import Imprinted, bin_edges, interpolated_quantile, laplace_quantile, normal_quantile
from leakscope.attacks.imprint_reading import read_bins
from leakscope.contracts.attack import MissingKnowledge
from leakscope.contracts.inputs import Box, ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.metrics import assign, psnr

SERVER = Knowledge.malicious_server
SHAPE = (3, 8, 8)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(brightness: list[float], shape: tuple[int, ...] = SHAPE, seed: int = 0, eight_bit: bool = False) -> Tensor:
    """Random pictures in [0, 1] with exactly these means, or nearly where their values are those of 8-bit pictures."""
    x = torch.rand(len(brightness), *shape, generator=draws(seed), dtype=torch.float64)
    wanted = torch.tensor(brightness, dtype=torch.float64).reshape(-1, *[1] * len(shape))
    mean = x.flatten(1).mean(1).reshape(wanted.shape)
    small = torch.minimum(wanted, 1 - wanted)
    x = wanted + (x - mean) * small
    return (x * 255).round() / 255 if eight_bit else x


def net(shape: tuple[int, ...] = SHAPE, seed: int = 0, name: str = "convnet") -> nn.Module:
    model = ls.build_model(name, input_shape=shape, num_classes=4, seed=seed)
    return model.double()


def look(
    attack: RobbingTheFed, x: Tensor, y: Tensor | None = None, protocol: Any = None, model: Any = None, **how: Any
) -> Observation:
    shape = tuple(x.shape[1:])
    sent = attack.prepare(net(shape) if model is None else model, shape)
    labels = torch.arange(len(x)) % 4 if y is None else y
    how.setdefault("knowledge", SERVER)
    how.setdefault("value_range", ValueRange(0, 1))
    return (protocol or ls.FedSGD()).observe(sent, x, labels, **how)


def errors(x: Tensor, found: Tensor) -> Tensor:
    """The largest error of each example's nearest reconstruction."""
    found = found[assign(x, found, cost="psnr")]
    return (x - found).flatten(1).abs().amax(1)


def truly_alone(x: Tensor, model: Any) -> set[int]:
    places = torch.bucketize(x.flatten(1).double() @ model.imprint.row.double(), model.imprint.edges.double()) - 1
    counts = torch.bincount(places, minlength=len(model.imprint.edges) - 1)
    return set(places[counts[places] == 1].tolist())


def certified(attack: RobbingTheFed, seen: Observation) -> set[int]:
    reading = read_bins(seen, seen.model, attack.tolerance)
    return set(reading.places[reading.alone].tolist())


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
    inside = (measured > 0) & (measured < attack._gain)
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
    assert "the variant sparse is made for them" in " ".join(result.notes)
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


# --- nothing where nothing is


def test_noise_is_never_certified_and_the_flags_say_so() -> None:
    attack = RobbingTheFed(bins=64)
    x = pictures([0.3, 0.45, 0.6])
    seen = look(attack, x)
    noise = {n: torch.randn(v.shape, generator=draws(5), dtype=v.dtype) for n, v in seen.message.update.items()}
    result = attack(seen.with_update(noise))
    assert result.info["alone"] == 0
    assert set(result.flags) == {"ill-conditioned", "mixture"}
    assert "altered" in " ".join(result.notes)
    assert float(errors(x, result.inputs).min()) > 0.1


@pytest.mark.parametrize("variant", ["relu", "sparse"])
def test_noise_is_measured_on_bins_that_must_be_empty(variant: str) -> None:
    """Behind moderate noise as many bins are occupied as there are examples, and what is left is the noise."""
    attack = RobbingTheFed(bins=64, variant=variant, gain=1e-6)
    x = pictures([0.3, 0.42, 0.5, 0.6])
    result = attack(look(attack, x, defense=ls.defenses.GradientNoise(sigma=1e-3), generator=draws(8)))
    assert result.info["occupied_bins"] == 4
    assert "ill-conditioned" in result.flags
    assert float(errors(x, result.inputs).max()) < 0.2
    assert float(errors(x, result.inputs).max()) > 1e-6


def test_a_zero_update_is_grey_and_said_so() -> None:
    attack = RobbingTheFed(bins=64)
    seen = look(attack, pictures([0.3, 0.45]))
    result = attack(seen.with_update({name: torch.zeros_like(v) for name, v in seen.message.update.items()}))
    assert float((result.inputs - 0.5).abs().max()) == 0
    assert "zero in every bin" in result.notes[0]
    assert bool(torch.isinf(result.scores).all())


@pytest.mark.parametrize(
    "defense",
    [
        ls.defenses.GradientPruning(fraction=0.3),
        ls.defenses.GradientPruning(fraction=0.9),
        ls.defenses.GradientNoise(sigma=1e-3),
    ],
    ids=repr,
)
@pytest.mark.parametrize("variant", ["relu", "sparse"])
def test_what_a_defence_altered_is_not_certified_unless_it_is_right(defense: Any, variant: str) -> None:
    attack = RobbingTheFed(bins=32, variant=variant)
    x = pictures([0.3, 0.42, 0.5, 0.6, 0.7], eight_bit=True).float()
    seen = look(attack, x, defense=defense, model=net().float())
    reading = read_bins(seen, seen.model, attack.tolerance)
    for picture in reading.pictures[reading.alone]:
        assert float((x.flatten(1) - picture).square().mean(1).min()) < 1e-3


def test_clipping_changes_nothing() -> None:
    attack = RobbingTheFed(bins=32)
    x = pictures([0.3, 0.42, 0.5])
    clipped = ls.defenses.DPSGD(clip=0.01, noise_multiplier=0.0)
    result = attack(look(attack, x, defense=clipped))
    assert float(errors(x, result.inputs).max()) < 1e-8


# --- refusals


def test_refuses_a_model_without_an_imprint() -> None:
    seen = ls.FedSGD().observe(net(), pictures([0.5]), torch.tensor([0]), knowledge=SERVER)
    with pytest.raises(NotApplicable, match="the model has no imprint"):
        RobbingTheFed()(seen)


@pytest.mark.parametrize("missing", ["choose_structure", "num_examples"])
def test_refuses_without_the_power_or_the_number(missing: str) -> None:
    attack = RobbingTheFed()
    seen = look(attack, pictures([0.5]), knowledge=dataclasses.replace(SERVER, **{missing: False}))
    with pytest.raises(MissingKnowledge, match=missing):
        attack(seen)


def test_refuses_what_it_cannot_prepare() -> None:
    attack = RobbingTheFed()
    vertical = ls.build_model("vertical-mlp", input_shape=(16,), num_classes=2)
    with pytest.raises(NotApplicable, match="vertical"):
        attack.prepare(vertical, (16,))
    with pytest.raises(NotApplicable, match="already"):
        attack.prepare(attack.prepare(net(), SHAPE), SHAPE)
    with pytest.raises(ValueError, match="bins: rows of the imprint"):
        RobbingTheFed(bins=10**5).prepare(net(), (3, 1024, 1024))


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"bins": 1}, "bins: expected a whole number of at least 2"),
        ({"gain": 0.0}, "gain"),
        ({"spread": 0.0}, "spread"),
        ({"quantiles": (0.5,)}, "quantiles: expected at least two"),
        ({"quantiles": (0.5, 0.4)}, "quantiles: expected at least two, each above"),
        ({"measurement": "dct"}, "quantiles: expected some for the measurement dct"),
        ({"variant": "dense"}, "variant: expected 'relu' or 'sparse'"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RobbingTheFed(**settings)


def test_fitting_needs_examples() -> None:
    with pytest.raises(ValueError, match="expected at least 17"):
        RobbingTheFed.fitted_to(torch.rand(3, 4))


# --- preparing


def test_prepare_draws_from_its_seed_only() -> None:
    globe = torch.random.get_rng_state()
    quantiles = (0.0, 1.0)
    first, same, other = (
        RobbingTheFed(measurement="random", quantiles=quantiles, seed=seed).prepare(net(), SHAPE).state_dict()
        for seed in (1, 1, 2)
    )
    assert torch.equal(globe, torch.random.get_rng_state())
    assert all(torch.equal(value, same[name]) for name, value in first.items())
    for name in ("imprint.measure.weight", "imprint.spread.weight"):
        assert not torch.equal(first[name], other[name])


def test_prepare_keeps_mode_precision_and_the_users_weights() -> None:
    model = net().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sent = RobbingTheFed().prepare(model, SHAPE)
    assert isinstance(sent, Imprinted)
    assert not sent.training
    assert {p.dtype for p in sent.parameters()} == {torch.float64}
    assert all(torch.equal(value, sent.state_dict()[f"model.{name}"]) for name, value in before.items())
    x = pictures([0.469])  # of middling brightness: passes nearly unchanged
    assert float((sent.imprint(x).detach() - x).abs().max()) < 0.01


def test_quantiles_cut_what_they_were_measured_on_into_equal_parts() -> None:
    values = torch.randn(4000, generator=draws(6), dtype=torch.float64).exp()
    quantiles = torch.quantile(values, (torch.arange(17, dtype=torch.float64) + 0.5) / 17).tolist()
    inner = [interpolated_quantile(place / 16, quantiles) for place in range(1, 16)]
    counts = torch.bincount(torch.bucketize(values, torch.tensor(inner, dtype=torch.float64)), minlength=16)
    assert int(counts.min()) > 0.75 * 250
    assert int(counts.max()) < 1.25 * 250
    assert bin_edges([0.0]).tolist() == [-10.0, 0.0, 10.0]
    assert laplace_quantile(0.9) == pytest.approx(-laplace_quantile(0.1))
    assert normal_quantile(0.5) == 0


def test_the_box_is_that_of_the_observation() -> None:
    """Results stay within the known range."""
    attack = RobbingTheFed(bins=16)
    x = pictures([0.5, 0.5, 0.5, 0.52])
    seen = look(attack, x, y=torch.tensor([0, 1, 2, 3]))
    assert isinstance(seen.inputs, Box)
    found = attack(seen).inputs
    assert float(found.min()) >= 0
    assert float(found.max()) <= 1


def test_steps_that_move_another_example_into_a_bin_are_noticed() -> None:
    """A tiny gain lets bins drift: what is called an example is one all the same, though fewer are."""
    attack, called = RobbingTheFed(bins=16, variant="sparse", gain=0.01), 0
    for seed in range(12):
        brightness = (0.47 + 0.1 * torch.randn(4, generator=draws(seed))).clamp(0.1, 0.9).tolist()
        x = pictures(brightness, seed=seed).float()
        protocol = ls.FedAvg(epochs=5, batch_size=4, lr=0.1)
        seen = look(attack, x, model=net(seed=seed).float(), protocol=protocol)
        reading = read_bins(seen, seen.model, attack.tolerance)
        for picture in reading.pictures[reading.alone]:
            assert float((x.flatten(1) - picture).square().mean(1).min()) < 1e-4
            called += 1
    assert called >= 3


def test_real_pictures_as_many_as_the_guarantee_says(real_data: Path) -> None:
    """64 pictures of CIFAR-10 in 128 bins: those alone are exact and called so, and as many as expected."""
    data = ls.load_data("cifar10", path=real_data / "cifar-10-batches-bin", split="test", limit=1064)
    x, y = data.x[1000:], data.y[1000:]
    attack = RobbingTheFed()
    model = ls.build_model("convnet", filters=8)
    seen = look(attack, x, y, model=model, inputs=data.inputs, value_range=None)
    result = attack(seen)
    alone = truly_alone(x, seen.model)
    low, high = ls.limits.imprint_guarantee(128, 64).interval
    assert low <= len(alone) <= high
    assert certified(attack, seen) == alone
    assert int((psnr(x, result.inputs[assign(x, result.inputs, cost="psnr")]) >= 60).sum()) >= len(alone)
