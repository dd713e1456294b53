"""Add terms to the distance that say what a natural input looks like.

Each prior is a frozen dataclass called as ``prior(picture, scene)``; ``picture`` is (examples, channels, ...) in the
canvas's space.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import InputSpace

TVVariant = Literal["l1mean_sum", "l1mean_avg", "conv", "sq_roll", "l1sum", "joint"]


@dataclass(frozen=True)
class Scene:
    """Hold what priors may look at besides the picture.

    ``iteration`` is a tensor, so that a compiled step need not be compiled anew; ``layer_inputs`` are the candidate's
    of each recorded layer. ``inputs`` is the picture's space as the model reads it; None where it is in [0, 1] already.
    """

    iteration: Tensor
    layer_inputs: Mapping[str, Tensor]
    batchnorm_targets: Mapping[str, tuple[Tensor, Tensor]]
    inputs: InputSpace | None = None

    def unit(self, picture: Tensor) -> Tensor:
        return picture if self.inputs is None else self.inputs.to_unit(picture)


class Prior(Protocol):
    def __call__(self, picture: Tensor, scene: Scene) -> Tensor: ...


def total_variation(picture: Tensor, variant: TVVariant = "l1mean_sum") -> Tensor:
    """Return the total variation of (examples, channels, ...) in one of the literature's definitions; 0 without axes.

    ``l1mean_sum``: mean |difference| along each axis, added (Inverting Gradients). ``l1mean_avg``: their mean (SME).
    ``conv``: differences to the next pixel including a zero border, mean over everything, halved. ``sq_roll``:
    squared differences with wrap-around plus 1e-7, summed over pixels and channels, mean over examples (DLFA).
    ``l1sum``: sum of |difference| an example, mean over examples (CAFE). ``joint``: the length of all differences at a
    pixel together, over axes and channels, mean over pixels and examples: edges then fall on the same pixels in every
    channel, and changes below 1e-4 count as none.

    >>> ramp = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> float(total_variation(ramp)), float(total_variation(ramp, "l1sum"))
    (3.0, 6.0)
    >>> round(float(total_variation(ramp, "joint")), 3)  # (sqrt(5) + 2 + 1 + 0) / 4
    1.309
    """
    axes = range(2, picture.dim())
    if not axes:
        return picture.new_zeros(())
    if variant in ("l1mean_sum", "l1mean_avg", "l1sum"):
        steps = [picture.diff(dim=axis).abs() for axis in axes if picture.shape[axis] > 1]
        if not steps:
            return picture.new_zeros(())
        if variant == "l1sum":
            return torch.stack([step.sum() for step in steps]).sum() / picture.shape[0]
        means = torch.stack([step.mean() for step in steps])
        return means.sum() if variant == "l1mean_sum" else means.mean()
    borders = [(axis, torch.zeros_like(picture.narrow(axis, 0, 1))) for axis in axes]
    if variant == "conv":
        ahead = [
            torch.cat([picture.narrow(axis, 1, picture.shape[axis] - 1), border], axis) for axis, border in borders
        ]
        return torch.stack([(step - picture).abs() for step in ahead]).sum(0).mean() / 2
    if variant == "sq_roll":
        squares = torch.stack([(picture - picture.roll(1, axis)) ** 2 for axis in axes]).sum(0) + 1e-7
        return squares.sum() / picture.shape[0]
    if variant == "joint":
        steps = [torch.cat([picture.diff(dim=axis), border], axis) for axis, border in borders]
        together = torch.stack([step.square().sum(1) for step in steps]).sum(0)
        return (torch.sqrt(together + 1e-8) - 1e-4).mean()
    raise UserError(f"variant: expected one of {', '.join(get_args(TVVariant))}, got {variant!r}")


@dataclass(frozen=True, kw_only=True)
class TotalVariation:
    weight: float
    variant: TVVariant = "l1mean_sum"

    def __post_init__(self) -> None:
        if self.variant not in get_args(TVVariant):
            raise UserError(f"variant: expected one of {', '.join(get_args(TVVariant))}, got {self.variant!r}")

    def __call__(self, picture: Tensor, scene: Scene) -> Tensor:
        return self.weight * total_variation(picture, self.variant)


@dataclass(frozen=True, kw_only=True)
class L2Norm:
    """weight * ||picture||_F, or its square; averaged over examples."""

    weight: float
    squared: bool = True
    decay: float = 1.0
    every: int = 1

    def __call__(self, picture: Tensor, scene: Scene) -> Tensor:
        squares = picture.flatten(1).square().sum(1)
        size = squares if self.squared else torch.sqrt(squares + 1e-24)
        return self.weight * _decayed(self.decay, self.every, scene) * size.mean()


@dataclass(frozen=True, kw_only=True)
class Orthogonality:
    """weight * sum over ordered pairs k != k' of <x_k, x_k'>^2, decaying as training goes on."""

    weight: float
    decay: float = 0.9
    every: int = 100

    def __call__(self, picture: Tensor, scene: Scene) -> Tensor:
        flat = picture.flatten(1)
        products = flat @ flat.T
        off = products - torch.diag(torch.diagonal(products))
        return self.weight * _decayed(self.decay, self.every, scene) * off.square().sum()


@dataclass(frozen=True, kw_only=True)
class SoftRange:
    weight: float
    total: bool = False

    def __call__(self, picture: Tensor, scene: Scene) -> Tensor:
        picture = scene.unit(picture)
        excess = (picture - picture.clamp(0, 1)).square().mean()
        return self.weight * excess * (picture[0].numel() if self.total else 1)


@dataclass(frozen=True, kw_only=True)
class BatchNormStatistics:
    """Add weight * sum over BatchNorm layers of ||mean - known|| + ||var - known||; the first ``first`` times."""

    weight: float
    first: float = 1.0

    def __call__(self, picture: Tensor, scene: Scene) -> Tensor:
        total = picture.new_zeros(())
        known = [name for name in scene.layer_inputs if name in scene.batchnorm_targets]
        for number, name in enumerate(known):
            inputs, (mean, variance) = scene.layer_inputs[name], scene.batchnorm_targets[name]
            axes = [0, *range(2, inputs.dim())]
            gap = _length(inputs.mean(axes) - mean) + _length(inputs.var(axes, unbiased=False) - variance)
            total = total + (self.first if number == 0 else 1.0) * gap
        return self.weight * total


@dataclass(frozen=True, kw_only=True)
class EpochAgreement:
    """Make copies of the same examples in unknown orders agree in what no order changes (Dimitrov et al., 2022).

    For each of ``copies`` groups, one an epoch, the mean or maximum over its pictures, by itself or of ``features``
    random 3x3 filters; then weight * the mean over all pairs of groups (each with itself too) of the mean squared
    (``l2``) or absolute (``l1``) difference.
    """

    weight: float
    copies: int
    statistic: Literal["mean", "max"] = "mean"
    norm: Literal["l1", "l2"] = "l2"
    features: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.statistic not in ("mean", "max") or self.norm not in ("l1", "l2"):
            got = f"{self.statistic!r} and {self.norm!r}"
            raise UserError(f"EpochAgreement: expected statistic 'mean' or 'max' and norm 'l1' or 'l2', got {got}")
        if self.copies < 1 or self.features < 0 or self.weight < 0:
            raise UserError(f"EpochAgreement: expected copies >= 1, features >= 0 and weight >= 0, got {self}")

    def __call__(self, picture: Tensor, scene: Scene) -> Tensor:
        values = picture
        if self.features and picture.dim() == 4:
            filters = _random_filters(self.features, picture.shape[1], self.seed)
            values = torch.nn.functional.conv2d(picture, filters.to(picture), padding=1)
        groups = values.reshape(self.copies, -1, *values.shape[1:])
        summary = groups.mean(1) if self.statistic == "mean" else groups.amax(1)
        flat = summary.flatten(1)
        if self.norm == "l2":
            # Mean over ordered pairs of |a - b|^2 is twice the variance.
            return self.weight * 2 * flat.var(0, unbiased=False).mean()
        return self.weight * (flat[:, None] - flat[None]).abs().mean()


@functools.lru_cache(maxsize=8)
def _random_filters(features: int, channels: int, seed: int) -> Tensor:
    # NumPy's generator, for torch's may not be used while restarts are batched.
    drawn = np.random.default_rng(seed).standard_normal((features, channels, 3, 3))
    return torch.from_numpy(drawn / (9 * channels) ** 0.5)


def _length(vector: Tensor) -> Tensor:
    return torch.sqrt(vector.square().sum() + 1e-24)


def _decayed(decay: float, every: int, scene: Scene) -> Tensor | float:
    if decay == 1.0:
        return 1.0
    return torch.pow(torch.as_tensor(decay, dtype=scene.iteration.dtype), torch.floor(scene.iteration / every))


@torch.library.custom_op("leakscope::assignment", mutates_args=())
def assignment(costs: Tensor) -> Tensor:
    """Return each row's column in the assignment of least total ``costs`` (n, m), -1 without one; infinite costs last.

    >>> assignment(torch.tensor([[4.0, 1.0, 3.0], [2.0, 0.0, 5.0], [3.0, 2.0, 2.0]])).tolist()
    [1, 0, 2]
    """
    table = costs.detach().double().cpu()
    finite = torch.isfinite(table)
    most = float(table[finite].abs().max()) if bool(finite.any()) else 1.0
    rows, columns = linear_sum_assignment(torch.where(finite, table, 2 * (most + 1) * sum(table.shape)).numpy())
    order = torch.full((len(table),), -1, dtype=torch.int64)
    order[torch.from_numpy(rows)] = torch.from_numpy(columns)
    return order.to(costs.device)


@assignment.register_fake
def _(costs: Tensor) -> Tensor:
    return costs.new_empty(costs.shape[0], dtype=torch.int64)


@assignment.register_vmap
def _(info: object, dimensions: tuple[int | None, ...], costs: Tensor) -> tuple[Tensor, int]:
    (dimension,) = dimensions
    return torch.stack([assignment(table) for table in costs.movedim(dimension or 0, 0)]), 0


FeatureForm = Literal["direction", "span"]
#: Added to squared lengths: features of nothing have no direction, but derivatives.
TINY = 1e-24


@dataclass(frozen=True, kw_only=True, eq=False)
class FeatureMatching:
    """Add weight * the mean over examples of how far the input of ``layer`` is from the known ``features`` (n, d).

    "direction": 1 - cos^2 of the angle to the feature that an assignment gives to the example at each step. "span": the
    share of the squared length outside the span of all features, which needs neither order nor signs.
    """

    weight: float
    layer: str
    features: Tensor
    form: FeatureForm = "direction"
    _basis: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.form not in get_args(FeatureForm):
            raise UserError(f"form: expected one of {', '.join(get_args(FeatureForm))}, got {self.form!r}")
        if self.features.dim() != 2 or not self.features.numel():
            raise UserError(f"features: expected (n, d), got {tuple(self.features.shape)}")
        object.__setattr__(self, "_basis", orthonormal(self.features))

    def __call__(self, picture: Tensor, scene: Scene) -> Tensor:
        own = scene.layer_inputs[self.layer].flatten(1)
        if self.form == "span":
            return self.weight * outside_span(own, self._basis.to(own))
        return self.weight * misdirection(own, self.features.to(own))


def misdirection(own: Tensor, known: Tensor) -> Tensor:
    """Return the mean of 1 - cos^2 between each of ``own`` (examples, d) and its feature of ``known`` (n, d), if any.

    >>> own = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    >>> float(misdirection(own, torch.tensor([[0.0, -1.0], [1.0, 0.0]])))
    0.0
    >>> float(misdirection(own, torch.tensor([[1.0, 1.0]])))
    0.5
    """
    lengths = own.square().sum(1)[:, None] * known.square().sum(1)[None]
    apart = 1 - (own @ known.T).square() / (lengths + TINY)
    order = assignment(apart.detach())
    each = apart.gather(1, order.clamp_min(0)[:, None])[:, 0]
    matched = (order >= 0).to(each)
    return (each * matched).sum() / matched.sum()


def outside_span(own: Tensor, basis: Tensor) -> Tensor:
    """Mean share of the squared length of each of ``own`` (examples, d) outside the span of an orthonormal ``basis``.

    >>> float(outside_span(torch.tensor([[3.0, 4.0, 0.0]]), torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])))
    0.6399999856948853
    """
    inside = own @ basis.T @ basis
    return ((own - inside).square().sum(1) / (own.square().sum(1) + TINY)).mean()


def orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis (r, d) of the rows' span; directions below 1e-6 of the largest are rounding."""
    _, values, basis = torch.linalg.svd(F.normalize(rows, dim=1), full_matrices=False)
    return basis[values > 1e-6 * values[0]]
