"""Only some entries of the update are sent: the largest, or those that a random draw keeps.

Promise: fewer bytes. What is sent is true, and zeros show what is not: an attack that compares only the entries that
were sent (``inverting-gradients``, knowing the defence) loses equations, of which there are far more than unknowns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.channel import Channel, PruneScope
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction


@dataclass(frozen=True, kw_only=True)
class GradientDropout(Defense):
    """Set every entry of the message to zero with ``probability``, each by a draw of its own.

    Wei et al., "Gradient-Leakage Resilient Federated Learning", 2021, and Liu et al., "Data Reconstruction Attacks and
    Defenses: A Systematic Evaluation", who do not say whether the others are scaled; ``scaled`` keeps the mean.
    """

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


@dataclass(frozen=True, kw_only=True)
class GradientPruning(Defense):
    """Set the ``fraction`` of entries with the smallest magnitude to zero; exactly floor(fraction * n) of them.

    Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019; Aji and Heafield, "Sparse Communication for Distributed
    Gradient Descent", EMNLP 2017. Theory takes one threshold for the whole update, published code one a tensor.
    """

    fraction: float = setting(0.9, "Share of the entries set to zero.", ge=0, lt=1)
    scope: PruneScope = setting("tensor", "Whether of each tensor or of the whole update.")

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        if self.scope == "tensor":
            return {name: self._prune(value.flatten()).reshape(value.shape) for name, value in update.items()}
        pieces = self._prune(torch.cat([v.flatten() for v in update.values()]))
        parts = pieces.split([v.numel() for v in update.values()])
        return {name: part.reshape(v.shape) for (name, v), part in zip(update.items(), parts, strict=True)}

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return Channel(prune=self.fraction, prune_scope=self.scope)

    def _prune(self, flat: Tensor) -> Tensor:
        # A stable sort makes ties, such as many exact zeros, deterministic.
        drop = torch.sort(flat.abs(), stable=True).indices[: int(self.fraction * flat.numel())]
        pruned = flat.clone()
        pruned[drop] = 0
        return pruned


@dataclass(frozen=True, kw_only=True)
class TopK(Defense):
    """Send the ``share`` of entries with the largest magnitude, and zeros for the others.

    Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017, without the memory of what
    was left out, which a client may keep for its next round. It is pruning by the share that is sent.
    """

    share: float = setting(0.1, "Share of the entries that is sent.", gt=0, le=1)
    scope: PruneScope = setting("tensor", "Whether of each tensor or of the whole update.")

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return self.pruning.protect_message(update, generator)

    def channel(self, *, examples: int = 1, reduction: Reduction = "mean") -> Channel:
        return self.pruning.channel(examples=examples, reduction=reduction)

    @property
    def pruning(self) -> GradientPruning:
        """The same as pruning.

        >>> TopK(share=0.9).pruning
        GradientPruning(fraction=0.1, scope='tensor')
        """
        return GradientPruning(fraction=round(1 - self.share, 12), scope=self.scope)
