"""Cases with an exact answer, in both precisions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import InvertingGradients, LinearLayer
from leakscope.attacks.linear_layer import input_span, invert_single
from leakscope.contracts.errors import MissingKnowledge, NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.federation import FedAvg, FedSGD
from leakscope.models import build_model
from leakscope.network.layers import Layer, structure


def batch(examples: int, dtype: torch.dtype, shape=(3, 8, 8)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(examples, *shape, generator=generator, dtype=dtype), torch.arange(examples) % 5


def mlp(dtype: torch.dtype, **options) -> nn.Module:
    return build_model("mlp", input_shape=(3, 8, 8), num_classes=5, **options).to(dtype)


@pytest.mark.parametrize("dtype, error", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("activation", ["relu", "sigmoid", "tanh"])
def test_one_example_through_a_linear_layer_is_exact(dtype, error, activation) -> None:
    """E1. In single precision the error is that of the client's own arithmetic."""
    x, y = batch(1, dtype)
    seen = FedSGD().observe(mlp(dtype, hidden=[64, 16], activation=activation), x, y)
    result = LinearLayer()(seen)
    assert float((result.inputs - x).abs().max()) <= error
    assert result.flags == ()


@pytest.mark.parametrize("examples", [2, 5, 8])
def test_the_span_of_a_batch_is_readable(examples) -> None:
    """E4."""
    x, y = batch(examples, torch.float64)
    seen = FedSGD().observe(mlp(torch.float64, hidden=[64], activation="tanh"), x, y)
    first = structure(seen.model, (3, 8, 8)).linear_first
    assert isinstance(first, Layer)
    basis, _ = input_span(seen.message.update[f"{first.name}.weight"], 1e-10)
    assert len(basis) == examples
    flat = x.flatten(1)
    outside = flat - (flat @ basis.T) @ basis
    assert float(outside.norm() / flat.norm()) <= 1e-10
    result = LinearLayer()(seen)
    assert "mixture" in result.flags
    assert result.inputs.shape == x.shape


@pytest.mark.parametrize("clip", [1e-3, 0.5])
def test_clipping_alone_does_not_change_scale_free_attacks(clip) -> None:
    """E15: the closed form, the span and direction matching see the direction only."""
    x, y = batch(1, torch.float64)
    net = mlp(torch.float64, hidden=[32])
    seen = FedSGD().observe(net, x, y)
    norm = torch.cat([v.flatten() for v in seen.message.update.values()]).norm()
    factor = 1 / max(1.0, float(norm) / (clip * float(norm)))
    clipped = seen.with_update({k: factor * v for k, v in seen.message.update.items()})
    assert torch.allclose(LinearLayer()(seen).inputs, LinearLayer()(clipped).inputs, atol=1e-10)
    for distance in ("cosine", "direction-l1"):
        attack = InvertingGradients(iterations=20, distance=distance)
        assert torch.allclose(attack(seen).inputs, attack(clipped).inputs, atol=1e-10)


def test_least_squares_beats_ratios_where_an_output_gradient_is_tiny() -> None:
    x = torch.rand(1, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    back = torch.tensor([[1.0, 1e-9, -0.5]], dtype=torch.float64)
    noise = 1e-6 * torch.randn(3, 10, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    weight, bias = back.T @ x + noise, back[0]
    solved, residual = invert_single(weight, bias)
    assert float((solved - x).abs().max()) < 1e-5
    assert float(((weight / bias[:, None]).mean(0) - x).abs().max()) > 1
    assert 0 < float(residual) < 1e-5


def test_closed_form_says_where_it_does_not_apply() -> None:
    x, y = batch(1, torch.float32)
    with pytest.raises(NotApplicable, match="Conv2d"):
        LinearLayer()(FedSGD().observe(build_model("convnet", input_shape=(3, 8, 8), num_classes=5), x, y))
    with pytest.raises(NotApplicable, match="no bias"):
        LinearLayer()(FedSGD().observe(mlp(torch.float32, bias=False), x, y))

    class Squared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(192, 5)

        def forward(self, z: Tensor) -> Tensor:
            return self.layer(z.flatten(1) ** 2)

    with pytest.raises(NotApplicable, match="input"):
        LinearLayer()(FedSGD().observe(Squared(), x, y))


@pytest.mark.slow
def test_an_unrolled_update_needs_the_recipe_and_uses_it() -> None:
    net = build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=4)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.rand(2, 1, 8, 8, generator=generator), torch.tensor([0, 3])
    protocol = FedAvg(epochs=2, batch_size=1, lr=0.5, shuffle=False)
    known = protocol.observe(net, x, y)
    blind = protocol.observe(net, x, y, knowledge=Knowledge.eavesdropper)
    with pytest.raises(MissingKnowledge, match="local_epochs, batch_size, learning_rate"):
        InvertingGradients(update="unroll")(blind)
    unrolled = InvertingGradients(update="unroll", iterations=50, tv=0.0, lr=0.05)(known)
    single = InvertingGradients(update="gradient", iterations=50, tv=0.0, lr=0.05)(known)
    assert float(unrolled.scores[0]) < 0.5 * float(single.scores[0])
    assert float((unrolled.inputs - x).abs().mean()) < float((single.inputs - x).abs().mean())


def test_labels_recovered_never_come_from_the_start() -> None:
    """Joint labels are the optimised ones: a peer once returned those of the random start."""
    from leakscope.attacks import DLG

    net = build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=10)
    x = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    for label in (1, 6, 9):
        seen = FedSGD().observe(net, x, torch.tensor([label]))
        assert DLG(iterations=300)(seen, seed=4).labels.tolist() == [label]
