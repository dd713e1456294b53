"""What a natural input looks like: terms added to the distance while matching.

Each prior is a frozen dataclass called as ``prior(picture, scene)``; ``picture`` is (examples, channels, ...) in the
canvas's space, ``scene`` carries what the term may need besides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

TVVariant = Literal["l1mean_sum", "l1mean_avg", "conv", "sq_roll", "l1sum"]


@dataclass(frozen=True)
class Scene:
    """What priors may look at besides the picture.

    ``iteration`` is a tensor, so that a compiled step need not be compiled anew; ``batchnorm_inputs`` are the
    candidate's inputs of each BatchNorm layer, ``batchnorm_targets`` the known mean and variance of each.
    """

    iteration: Tensor
    batchnorm_inputs: Mapping[str, Tensor]
    batchnorm_targets: Mapping[str, tuple[Tensor, Tensor]]


class Prior(Protocol):
    def __call__(self, picture: Tensor, scene: Scene) -> Tensor: ...


def total_variation(picture: Tensor, variant: TVVariant = "l1mean_sum") -> Tensor:
    """Total variation of (examples, channels, ...) in one of the definitions found in the literature.

    ``l1mean_sum``: mean |difference| along each axis, added (Inverting Gradients). ``l1mean_avg``: their mean (SME).
    ``conv``: differences to the next pixel including a zero border, mean over everything, halved. ``sq_roll``:
    squared differences with wrap-around plus 1e-7, summed over pixels and channels, mean over examples (DLFA).
    ``l1sum``: sum of |difference| an example, mean over examples (CAFE). Data without spatial axes has none: 0.

    >>> ramp = torch.arange(4.0).reshape(1, 1, 2, 2)
    >>> float(total_variation(ramp)), float(total_variation(ramp, "l1sum"))
    (3.0, 6.0)
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
    if variant == "conv":
        steps = []
        for axis in axes:
            border = torch.zeros_like(picture.narrow(axis, 0, 1))
            steps.append((torch.cat([picture.narrow(axis, 1, picture.shape[axis] - 1), border], axis) - picture).abs())
        return torch.stack(steps).sum(0).mean() / 2
    if variant == "sq_roll":
        squares = torch.stack([(picture - picture.roll(1, axis)) ** 2 for axis in axes]).sum(0) + 1e-7
        return squares.sum() / picture.shape[0]
    raise ValueError(f"variant: expected l1mean_sum, l1mean_avg, conv, sq_roll or l1sum, got {variant!r}")


@dataclass(frozen=True, kw_only=True)
class TotalVariation:
    weight: float
    variant: TVVariant = "l1mean_sum"

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
    """weight * mean squared excess over [0, 1]: a soft box instead of clamping."""

    weight: float

    def __call__(self, picture: Tensor, scene: Scene) -> Tensor:
        return self.weight * (picture - picture.clamp(0, 1)).square().mean()


@dataclass(frozen=True, kw_only=True)
class BatchNormStatistics:
    """weight * sum over BatchNorm layers of ||mean - known|| + ||var - known||; the first layer counts ``first`` times.

    Known are the private batch's own statistics where the knowledge grants them, else the public running ones.
    Without BatchNorm layers the term is zero.
    """

    weight: float
    first: float = 1.0

    def __call__(self, picture: Tensor, scene: Scene) -> Tensor:
        total = picture.new_zeros(())
        for number, (name, inputs) in enumerate(scene.batchnorm_inputs.items()):
            axes = [0, *range(2, inputs.dim())]
            mean, variance = scene.batchnorm_targets[name]
            gap = _length(inputs.mean(axes) - mean) + _length(inputs.var(axes, unbiased=False) - variance)
            total = total + (self.first if number == 0 else 1.0) * gap
        return self.weight * total


def _length(vector: Tensor) -> Tensor:
    return torch.sqrt(vector.square().sum() + 1e-24)


def _decayed(decay: float, every: int, scene: Scene) -> Tensor | float:
    if decay == 1.0:
        return 1.0
    return torch.pow(torch.as_tensor(decay, dtype=scene.iteration.dtype), torch.floor(scene.iteration / every))
