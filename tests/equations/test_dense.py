"""Dense layers below the head: their inputs from their outputs, what came back, and their gradient."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.dense import peel_dense
from leakscope.network.dense_path import dense_path

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "leaky": nn.LeakyReLU(0.2),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": nn.Softplus(),
    "gelu": nn.GELU(),
    "silu": nn.SiLU(),
    "elu": nn.ELU(),
    "identity": nn.Identity(),
}


def layer(activation: Callable[[Tensor], Tensor], examples: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Weight, bias, inputs, outputs and what comes back to them, and the gradients of weight and bias."""
    draws = torch.Generator().manual_seed(seed)
    weight, bias = torch.randn((60, 25), generator=draws).double() / 4, torch.randn(60, generator=draws).double() / 4
    inputs, back = torch.randn((examples, 25), generator=draws).double(), torch.randn((examples, 60), generator=draws)
    inner = (inputs @ weight.T + bias).requires_grad_()
    outputs = activation(inner)
    (signals,) = torch.autograd.grad((outputs * back).sum(), inner)
    return weight, bias, inputs, outputs.detach(), back.double(), signals.T @ inputs, signals.sum(0)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("examples", [1, 4])
def test_inputs_follow_behind_any_elementwise_activation(name: str, examples: int) -> None:
    weight, bias, inputs, outputs, back, gradient, sums = layer(ACTIVATIONS[name], examples)
    for bias_gradient in (sums, None):
        found = peel_dense(weight, bias, gradient, bias_gradient, ACTIVATIONS[name], outputs, back)
        assert found.residual < 1e-7
        assert float((found.inputs - inputs).norm() / inputs.norm()) < 1e-7


def test_outputs_with_an_error_do_not_mislead_the_kinks() -> None:
    weight, bias, inputs, outputs, back, gradient, sums = layer(torch.relu, 3)
    draws = torch.Generator().manual_seed(1)
    near = outputs + 1e-6 * torch.randn(outputs.shape, generator=draws)
    found = peel_dense(weight, bias, gradient, sums, torch.relu, near, back)
    assert float((found.inputs - inputs).norm() / inputs.norm()) < 1e-9


def test_wrong_outputs_are_refused() -> None:
    weight, bias, _, outputs, back, gradient, sums = layer(torch.relu, 3)
    with pytest.raises(NotApplicable, match="other outputs than the known ones"):
        peel_dense(weight, bias, gradient, sums, torch.relu, outputs.flip(0), back)
    same = (outputs[:1].expand(3, -1), back[:1].expand(3, -1))
    with pytest.raises(NotApplicable, match="alike"):
        peel_dense(weight, bias, gradient, sums, torch.relu, *same)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(x.size(0), -1)
        return self.head(torch.relu(self.fc(torch.relu(self.fc(x)))))


class Skips(Twice):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.fc(x.flatten(1)))
        return self.head(x + torch.tanh(x))


class Views(Twice):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(torch.relu(self.fc(x.view(x.size(0), -1))), training=False))


def test_the_path_stops_where_what_comes_back_is_not_all() -> None:
    assert dense_path(Twice(), "head").steps == ()
    assert "does not run once" in dense_path(Twice(), "head").reason
    assert dense_path(Skips(), "head").steps == ()
    path = dense_path(Views(), "head")
    assert [step.name for step in path.steps] == ["fc"]
    assert path.reads_input == (False, True)


def test_normalisation_between_layers_stops_the_path() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 12), nn.LayerNorm(12), nn.ReLU(), nn.Linear(12, 3))
    path = dense_path(net, "4")
    assert path.steps == ()
    assert "LayerNorm" in path.reason
