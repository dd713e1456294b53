"""Gauss-Newton: exact on smooth nets, honest elsewhere."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from leakscope.attacks import GaussNewton
from leakscope.contracts.channel import Channel
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.defenses import GradientNoise
from leakscope.federation import FedAvg, FedSGD
from leakscope.limits import diagnose
from leakscope.limits.cramer_rao import cramer_rao
from leakscope.matching import GradientMap
from leakscope.models import build_model

pytestmark = pytest.mark.slow

SHAPE = (1, 8, 8)
#: Everything but the defence.
UNTOLD = dataclasses.replace(Knowledge.full, defense=False)


def pictures(count: int, generator: torch.Generator) -> torch.Tensor:
    x = torch.rand(count, *SHAPE, generator=generator, dtype=torch.float64)
    return (x + x.roll(1, 2) + x.roll(1, 3)) / 3


def net(activation: str = "sigmoid", init: str = "uniform", classes: int = 6):
    model = build_model("dlg-lenet", input_shape=SHAPE, num_classes=classes, activation=activation, init=init)
    return model.double()


@pytest.mark.parametrize("activation", ["sigmoid", "tanh", "softplus", "gelu", "silu"])
def test_one_example_to_the_last_digit_in_a_handful_of_steps(activation, generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    seen = FedSGD().observe(net(activation, "uniform" if activation == "sigmoid" else "default"), x, y)
    found = GaussNewton()(seen, seed=1)
    assert float((found.inputs - x).square().mean()) < 1e-18
    assert found.info["steps"] <= 15
    assert found.info["restarts"] == 1
    assert found.flags == ()
    assert diagnose(seen, found).outcome == "recovered"
    assert found.labels is not None
    assert found.labels.tolist() == [3]


def test_a_batch_with_different_labels(generator) -> None:
    x, y = pictures(4, generator), torch.tensor([0, 2, 3, 5])
    found = GaussNewton()(FedSGD().observe(net(), x, y, knowledge=Knowledge.full), seed=0)
    assert float((found.inputs - x).square().mean()) < 1e-18


def test_equal_labels_come_in_some_order(generator) -> None:
    x, y = pictures(2, generator), torch.tensor([2, 2])
    found = GaussNewton(steps=120)(FedSGD().observe(net(), x, y, knowledge=Knowledge.full), seed=0)
    errors = [float((found.inputs[list(order)] - x).square().mean()) for order in ([0, 1], [1, 0])]
    assert "ill-conditioned" in found.flags or min(errors) < 1e-15


def test_noise_leaves_no_more_than_theory_allows(generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    model = net()
    errors, floors = [], []
    for draw in range(5):
        noise = torch.Generator().manual_seed(draw)
        seen = FedSGD().observe(model, x, y, GradientNoise(sigma=1e-3), UNTOLD, noise)
        found = GaussNewton(noise=1e-3)(seen, seed=draw)
        assert found.flags == ()
        errors.append(float((found.inputs - x).square().mean()))
        mapping = GradientMap.of(seen, y)
        floors.append(cramer_rao(mapping, mapping.flat(x), Channel(noise=1e-3)).rmse ** 2)
    ratio = (sum(errors) / sum(floors)) ** 0.5
    assert 0.8 < ratio < 1.5


def test_a_prior_beats_the_floor_of_unbiased_attacks(generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    seen = FedSGD().observe(net(), x, y, GradientNoise(sigma=0.05), UNTOLD)
    plain = GaussNewton(noise=0.05, restarts=1)(seen, seed=0).inputs
    smooth = GaussNewton(noise=0.05, smoothness=0.15, restarts=1)(seen, seed=0).inputs
    assert float((smooth - x).square().mean()) < float((plain - x).square().mean())
    # Without any noise that is known, an update outweighs every prior.
    unaware = [GaussNewton(smoothness=size, restarts=1)(seen, seed=0).inputs for size in (0.0, 0.15)]
    assert torch.equal(*unaware)


def test_no_label_is_needed_where_the_output_gradient_is_seen(generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    seen = FedSGD().observe(net(), x, y)
    for hold in (True, False):
        found = GaussNewton(hold_output_gradient=hold)(seen, seed=0)
        assert found.info["output_gradient_held"] is hold
        assert float((found.inputs - x).square().mean()) < 1e-18


@pytest.mark.parametrize("end", [torch.nn.Softmax(dim=1), torch.nn.Tanh()])
def test_a_head_that_is_not_the_end_is_not_held(end, generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    model = torch.nn.Sequential(*net(), end)
    found = GaussNewton()(FedSGD().observe(model, x, y, knowledge=Knowledge.full), seed=0)
    assert found.info["output_gradient_held"] is False
    assert float((found.inputs - x).square().mean()) < 1e-15


def test_untold_noise_is_no_fault_of_the_search(generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    seen = FedSGD().observe(net(), x, y, GradientNoise(sigma=1e-3), UNTOLD)
    found = GaussNewton()(seen, seed=0)
    assert found.flags == ()
    assert found.info["restarts"] == 2
    assert float((found.inputs - x).square().mean()) < 1e-3


def test_an_update_of_zeros_is_flagged(generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    seen = FedSGD().observe(net(), x, y, knowledge=Knowledge.full)
    nothing = seen.with_update({name: torch.zeros_like(value) for name, value in seen.message.update.items()})
    assert GaussNewton(restarts=1, steps=3)(nothing, seed=0).flags


def test_gradients_that_all_but_vanish_do_not_hang(generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    model = net()
    with torch.no_grad():
        model.fc.bias[3] += 60
    found = GaussNewton(restarts=1, steps=5)(FedSGD().observe(model, x, y), seed=0)
    assert torch.isfinite(found.inputs).all()


def test_large_models_are_declined(generator) -> None:
    big = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 60_000), torch.nn.Tanh(), torch.nn.Linear(60_000, 4)
    )
    seen = FedSGD().observe(big, pictures(1, generator).float(), torch.tensor([1]))
    with pytest.raises(NotApplicable, match="too large"):
        GaussNewton()(seen)


def test_kinks_are_declined_or_told(generator) -> None:
    x, y = pictures(1, generator), torch.tensor([3])
    seen = FedSGD().observe(net("relu", "default"), x, y)
    with pytest.raises(NotApplicable, match=r"Relu.*smooth_only=False"):
        GaussNewton()(seen)
    found = GaussNewton(smooth_only=False, steps=3, restarts=1)(seen, seed=0)
    assert "ill-conditioned" in found.flags


def test_a_weight_update_of_one_step_is_a_gradient(generator) -> None:
    x, y = pictures(2, generator), torch.tensor([1, 4])
    one = FedAvg(epochs=1, batch_size=2, lr=0.1).observe(net(), x, y, knowledge=Knowledge.full)
    found = GaussNewton()(one, seed=0)
    assert float((found.inputs - x).square().mean()) < 1e-15
    assert "steps not simulated" not in found.flags
    many = FedAvg(epochs=2, batch_size=1, lr=0.1).observe(net(), x, y, knowledge=Knowledge.full)
    assert "steps not simulated" in GaussNewton(steps=2, restarts=1)(many, seed=0).flags


def test_float32_updates_are_solved_in_float64(generator) -> None:
    x, y = pictures(1, generator).float(), torch.tensor([3])
    found = GaussNewton()(FedSGD().observe(net().float(), x, y), seed=0)
    assert found.inputs.dtype == torch.float32
    assert float((found.inputs - x).abs().max()) < 1e-4


def test_settings_are_checked_all_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)steps:.*damping:.*noise:.*smoothness:"):
        GaussNewton(steps=0, damping=-1, noise=-1, smoothness=-1.0)


def test_a_real_image(real_data) -> None:
    from leakscope.data import load_data

    part = load_data("mnist", real_data, split="test", limit=1)
    x = torch.nn.functional.avg_pool2d(part.x, 2).double()
    model = build_model("dlg-lenet", input_shape=(1, 14, 14), num_classes=10).double()
    found = GaussNewton()(FedSGD().observe(model, x, part.y), seed=0)
    assert float((found.inputs - x).square().mean()) < 1e-15
