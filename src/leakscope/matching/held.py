"""Matching below a cut: what a layer received, and its derivative there, are known and held.

In a trained network the derivative of a matching distance mostly changes the logits, for the softmax answers to every
pixel. Where features and their adjoints are known exactly (equations/embedding.py), the client's loss is replaced by
sum_i <adjoint_i, h(x_i)>: the same weight gradients, without that path. Bias gradients then do not depend on the input
and are left out, and the first layer misleads where it is a convolution. See docs/strength.md.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from leakscope.contracts.inputs import InputSpace
from leakscope.matching.optimisers import Adam, schedule_factor
from leakscope.matching.priors import total_variation
from leakscope.matching.search import Evaluation, SearchResult, Watch, search
from leakscope.network.recorder import change_input, inputs_of, record_layers

#: Rows of a gradient below this share of the largest are left out: they are rounding.
SMALLEST_ROW = 1e-4
#: The share of step size and prior for a start that is nearly right, and a mask's step relative to a pixel's.
NEAR = PACE = 0.2


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """How much each term counts: the features, and then the layers from the cut down, each ``ratio`` times the next.

    ``level_rows`` divides each output unit's gradient by the square root of its size, so that quiet units count too.
    ``first`` includes the layers that read the input.
    """

    name: str
    features: float
    ratio: float
    level_rows: bool = False
    first: bool = False

    def layers(self, count: int) -> list[float]:
        """Return the weights of ``count`` layers, those nearest to the cut first.

        >>> [round(w, 2) for w in Weighting(name="depth", features=0.4, ratio=2.0).layers(2)]
        [0.4, 0.2]
        """
        shares = [self.ratio**-place for place in range(count)]
        return [(1 - self.features) * share / sum(shares) for share in shares]


DEPTH = Weighting(name="depth", features=0.4, ratio=2.0, level_rows=True)
FEATURES = Weighting(name="features", features=0.7, ratio=3.0)
EQUAL = Weighting(name="equal", features=0.3, ratio=1.0)
WHOLE = Weighting(name="whole", features=0.3, ratio=1.0, first=True)
#: Where masks are searched too, layers that read the input do not mislead.
MASKS = replace(WHOLE, name="masks")
WEIGHTINGS: tuple[Weighting, ...] = (DEPTH, FEATURES, EQUAL, WHOLE)


#: A weight, its observed gradient, and what each entry's difference from that is multiplied by.
Term = tuple[nn.Parameter, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class HeldMatching:
    """The search for inputs with known features and adjoints (examples, n) at what ``layer`` receives.

    ``gradients``: of the weights below the cut, from the input on, those that read the input in ``first``. ``model`` is
    a private copy. ``tv``: the weight of total variation, which falls over the search to the share ``least_tv``.
    ``angle`` compares features by one minus their cosine, where their length is not known. ``survivors``: ones where
    entries of a gradient were seen and zeros elsewhere; ``seen`` (n,) or (examples, n) the same of features.
    """

    model: nn.Module
    layer: nn.Module
    features: Tensor
    adjoints: Tensor
    gradients: Mapping[str, Tensor]
    inputs: InputSpace
    first: frozenset[str] = frozenset()
    tv: float = 0.2
    least_tv: float = 0.0
    optimiser: Adam = Adam()
    angle: bool = False
    survivors: Mapping[str, Tensor] = field(default_factory=dict)
    seen: Tensor | None = None

    def __post_init__(self) -> None:
        self.model.requires_grad_(False)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.features), *self.inputs.shape)

    def start(self, generator: torch.Generator) -> Tensor:
        return self.inputs.start("grey", len(self.features), generator, self.features).flatten()[None]

    def start_near(self, inputs: Tensor) -> Tensor:
        return self.inputs.to_unit(inputs).flatten()[None]

    def near(self) -> Self:
        """Return the search for a start that is nearly right, which steps and prior of one from afar would lose."""
        return replace(self, optimiser=replace(self.optimiser, lr=NEAR * self.optimiser.lr), tv=NEAR * self.tv)

    def run(self, start: Tensor, weighting: Weighting, iterations: int, watch: Watch | None = None) -> SearchResult:
        """Descend from ``start`` (1, n) under one weighting; the last point is the result."""
        terms = self._terms(weighting)
        sizes = self.features.abs().sum(1).clamp_min(torch.finfo(self.features.dtype).tiny)

        def evaluate(rows: Tensor, step: int) -> Evaluation:
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                point = rows.detach().requires_grad_()
                pictures, found = self.pictures(point), self.at_cut(point)
                distance = weighting.features * self._apart(found, sizes)
                if terms:
                    total = (found * self.adjoints).sum()
                    own = torch.autograd.grad(total, [one[0] for one in terms], create_graph=True, allow_unused=True)
                    for (_, target, scale), value in zip(terms, own, strict=True):
                        if value is not None:  # a weight that acts behind the cut only
                            distance = distance + ((value - target).abs() * scale).sum()
                # The prior leads from afar, and near the end it misleads.
                prior = self.tv * max(self.least_tv, schedule_factor("cosine", step, iterations))
                objective = distance + prior * total_variation(pictures) if prior else distance
                (gradient,) = torch.autograd.grad(objective, point)
            return objective.detach()[None], distance.detach().reshape(1, 1), gradient

        run = partial(search, evaluate, start, self.optimiser, project=self.project, keep="last")
        try:
            for weight, _, _ in terms:
                weight.requires_grad_(True)
            return run(iterations=iterations, watch=watch)
        finally:
            self.model.requires_grad_(False)

    def _apart(self, found: Tensor, sizes: Tensor) -> Tensor:
        if self.angle:
            return (1 - torch.nn.functional.cosine_similarity(found, self.features)).mean()
        apart = (found - self.features).abs()
        return ((apart if self.seen is None else apart * self.seen).sum(1) / sizes).mean()

    def at_cut(self, row: Tensor) -> Tensor:
        return inputs_of(self.layer, self.model, self.to_model(self.pictures(row))).flatten(1)

    def pictures(self, row: Tensor) -> Tensor:
        return row.reshape(self.shape)

    def to_model(self, pictures: Tensor) -> Tensor:
        return self.inputs.from_unit(pictures)

    def project(self, rows: Tensor) -> Tensor:
        return self.inputs.project_unit(rows.reshape(-1, *self.inputs.shape)).reshape(rows.shape)

    def _terms(self, weighting: Weighting) -> list[Term]:
        names, terms = [name for name in self.gradients if weighting.first or name not in self.first], []
        for name, weight in zip(reversed(names), weighting.layers(len(names)), strict=True):
            target = self.gradients[name]
            scale = _row_scale(target, weighting.level_rows) * self.survivors.get(name, 1.0)
            size = (target.abs() * scale).sum()
            if bool(size > 0):
                terms.append((self.model.get_parameter(name), target, weight * scale / size))
        return terms


@dataclass(frozen=True, eq=False, kw_only=True)
class DroppedMatching(HeldMatching):
    """The search in a network that dropped units: for the inputs and the masks of ``dropped`` layers.

    Scheliga, Maeder, Seeland, "Dropout Is NOT All You Need to Prevent Gradient Leakage", AAAI 2023: a mask between 0
    and 1 stands for each input that went with ``probability``, and moves together with the pixels. Unlike there,
    features, adjoints and masks at the cut are known and held. A row holds the pixels, then the masks over PACE.
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
            change_input(self.model.get_submodule(name), partial(self._masked, name))

    @property
    def pixels(self) -> int:
        return math.prod(self.shape)

    def start(self, generator: torch.Generator) -> Tensor:
        pixels, count = super().start(generator), sum(shape.numel() for shape in self._shapes.values())
        return torch.cat([pixels, pixels.new_full((1, count), (1 - self.probability) / PACE)], 1)

    def pictures(self, row: Tensor) -> Tensor:
        return row.flatten()[: self.pixels].reshape(self.shape)

    def at_cut(self, row: Tensor) -> Tensor:
        parts = row.flatten()[self.pixels :].split([shape.numel() for shape in self._shapes.values()])
        for (name, shape), part in zip(self._shapes.items(), parts, strict=True):
            self._masks[name] = part.reshape(shape) * PACE / (1 - self.probability)
        try:
            return super().at_cut(row)
        finally:
            self._masks.clear()

    def project(self, rows: Tensor) -> Tensor:
        pixels = super().project(rows[:, : self.pixels])
        return torch.cat([pixels, rows[:, self.pixels :].clamp(0, 1 / PACE)], 1)

    def _masked(self, name: str, x: Tensor) -> Tensor:
        return x * self._masks.get(name, 1.0)


def searched_layers(model: nn.Module, layer: str, dropped: Sequence[str], blank: Tensor) -> list[str]:
    """List the ``dropped`` layers that act below the cut, in the order of the network."""
    order = [call.name for call in record_layers(model, blank, evaluate=True).calls]
    return [name for name in order[: order.index(layer)] if name in dropped]


def _row_scale(target: Tensor, level: bool) -> Tensor:
    """Return a factor a row: zero where it is rounding, the inverse root of its share where rows are levelled."""
    rows = target.abs().flatten(1).sum(1)
    share = rows / rows.max().clamp_min(torch.finfo(rows.dtype).tiny)
    scale = torch.where(share > SMALLEST_ROW, share.clamp_min(SMALLEST_ROW) ** (-0.5 if level else 0.0), 0.0)
    return scale.reshape(-1, *[1] * (target.dim() - 1))
