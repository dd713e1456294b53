"""What a strided convolution reads, from a gradient with too few rows and from what it gave."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.equations import joint_solve as joint
from leakscope.equations.convolution_equations import gradient_rows
from leakscope.equations.joint_solve import Forward, determined_jointly, joint_solve
from leakscope.equations.mask_decoding import wrong_masks
from leakscope.network.gates import GatedNetwork, WeightedLayer, read_gated

SHAPE = (3, 8, 8)


class Padded(nn.Module):
    """A strided block whose shortcut pads channels with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.conv1, self.conv2 = nn.Conv2d(6, 12, 3, 2, 1), nn.Conv2d(12, 12, 3, padding=1)
        self.head = nn.Linear(12 * 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        inner = self.conv2(F.relu(self.conv1(x)))
        x = F.relu(inner + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 3, 3)))
        return self.head(x.flatten(1))


def block() -> tuple[GatedNetwork, dict[int, Tensor], int, WeightedLayer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = read_gated(Padded(), SHAPE, "head")
        values = network.onwards(0, torch.randn(1, *SHAPE, dtype=torch.float64)).values
    layer = next(one for one in network.layers if one.weight_name == "conv1.weight")
    return network, values, network.steps[layer.step].sources[0], layer


def equations(layer: WeightedLayer, value: Tensor, signal: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    kernel = layer.weight_gradient(value, signal.flatten(2)).reshape(layer.module.weight.shape)
    matrix = gradient_rows(layer, signal, tuple(value.shape[1:]))
    groups = torch.arange(len(kernel)).repeat_interleave(kernel[0, 0].numel())
    return matrix, kernel.flatten(2).transpose(1, 2).flatten(0, 1), groups


def known(network: GatedNetwork, values: dict[int, Tensor], number: int) -> dict[int, Tensor]:
    return {step: values[step] for step, one in enumerate(network.steps) if one.kind == "relu" and step > number}


@pytest.mark.parametrize("spoiled", [0, 1])
def test_gradient_and_forward_pass_determine_what_neither_does(spoiled: int) -> None:
    network, values, number, layer = block()
    truth = values[number]
    signal = torch.randn(values[layer.step].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix, wanted, groups = equations(layer, truth, signal)
    assert int(torch.linalg.matrix_rank(matrix)) < matrix.shape[1]
    forward = Forward(network=network, number=number, known=known(network, values, number))
    assert forward.affine
    assert determined_jointly(forward, [layer.module], tuple(truth.shape))
    wanted[groups < spoiled] += 0.1  # a wrong mask
    found, weights, left = joint_solve(matrix, wanted, groups, forward, torch.ones_like(truth))
    assert float((found - truth).norm() / truth.norm()) < 1e-3
    assert left < 1e-4
    assert weights[:spoiled].tolist() == [0] * spoiled


def test_what_is_not_determined_leaves_much_or_is_refused() -> None:
    network, values, number, layer = block()
    truth = values[number]
    signal = torch.randn(values[layer.step].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    matrix, wanted, groups = equations(layer, truth, signal)
    other = {step: value.flip(2) for step, value in known(network, values, number).items()}
    forward = Forward(network=network, number=number, known=other)
    try:
        _, _, left = joint_solve(matrix, wanted, groups, forward, torch.ones_like(truth))
    except NotApplicable:
        return
    assert left > 1e-2


def test_too_few_equations_of_both_are_not_tried() -> None:
    network, values, number, layer = block()
    silent = {step: torch.zeros_like(value) for step, value in known(network, values, number).items()}
    forward = Forward(network=network, number=number, known=silent)
    assert not determined_jointly(forward, [layer.module], tuple(values[number].shape))


def test_solves_that_take_too_long_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    network, values, number, layer = block()
    forward = Forward(network=network, number=number, known=known(network, values, number))
    shape = tuple(values[number].shape)
    work = (shape[2] * shape[3]) ** 2 * shape[1]
    for most, tried in ((work, True), (work - 1, False)):
        monkeypatch.setattr(joint, "MOST_WORK", most)
        assert determined_jointly(forward, [layer.module], shape) is tried


def test_a_wrong_mask_is_found_by_what_its_channel_leaves() -> None:
    _, values, number, layer = block()
    truth, out = values[number], values[layer.step]
    unmasked = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    active = (out > 0).double()
    kernel = layer.weight_gradient(truth, (active * unmasked).flatten(2)).reshape(layer.module.weight.shape)
    mistaken = active.clone()
    mistaken[0, 3, 1, 2] = 1 - mistaken[0, 3, 1, 2]
    near = torch.ones_like(out)
    wrong = wrong_masks(layer, kernel, truth, mistaken * unmasked, unmasked, mistaken, near)
    assert torch.equal(wrong, mistaken != active)
    assert not wrong_masks(layer, kernel, truth, mistaken * unmasked, unmasked, mistaken, 0 * near).any()
