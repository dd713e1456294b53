"""Noise on the update: g + e, with independent e of standard deviation sigma, Gaussian or Laplace.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019, section 5. ``sigma`` is absolute, not relative to the
update's size, as in the systematic evaluation of Liu et al. Laplace noise of standard deviation sigma has the density
exp(-|e| / b) / 2b with b = sigma / sqrt(2).

Promise: a floor under the error of every unbiased attack (``leakscope limits``). No differential privacy, for nothing
bounds what one example adds to the update. An attack with a prior on its side goes below the floor:
``inverting-gradients`` and ``gauss-newton`` with ``smoothness`` tell how far.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.channel import Channel, NoiseLaw
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction


@dataclass(frozen=True, kw_only=True)
class GradientNoise(Defense):
    """Add independent noise of standard deviation ``sigma`` to every entry of the message."""

    sigma: float = setting(0.01, "Standard deviation of the noise, in units of the update.", ge=0)
    law: NoiseLaw = setting("gaussian", "The law of the noise.")

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        # Drawn on the CPU, so that the noise is the same on every device.
        return {name: value + self._noise(value.shape, generator).to(value) for name, value in update.items()}

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return Channel(noise=self.sigma, noise_law=self.law if self.sigma else "gaussian")

    def _noise(self, shape: torch.Size, generator: torch.Generator) -> Tensor:
        if self.law == "gaussian":
            return self.sigma * torch.randn(shape, generator=generator)
        # By the inverse of its distribution function; in double precision, whose least step does not cut the tails.
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
        tails = torch.log1p(-2 * uniform.abs().clamp(max=0.5 - 2**-54))
        return -self.sigma / math.sqrt(2) * uniform.sign() * tails
