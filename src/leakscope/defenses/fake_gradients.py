"""Fake gradients: the update is cut down to sorted random numbers, or replaced by them, entry by entry.

Jin, Chen, Hsu, Yu, Chen, "CAFE: Catastrophic Data Leakage in Vertical Federated Learning", NeurIPS 2021, Algorithm 5.
Several vectors psi of Gaussian numbers are drawn, each tensor of them sorted with the largest first. The entries g of
the update are put in order too, tensor by tensor, and the nearest psi is taken; if it is farther than a threshold, all
are drawn anew. What is sent for the l-th entry in this order is min(psi_l, max(g_l, -psi_l)): g_l cut to at most psi_l
in magnitude where psi_l >= 0, and psi_l itself where psi_l < 0, which is the lower half of each tensor.

Promise: none. A positive value sent has the true sign; it is the true value where that is below psi_l, so a huge
``sigma`` sends the upper half as it is. With ``order`` "signed" the ranks stay, and what is sent is nearly parallel to
the update whatever ``sigma``. For training, ``sigma`` is the length of the step: small ones are slow, and above 0.5
training drifts off, for the upper half stays small.

Deviations. The paper sorts by magnitude but compares signed values: ``order`` has both, "magnitude" as printed, which
sends the most negative numbers for the entries next to zero. It does not tell sigma, the number of candidates and the
threshold. In ``units`` "relative" sigma is in units of each tensor's root mean square and the threshold in units of the
update's norm; "absolute" is as printed. Equal entries are put in a random order. In high dimension all candidates are
about equally far, so a few do, and ``retries`` has an end.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.errors import UserError
from leakscope.contracts.settings import setting


@dataclass(frozen=True, kw_only=True)
class FakeGradients(Defense):
    """Cut the update down to the nearest of some sorted random vectors: clip its upper half, replace its lower half."""

    sigma: float = setting(0.5, "Size of the random numbers.", gt=0)
    threshold: float = setting(2.0, "How far the nearest random vector may be.", gt=0)
    candidates: int = setting(4, "Random vectors drawn at a time.", ge=1)
    retries: int = setting(10, "How often all are drawn anew before it is an error.", ge=0)
    order: Literal["signed", "magnitude"] = setting("signed", "How the entries are sorted.")
    units: Literal["relative", "absolute"] = setting("relative", "Units of sigma and threshold.")

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        if broken := [name for name, value in update.items() if not bool(torch.isfinite(value).all())]:
            raise UserError(
                f"FakeGradients: expected finite values, which can be sorted, got others in {', '.join(broken)}: "
                "the training diverged. Lower the learning rate or check the inputs."
            )
        places, true = {}, {}
        for name, value in update.items():
            # On the CPU, where the generator is, so that the result is the same on every device.
            flat = value.detach().cpu().flatten().to(torch.promote_types(value.dtype, torch.float32))
            places[name] = self._places(flat, generator)
            true[name] = flat[places[name]]
        fake = self._nearest(true, generator)
        protected = {}
        for name, value in update.items():
            flat = torch.empty_like(true[name])
            flat[places[name]] = cut_to(true[name], fake[name])
            protected[name] = flat.reshape(value.shape).to(value)
        return protected

    def _places(self, flat: Tensor, generator: torch.Generator) -> Tensor:
        # Equal entries, such as the many exact zeros of a ReLU net, in a random order: in that of the tensor their
        # fake values would fall along it and tell which they are.
        shuffled = torch.randperm(flat.numel(), generator=generator)
        keys = flat[shuffled] if self.order == "signed" else flat[shuffled].abs()
        return shuffled[torch.sort(keys, descending=True, stable=True).indices]

    def _nearest(self, true: Mapping[str, Tensor], generator: torch.Generator) -> Gradient:
        norm = math.sqrt(sum(_square(value) for value in true.values()))
        unit = norm if self.units == "relative" else 1.0
        sizes = {name: self._size(value) for name, value in true.items()}
        nearest: Gradient = {}
        least = math.inf
        for _ in range(1 + self.retries):
            for _ in range(self.candidates):
                # One at a time: the update may have millions of entries.
                candidate = {name: sizes[name] * _sorted_normal(value, generator) for name, value in true.items()}
                distance = math.sqrt(sum(_square(candidate[name] - value) for name, value in true.items()))
                if distance < least:
                    nearest, least = candidate, distance
            if least <= self.threshold * unit:
                return nearest
        raise UserError(
            f"FakeGradients: expected a candidate within the threshold of {self.threshold:g}"
            f"{' times the norm of the update' if self.units == 'relative' else ''}, got {least / unit:.4g} as the "
            f"nearest of {(1 + self.retries) * self.candidates}. Use a larger threshold, more candidates, or a sigma "
            "nearer to the size of the entries. The more entries, the less the distance varies between draws, so the "
            "number of candidates hardly matters for a whole model."
        )

    def _size(self, value: Tensor) -> float:
        if self.units == "absolute":
            return self.sigma
        return self.sigma * math.sqrt(_square(value) / max(1, value.numel()))


def cut_to(true: Tensor, fake: Tensor) -> Tensor:
    """min(fake, max(true, -fake)): ``true`` cut to [-fake, fake] where fake >= 0, and ``fake`` itself below.

    >>> cut_to(torch.tensor([5.0, 1.0, -4.0, 3.0, -9.0]), torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0])).tolist()
    [2.0, 1.0, -2.0, -1.0, -1.0]
    """
    return torch.minimum(fake, torch.maximum(true, -fake))


def _sorted_normal(like: Tensor, generator: torch.Generator) -> Tensor:
    # The sort of numpy gives the same values in a tenth of the time.
    rising = np.sort(torch.randn(like.shape, generator=generator).numpy())
    return torch.from_numpy(rising).flip(0).to(like)


def _square(value: Tensor) -> float:
    return float(value.double().square().sum())
