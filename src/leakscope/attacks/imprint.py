"""The imprint block: a measurement of the input, many thresholds of it, and one number that is handed on.

Row i of the first layer is the measurement h, its bias the negative threshold -c_i: unit i is active for inputs with
h x > c_i (ReLU), or with c_i < h x < c_(i+1) (the sparse form, a Hardtanh). Thresholds that cut the data into bins of
equal mass leave many inputs alone in their bin. What comes after must treat all units alike, so that an input gives
every unit it activates the same output gradient.

Pure functions place the thresholds; ``Imprint`` is the block and ``Imprinted`` a model behind one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

Measurement = Literal["mean", "dct", "random"]
Placement = Literal["measured", "normal", "laplace"]
Connection = Literal["add", "replace"]

#: Quantiles of the mean brightness of natural pictures with values in [0, 1], at equal steps (j + 1/2) / 9 of their
#: probability: 10,000 training images of CIFAR-10.
NATURAL_BRIGHTNESS = (0.2850, 0.3563, 0.4017, 0.4366, 0.4690, 0.5009, 0.5377, 0.5911, 0.6890)
#: Where the outermost bins end, in distances between the lowest and the highest threshold of the others.
OUTER = 10.0
#: How far the block moves an input value when the measurement goes through the whole of its range (sparse), or by one
#: (ReLU). Small, so that the model behind it keeps its use.
PATTERN = 0.1


def measurement_row(kind: Measurement, shape: Sequence[int], frequency: int, generator: torch.Generator) -> Tensor:
    """The measurement h as a flat row of float64: the mean, one cosine along the flat input, or random numbers.

    The last two have length one, so that they have unit variance where every input value has it.

    >>> measurement_row("mean", (1, 2, 2), 1, torch.Generator()).tolist()
    [0.25, 0.25, 0.25, 0.25]
    >>> [round(v, 3) for v in measurement_row("dct", (4,), 1, torch.Generator()).tolist()]
    [0.653, 0.271, -0.271, -0.653]
    """
    size = math.prod(shape)
    if kind == "mean":
        return torch.full((size,), 1 / size, dtype=torch.float64)
    if kind == "dct":
        row = torch.cos(math.pi / size * (torch.arange(size, dtype=torch.float64) + 0.5) * frequency)
    else:
        row = torch.randn(size, generator=generator, dtype=torch.float64)
    return row / torch.linalg.vector_norm(row)


def normal_quantile(share: float) -> float:
    """The number that a standard normal variable stays below with this probability.

    >>> round(normal_quantile(0.975), 3)
    1.96
    """
    return NormalDist().inv_cdf(share)


def laplace_quantile(share: float) -> float:
    """The same for a Laplace variable of unit variance (scale 1 / sqrt 2).

    >>> round(laplace_quantile(0.5), 3), round(laplace_quantile(0.75), 3)
    (0.0, 0.49)
    """
    tail = math.log(2 * min(share, 1 - share)) / math.sqrt(2)
    return tail if share <= 0.5 else -tail


def interpolated_quantile(share: float, quantiles: Sequence[float]) -> float:
    """Between measured quantiles at (j + 1/2) / m: linear in normal scores, so that tails go on as a normal's do.

    >>> standard = [normal_quantile((j + 0.5) / 5) for j in range(5)]
    >>> round(interpolated_quantile(0.999, standard), 3), round(normal_quantile(0.999), 3)
    (3.09, 3.09)
    """
    count = len(quantiles)
    scores = [normal_quantile((j + 0.5) / count) for j in range(count)]
    score = normal_quantile(share)
    right = min(max(sum(known < score for known in scores), 1), count - 1)
    slope = (quantiles[right] - quantiles[right - 1]) / (scores[right] - scores[right - 1])
    return quantiles[right - 1] + slope * (score - scores[right - 1])


def bin_edges(inner: Sequence[float]) -> Tensor:
    """Edges of the bins between ``inner`` thresholds: a lowest and a highest one far outside are added.

    >>> bin_edges([0.0, 0.5, 1.0]).tolist()
    [-10.0, 0.0, 0.5, 1.0, 11.0]
    """
    span = (inner[-1] - inner[0]) if len(inner) > 1 else 1.0
    return torch.tensor([inner[0] - OUTER * span, *inner, inner[-1] + OUTER * span], dtype=torch.float64)


class Imprint(nn.Module):
    """Measure, compare with thresholds, hand one number on.

    ``edges`` are those of the bins, one more than there are; the highest is of use to the sparse form only. With
    ``connection`` "add" the output is the input plus a pattern times that number, with "replace" the pattern alone.
    Measurement and edges stay with the block for whoever reads it, and are no part of what a client trains.

    ``reader`` names the layer whose update is read. In the sparse form the measurement is frozen and a layer of zeros
    beside it is trained: weights after a step are rounded, and beside large thresholds a small step would be lost.
    """

    row: Tensor
    edges: Tensor

    def __init__(
        self, row: Tensor, edges: Tensor, pattern: Tensor, *, gain: float, sparse: bool, connection: Connection
    ) -> None:
        super().__init__()
        bins, size = len(edges) - 1, len(row)
        self.sparse, self.connection = sparse, connection
        self.register_buffer("row", row.clone(), persistent=False)
        self.register_buffer("edges", edges.clone(), persistent=False)
        # Every weight is set below; drawing them first would move the global random state.
        self.measure = skip_init(nn.Linear, size, bins)
        self.beside = skip_init(nn.Linear, size, bins) if sparse else None
        self.activation: nn.Module = nn.Hardtanh(0.0, gain) if sparse else nn.ReLU()
        self.combine = skip_init(nn.Linear, bins, 1)
        self.spread = skip_init(nn.Linear, 1, size, bias=False)
        scales = gain / edges.diff() if sparse else torch.full((bins,), gain, dtype=torch.float64)
        with torch.no_grad():
            self.measure.weight.copy_(scales[:, None] * row)
            self.measure.bias.copy_(-scales * edges[:-1])
            if self.beside is not None:
                self.measure.requires_grad_(False)
                for parameter in self.beside.parameters():
                    parameter.zero_()
            self.combine.weight.fill_(1 / (bins * gain))
            self.spread.weight.copy_(pattern[:, None])
            # An input whose measurement is in the middle passes unchanged.
            middle = scales * (edges[bins // 2] - edges[:-1])
            active = middle.clamp(0, gain) if sparse else middle.clamp(min=0)
            self.combine.bias.fill_(-float(active.sum()) / (bins * gain))

    @property
    def reader(self) -> str:
        return "measure" if self.beside is None else "beside"

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        measured = self.measure(flat) if self.beside is None else self.measure(flat) + self.beside(flat)
        number = self.combine(self.activation(measured))
        shift = self.spread(number).reshape(x.shape)
        return x + shift if self.connection == "add" else shift


class Imprinted(nn.Module):
    """Somebody's model behind an imprint."""

    def __init__(self, imprint: Imprint, model: nn.Module) -> None:
        super().__init__()
        self.imprint = imprint
        self.model = model

    def forward(self, x: Tensor) -> object:
        return self.model(self.imprint(x))
