"""What is optimised, and how it becomes an input of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakscope.contracts.inputs import InputSpace, Start


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """The input itself, kept in the valid box.

    ``space="unit"`` optimises a picture in [0, 1] whatever the model's normalisation, so that one step size fits all
    data; ``"model"`` optimises in the model's own input space as published code does. Without a known box both are
    the model's space, unclamped. ``start``: "grey" (mid-box with a little noise), "normal" (N(0, 1)) or "uniform".
    """

    space: Literal["unit", "model"] = "unit"
    start: Start = "grey"
    clamp: bool = True

    def initial(self, count: int, inputs: InputSpace, generator: torch.Generator, like: Tensor) -> Tensor:
        """A random start of so many examples, (count, ...)."""
        picture = inputs.start(self.start, count, generator, like)
        # Published code draws N(0, 1) in whatever space it searches; only the middle has its place.
        return inputs.from_unit(picture) if self.start == "grey" and self.space == "model" else picture

    def project(self, picture: Tensor, inputs: InputSpace) -> Tensor:
        """The nearest valid picture."""
        if not inputs.bounded or not self.clamp:
            return picture
        return inputs.project_unit(picture) if self.space == "unit" else inputs.project(picture)

    def to_model(self, picture: Tensor, inputs: InputSpace) -> Tensor:
        return picture if self.space == "model" else inputs.from_unit(picture)
