"""From nearly right inputs of a dense layer to the exact ones, with a certificate that wrong ones do not get."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from leakscope.equations.dense_signals import NEAR, SPARE, positive_peak, separate


class Layer:
    """A dense layer of 60 units, an activation, and a linear head of three outputs; what a client sends of it."""

    def __init__(self, count: int = 6, width: int = 30, slope: Callable[[Tensor], Tensor] | None = None, seed: int = 0):
        draws = torch.Generator().manual_seed(seed)
        self.weight = torch.randn((60, width), generator=draws).double() / width**0.5
        self.bias = 0.3 * torch.randn(60, generator=draws).double()
        self.head = torch.randn((3, 60), generator=draws).double()
        self.inputs = torch.rand((count, width), generator=draws).double() - 0.3
        self.slope = slope or (lambda inner: (inner > 0).double())
        self.back = torch.randn((count, 3), generator=draws).double()
        self.signals = torch.einsum("nuk,nk->nu", self.jacobian(self.inputs), self.back)
        self.noise = torch.randn(self.inputs.shape, generator=draws).double()

    def jacobian(self, rows: Tensor) -> Tensor:
        return self.slope(rows @ self.weight.T + self.bias)[:, :, None] * self.head.T

    @property
    def gradient(self) -> Tensor:
        return self.signals.T @ self.inputs

    def near(self, error: float) -> Tensor:
        return self.inputs + error * self.noise


@pytest.mark.parametrize("seed", range(3))
def test_exact_from_nearly_right_inputs(seed) -> None:
    layer = Layer(seed=seed)
    found = separate(layer.gradient, layer.signals.sum(0), layer.near(0.03), layer.jacobian)
    assert found.certified
    assert found.residual < 1e-10
    torch.testing.assert_close(found.inputs, layer.inputs, atol=1e-8, rtol=0)
    torch.testing.assert_close(found.signals, layer.signals, atol=1e-8, rtol=0)
    torch.testing.assert_close(found.output_gradients, layer.back, atol=1e-7, rtol=0)
    assert (found.obeyed >= NEAR).all()


def test_scale_order_and_float32_do_not_matter() -> None:
    layer = Layer()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    found = separate(1e-4 * layer.gradient, 1e-4 * layer.signals.sum(0), layer.near(0.03)[order], layer.jacobian)
    torch.testing.assert_close(found.inputs, layer.inputs[order], atol=1e-8, rtol=0)
    rounded = separate(layer.gradient.float(), layer.signals.sum(0).float(), layer.near(0.03), layer.jacobian)
    assert rounded.certified
    torch.testing.assert_close(rounded.inputs, layer.inputs, atol=1e-4, rtol=0)


def test_inputs_that_are_far_away_are_not_certified() -> None:
    layer = Layer()
    other = Layer(seed=9)
    for start in (layer.near(3.0), other.inputs):
        found = separate(layer.gradient, layer.signals.sum(0), start, layer.jacobian)
        off = (found.inputs - layer.inputs).abs().amax()
        assert torch.isfinite(found.inputs).all()
        assert not found.certified or any(
            torch.allclose(found.inputs[row], truth, atol=1e-6) for row in range(6) for truth in layer.inputs
        ), float(off)


def test_the_wrong_model_and_a_gradient_of_noise_are_not_certified() -> None:
    layer, other = Layer(), Layer(seed=9)
    assert not separate(layer.gradient, layer.signals.sum(0), layer.inputs, other.jacobian).certified
    noise = torch.randn(layer.gradient.shape, generator=torch.Generator().manual_seed(1)).double()
    assert not separate(noise, noise.sum(1), layer.inputs, layer.jacobian).certified


def test_as_many_outputs_as_units_certify_nothing() -> None:
    """With one layer alone any signals are those of some output gradients, and any inputs explain the gradient."""
    layer = Layer()
    mixed = layer.inputs + 0.5 * layer.inputs.roll(1, 0)
    itself = torch.eye(60, dtype=torch.float64)
    found = separate(layer.gradient, layer.signals.sum(0), mixed, lambda rows: itself.expand(len(rows), 60, 60))
    assert found.residual < 1e-6
    assert found.spare < SPARE
    assert not found.certified


def test_smooth_activations_are_approached() -> None:
    layer = Layer(slope=lambda inner: 1 - torch.tanh(inner) ** 2)
    start = layer.near(0.03)
    found = separate(layer.gradient, layer.signals.sum(0), start, layer.jacobian)
    assert (found.inputs - layer.inputs).norm() < 0.1 * (start - layer.inputs).norm()


def test_without_a_bias_gradient_directions_are_exact_and_the_scale_is_the_callers() -> None:
    layer = Layer()
    layer.bias = torch.zeros(60, dtype=torch.float64)
    layer.inputs = layer.inputs + 0.3
    layer.signals = torch.einsum("nuk,nk->nu", layer.jacobian(layer.inputs), layer.back)
    found = separate(layer.gradient, None, positive_peak(layer.near(0.02)), layer.jacobian)
    cosines = torch.nn.functional.cosine_similarity(found.inputs, layer.inputs)
    assert (cosines > 1 - 1e-9).all()
    torch.testing.assert_close(found.inputs.amax(1), torch.ones(6, dtype=torch.float64))


def test_noise_leaves_an_error_of_its_own_size() -> None:
    layer = Layer()
    noise = torch.randn(layer.gradient.shape, generator=torch.Generator().manual_seed(1)).double()
    errors = []
    for level in (1e-6, 1e-4):
        gradient = layer.gradient + level * layer.gradient.std() * noise
        found = separate(gradient, layer.signals.sum(0), layer.near(0.03), layer.jacobian)
        errors.append(float((found.inputs - layer.inputs).abs().amax()))
    assert errors[0] < 1e-3
    assert errors[0] < errors[1] < 0.1
