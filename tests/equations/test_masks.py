"""Masks of a layer, decoded from its weight gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leakscope.equations.gated_equations import LayerEquations, Masks, decode_masks

EXAMPLES, UNITS, INPUTS, PLACES = 2, 6, 40, 12


class Layer:
    """A layer with random signals and patches, and pre-activations whose signs are the true masks."""

    def __init__(self, seed: int = 0, *, bias: bool = True, inputs: int = INPUTS) -> None:
        draws = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draws, dtype=torch.float64)

        self.signal, self.patches = normal(EXAMPLES, UNITS, PLACES), normal(EXAMPLES, inputs, PLACES)
        self.received = normal(EXAMPLES, UNITS, PLACES)
        self.truth = self.received > 0
        self.bias, self.draws = bias, draws

    def equations(self, noise: float = 0.0) -> LayerEquations:
        active = self.signal * self.truth
        gradient = torch.einsum("ncl,npl->cp", active, self.patches)
        noise = noise * float(gradient.norm()) / gradient.numel() ** 0.5
        gradient = gradient + noise * torch.randn(gradient.shape, generator=self.draws, dtype=torch.float64)
        return LayerEquations(self.signal, self.patches, gradient, active.sum((0, 2)) if self.bias else None)

    def disturbed(self, error: float) -> Tensor:
        """What the gate receives of an approximate input: off by twice the error at most, so wrong masks are free."""
        off = torch.rand(self.received.shape, generator=self.draws, dtype=torch.float64)
        return self.received + error * (4 * off - 2)

    def decode(self, error: float, noise: float = 0.0) -> tuple[Masks, Tensor]:
        received = self.disturbed(error)
        found = decode_masks(
            self.equations(noise), received > 0, received.abs() < 3 * error, 1 + (received / error) ** 2
        )
        return found, received > 0


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("error", [0.1, 0.2])
def test_true_masks_are_found_from_a_disturbed_input(error: float, bias: bool) -> None:
    exact = before = after = 0
    for seed in range(20):
        layer = Layer(seed, bias=bias)
        found, forward = layer.decode(error)
        wrong = found.active != layer.truth
        before, after = before + int((forward != layer.truth).sum()), after + int(wrong.sum())
        assert bool((layer.signal[wrong].abs() < 0.3).all()), "only what hardly counts is missed"
        if not wrong.any():
            exact += 1
            assert found.residual < 1e-12
            assert found.whole < 1e-12
            assert bool(found.kept.all())
    assert before > 80, "there is something to find"
    assert after < before / 10
    assert exact >= 16


def test_a_little_noise_does_not_hide_them() -> None:
    layer = Layer(1)
    found, forward = layer.decode(0.2, noise=0.01)
    wrong = [(layer.truth != masks).sum() for masks in (forward, found.active)]
    assert wrong[0] > 5
    assert wrong[1] <= 1, "one of hardly any signal, perhaps"
    assert 0.001 < found.residual < 0.05


def test_the_bias_is_one_more_equation() -> None:
    """With fewer equations than doubtful units the right masks are not found as often without it."""
    wrong = {True: 0, False: 0}
    for bias in wrong:
        for seed in range(30):
            layer = Layer(seed, bias=bias, inputs=3)
            wrong[bias] += int((layer.decode(0.15)[0].active != layer.truth).sum())
    assert wrong[True] < wrong[False]


def test_right_masks_are_left_alone() -> None:
    layer = Layer(2)
    everywhere = torch.ones_like(layer.truth)
    found = decode_masks(layer.equations(), layer.truth, everywhere, 1 + layer.received**2)
    assert torch.equal(found.active, layer.truth)
    assert found.whole < 1e-12


def test_without_free_units_nothing_changes() -> None:
    layer = Layer(3)
    forward = layer.disturbed(0.5) > 0
    nowhere = torch.zeros_like(forward)
    found = decode_masks(layer.equations(), forward, nowhere, torch.ones_like(layer.received))
    assert torch.equal(found.active, forward)
    rest = torch.einsum("ncl,npl->cp", layer.signal * (layer.truth ^ forward), layer.patches)
    assert found.whole > 0.1 < float(rest.norm())


def test_only_free_units_flip() -> None:
    layer = Layer(4)
    forward, free = ~layer.truth, torch.zeros_like(layer.truth)
    free[0, :, :4] = True
    found = decode_masks(layer.equations(), forward, free, torch.full_like(layer.received, 1.5))
    assert torch.equal(found.active[~free], forward[~free])


def test_a_unit_with_too_many_free_masks_keeps_them() -> None:
    layer = Layer(5)
    forward = layer.disturbed(0.5) > 0
    free = torch.ones_like(forward)
    free[:, 0] = False
    free[0, 0, :3] = True
    found = decode_masks(layer.equations(), forward, free, torch.full_like(layer.received, 1.5), most_free=3)
    assert torch.equal(found.active[:, 1:], forward[:, 1:])


def test_units_with_wrong_equations_are_trimmed_and_told_in_the_whole() -> None:
    layer = Layer(6)
    exact = layer.equations()
    gradient = exact.gradient.clone()
    gradient[2] += 3 * gradient[2].norm()
    equations = LayerEquations(exact.signal, exact.patches, gradient, exact.bias_gradient)
    found = decode_masks(equations, layer.truth, layer.received.abs() < 0.3, 1 + (layer.received / 0.1) ** 2)
    assert found.kept.tolist() == [True, True, False, True, True, True]
    assert found.residual < 1e-12
    assert found.whole > 0.1
    others = [0, 1, 3, 4, 5]
    assert torch.equal(found.active[:, others], layer.truth[:, others])


def test_a_unit_without_signal_is_not_counted_on() -> None:
    layer = Layer(7)
    layer.signal[:, 4] = 0
    found, forward = layer.decode(0.05)
    assert found.kept.tolist() == [True] * 4 + [False, True]
    assert torch.equal(found.active[:, 4], forward[:, 4]), "nothing tells its masks"
    layer.signal.zero_()
    silent, _ = layer.decode(0.2)
    assert not silent.kept.any()
    assert silent.whole == 0


def test_a_leaky_gate_is_one_of_zero_and_one_after_a_shift() -> None:
    """What a shut gate passes on is known: taken off, the rest has masks of 0 and 1."""
    layer, slope = Layer(8), 0.1
    gates = torch.where(layer.truth, layer.signal.new_ones(()), slope)
    gradient = torch.einsum("ncl,npl->cp", layer.signal * gates, layer.patches)
    passed = slope * layer.signal
    equations = LayerEquations(
        signal=layer.signal - passed,
        patches=layer.patches,
        gradient=gradient - torch.einsum("ncl,npl->cp", passed, layer.patches),
        bias_gradient=(layer.signal * gates).sum((0, 2)) - passed.sum((0, 2)),
    )
    received = layer.disturbed(0.2)
    found = decode_masks(equations, received > 0, received.abs() < 0.6, 1 + (received / 0.2) ** 2)
    assert torch.equal(found.active, layer.truth)
    assert found.whole < 1e-12
