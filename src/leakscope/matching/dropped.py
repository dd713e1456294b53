"""Matching below a cut of a network that dropped units: its masks are searched along with the inputs.

Scheliga, Maeder, Seeland, "Dropout Is NOT All You Need to Prevent Gradient Leakage", AAAI 2023: the client's network is
one of many, and which one is as unknown as its example. A mask between 0 and 1 stands for each input of a layer that
may have been dropped, and all are moved together with the pixels; the layers that the masks lie between have many more
gradients than one example has pixels. Unlike there, features and adjoints at the cut are known and held, masks of the
cut itself included, which were read and not searched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from leakscope.matching.held import HeldMatching, Weighting
from leakscope.network.recorder import change_input, record_layers

#: A mask's step relative to a pixel's.
PACE = 0.2
#: All layers count alike, those that read the input too: what they say of the masks does not mislead.
MASKS = Weighting(name="masks", features=0.3, ratio=1.0, first=True)


@dataclass(frozen=True, eq=False, kw_only=True)
class DroppedMatching(HeldMatching):
    """The search for inputs and for the masks of ``dropped`` layers, whose inputs went with ``probability``.

    A row holds the pixels, then the masks in units of their pace.
    """

    dropped: Sequence[str]
    probability: float
    _masks: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    _shapes: dict[str, torch.Size] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        blank = self.features.new_zeros(self.shape)
        record = record_layers(self.model, blank, lambda name, _: name in self.dropped, evaluate=True)
        for name in self.dropped:
            (call,) = record.of(name)
            self._shapes[name] = call.inputs.shape
            change_input(self.model.get_submodule(name), _Masked(name, self._masks))

    @property
    def pixels(self) -> int:
        return math.prod(self.shape)

    def start(self, generator: torch.Generator) -> Tensor:
        return self._with_masks(super().start(generator))

    def start_near(self, inputs: Tensor) -> Tensor:
        return self._with_masks(super().start_near(inputs))

    def pictures(self, row: Tensor) -> Tensor:
        return row.flatten()[: self.pixels].reshape(self.shape)

    def at_cut(self, row: Tensor) -> Tensor:
        sizes = [shape.numel() for shape in self._shapes.values()]
        parts = row.flatten()[self.pixels :].split(sizes)
        for (name, shape), part in zip(self._shapes.items(), parts, strict=True):
            self._masks[name] = part.reshape(shape) * PACE / (1 - self.probability)
        try:
            return super().at_cut(row)
        finally:
            self._masks.clear()

    def project(self, rows: Tensor) -> Tensor:
        pixels = super().project(rows[:, : self.pixels])
        return torch.cat([pixels, rows[:, self.pixels :].clamp(0, 1 / PACE)], 1)

    def _with_masks(self, pixels: Tensor) -> Tensor:
        """All masks at their mean to begin with."""
        count = sum(shape.numel() for shape in self._shapes.values())
        return torch.cat([pixels, pixels.new_full((1, count), (1 - self.probability) / PACE)], 1)


@dataclass(frozen=True, eq=False)
class _Masked:
    """Multiplies a layer's inputs with the mask of its name."""

    name: str
    masks: dict[str, Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        mask = self.masks.get(self.name)
        return x if mask is None else x * mask


def searched_layers(model: nn.Module, layer: str, dropped: Sequence[str], blank: Tensor) -> list[str]:
    """Those of the ``dropped`` layers that act below the cut, in the order of the network."""
    order = [call.name for call in record_layers(model, blank, evaluate=True).calls]
    return [name for name in order[: order.index(layer)] if name in dropped]
