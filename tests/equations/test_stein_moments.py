"""Stein moments and their decomposition: population checks, exact tensors, and the published estimator's error."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from leakscope.equations.stein_moments import (
    activation_class,
    diagonalising_vectors,
    head_loadings,
    moment_matrices,
    second_moment,
    stein_span,
)
from leakscope.metrics import feature_cosines, feature_error


def layer_gradient(features: Tensor, units: int, activation, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient, weights and loadings of random units with coefficients of either sign."""
    draws = torch.Generator().manual_seed(seed)
    weight = torch.randn((units, features.shape[1]), generator=draws, dtype=torch.float64)
    signs = 1.0 - 2.0 * (torch.arange(len(features)) % 2).double()
    inner = (weight @ features.T).requires_grad_()
    (slopes,) = torch.autograd.grad(activation(inner).sum(), inner)
    return (slopes * signs) @ features, weight, torch.ones((1, units), dtype=torch.float64)


def sphere(count: int, dimensions: int, seed: int) -> Tensor:
    draws = torch.Generator().manual_seed(seed)
    return nn.functional.normalize(torch.randn((count, dimensions), generator=draws, dtype=torch.float64), dim=1)


@pytest.mark.parametrize("activation", [nn.functional.softplus, nn.functional.silu], ids=["softplus", "silu"])
def test_the_population_moment_is_stein_s_by_gauss_hermite(activation) -> None:
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    t, mass = torch.tensor(nodes), torch.tensor(weights / math.sqrt(2 * math.pi))
    grid = torch.cartesian_prod(t, t)
    masses = torch.cartesian_prod(mass, mass).prod(1)
    x = torch.tensor([[0.6, 0.8]], dtype=torch.float64)
    inner = (grid @ x.T).requires_grad_()
    (slopes,) = torch.autograd.grad(activation(inner).sum(), inner)
    moment = second_moment(-1.7 * slopes @ x, grid, masses * len(grid), whiten=False)
    expected = -1.7 * activation_class(activation).second * torch.outer(x[0], x[0])
    assert (moment - expected).abs().max() <= 1e-8


@pytest.mark.parametrize("orthonormal", [True, False])
def test_an_exact_tensor_is_taken_apart(orthonormal) -> None:
    draws = torch.Generator().manual_seed(2)
    x = torch.randn((5, 5), generator=draws, dtype=torch.float64)
    x = torch.linalg.qr(x)[0] if orthonormal else nn.functional.normalize(x, dim=1)
    sizes = torch.tensor([1.0, -2.0, 0.5, 3.0, -0.7], dtype=torch.float64)
    slices = torch.einsum("i,ia,ib,ic->cab", sizes, x, x, x)
    vectors, residual = diagonalising_vectors(slices, draws)
    assert residual <= 1e-10
    assert feature_cosines(x, vectors).min() >= 1 - 1e-15 or (1 - feature_cosines(x, vectors)).max().sqrt() <= 1e-8


def test_noise_has_no_diagonal_form() -> None:
    draws = torch.Generator().manual_seed(0)
    noise = torch.randn((12, 4, 4), generator=draws, dtype=torch.float64)
    assert diagonalising_vectors(noise, draws)[1] > 0.3


@pytest.mark.parametrize(
    ("activation", "orders"),
    [
        (torch.relu, (2, 4)),
        (lambda t: nn.functional.leaky_relu(t, 0.2), (2, 4)),
        (torch.tanh, (3,)),
        (lambda t: torch.sigmoid(t) - 0.5, (3,)),
        (torch.square, (2,)),
        (lambda t: t**2 + t**3, (2, 3)),
        (lambda t: 2 * t, ()),
    ],
    ids=["relu", "leaky", "tanh", "sigmoid", "square", "square and cube", "linear"],
)
def test_classes_of_activations(activation, orders) -> None:
    found = activation_class(activation)
    assert found.orders == orders
    assert (found.reason is None) == (len(orders) > 1 or orders == (3,))


def test_the_leaky_slope_scales_the_second_moment() -> None:
    leaky = activation_class(lambda t: nn.functional.leaky_relu(t, 0.2))
    assert leaky.second == pytest.approx((1 - 0.2) / math.sqrt(2 * math.pi), rel=1e-6)


def test_the_published_estimator_has_the_published_error_and_ours_less() -> None:
    """The error goes with sqrt(d / m): 0.17 at 512 / 14336, here at the same ratio."""
    published, whitened = [], []
    for seed in range(6):
        truth = sphere(4, 128, seed)
        parts = layer_gradient(truth, 3584, torch.relu, seed + 50)
        draws = torch.Generator().manual_seed(seed)
        for errors, whiten in ((published, False), (whitened, True)):
            span = stein_span(*parts, 4, activation_class(torch.relu), draws, whiten=whiten)
            errors.append(feature_error(truth, span))
    assert 0.14 < np.mean(published) < 0.19
    assert np.mean(whitened) < 0.09


def test_odd_activations_need_all_slices() -> None:
    truth = sphere(3, 24, 1)
    parts = layer_gradient(truth, 20_000, torch.tanh, 2)
    kind = activation_class(torch.tanh)
    one = stein_span(*parts, 3, kind, torch.Generator().manual_seed(0), whiten=False)
    every = stein_span(*parts, 3, kind, torch.Generator().manual_seed(0))
    assert feature_error(truth, every) < 0.15
    assert feature_error(truth, every) < feature_error(truth, one)


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh], ids=["relu", "tanh"])
def test_moments_inside_an_exact_span_separate(activation) -> None:
    truth = sphere(3, 40, 4)
    gradient, weight, loadings = layer_gradient(truth, 14_000, activation, 5)
    span = torch.linalg.qr(truth.T)[0].T
    matrices, back = moment_matrices(gradient @ span.T, weight @ span.T, loadings, activation_class(activation))
    vectors, _ = diagonalising_vectors(matrices, torch.Generator().manual_seed(0))
    assert feature_cosines(truth, vectors @ back @ span).min() > 0.98


def test_head_loadings_leave_out_what_all_rows_share() -> None:
    draws = torch.Generator().manual_seed(0)
    shared = torch.randn((1, 30), generator=draws, dtype=torch.float64).expand(5, 30)
    assert len(head_loadings(shared)) == 0
    steps = torch.arange(1.0, 6.0, dtype=torch.float64)[:, None].expand(5, 30)
    loadings = head_loadings(shared + steps)
    assert torch.allclose(loadings.abs(), torch.ones_like(loadings))
