"""The equations of a layer: against autograd as an oracle, ranks against the formula, solutions against lstsq."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import Tensor, nn

from leakscope.equations import linear_system
from leakscope.equations.constraints import generic_rank, signal_at_input, stage_system
from leakscope.equations.linear_system import LinearSystem
from leakscope.network.chain import Stage, read_chain


def first_stage(
    layers: nn.Sequential, shape: tuple[int, ...], seed: int = 0
) -> tuple[Stage, LinearSystem, Tensor, Tensor]:
    """The equations of the only stage at a random input and output gradient, the input, and dL/dx by autograd."""
    generator = torch.Generator().manual_seed(seed)
    (stage,) = read_chain(layers, shape).stages
    x = torch.randn(1, *shape, generator=generator, dtype=torch.float64, requires_grad=True)
    outputs = stage.linear(x)
    signal = torch.randn(outputs.shape, generator=generator, dtype=torch.float64)
    names = {o.weight_name: o.module.weight for o in stage.operations if o.weight_name is not None}
    found = torch.autograd.grad((outputs * signal).sum(), [x, *names.values()])
    update = dict(zip(names, found[1:], strict=True))
    assert np.allclose(signal_at_input(stage, signal), found[0].flatten().numpy(), atol=1e-12)
    return stage, stage_system(stage, outputs, signal, update), x.detach().flatten(), found[0]


LAYERS = {
    "conv": (nn.Conv2d(3, 4, 3), (3, 6, 5)),
    "padding, stride, bias": (nn.Conv2d(2, 5, (3, 2), stride=(2, 1), padding=(1, 2)), (2, 7, 6)),
    "dilation": (nn.Conv2d(2, 3, 3, dilation=2, padding=2, bias=False), (2, 7, 6)),
    "groups": (nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "depthwise": (nn.Conv2d(3, 6, 3, groups=3, padding=1), (3, 5, 4)),
    "same": (nn.Conv2d(2, 3, 4, padding="same"), (2, 6, 5)),
    "circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 6, 5)),
    "reflect": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 6, 5)),
    "signal": (nn.Conv1d(2, 4, 5, stride=2, padding=2), (2, 17)),
    "linear": (nn.Linear(6, 4), (6,)),
    "pool first": (nn.Sequential(nn.AvgPool2d(2), nn.Conv2d(2, 3, 3)), (2, 10, 9)),
    "pool last": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.AvgPool2d(3, 2, padding=1, ceil_mode=True)), (2, 8, 9)),
    "pool without the border": (
        nn.Sequential(nn.Conv2d(2, 3, 3), nn.AvgPool2d((3, 2), padding=1, count_include_pad=False)),
        (2, 8, 9),
    ),
    "adaptive": (nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d((3, 4))), (2, 9, 9)),
    "pooled signal": (nn.Sequential(nn.Conv1d(2, 3, 3), nn.AvgPool1d(3)), (2, 14)),
    "two linear": (nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), (5,)),
    "conv, conv, linear": (
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 4)),
        (1, 6, 6),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_the_true_input_satisfies_every_equation(name: str) -> None:
    """Outputs and gradients come from torch's own layers, so matrices, offsets and rows are checked at once."""
    layers, shape = LAYERS[name]
    stage, system, x, _ = first_stage(nn.Sequential(layers), shape)
    left = system.matrix @ x.numpy() - system.target
    assert np.abs(left).max() < 1e-11
    weights = sum(o.module.weight.numel() for o in stage.operations if o.weight_name is not None)
    if all(not isinstance(o.module, nn.Linear) for o in stage.operations):
        assert system.rows == math.prod(stage.output_shape) + weights
    if name != "linear":
        # ... and an equation is not satisfied because it is empty: another input breaks it.
        assert np.linalg.norm(system.matrix @ (x.numpy() + 1)) > 0
    found = system.solve()
    assert found.residual < 1e-12
    dense = np.linalg.lstsq(system.balanced.matrix.toarray(), system.balanced.target, rcond=1e-10)[0]
    # Undetermined directions are zero up to the rounding errors that the ridge lets in.
    assert np.allclose(found.x, dense, atol=1e-5)
    if system.rank == system.unknowns:
        assert np.allclose(found.x, x.numpy(), atol=1e-11)


def random_convolution(number: int) -> tuple[nn.Conv2d, tuple[int, int, int]]:
    draw = np.random.default_rng(number)
    kernel = int(draw.integers(1, 5))
    side = int(draw.integers(kernel + 1, 11))
    channels, filters = int(draw.integers(1, 5)), int(draw.integers(1, 7))
    padding = int(draw.integers(0, min(kernel, 3)))
    layer = nn.Conv2d(
        channels, filters, kernel, stride=int(draw.integers(1, 4)), padding=padding, bias=bool(number % 2)
    )
    return layer, (channels, side, side + int(draw.integers(0, 3)))


@pytest.mark.parametrize("number", range(50))
@torch.random.fork_rng(devices=[])
def test_rank_is_what_sizes_predict(number: int) -> None:
    """Never above min(unknowns, |z| + |w| - filters^2); that, where no border or stride makes equations of its own.

    Strides treat pixels unequally: some classes of them have equations to spare while others lack some. Padding of more
    than half the kernel makes outputs that see hardly any pixel. Both can cost a few ranks.
    """
    layer, shape = random_convolution(number)
    torch.manual_seed(number)
    layer.reset_parameters()
    stage, system, _, _ = first_stage(nn.Sequential(layer), shape, seed=number)
    assert system.rank == np.linalg.matrix_rank(system.matrix.toarray())
    # More filters than positions of the output or of the kernel have fewer independent redundancies than pairs.
    independent = min(math.prod(stage.output_shape[1:]), layer.weight[0].numel()) >= layer.out_channels
    predicted = generic_rank(stage)
    assert predicted is not None
    if independent:
        assert system.rank <= predicted
    if independent and layer.stride[0] == 1 and 2 * layer.padding[0] <= layer.kernel_size[0] - 1:
        assert system.rank == predicted


@pytest.mark.parametrize("number", [0, 5, 11, 17, 23, 31, 44])
def test_large_systems_agree_with_exact_singular_values(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, shape = random_convolution(number)
    _, system, _, _ = first_stage(nn.Sequential(layer), shape)
    exact = system.spectrum
    monkeypatch.setattr(linear_system, "MAX_EXACT", 0)
    fast = LinearSystem(system.matrix, system.target, system.blocks).spectrum
    assert exact.method == "singular values"
    assert fast.method in ("Cholesky", "Gram eigenvalues")
    assert fast.rank == exact.rank
    assert fast.largest == pytest.approx(exact.largest, rel=0.05)
    assert fast.smallest == pytest.approx(exact.smallest, rel=0.05)


@torch.random.fork_rng(devices=[])
def test_blocks_of_different_scale_do_not_spoil_the_rank() -> None:
    """An output gradient of 1e-9 makes gradient rows that a tolerance relative to the weights would take for zero."""
    torch.manual_seed(0)
    (stage,) = read_chain(nn.Sequential(nn.Conv2d(3, 3, 3, stride=2, bias=False)), (3, 9, 9)).stages
    x = torch.rand(1, 3, 9, 9, dtype=torch.float64)
    outputs = stage.linear(x)
    signal = 1e-9 * torch.randn(outputs.shape, dtype=torch.float64)
    weight = stage.operations[0].module.weight
    (gradient,) = torch.autograd.grad((outputs * signal).sum(), weight)
    system = stage_system(stage, outputs, signal, {"0.weight": gradient})
    assert system.rank == generic_rank(stage) == 48 + 81 - 9
    assert system.solve().residual < 1e-12


def test_least_squares_and_least_norm() -> None:
    draw = np.random.default_rng(3)
    tall = draw.standard_normal((9, 4)) @ np.diag([1, 1e-2, 1e-4, 0])
    for matrix in (tall, tall.T, draw.standard_normal((5, 5))):
        target = draw.standard_normal(len(matrix))
        found = LinearSystem(scipy.sparse.csr_array(matrix), target).solve()
        assert np.allclose(found.x, np.linalg.lstsq(matrix, target, rcond=1e-10)[0], rtol=1e-5, atol=1e-6)


def test_iterations_take_over_where_dense_matrices_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    _, system, x, _ = first_stage(nn.Sequential(nn.Conv2d(2, 6, 3)), (2, 8, 8))
    monkeypatch.setattr(linear_system, "MAX_DENSE", 10)
    monkeypatch.setattr(linear_system, "MAX_EXACT", 5)
    found = system.solve()
    assert found.method == "LSMR"
    assert np.allclose(found.x, x.numpy(), atol=1e-9)
    assert system.spectrum_up_to(10_000) is None
    with pytest.raises(ValueError, match="10"):
        _ = system.rank


def test_a_linear_layers_rows_lose_nothing() -> None:
    """K'K = |k|^2 I: the reduced equations have the same normal equations as the full ones."""
    _, system, x, _ = first_stage(nn.Sequential(nn.Linear(6, 4)), (6,))
    assert system.rows == system.unknowns == system.rank == 6
    assert system.condition == pytest.approx(1.0)
    assert np.allclose(system.solve().x, x.numpy(), atol=1e-14)


def test_zero_updates_give_zero() -> None:
    (stage,) = read_chain(nn.Sequential(nn.Linear(6, 4)), (6,)).stages
    system = stage_system(stage, np.zeros(4), np.zeros(4), {"0.weight": torch.zeros(4, 6), "0.bias": torch.zeros(4)})
    assert np.isfinite(system.solve().x).all()


def test_wrong_sizes_are_refused() -> None:
    matrix = scipy.sparse.csr_array(np.eye(3))
    with pytest.raises(ValueError, match=r"^target.*3 rows"):
        LinearSystem(matrix, np.zeros(2))
    with pytest.raises(ValueError, match=r"^blocks"):
        LinearSystem(matrix, np.zeros(3), (1, 1))
