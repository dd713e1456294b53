"""Find wrong places of maxima by what they leave of a convolution's weight gradient, given nearly what it reads.

A max pooling passes each derivative on to one place of its window. With a wrong place a channel's gradient is off by
this derivative times the difference of what the two places read, which is known but for the small errors of that.
"""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn

from leakscope.equations.mask_decoding import AMISS, EXPLAINS_SOME
from leakscope.equations.peel_state import PeelState
from leakscope.network.gates import Ahead, Gates, Step, WeightedLayer

#: Places that one channel may correct.
MOVES = 40


def corrected_gates(state: PeelState, ahead: Ahead, guessed: Container[int]) -> Gates:
    """Return the gates of a forward pass from what is nearly right, with right places of maxima that were ``guessed``.

    Behind a ReLU only the places of maxima pass on derivatives, those where the known maximum is not zero.
    """
    gates, steps = dict(ahead.gates), state.network.steps
    for pooling in [number for number in gates if steps[number].kind == "max" and number in guessed]:
        relu = steps[pooling].sources[0]
        layer = next((one for one in state.network.layers if one.gate == relu), None)
        known = pooling in state.values and pooling in state.signals and len(state.values[pooling]) == 1
        if not known or layer is None or layer.weight_name not in state.gradients or relu not in gates:
            continue
        source = steps[layer.step].sources[0]
        if source not in ahead.values or not isinstance(layer.module, nn.Conv2d) or steps[relu].slope:
            continue
        active = (state.gated(pooling, state.values[pooling]) > 0).double()
        signal = state.unmasked(layer.step, relu, active * state.signals[pooling])
        gradient, shape = state.gradients[layer.weight_name], steps[relu].shape[1:]
        places = right_places(layer, steps[pooling], gradient, ahead.values[source], signal, gates[pooling], shape)
        gates[pooling] = places
        mask = torch.zeros_like(gates[relu]).flatten(2).scatter(2, places.flatten(2), active.flatten(2))
        gates[relu] = mask.reshape(gates[relu].shape)
    return gates


def right_places(
    layer: WeightedLayer,
    pooling: Step,
    gradient: Tensor,
    value: Tensor,
    signal: Tensor,
    places: Tensor,
    shape: tuple[int, ...],
) -> Tensor:
    """Return the ``places`` (images, channels, ...) of maxima, the wrong ones corrected; one image.

    ``value``: what the layer reads. ``signal``: the derivative for each window, with the factor of the BatchNorm
    between layer and pooling. ``shape``: rows and columns of the map that is pooled.
    """
    flat = layer.patches(value)[0]
    products, wanted = flat.T @ flat, gradient.double().flatten(1)
    windows, derivative = _windows(pooling, shape), signal[0].flatten(1)
    found = places[0].flatten(1).clone()
    rows = torch.arange(len(found))
    for _ in range(MOVES):
        own = flat.new_zeros(len(found), flat.shape[1]).scatter_add(1, found, derivative)
        left = wanted - own @ flat.T
        along = left @ flat
        # What the channel leaves along each move, and the move's own size.
        apart = along[:, windows] - along.gather(1, found)[:, :, None]
        cross = products[found[:, :, None], windows[None]]
        sizes = products.diagonal()[windows][None] + products.diagonal()[found][:, :, None] - 2 * cross
        fit, size = derivative[:, :, None] * apart, derivative[:, :, None].square() * sizes
        gain = (2 * fit - size) / left.square().sum(1).clamp_min(1e-300)[:, None, None]
        gain = torch.where((fit - size).abs() < AMISS * size, gain, 0.0).flatten(1)
        best = gain.argmax(1)
        explained = gain[rows, best] > EXPLAINS_SOME
        if not bool(explained.any()):
            break
        window = best // windows.shape[1]
        place = windows[window, best % windows.shape[1]]
        found[rows[explained], window[explained]] = place[explained]
    return found.reshape(places.shape)


def _windows(pooling: Step, shape: tuple[int, ...]) -> Tensor:
    """Return the places of each window of a map; one place more than once where padding makes windows smaller."""
    assert pooling.average is not None
    each = torch.eye(shape[0] * shape[1], dtype=torch.float64).reshape(-1, 1, *shape)
    inside = pooling.average(each).flatten(1).T > 0
    most = int(inside.sum(1).max())
    order = inside.double().argsort(dim=1, descending=True, stable=True)[:, :most]
    return torch.where(inside.gather(1, order), order, order[:, :1])
