"""Where examples live: the space that a search starts in, stays in, and in which results are measured and shown.

A further space (tokens of a vocabulary, mixed columns of a table) is one class that inherits :class:`InputSpace`, and
one line in :data:`SPACES` if observations are saved. No attack or measure asks which space it has.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from leakscope.contracts.checks import BYTES, FLOAT, MAX_AXES, brief
from leakscope.contracts.errors import NotApplicable, UserError

Start = Literal["grey", "normal", "uniform"]


@dataclass(frozen=True)
class ValueRange:
    """The valid box of inputs in the space the model reads, one bound a channel (or one for all).

    >>> ValueRange.normalised(mean=(0.5,), std=(0.25,))
    ValueRange(low=(-2.0,), high=(2.0,))
    >>> ValueRange(0, 255)
    ValueRange(low=(0.0,), high=(255.0,))
    """

    low: tuple[float, ...] = (0.0,)
    high: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            bound = getattr(self, name)
            every = (bound,) if isinstance(bound, int | float) else bound  # one number is one for all channels
            object.__setattr__(self, name, tuple(float(v) for v in every))
        if len(self.low) != len(self.high):
            raise UserError(f"ValueRange: {len(self.low)} lower but {len(self.high)} upper bounds")
        if not all(math.isfinite(bound) for bound in (*self.low, *self.high)):
            raise UserError(f"ValueRange: expected finite bounds, got {self.low} and {self.high}")
        if not all(a < b for a, b in zip(self.low, self.high, strict=True)):
            raise UserError(f"ValueRange: every low must be below its high, got {self.low} and {self.high}")

    @classmethod
    def normalised(cls, mean: tuple[float, ...], std: tuple[float, ...]) -> ValueRange:
        """The box of pixels in [0, 1] after subtracting ``mean`` and dividing by ``std``."""
        if len(mean) != len(std) or any(s <= 0 for s in std):
            raise UserError(f"normalisation: expected equally long mean and positive std, got {mean}, {std}")
        low, high = (tuple((end - m) / s for m, s in zip(mean, std, strict=True)) for end in (0.0, 1.0))
        return cls(low, high)

    def bounds(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Lower and upper bound, shaped to broadcast over a batch (B, C, ...) such as ``like``."""
        channels = len(self.low)
        if channels > 1 and (like.dim() < 2 or like.shape[1] != channels):
            raise UserError(f"ValueRange has {channels} channels but the inputs have shape {tuple(like.shape)}")
        low, high = (torch.tensor(bound, device=like.device, dtype=like.dtype) for bound in (self.low, self.high))
        shape = () if channels == 1 else (channels,) + (1,) * (like.dim() - 2)
        return low.reshape(shape), high.reshape(shape)

    def to_unit(self, x: Tensor) -> Tensor:
        low, high = self.bounds(x)
        return (x - low) / (high - low)

    def from_unit(self, x: Tensor) -> Tensor:
        low, high = self.bounds(x)
        return low + x * (high - low)


@dataclass(frozen=True)
class InputSpace(ABC):
    """``shape`` is that of one example as the model reads it; examples are compared in unit space, [0, 1].

    A ``discrete`` space has no gradients, so attacks search in its unit space with the model that :meth:`relaxed`
    gives, and :meth:`from_unit` makes valid inputs of what they find.
    """

    #: What files call it.
    kind: ClassVar[str]
    #: Names of the measures that mean something here; see ``leakscope.metrics.MEASURES``.
    measures: ClassVar[tuple[str, ...]]
    #: Whether inputs are whole numbers, such as tokens.
    discrete: ClassVar[bool] = False

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))
        if not self.shape or any(size < 1 for size in self.shape) or len(self.shape) > MAX_AXES:
            raise UserError(f"input_shape: expected positive sizes without the batch, got {brief(self.shape)}")
        BYTES.check("input_shape: one example", FLOAT * self.size)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def unit_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    @abstractmethod
    def bounded(self) -> bool:
        """Whether the adversary knows the valid values, so that [0, 1] has a meaning."""

    @property
    def value_range(self) -> ValueRange | None:
        """The bounds of a box of floats, where they are known."""
        return None

    @property
    def smooth(self) -> bool:
        """Whether neighbouring numbers tend to be alike, as pixels are, so that priors on differences make sense."""
        return False

    def unknown(self) -> InputSpace:
        """The same space for an adversary who does not know the valid values."""
        return Box(self.shape)

    def problems(self, x: Tensor) -> list[str]:
        """What is wrong with ``x`` as a batch of such inputs."""
        if not x.is_floating_point():
            return [f"x: expected floating point, got {x.dtype}; convert with x.float()"]
        return [] if bool(torch.isfinite(x).all()) else ["x: has NaN or infinite values"]

    def cast(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype)

    def relaxed(self, model: nn.Module) -> nn.Module:
        """Return ``model`` reading numbers of unit space, with the same parameters; asked of discrete spaces only."""
        raise NotApplicable(f"a {self.kind} has no relaxation to search in: override InputSpace.relaxed")

    def relaxed_space(self) -> InputSpace:
        return Box(self.unit_shape, ValueRange())

    def text(self, unit: Tensor) -> str | None:
        """One example of unit space in words; None where it is better drawn, as an image or as a line."""
        return None

    @abstractmethod
    def to_unit(self, x: Tensor) -> Tensor:
        """Inputs of the model as numbers in [0, 1]; as they are where the valid values are not known."""

    @abstractmethod
    def from_unit(self, x: Tensor) -> Tensor:
        """Invert :meth:`to_unit`."""

    @abstractmethod
    def start(self, kind: Start, count: int, generator: torch.Generator, like: Tensor) -> Tensor:
        """Draw where a search for ``count`` examples begins, on the CPU so that every device starts alike.

        "grey": the middle of the valid values with a little noise; "normal": N(0, 1); "uniform": [0, 1].
        """

    @abstractmethod
    def project(self, x: Tensor) -> Tensor:
        """The nearest valid inputs of the model."""

    def project_unit(self, x: Tensor) -> Tensor:
        """The nearest valid inputs, of numbers as :meth:`to_unit` gives them."""
        return self.to_unit(self.project(self.from_unit(x)))

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What a file needs to make it again, as JSON values."""

    @classmethod
    @abstractmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> InputSpace:
        """The inverse of :meth:`facts`."""


@dataclass(frozen=True)
class Box(InputSpace):
    """Floats between bounds; ``range`` None where the adversary does not know them.

    >>> Box((1, 2, 2), ValueRange((0.0,), (2.0,))).to_unit(torch.ones(1, 1, 2, 2)).max().item()
    0.5
    >>> Box((4,)).bounded
    False
    """

    kind: ClassVar[str] = "box"
    measures: ClassVar[tuple[str, ...]] = ("mse", "rmse", "rmse_maxnorm", "psnr", "ssim", "lpips", "identification")

    range: ValueRange | None = None

    @property
    def bounded(self) -> bool:
        return self.range is not None

    @property
    def value_range(self) -> ValueRange | None:
        return self.range

    @property
    def smooth(self) -> bool:
        return len(self.shape) > 1

    def to_unit(self, x: Tensor) -> Tensor:
        return x if self.range is None else self.range.to_unit(x)

    def from_unit(self, x: Tensor) -> Tensor:
        return x if self.range is None else self.range.from_unit(x)

    def start(self, kind: Start, count: int, generator: torch.Generator, like: Tensor) -> Tensor:
        draw = torch.rand if kind == "uniform" else torch.randn
        drawn = draw((count, *self.shape), generator=generator).to(like)
        return drawn if kind != "grey" else 0.5 + 0.1 * drawn if self.bounded else 0.1 * drawn

    def project(self, x: Tensor) -> Tensor:
        if self.range is None:
            return x
        low, high = self.range.bounds(x)
        return torch.minimum(torch.maximum(x, low), high)

    def project_unit(self, x: Tensor) -> Tensor:
        return x.clamp(0, 1) if self.bounded else x

    def facts(self) -> dict[str, Any]:
        bounds = None if self.range is None else {"low": list(self.range.low), "high": list(self.range.high)}
        return {"kind": self.kind, "shape": list(self.shape), "range": bounds}

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Box:
        bounds = facts["range"]
        box = None if bounds is None else ValueRange(tuple(bounds["low"]), tuple(bounds["high"]))
        return cls(tuple(facts["shape"]), box)


#: Spaces by the name that files have for them; add your own here.
SPACES: dict[str, type[InputSpace]] = {Box.kind: Box}


def space_from_facts(facts: Mapping[str, Any]) -> InputSpace:
    """Make the space that a file describes."""
    if facts["kind"] not in SPACES:
        raise UserError(f"inputs: expected one of {', '.join(SPACES)}, got {facts['kind']!r}")
    return SPACES[facts["kind"]].from_facts(facts)
