"""Tell whether one layer of an observed update determines its batch: counts of the model, checked on the update.

The counts are those of :mod:`leakscope.limits.reach`. Noise, pruning and rounding fill up the rank of a layer's
gradient, and dead channels lower it: a layer counts only where the rank is that of the batch. This takes a fraction of
a second, with or without knowledge of the defence, and runs no attack.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.channel import Channel
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import RECOVERED
from leakscope.contracts.task import Classification
from leakscope.equations.convolution_factor import visible_rank
from leakscope.equations.local_networks import rounding
from leakscope.equations.patch_embedding import solve_patches
from leakscope.limits.reach import LayerReach, layer_reaches, lowest_layer
from leakscope.matching.recipe import plain_steps
from leakscope.network.kinks import kinks
from leakscope.network.patches import find_patches

#: Layers whose rank is looked at: trained networks have dead channels in some.
MOST_STARTS = 8


@dataclass(frozen=True, kw_only=True)
class Determined:
    """The gradient of ``layer`` determines a batch, down to the ``numbers`` of each example that ``lowest`` receives.

    ``size``: numbers of one input; ``narrowest``: what the narrowest layer on the way from there receives.

    >>> facts = {"layer": "4", "lowest": "1", "numbers": 4096, "size": 3072}
    >>> Determined(narrowest=3072, **facts).whole, Determined(narrowest=768, **facts).whole
    (True, False)
    """

    layer: str
    lowest: str
    numbers: int
    size: int
    narrowest: int

    @property
    def whole(self) -> bool:
        """Return whether each layer up to the lowest receives at least as many numbers as an input has."""
        return self.narrowest >= self.size

    def __str__(self) -> str:
        where = "itself" if self.lowest == self.layer else f"down to {self.lowest!r}"
        return (
            f"the gradient of {self.layer!r} determines the batch {where}: "
            f"{self.numbers:,} numbers of each example, whose input has {self.size:,}"
        )


def determined_by(observation: Observation) -> Determined | None:
    """Return the layer that determines the batch of an update; None where no layer does, or where noise is on it."""
    images, update = _images(observation), observation.message.update if not observation.has_rounds else {}
    if images is None or not update or not _undisturbed(observation.channel):
        return None
    if observation.inputs.discrete or not isinstance(observation.task, Classification):
        return None
    layers = _counts(observation, images, update)
    for _ in range(MOST_STARTS):
        found = lowest_layer(layers, images)
        if found is None:
            return None
        names = [layer.name for layer in layers]
        start, end = (names.index(name) for name in found)
        if _shows(observation, layers[end : start + 1], update, images):
            numbers, narrowest = layers[end].reads, min(layer.reads for layer in layers[: end + 1])
            facts = {"numbers": numbers, "size": observation.inputs.size, "narrowest": narrowest}
            return Determined(layer=names[start], lowest=names[end], **facts)
        layers[start] = dataclasses.replace(layers[start], alone=0)
    return None


def _counts(observation: Observation, images: int, update: Mapping[str, Tensor]) -> list[LayerReach]:
    """Return what each layer tells of this update: nothing where it is not sent."""
    model, shape = observation.model, observation.input_shape
    # Zeros of a ReLU separate the images behind a convolution, and the softmax those of one step behind a head.
    apart = {"Conv2d": images == 1 or bool(kinks(model, shape)), "Linear": plain_steps(observation) == 1}
    found = []
    for layer in layer_reaches(model, shape):
        sent = f"{layer.name}.weight" in update
        alone = layer.alone if sent and apart.get(layer.kind, False) else 0
        found.append(dataclasses.replace(layer, alone=alone, below=layer.below if sent else 0))
    return found


def _images(observation: Observation) -> int | None:
    """Return of how many images the update is the gradient: every image once for each plain local step."""
    steps = plain_steps(observation)
    if steps is None or observation.num_examples is None or (steps > 1 and observation.batchnorm == "train"):
        return None
    return steps * observation.num_examples


def _undisturbed(channel: Channel | None) -> bool:
    if channel is None:
        return True  # what is not known shows in the rank
    altered = channel.noisy or channel.masked or channel.rounding != "none" or channel.unreliable or channel.inexact
    return type(channel) is Channel and not (altered or channel.dropped_layers or channel.mixed > 1)


def _shows(observation: Observation, layers: Sequence[LayerReach], update: Mapping[str, Tensor], images: int) -> bool:
    """Return whether the last layer's gradient is that of so many images, and those below it of no more."""
    *below, start = layers
    if start.limit == "positions":
        return _solves_patches(observation, update)
    if _rank(observation, update, start) != images * start.places:
        return False
    # Elsewhere the batch fills the rank by itself.
    narrow = [layer for layer in below if update[f"{layer.name}.weight"].shape[1] > images * layer.places]
    return all(_rank(observation, update, layer) <= images * layer.places for layer in narrow)


def _rank(observation: Observation, update: Mapping[str, Tensor], layer: LayerReach) -> int:
    """Return how many directions of a layer's inputs its gradient shows."""
    name = f"{layer.name}.weight"
    gradient, weight = update[name].detach().cpu(), observation.model.get_parameter(name)
    noise = 0.0 if observation.message.kind == "gradient" else rounding(weight, plain_steps(observation) or 1)
    return visible_rank(gradient if gradient.dim() == 4 else gradient[:, :, None, None], noise)


def _solves_patches(observation: Observation, update: Mapping[str, Tensor]) -> bool:
    """Return whether the patches of one image follow from the update with a small expected error."""
    try:
        place = find_patches(observation.model, observation.input_shape, update)
        grey = place.patches(torch.full((math.prod(observation.input_shape),), 0.5, dtype=torch.float64))
        gradient, signals = update[place.weight].flatten(1).cpu(), place.signals(update[place.position].cpu())
        bias = None if place.bias is None else update[place.bias].cpu()
        return solve_patches(signals, gradient, bias, grey, 1.0).error <= RECOVERED
    except (NotApplicable, RuntimeError):
        return False
