"""What is optimised, and how it becomes an input of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakscope.observation import ValueRange


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """The input itself, kept in the valid box.

    ``space="unit"`` optimises a picture in [0, 1] whatever the model's normalisation, so that one step size fits all
    data; ``"model"`` optimises in the model's own input space as published code does. Without a known box both are
    the model's space, unclamped. ``start``: "grey" (mid-box with a little noise), "normal" (N(0, 1)) or "uniform".
    """

    space: Literal["unit", "model"] = "unit"
    start: Literal["grey", "normal", "uniform"] = "grey"
    clamp: bool = True

    def __post_init__(self) -> None:
        if self.space not in ("unit", "model"):
            raise ValueError(f"space: expected 'unit' or 'model', got {self.space!r}")
        if self.start not in ("grey", "normal", "uniform"):
            raise ValueError(f"start: expected 'grey', 'normal' or 'uniform', got {self.start!r}")

    def initial(
        self, shape: tuple[int, ...], box: ValueRange | None, generator: torch.Generator, like: Tensor
    ) -> Tensor:
        """A random start of ``shape`` (examples, ...), drawn on the CPU so that every device starts alike."""
        if self.start == "uniform":
            picture = torch.rand(shape, generator=generator)
        else:
            picture = torch.randn(shape, generator=generator)
        picture = picture.to(like)
        if self.start == "grey":
            picture = 0.1 * picture if box is None else 0.5 + 0.1 * picture
            return picture if box is None or self.space == "unit" else box.from_unit(picture)
        return picture

    def project(self, picture: Tensor, box: ValueRange | None) -> Tensor:
        """The nearest valid picture."""
        if box is None or not self.clamp:
            return picture
        if self.space == "unit":
            return picture.clamp(0, 1)
        low, high = box.bounds(picture)
        return torch.minimum(torch.maximum(picture, low), high)

    def to_model(self, picture: Tensor, box: ValueRange | None) -> Tensor:
        return picture if box is None or self.space == "model" else box.from_unit(picture)
