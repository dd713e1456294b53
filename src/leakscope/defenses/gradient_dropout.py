"""Dropout of the update's entries: each is set to zero with probability p, independently.

Wei et al., "Gradient-Leakage Resilient Federated Learning", 2021, and Liu et al., "Data Reconstruction Attacks and
Defenses: A Systematic Evaluation", who do not say whether the others are scaled: here they are not, unless ``scaled``
divides them by 1 - p, which keeps the mean of the update.

Promise: none. What is sent is true, and zeros give away what was dropped: an attack that compares only the entries that
were sent (``inverting-gradients``, knowing the defence) loses equations, of which there are far more than unknowns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction


@dataclass(frozen=True, kw_only=True)
class GradientDropout(Defense):
    """Set every entry of the message to zero with ``probability``, each by a draw of its own."""

    probability: float = setting(0.5, "Probability with which an entry is set to zero.", ge=0, lt=1)
    scaled: bool = setting(False, "Whether the other entries are divided by the probability that they are sent.")

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        factor = 1 / (1 - self.probability) if self.scaled else 1.0
        protected = {}
        for name, value in update.items():
            # Drawn on the CPU, so that it is the same on every device.
            sent = torch.rand(value.shape, generator=generator, dtype=torch.float64) >= self.probability
            protected[name] = value * sent.to(value) * factor
        return protected

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return Channel(dropout=self.probability, dropout_scaled=self.scaled and self.probability > 0)
