"""The equations of a residual block, against autograd and dense linear algebra as oracles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from leakscope.equations.constraints import (
    ResidualSystem,
    generic_rank,
    operation_matrix,
    operation_offset,
    signal_at_input,
    stage_system,
)
from leakscope.network.chain import ResidualStage, Stage, read_chain


class Block(nn.Module):
    def __init__(self, body: nn.Sequential, shortcut: nn.Module | None = None) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x) + self.shortcut(x))


def norm(channels: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels)
    for values, low, high in (
        (layer.running_mean, -1.0, 1.0),
        (layer.running_var, 0.5, 2.0),
        (layer.weight, 0.5, 2.0),
        (layer.bias, -1.0, 1.0),
    ):
        nn.init.uniform_(values, low, high)
    return layer


@torch.random.fork_rng(devices=[])
def blocks() -> dict[str, tuple[Block, tuple[int, ...]]]:
    torch.manual_seed(0)
    return {
        "identity": (
            Block(nn.Sequential(nn.Conv2d(5, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 5, 3, padding=1))),
            (5, 6, 6),
        ),
        "narrow": (
            Block(nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(3, 2, 3, padding=1))),
            (2, 6, 6),
        ),
        "strided convolution": (
            Block(
                nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1, bias=False), nn.Softplus(), nn.Conv2d(4, 6, 3, padding=1)),
                nn.Conv2d(3, 6, 1, stride=2),
            ),
            (3, 8, 8),
        ),
        "several layers on each path": (
            Block(
                nn.Sequential(
                    nn.AvgPool2d(2), nn.Conv2d(2, 3, 3), nn.Sigmoid(), nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 2)
                ),
                nn.Sequential(nn.Conv2d(2, 4, 3), nn.AvgPool2d(2), nn.Conv2d(4, 5, 3)),
            ),
            (2, 12, 12),
        ),
        "batch norm": (
            Block(
                nn.Sequential(
                    nn.Conv2d(2, 4, 3, padding=1), norm(4), nn.Tanh(), nn.Conv2d(4, 5, 3, padding=1), norm(5)
                ),
                nn.Sequential(nn.Conv2d(2, 5, 1, bias=False), norm(5)),
            ),
            (2, 6, 6),
        ),
        "dense": (Block(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))), (6,)),
        "dense with a layer": (
            Block(nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)), nn.Linear(6, 4, bias=False)),
            (6,),
        ),
        "flattening": (
            Block(
                nn.Sequential(nn.Flatten(), nn.Linear(18, 5), nn.Tanh(), nn.Linear(5, 8)),
                nn.Sequential(nn.Conv1d(2, 2, 3, stride=2), nn.Flatten()),
            ),
            (2, 9),
        ),
    }


def truth(name: str) -> tuple[ResidualSystem, dict[str, Tensor], dict[str, Tensor]]:
    """The equations at a random input and output gradient; the values, and the loss's derivative by each of them."""
    model, shape = blocks()[name]
    (block,) = read_chain(model, shape, residual=True, batch_norm=True).stages
    assert isinstance(block, ResidualStage)
    generator = torch.Generator().manual_seed(1)
    values = {"x": torch.randn(1, *shape, generator=generator, dtype=torch.float64).requires_grad_()}
    values["z"] = block.inner.linear(values["x"])
    values["h"] = block.inner.activation(values["z"])
    passed = values["x"] if block.shortcut is None else block.shortcut.linear(values["x"])
    values["y"] = block.outer.linear(values["h"]).flatten(1) + passed.flatten(1)
    assert torch.allclose(block.linear(values["x"].flatten(1)).flatten(1), values["y"])
    loss = (values["y"] * torch.randn(values["y"].shape, generator=generator, dtype=torch.float64)).sum()
    names = {o.weight_name: o.module.weight for o in block.operations if o.weight_name is not None}
    found = torch.autograd.grad(loss, [*values.values(), *names.values()])
    signals = dict(zip(values, found, strict=False))
    update = dict(zip(names, found[len(values) :], strict=True))
    outputs, output_gradient = values["y"].detach().flatten().numpy(), signals["y"].flatten().numpy()
    systems = ResidualSystem(block=block, outputs=outputs, output_gradient=output_gradient, update=update)
    return (
        systems,
        {k: v.detach().flatten().numpy() for k, v in values.items()},
        {k: v.flatten().numpy() for k, v in signals.items()},
    )


@pytest.mark.parametrize("name", blocks())
def test_the_true_values_satisfy_both_steps(name: str) -> None:
    """Values and derivatives come from torch's own layers, so every row, offset and derivative is checked."""
    systems, values, signals = truth(name)
    together = np.concatenate([values["x"], values["h"]])
    assert np.abs(systems.first.matrix @ together - systems.first.target).max() < 1e-11
    assert np.array_equal(together[systems.block.unknowns :], values["h"])
    assert np.allclose(signal_at_input(systems.block.outer, systems.output_gradient), signals["h"], atol=1e-12)
    second = systems.second(values["h"], values["z"], signals["z"])
    assert np.abs(second.matrix @ values["x"] - second.target).max() < 1e-11
    assert np.allclose(systems.signal_at_input(signals["z"]), signals["x"], atol=1e-12)
    # One block for each path and each weight that reads x; another input breaks them.
    readers = [*systems.block.inner.operations, *(systems.block.shortcut.operations if systems.block.shortcut else ())]
    weights = [o for o in readers if o.weight_name is not None and not isinstance(o.module, nn.BatchNorm2d)]
    assert len(second.blocks) == 2 + len(weights)
    assert np.linalg.norm(second.matrix @ (values["x"] + 1) - second.target) > 0.1
    if second.rank == second.unknowns:
        assert np.allclose(second.solve().x, values["x"], atol=1e-9)


@pytest.mark.parametrize("name", blocks())
def test_hidden_rank_is_what_the_null_space_leaves(name: str) -> None:
    """Directions of h in which a solution of step 1 can move, whatever x does, are the h part of the null space."""
    systems, values, _ = truth(name)
    matrix = systems.first.balanced.matrix.toarray()
    sizes, right = np.linalg.svd(matrix)[1:]
    null = right[int((sizes > 1e-9 * sizes[0]).sum()) :]
    free = np.linalg.matrix_rank(null[:, systems.block.unknowns :], tol=1e-6) if len(null) else 0
    hidden = len(values["h"])
    assert systems.hidden_rank(1000) == hidden - free
    if free == 0:
        assert np.allclose(systems.first.solve().x[systems.block.unknowns :], values["h"], atol=1e-9)
    assert systems.hidden_rank(0) is None


def test_beside_an_identity_the_filters_decide() -> None:
    """A channel of h has 36 pixels and nine equations a filter, fewer where the filters are redundant."""
    assert truth("identity")[0].hidden_rank(1000) == 4 * 36
    assert truth("narrow")[0].hidden_rank(1000) == 3 * 2 * 9
    # A stride leaves three quarters of x out of step 1, and h is determined all the same.
    strided = truth("strided convolution")[0]
    assert strided.hidden_rank(1000) == 4 * 16
    assert strided.first.deficiency < 0


def test_the_equations_of_plain_stages_refuse_a_block() -> None:
    systems, values, signals = truth("dense")
    with pytest.raises(ValueError, match="'body'"):
        stage_system(systems.block, values["y"], signals["y"], systems.update)
    with pytest.raises(ValueError, match="'body'"):
        signal_at_input(systems.block, signals["y"])
    assert generic_rank(systems.block) is None


@pytest.mark.parametrize(
    "layer, shape",
    [
        (norm(3), (3, 4, 5)),
        (nn.BatchNorm2d(3, affine=False), (3, 4, 5)),
        (nn.BatchNorm1d(4), (4, 6)),
        (nn.BatchNorm1d(4), (4,)),
    ],
)
def test_batch_norm_as_a_matrix(layer: nn.Module, shape: tuple[int, ...]) -> None:
    layer.running_mean.uniform_(-1, 1)
    layer.running_var.uniform_(0.5, 2)
    kernel = nn.Linear(4, 4) if len(shape) == 1 else (nn.Conv1d if len(shape) == 2 else nn.Conv2d)(shape[0], 2, 1)
    (stage,) = read_chain(nn.Sequential(layer, kernel), shape, batch_norm=True).stages
    assert isinstance(stage, Stage)
    operation = stage.operations[0]
    x = torch.randn(1, *shape, dtype=torch.float64)
    found = operation_matrix(operation) @ x.flatten().numpy() + operation_offset(operation)
    assert np.allclose(found, layer.double().eval()(x).detach().flatten().numpy(), atol=1e-12)
