"""Begin a peel at the top of one image: a 1x1 convolution in front of a ReLU and a mean over all places.

Its gradient gives the masks of the ReLU and what it reads, place by place but in no order (equations/binary_factor.py).
The convolution below tells the order: derivatives at its outputs are now known, so that its gradient gives, for each
place and offset of the kernel, what was read there. Windows of neighbours overlap in the same numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.binary_factor import binary_factor
from leakscope.equations.local_networks import LocalNetworks
from leakscope.equations.peel_state import PeelState, active
from leakscope.network.gates import GatedNetwork, WeightedLayer, padding_of

#: Share of a window's size by which overlaps of neighbours may differ; others differ by about their size.
SAME = 1e-2
#: Share of the largest singular value below which derivatives do not tell the windows behind them.
TOLD = 1e-6


def find_top(network: GatedNetwork | LocalNetworks, names: Container[str]) -> tuple[WeightedLayer, WeightedLayer]:
    """Return the 1x1 convolution in front of the last ReLU, and the convolution below it; NotApplicable without.

    ``names``: the parameters of the update.
    """
    last = max((number for number, step in enumerate(network.steps) if step.kind == "relu"), default=None)
    for layer in network.layers:
        if layer.gate != last or layer.gate is None or layer.weight_name not in names or not is_pointwise(layer):
            continue
        source = network.steps[layer.step].sources[0]
        below = next((one for one in network.layers if one.gate == source and one.weight_name in names), None)
        if below is not None and isinstance(below.module, nn.Conv2d) and overlaps(below.module):
            return layer, below
    raise NotApplicable("no 1x1 convolution behind one whose windows overlap is in front of the last ReLU")


def is_pointwise(layer: WeightedLayer) -> bool:
    module = layer.module
    plain = isinstance(module, nn.Conv2d) and {*module.kernel_size, *module.stride} == {1}
    return plain and not any(itertools.chain(*padding_of(module)))


def overlaps(module: nn.Conv2d) -> bool:
    """Return whether neighbours of outputs read the same places: their numbers tell the order of the outputs.

    >>> overlaps(nn.Conv2d(1, 1, 3, 2)), overlaps(nn.Conv2d(1, 1, 2, 2))
    (True, False)
    """
    axes = zip(module.kernel_size, module.dilation, module.stride, strict=True)
    return all(stride % d == 0 and size > stride // d for size, d, stride in axes)


def begin_at_top(state: PeelState, adjoint: Tensor) -> WeightedLayer:
    """Begin with the derivative at the last step of one image; return the 1x1 convolution that tells."""
    if state.network.batched or len(adjoint) != 1:
        raise NotApplicable("what a 1x1 convolution gives is not that of one image by itself")
    layer, below = find_top(state.network, state.gradients)
    steps = state.network.steps
    assert layer.gate is not None
    state.signals[len(steps) - 1] = adjoint.reshape(1, *steps[-1].shape)
    state.gates[layer.gate] = torch.ones((1, *steps[layer.step].shape), dtype=torch.float64)
    _descend(state, layer.step)
    scales = state.signals[layer.step].flatten(2)[0]
    if not torch.allclose(scales, scales[:, :1], rtol=1e-9):
        raise NotApplicable("derivatives behind the 1x1 convolution are not alike at all places")
    gradient = state.gradients[layer.weight_name].double().flatten(1)
    found = binary_factor(gradient, scales[:, 0], scales.shape[1])
    _place(state, layer, found.masks, found.inputs.T)
    _descend(state, below.step)
    order = _order(state, below)
    _place(state, layer, found.masks[:, order], found.inputs.T[:, order])
    _descend(state, layer.step)
    state.pinned = {number for number in state.signals if number >= layer.step}
    state.signals = {number: state.signals[number] for number in state.pinned}
    return layer


def _place(state: PeelState, layer: WeightedLayer, masks: Tensor, inputs: Tensor) -> None:
    """Set the masks behind a layer (channels, places), what it reads, and the masks in front."""
    steps, source = state.network.steps, state.network.steps[layer.step].sources[0]
    assert layer.gate is not None
    state.gates[layer.gate] = masks.reshape(1, *steps[layer.step].shape)
    state.values[source] = inputs.reshape(1, *steps[source].shape)
    state.gates[source] = active(state.values[source])


def _descend(state: PeelState, lowest: int) -> None:
    """Take the derivative at the last step down to another, through masks that are known."""
    for number in range(len(state.network.steps) - 2, lowest - 1, -1):
        state.signals.pop(number, None)
        if state.readers[number] and all(state.passes(reader) for reader in state.readers[number]):
            state.signals[number] = state.backward(number)
    if lowest not in state.signals:
        raise NotApplicable(f"the derivative at {state.network.steps[lowest].name!r} is not known")


def _order(state: PeelState, layer: WeightedLayer) -> Tensor:
    """Return the places in their order, row by row, for derivatives at a layer's output that are in none."""
    module: Any = layer.module
    height, width = state.network.steps[layer.step].shape[1:]
    kernel = state.gradients[layer.weight_name].double()
    signals = state.signals[layer.step].flatten(2)[0]
    windows, _, rank, _ = torch.linalg.lstsq(signals, kernel.flatten(1), rcond=TOLD, driver="gelsd")
    if int(rank) < height * width:
        raise NotApplicable(f"derivatives have rank {int(rank)}, not one for each of {height * width} places")
    windows = windows.reshape(-1, *kernel.shape[1:])
    down, across = (stride // d for stride, d in zip(module.stride, module.dilation, strict=True))
    below = _neighbours(windows[:, :, down:].flatten(1), windows[:, :, : windows.shape[2] - down].flatten(1))
    beside = _neighbours(windows[..., across:].flatten(1), windows[..., : windows.shape[3] - across].flatten(1))
    corner = sorted(set(range(len(windows))) - set(below.values()) - set(beside.values()))
    grid = torch.full((height, width), -1)
    for row in range(height):
        for column in range(width):
            if row and column and below.get(int(grid[row - 1, column])) != beside.get(int(grid[row, column - 1])):
                raise NotApplicable("neighbours of places contradict each other")
            if column:
                grid[row, column] = beside.get(int(grid[row, column - 1]), -1)
            elif row:
                grid[row, column] = below.get(int(grid[row - 1, column]), -1)
            else:
                grid[0, 0] = corner[0] if len(corner) == 1 else -1
    if sorted(grid.flatten().tolist()) != list(range(len(windows))):
        raise NotApplicable("windows do not tell the order of the places")
    return grid.flatten()


def _neighbours(ends: Tensor, starts: Tensor) -> dict[int, int]:
    """Return for each window's end the window that starts with it, for those that have one.

    >>> _neighbours(torch.tensor([[1.0, 2.0], [5.0, 6.0]]), torch.tensor([[3.0, 4.0], [1.0, 2.0]]))
    {0: 1}
    """
    apart, size = torch.cdist(ends, starts), ends.norm(dim=1)
    nearest = apart.argmin(1)
    found = (apart.amin(1) < SAME * size).nonzero()[:, 0].tolist()
    return {one: int(nearest[one]) for one in found}
