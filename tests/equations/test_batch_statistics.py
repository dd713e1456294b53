"""Inputs of convolutions whose outputs are normalised by the statistics of the batch."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.equations import batch_statistics
from leakscope.equations.batch_statistics import NormalisedLayer, solve_normalised
from leakscope.equations.peeling import Peel, peel
from leakscope.equations.robust_solve import agreed_ratio
from leakscope.network.gates import read_gated

INPUTS, OUTPUTS, SIZE = 12, 24, 5


def problem() -> tuple[NormalisedLayer, Tensor, Tensor]:
    """Return a layer, the input that it read, and the derivative at its output, by autograd."""
    draws = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    x, weight = random(2, INPUTS, SIZE, SIZE).relu(), random(OUTPUTS, INPUTS, 3, 3).requires_grad_()
    gain, bias = (1 + 0.1 * random(OUTPUTS)).requires_grad_(), random(OUTPUTS).requires_grad_()
    signal = random(2, OUTPUTS, SIZE, SIZE)
    out = F.conv2d(x, weight, padding=1)
    normal = F.batch_norm(out, None, None, gain, bias, training=True)
    at_output, *gradients = torch.autograd.grad((normal * signal).sum(), (out, weight, gain, bias))
    layer = NormalisedLayer(
        signal=signal,
        gradient=gradients[0].flatten(2).transpose(1, 2),
        gain=gain.detach(),
        gain_gradient=gradients[1],
        bias_gradient=gradients[2],
        eps=1e-5,
        rows=_rows,
        forward=lambda value: F.conv2d(value, weight.detach(), padding=1),
    )
    return layer, x, at_output


def _rows(signal: Tensor) -> Tensor:
    places = torch.eye(2 * SIZE * SIZE, dtype=torch.float64).reshape(-1, 2, 1, SIZE, SIZE)
    columns = [torch.nn.grad.conv2d_weight(place, (OUTPUTS, 1, 3, 3), signal, padding=1).flatten() for place in places]
    return torch.stack(columns, 1)


def reshape(solution: Tensor) -> Tensor:
    return solution.reshape(2, SIZE, SIZE, -1).permute(0, 3, 1, 2)


def test_the_input_is_found_but_for_its_scale() -> None:
    layer, x, _ = problem()
    value, _ = solve_normalised([layer], reshape)
    scale = float((value * x).sum() / value.square().sum())
    assert scale > 0
    assert torch.allclose(scale * value, x, atol=1e-4)


@pytest.mark.parametrize("noisy", [True, False])
def test_noise_of_the_gains_gradient_counts_where_it_is_relied_on(noisy: bool) -> None:
    layer, x, _ = problem()
    noise = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    off = layer.gain_gradient + 1e-2 * layer.gain_gradient.abs().mean() * noise
    value, _ = solve_normalised([dataclasses.replace(layer, gain_gradient=off, noisy=noisy)], reshape)
    scale = float((value * x).sum() / value.square().sum())
    assert (float((scale * value - x).norm() / x.norm()) < 1e-4) is noisy


def test_derivatives_go_down_and_up_through_the_statistics() -> None:
    layer, x, at_output = problem()
    assert torch.allclose(layer.signals(x), at_output)
    assert torch.allclose(layer.signal_above(x, at_output), layer.signal)


def test_statistics_that_still_move_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_statistics, "ROUNDS", 3)
    with pytest.raises(NotApplicable, match="still move"):
        solve_normalised([problem()[0]], reshape)


def network(stride: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 40, 3, padding=1, bias=False), nn.BatchNorm2d(40), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 5)),
        ).train()


def peeled(net: nn.Module, x: Tensor) -> tuple[Peel, dict[int, Tensor]]:
    read = read_gated(net, tuple(x.shape[1:]), "11", training=True)
    gradients = torch.autograd.grad(F.cross_entropy(net(x), torch.arange(len(x))), list(net.parameters()))
    names = [name for name, _ in net.named_parameters()]
    truth = read.onwards(0, x.double()).values
    return peel(read, dict(zip(names, gradients, strict=True)), len(x)), truth


@pytest.mark.parametrize(("stride", "size"), [(1, 5), (2, 10)])
def test_layers_below_a_factored_one_are_exact_in_train_mode(stride: int, size: int) -> None:
    """Behind a stride the derivatives hide a constant of each channel, which the zeros of the ReLU tell."""
    x = torch.rand((1, 3, size, size), generator=torch.Generator().manual_seed(3))
    found, truth = peeled(network(stride), x)
    assert set(found.values) >= {3, 6}
    for step, value in found.values.items():
        assert float((value - truth[step]).norm() / truth[step].norm()) < 1e-3


def test_a_scale_that_fewer_than_half_agree_on_is_refused() -> None:
    known = torch.tensor([1.0, 1.0, 1.0, 1.0])
    assert agreed_ratio(known, torch.tensor([2.0, 2.0, 2.0, 7.0])) == pytest.approx(2)
    with pytest.raises(NotApplicable):
        agreed_ratio(known, torch.tensor([2.0, 3.0, 5.0, 7.0]))
