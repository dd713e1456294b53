"""Robbing the Fed: nothing where nothing is, refusals, and how the server prepares the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

import leakscope as ls
from imprint_cases import SERVER, SHAPE, certified, draws, errors, look, net, pictures, truly_alone
from leakscope.attacks import RobbingTheFed
from leakscope.attacks.robbing_the_fed import bin_edges, interpolated_quantile, laplace_quantile, normal_quantile
from leakscope.attacks.robbing_the_fed.imprint import Imprinted, read_bins
from leakscope.contracts.errors import MissingKnowledge, NotApplicable
from leakscope.contracts.inputs import Box
from leakscope.metrics import assign, psnr

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
    with pytest.raises(NotApplicable, match="imprint"):
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
    with pytest.raises(ValueError, match=r"^bins"):
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
    with pytest.raises(ValueError, match=r"examples.*17"):
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
