"""Find wrong masks by what they leave of a convolution's weight gradient, now that what it reads is nearly known.

A unit within errors of zero may count as active by mistake, or as shut. Its derivative without the mask is known, and
with it exactly what the mistake takes from its channel's gradient, or adds: that times what the unit reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakscope.equations.peel_state import PeelState
from leakscope.network.gates import WeightedLayer

#: Share of the largest value up to which a unit's sign may be wrong.
NEAR_ZERO = 1e-3
#: Share of what a channel leaves, squared, that one other sign must explain; less where what fits best is not further
#: from what the sign gives than this share: errors of what the layer reads have other sizes.
EXPLAINS, EXPLAINS_SOME, AMISS = 0.3, 0.08, 0.4


def wrong_masks(
    layer: WeightedLayer,
    gradient: Tensor,
    value: Tensor,
    signal: Tensor,
    unmasked: Tensor,
    active: Tensor,
    near: Tensor,
) -> Tensor:
    """Mark the units (images, channels, ...) whose sign explains what their channels leave, one a channel at most.

    ``value``: what the layer reads. ``signal``: the derivative at its output, ``unmasked`` without the mask, which is
    ``active``. Units that are not ``near`` zero have the right sign.
    """
    patches = layer.patches(value)
    flat = patches.transpose(0, 1).flatten(1)
    own, full, mask, doubtful = (one.transpose(0, 1).flatten(1) for one in (signal, unmasked, active, near))
    left = gradient.double().flatten(1) - own @ flat.T
    change = torch.where(mask > 0, -full, full)
    along, sizes = left @ flat, flat.square().sum(0)
    gain = change * (2 * along - change * sizes) / left.square().sum(1, keepdim=True).clamp_min(1e-300)
    fits = (along - change * sizes).abs() < AMISS * (change * sizes).abs()
    gain = torch.where((doubtful > 0) & (fits | (gain > EXPLAINS)), gain, 0.0)
    best = gain.argmax(1, keepdim=True)
    explained = gain.gather(1, best) > EXPLAINS_SOME
    found = torch.zeros_like(gain, dtype=torch.bool).scatter_(1, best, explained)
    return found.reshape(len(found), len(signal), *signal.shape[2:]).transpose(0, 1)


def correct_masks(state: PeelState, number: int, readers: Sequence[WeightedLayer], value: Tensor) -> bool:
    """Correct masks behind layers that read a step by what its ``value`` leaves; return whether any was wrong."""
    changed = list[int]()
    for one in readers:
        gate = one.gate
        if gate is None or gate not in state.values or gate not in state.gates or state.network.steps[gate].slope:
            continue
        active, near = state.gates[gate], state.values[gate] < NEAR_ZERO * state.values[gate].max()
        unmasked, signal = state.unmasked(one.step, gate), state.signals[one.step]
        wrong = wrong_masks(one, state.gradients[one.weight_name], value, signal, unmasked, active, near)
        if bool(wrong.any()):
            state.gates[gate] = torch.where(wrong, 1 - active, active)
            state.seen.add(gate)
            changed.append(gate)
    for step in range(max(changed, default=number) - 1, number, -1):
        if step in state.signals and step not in state.pinned:
            state.signals[step] = state.backward(step)
    return bool(changed)
