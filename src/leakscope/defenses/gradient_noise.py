"""Gaussian noise on the update: g + N(0, sigma^2 I).

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019, section 5. ``sigma`` is absolute, not relative to the
update's size, as in the systematic evaluation of Liu et al.; it gives no differential privacy, having no clipping.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction


@dataclass(frozen=True, kw_only=True)
class GradientNoise(Defense):
    """Add independent Gaussian noise of standard deviation ``sigma`` to every entry of the message."""

    sigma: float = setting(0.01, "Standard deviation of the noise, in units of the update.", ge=0)

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        # Drawn on the CPU, so that the noise is the same on every device.
        return {
            name: value + self.sigma * torch.randn(value.shape, generator=generator).to(value)
            for name, value in update.items()
        }

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return Channel(noise=self.sigma)
