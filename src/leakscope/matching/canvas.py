"""What is optimised, and how it becomes an input of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from leakscope.contracts.inputs import InputSpace, Start

Space = Literal["unit", "model"]


class Canvas(Protocol):
    """Flat rows of variables that become pictures; ``count`` examples of the space ``inputs`` each."""

    @property
    def space(self) -> Space:
        """Whether a picture is in [0, 1], where the valid box is known, or an input of the model."""

    @property
    def start(self) -> Start:
        """How numbers that are searched besides the pictures begin."""

    @property
    def compiles(self) -> bool:
        """Whether a step with it is compiled in less time than that saves."""

    def variables(self, count: int, inputs: InputSpace) -> int:
        """How many numbers a row has."""

    def initial(self, count: int, inputs: InputSpace, generator: torch.Generator, like: Tensor) -> Tensor:
        """A random start, which need not be valid yet; flat, it is a row."""

    def project_rows(self, rows: Tensor, inputs: InputSpace) -> Tensor:
        """The nearest valid rows (k, n)."""

    def draw(self, row: Tensor, count: int, inputs: InputSpace) -> Tensor:
        """The pictures (count, ...) of a row, differentiable."""

    def to_model(self, picture: Tensor, inputs: InputSpace) -> Tensor:
        """Pictures as the model reads them."""


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """The input itself, kept in the valid box.

    ``space="unit"`` optimises a picture in [0, 1] whatever the model's normalisation, so that one step size fits all
    data; ``"model"`` optimises in the model's own input space as published code does. Without a known box both are
    the model's space, unclamped. ``start``: "grey" (mid-box with a little noise), "normal" (N(0, 1)) or "uniform".
    """

    space: Space = "unit"
    start: Start = "grey"
    clamp: bool = True
    compiles: ClassVar[bool] = True

    def variables(self, count: int, inputs: InputSpace) -> int:
        return count * inputs.size

    def initial(self, count: int, inputs: InputSpace, generator: torch.Generator, like: Tensor) -> Tensor:
        """A random start of so many examples, (count, ...)."""
        picture = inputs.start(self.start, count, generator, like)
        # Published code draws N(0, 1) in whatever space it searches; only the middle has its place.
        return inputs.from_unit(picture) if self.start == "grey" and self.space == "model" else picture

    def project(self, picture: Tensor, inputs: InputSpace) -> Tensor:
        """The nearest valid picture."""
        if not self.clamp:
            return picture
        return inputs.project_unit(picture) if self.space == "unit" else inputs.project(picture)

    def project_rows(self, rows: Tensor, inputs: InputSpace) -> Tensor:
        if not self.clamp:
            return rows
        return self.project(rows.reshape(-1, *inputs.shape), inputs).reshape(rows.shape)

    def draw(self, row: Tensor, count: int, inputs: InputSpace) -> Tensor:
        return row.reshape(count, *inputs.shape)

    def to_model(self, picture: Tensor, inputs: InputSpace) -> Tensor:
        return picture if self.space == "model" else inputs.from_unit(picture)
