"""Gaussian noise on the update: g + N(0, sigma^2 I).

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019, section 5. ``sigma`` is absolute, not relative to the
update's size, as in the systematic evaluation of Liu et al.; it gives no differential privacy, having no clipping.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leakscope.federation import Defense
from leakscope.federation.base import Gradient


@dataclass(frozen=True, kw_only=True)
class GradientNoise(Defense):
    """Add independent Gaussian noise of standard deviation ``sigma`` to every entry of the message."""

    sigma: float = 0.01

    def __post_init__(self) -> None:
        if not 0 <= self.sigma < float("inf"):
            raise ValueError(f"sigma: expected a finite number >= 0, got {self.sigma}")

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        # Drawn on the CPU, so that the noise is the same on every device.
        return {
            name: value + self.sigma * torch.randn(value.shape, generator=generator).to(value)
            for name, value in update.items()
        }
