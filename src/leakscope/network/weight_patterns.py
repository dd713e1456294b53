"""Patterns in a layer's weights that training does not make and attacks need; pure functions of one matrix.

A row is what one unit multiplies its input with, a column what one input is multiplied with. Every test asks for
something that has no chance of happening by itself in a layer of this size, so that ordinary layers, trained or not,
pass all of them; layers too small to tell are left alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Layers with fewer inputs or units are not judged: there, rows agree by chance or by purpose.
LEAST_INPUTS, LEAST_UNITS = 8, 6
#: A group of parallel rows is this share of the layer or so many units: upsampling layers begin with up to 16 alike.
LEAST_SHARE, MANY_UNITS = 0.05, 17
#: Rows are parallel where 1 - |cosine| is below the first, in layers of few inputs (up to WIDE) below the second.
PARALLEL, PARALLEL_NARROW, WIDE = 1e-3, 1e-4, 64
#: ... and a whole layer of rank one where it is below this: what one training step leaves of parallel rows.
RANK_ONE = 1e-8
#: Rows and columns that are compared first; what is found is then looked at in full.
SAMPLED_ROWS, SAMPLED_COLUMNS = 1024, 1024
#: Thresholds count as different beyond this share of their range; and as a ladder where their standard deviation is
#: above the second share of their mean: units that learned the same weights learned the same threshold too.
DISTINCT, LADDER = 1e-6, 0.01
#: Relative differences below this are rounding.
EQUAL = 1e-5
#: How much longer than the others, and than usual, a row has to be.
OUTSIZED, UNUSUAL_LENGTH = 100.0, 20.0
#: Standard deviations of the entries of a row that pass for one, and how much smaller those of the other rows are.
UNIT_LOW, UNIT_HIGH, UNIT_BEYOND_OTHERS = 0.8, 1.25, 5.0


@dataclass(frozen=True, eq=False)
class ParallelRows:
    """Units whose rows are parallel: their numbers in the layer, in ascending order of their thresholds.

    Unit i switches on where the common direction, times the input, passes ``thresholds[i]``; ``lengths`` are those of
    the rows along the direction. Without a bias all thresholds are 0.
    """

    units: Tensor
    thresholds: Tensor
    lengths: Tensor

    @property
    def ladder(self) -> bool:
        """Whether the thresholds differ, nearly all of them and by more than training would leave."""
        spread = float(self.thresholds[-1] - self.thresholds[0])
        distinct = 1 + int((self.thresholds.diff() > DISTINCT * spread).sum())
        wide = float(self.thresholds.std()) > LADDER * abs(float(self.thresholds.mean()))
        return spread > 0 and wide and distinct >= 0.8 * len(self.units)

    @property
    def common_threshold(self) -> bool:
        """Whether all thresholds are one, not zero: weights and biases then come of the same steps, as in training."""
        return bool((self.thresholds - self.thresholds[0]).abs().max() <= 0.01 * abs(float(self.thresholds[0]))) and (
            float(self.thresholds[0]) != 0
        )

    @property
    def tiling(self) -> bool:
        """Whether the lengths are inverse to the steps between thresholds: each unit has an interval of its own."""
        steps = (self.thresholds.diff() * self.lengths[:-1])[1:]
        varied = float(self.lengths.std()) > 0.01 * float(self.lengths.mean())
        return varied and len(steps) > 1 and float(steps.std()) < 0.01 * float(steps.mean())


def parallel_rows(weight: Tensor, bias: Tensor | None) -> ParallelRows | None:
    """The largest group of units with parallel rows; None where it is too small to mean anything.

    >>> rows = torch.ones(8, 1) * torch.arange(1.0, 11.0)
    >>> group = parallel_rows(rows, -torch.arange(8.0))
    >>> len(group.units), group.ladder, group.tiling
    (8, True, False)
    >>> parallel_rows(torch.eye(10), None) is None
    True
    """
    lengths = torch.linalg.vector_norm(weight, dim=1)
    alive = torch.nonzero(lengths > 0).flatten()
    if weight.shape[1] < LEAST_INPUTS or len(alive) < LEAST_UNITS:
        return None
    tolerance = PARALLEL if weight.shape[1] > WIDE else PARALLEL_NARROW
    sample = alive[_evenly(len(alive), SAMPLED_ROWS)]
    part = _normalised(weight[sample][:, _evenly(weight.shape[1], SAMPLED_COLUMNS)])
    # A sample of the columns tells less exactly.
    near = (part @ part.T).abs() > 1 - 2 * tolerance
    leader = int(sample[int(near.sum(1).argmax())])
    cosines = (weight[alive] @ weight[leader]) / (lengths[alive] * lengths[leader])
    units = alive[cosines.abs() > 1 - tolerance]
    if len(units) < LEAST_UNITS or (len(units) < MANY_UNITS and len(units) < LEAST_SHARE * len(weight)):
        return None
    direction = weight[leader] / lengths[leader]
    along = weight[units] @ direction
    shifts = torch.zeros_like(along) if bias is None else bias[units]
    thresholds = -shifts / along
    order = thresholds.argsort()
    return ParallelRows(units[order], thresholds[order], along.abs()[order])


def rank_one(weight: Tensor) -> bool:
    """Whether all rows that are not zero are multiples of one, of different entries; a constant matrix is not meant.

    >>> rank_one(torch.arange(1.0, 9.0)[:, None] * torch.arange(1.0, 9.0)), rank_one(torch.ones(8, 8))
    (True, False)
    """
    alive = weight[torch.linalg.vector_norm(weight, dim=1) > 0].double()
    if weight.shape[1] < LEAST_INPUTS or len(alive) < LEAST_UNITS:
        return False
    rows = _normalised(alive)
    constant = float(rows[0].std()) < EQUAL * float(rows[0].abs().mean())
    return not constant and bool(((rows @ rows[0]).abs() > 1 - RANK_ONE).all())


def constant_columns(weight: Tensor) -> Tensor:
    """Inputs that have the same weight, not zero, to every unit.

    >>> constant_columns(torch.tensor([[1.0, 2.0, 0.0, 5.0], [1.0, 3.0, 0.0, 5.0], [1.0, 2.0, 0.0, 5.0]])).tolist()
    [0, 3]
    """
    low, high = weight.amin(0), weight.amax(0)
    size = torch.maximum(low.abs(), high.abs())
    return torch.nonzero((high - low <= EQUAL * size) & (size > 0)).flatten()


def equal_columns(weight: Tensor, columns: Tensor) -> bool:
    """Whether these inputs are all treated alike: their columns are equal and not zero.

    >>> equal_columns(torch.tensor([[1.0, 1.0, 4.0], [2.0, 2.0, 5.0]]), torch.tensor([0, 1]))
    True
    """
    part = weight[:, columns]
    size = float(part.abs().max()) if part.numel() else 0.0
    return size > 0 and float((part - part[:, :1]).abs().max()) <= EQUAL * size


def unit_variance_rows(weight: Tensor) -> Tensor:
    """Units whose entries look like standard normal numbers, where other units' are far smaller or there are none.

    >>> draws = torch.Generator().manual_seed(0)
    >>> mixed = torch.cat([torch.randn(8, 256, generator=draws), 0.05 * torch.randn(24, 256, generator=draws)])
    >>> unit_variance_rows(mixed).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if weight.shape[1] < WIDE:
        return torch.zeros(0, dtype=torch.long)
    sizes = weight.square().mean(1).sqrt()
    centred = weight.mean(1).abs() < 6 / weight.shape[1] ** 0.5
    # Half of a normal variable's absolute values are below 0.674 of its deviation.
    bell = ((weight.abs().median(1).values / sizes.clamp_min(1e-30)) - 0.674).abs() < 3 / weight.shape[1] ** 0.5
    unit = (sizes > UNIT_LOW) & (sizes < UNIT_HIGH) & centred & bell
    others = sizes[~unit & (sizes > 0)]
    if len(others) and float(others.median()) * UNIT_BEYOND_OTHERS > float(sizes[unit].min() if unit.any() else 0):
        return torch.zeros(0, dtype=torch.long)
    return torch.nonzero(unit).flatten()


def outsized_rows(weight: Tensor) -> Tensor:
    """Units whose rows are far longer than those of the others, and than rows usually are.

    >>> rows = torch.eye(16)
    >>> rows[3] *= 1e4
    >>> outsized_rows(rows).tolist()
    [3]
    """
    lengths = torch.linalg.vector_norm(weight, dim=1)
    alive = lengths[lengths > 0]
    if len(alive) < LEAST_UNITS:
        return torch.zeros(0, dtype=torch.long)
    # Many units may have died in training and be short, so the median would not do.
    usual = float(alive.quantile(0.75)) if len(alive) > 1 else 0.0
    return torch.nonzero(lengths > max(OUTSIZED * usual, UNUSUAL_LENGTH)).flatten()


def mirrored_rows(weight: Tensor) -> tuple[Tensor, float]:
    """Units whose positive entries are their negative ones times one factor below 1, in another order; and the factor.

    >>> negative = torch.linspace(0.1, 1.0, 10)
    >>> units, factor = mirrored_rows(torch.cat([-negative, 0.9 * negative.flip(0)]).repeat(6, 1))
    >>> len(units), round(factor, 3)
    (6, 0.9)
    """
    units, factors = [], []
    inputs = weight.shape[1]
    if inputs < 2 * LEAST_INPUTS:
        return torch.zeros(0, dtype=torch.long), 1.0
    balanced = ((weight > 0).sum(1) - (weight < 0).sum(1)).abs() <= 1
    for unit in torch.nonzero(balanced).flatten().tolist():
        row = weight[unit]
        positive, negative = row[row > 0].sort().values, (-row[row < 0]).sort().values
        if len(positive) != len(negative) or len(positive) < LEAST_INPUTS:
            continue
        ratios = positive / negative
        factor = float(ratios.median())
        if factor < 0.9995 and float((ratios - factor).abs().max()) < 1e-3 * factor:
            units.append(unit)
            factors.append(factor)
    return torch.tensor(units, dtype=torch.long), sum(factors) / len(factors) if factors else 1.0


def _evenly(count: int, most: int) -> Tensor:
    """Up to ``most`` of ``count`` places, evenly spaced."""
    return torch.arange(count) if count <= most else torch.linspace(0, count - 1, most).round().long()


def _normalised(rows: Tensor) -> Tensor:
    return rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp_min(1e-30)
