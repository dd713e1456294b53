"""Each defence does exactly what its definition says."""

from __future__ import annotations

import pytest
import torch

from leakscope.defenses import DEFENSES, GradientNoise, GradientPruning


@pytest.fixture
def update() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(40, 30, generator=generator), "b": 10 * torch.randn(40, generator=generator)}


def test_noise_has_the_stated_size_and_follows_the_generator(update, generator) -> None:
    noisy = GradientNoise(sigma=0.5).protect_message(update, generator)
    difference = torch.cat([(noisy[k] - v).flatten() for k, v in update.items()])
    assert abs(float(difference.std()) - 0.5) < 0.03
    again = GradientNoise(sigma=0.5).protect_message(update, torch.Generator().manual_seed(0))
    assert all(torch.equal(noisy[k], again[k]) for k in update)
    same = GradientNoise(sigma=0.0).protect_message(update, generator)
    assert all(torch.equal(same[k], v) for k, v in update.items())


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.9, 0.99])
def test_pruning_keeps_exactly_the_largest(fraction, update, generator) -> None:
    pruned = GradientPruning(fraction=fraction).protect_message(update, generator)
    for name, value in update.items():
        kept = pruned[name] != 0
        assert int((~kept).sum()) == int(fraction * value.numel())
        assert torch.equal(pruned[name][kept], value[kept])
        if fraction:
            assert float(value[kept].abs().min()) >= float(value[~kept].abs().max())


def test_global_pruning_has_one_threshold_and_pruning_twice_is_pruning_once(update, generator) -> None:
    rule = GradientPruning(fraction=0.5, scope="global")
    once = rule.protect_message(update, generator)
    assert sum(int((v == 0).sum()) for v in once.values()) == 620
    assert int((once["b"] == 0).sum()) < 10
    twice = rule.protect_message(once, generator)
    assert all(torch.equal(once[k], twice[k]) for k in once)


def test_ties_are_deterministic(generator) -> None:
    flat = {"w": torch.ones(10)}
    assert int(GradientPruning(fraction=0.5).protect_message(flat, generator)["w"].sum()) == 5


@pytest.mark.parametrize(
    "make",
    [
        lambda: GradientNoise(sigma=-1),
        lambda: GradientNoise(sigma=float("nan")),
        lambda: GradientPruning(fraction=1.0),
        lambda: GradientPruning(fraction=-0.1),
        lambda: GradientPruning(scope="layer"),
    ],
)
def test_bad_settings_are_refused(make) -> None:
    with pytest.raises(ValueError, match="expected"):
        make()


@pytest.mark.parametrize("name", DEFENSES)
def test_every_defence_keeps_shape_and_type_and_leaves_its_input_alone(name, update) -> None:
    double = {k: v.double() for k, v in update.items()}
    before = {k: v.clone() for k, v in double.items()}
    out = DEFENSES[name].target().protect_message(double, torch.Generator().manual_seed(1))
    assert list(out) == list(double)
    for k, v in out.items():
        assert v.shape == double[k].shape
        assert v.dtype == torch.float64
        assert torch.equal(before[k], double[k])
