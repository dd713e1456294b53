"""Draw what is optimised as an input of the model: the pixels, or a network that draws them.

An untrained convolutional net draws smooth, structured pictures long before it draws noise (Ulyanov, Vedaldi,
Lempitsky, Deep Image Prior, CVPR 2018). The net is a U-Net of residual blocks with group norm and self-attention
(Wide-ResNet U-Net as in PixelCNN++ and Ho, Jain, Abbeel, 2020); known features of the examples enter every block.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, Protocol, get_args

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from leakscope.contracts.errors import UserError
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
    """Optimise the input itself, kept in the valid box.

    ``space="unit"`` optimises a picture in [0, 1], so that one step size fits all data; ``"model"`` in the model's own
    input space as published code does. Without a known box both are the model's space, unclamped. ``start``: "grey"
    (mid-box with a little noise), "normal" (N(0, 1)) or "uniform".
    """

    space: Space = "unit"
    start: Start = "grey"
    clamp: bool = True
    compiles: ClassVar[bool] = True

    def variables(self, count: int, inputs: InputSpace) -> int:
        return count * inputs.size

    def initial(self, count: int, inputs: InputSpace, generator: torch.Generator, like: Tensor) -> Tensor:
        picture = inputs.start(self.start, count, generator, like)
        # Published code draws N(0, 1) in whatever space it searches; only the middle has its place.
        return inputs.from_unit(picture) if self.start == "grey" and self.space == "model" else picture

    def project_rows(self, rows: Tensor, inputs: InputSpace) -> Tensor:
        project = inputs.project_unit if self.space == "unit" else inputs.project
        return project(rows.reshape(-1, *inputs.shape)).reshape(rows.shape) if self.clamp else rows

    def draw(self, row: Tensor, count: int, inputs: InputSpace) -> Tensor:
        return row.reshape(count, *inputs.shape)

    def to_model(self, picture: Tensor, inputs: InputSpace) -> Tensor:
        return picture if self.space == "model" else inputs.from_unit(picture)


DrawingSize = Literal["tiny", "small", "paper"]


@dataclass(frozen=True)
class Plan:
    """Plan a U-Net: ``channels`` times ``factors`` at each halved resolution, with so many residual ``blocks``."""

    channels: int
    factors: tuple[int, ...]
    blocks: int

    @property
    def grain(self) -> int:
        return int(2 ** (len(self.factors) - 1))


PLANS: Mapping[DrawingSize, Plan] = MappingProxyType(
    {"tiny": Plan(16, (1, 2, 2), 1), "small": Plan(32, (1, 2, 2, 2), 1), "paper": Plan(128, (1, 2, 2, 2), 2)}
)
ATTENTIVE_LEVEL = 1


class Block(nn.Module):
    """Two 3x3 convolutions behind group norm, added to the input; features, where there are any, in between."""

    def __init__(self, inputs: int, outputs: int, features: int, attentive: bool) -> None:
        super().__init__()
        self.norm1 = _norm(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.feature = nn.Linear(features, outputs) if features else None
        self.norm2 = _norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        self.attention = Attention(outputs) if attentive else nn.Identity()

    def forward(self, x: Tensor, features: Tensor | None) -> Tensor:
        inner = self.conv1(F.silu(self.norm1(x)))
        if self.feature is not None and features is not None:
            inner = inner + self.feature(features)[:, :, None, None]
        return self.attention(self.shortcut(x) + self.conv2(F.silu(self.norm2(inner))))


class Attention(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = _norm(channels)
        self.sight = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.sight(self.norm(x)).flatten(2).mT.chunk(3, dim=2)
        looked = F.scaled_dot_product_attention(query, key, value)
        return x + self.out(looked.mT.reshape(x.shape))


class UNet(nn.Module):
    """From noise (examples, channels, height, width) and features (examples, n) to pictures of the noise's shape."""

    def __init__(self, plan: Plan, channels: int, features: int) -> None:
        super().__init__()
        widths = [plan.channels * factor for factor in plan.factors]
        inner = 4 * plan.channels if features else 0
        self.features = nn.Linear(features, inner) if features else None
        self.first = nn.Conv2d(channels, widths[0], 3, padding=1)
        self.down, self.shrink, self.up, self.grow = (nn.ModuleList() for _ in range(4))
        self.plan, width, kept = plan, widths[0], [widths[0]]
        for level, outputs in enumerate(widths):
            stage = nn.ModuleList()
            for _ in range(plan.blocks):
                stage.append(Block(width, outputs, inner, level == ATTENTIVE_LEVEL))
                width = outputs
                kept.append(width)
            self.down.append(stage)
            if level + 1 < len(widths):
                self.shrink.append(nn.Conv2d(width, width, 3, stride=2, padding=1))
                kept.append(width)
        self.middle1, self.middle2 = Block(width, width, inner, True), Block(width, width, inner, False)
        for level, outputs in reversed(list(enumerate(widths))):
            stage = nn.ModuleList()
            for _ in range(plan.blocks + 1):
                stage.append(Block(width + kept.pop(), outputs, inner, level == ATTENTIVE_LEVEL))
                width = outputs
            self.up.append(stage)
            if level:
                self.grow.append(nn.Conv2d(width, width, 3, padding=1))
        self.norm = _norm(width)
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, noise: Tensor, features: Tensor | None = None) -> Tensor:
        known = None if self.features is None or features is None else F.silu(self.features(features))
        x = self.first(noise)
        kept = [x]
        for level, stages in enumerate(self.down):
            for stage in stages:  # type: ignore[attr-defined]  # a ModuleList
                x = stage(x, known)
                kept.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
                kept.append(x)
        x = self.middle2(self.middle1(x, known), known)
        for level, stages in enumerate(self.up):
            for stage in stages:  # type: ignore[attr-defined]  # a ModuleList
                x = stage(torch.cat([x, kept.pop()], dim=1), known)
            if level < len(self.grow):
                x = self.grow[level](x.repeat_interleave(2, 2).repeat_interleave(2, 3))
        return self.last(F.silu(self.norm(x)))


@dataclass(frozen=True, kw_only=True, eq=False)
class Drawing:
    """Draw with a U-Net: a row holds the noise that it draws from, which no derivative moves, and its weights.

    ``features`` (examples, n): what is known of the examples, in the order of the labels; only directions count.
    Pictures come through a sigmoid into [0, 1] where the valid box is known. Sides that cannot be halved often enough
    are drawn larger and cropped; signals are pictures of one line, and axes before the last two are channels.
    """

    size: DrawingSize = "tiny"
    features: Tensor | None = None
    space: ClassVar[Space] = "unit"
    start: ClassVar[Start] = "normal"
    #: Two nets in one graph took the compiler minutes, as long as the plain search of a small one.
    compiles: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.size not in PLANS:
            raise UserError(f"size: expected one of {', '.join(get_args(DrawingSize))}, got {self.size!r}")
        if self.features is not None and (self.features.dim() != 2 or not self.features.numel()):
            raise UserError(f"features: expected (examples, n), got {tuple(self.features.shape)}")

    def variables(self, count: int, inputs: InputSpace) -> int:
        return math.prod(self._noise_shape(count, inputs)) + sum(math.prod(s) for s in self._weights(inputs).values())

    def initial(self, count: int, inputs: InputSpace, generator: torch.Generator, like: Tensor) -> Tensor:
        """Noise N(0, 1), convolutions N(0, 1 / inputs of a unit), norms one, biases and the way of features zero."""
        parts = [torch.randn(math.prod(self._noise_shape(count, inputs)), generator=generator)]
        for name, shape in self._weights(inputs).items():
            if name.endswith(".feature.weight"):  # the net begins as one that knows nothing
                parts.append(torch.zeros(math.prod(shape)))
            elif len(shape) > 1:
                # A faint last layer: the first picture is nearly grey.
                scale = (0.3 if name.startswith("last.") else 1.0) / math.sqrt(math.prod(shape[1:]))
                parts.append(scale * torch.randn(math.prod(shape), generator=generator))
            else:
                parts.append(torch.full(shape, float(name.endswith("weight"))))
        return torch.cat(parts).to(like)

    def project_rows(self, rows: Tensor, inputs: InputSpace) -> Tensor:
        return rows

    def draw(self, row: Tensor, count: int, inputs: InputSpace) -> Tensor:
        shapes = {"noise": self._noise_shape(count, inputs), **self._weights(inputs)}
        # Split at once: the derivative of each single slice would be a row of zeros to fill and to add.
        parts = zip(shapes.items(), row.split([math.prod(shape) for shape in shapes.values()]), strict=True)
        weights = {name: part.reshape(shape) for (name, shape), part in parts}
        noise = weights.pop("noise").detach()
        known = None
        if self.features is not None:
            if len(self.features) != count:
                raise UserError(f"features: expected one row for each of {count} examples, got {len(self.features)}")
            known = F.normalize(self.features.to(row), dim=1) * math.sqrt(self.features.shape[1])
        drawn: Tensor = functional_call(self._net(inputs), weights, (noise, known))
        _, height, width = _plane(inputs)
        drawn = drawn[:, :, :height, :width].reshape(count, *inputs.shape)
        return torch.sigmoid(drawn) if inputs.bounded else drawn

    def to_model(self, picture: Tensor, inputs: InputSpace) -> Tensor:
        return inputs.from_unit(picture)

    def _noise_shape(self, count: int, inputs: InputSpace) -> tuple[int, int, int, int]:
        channels, *sides = _plane(inputs)
        height, width = (-(-side // PLANS[self.size].grain) * PLANS[self.size].grain for side in sides)
        return count, channels, height, width

    def _net(self, inputs: InputSpace) -> UNet:
        return _net(PLANS[self.size], _plane(inputs)[0], 0 if self.features is None else self.features.shape[1])

    def _weights(self, inputs: InputSpace) -> dict[str, tuple[int, ...]]:
        return {name: tuple(value.shape) for name, value in self._net(inputs).named_parameters()}


@functools.lru_cache(maxsize=16)
def _net(plan: Plan, channels: int, features: int) -> UNet:
    with torch.device("meta"):
        return UNet(plan, channels, features)


def _plane(inputs: InputSpace) -> tuple[int, int, int]:
    *channels, height, width = (1, 1, *inputs.shape)[-max(3, len(inputs.shape)) :]
    if len(inputs.shape) == 2:  # channels of a signal are no lines of a picture
        channels, height = [inputs.shape[0]], 1
    return math.prod(channels), height, width


def _norm(channels: int) -> nn.GroupNorm:
    """Up to 32 groups, of four channels at least: a norm of single channels would take away what features add."""
    return nn.GroupNorm(math.gcd(channels // 4, 32), channels)
