"""Top-k: only the largest entries are sent.

Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017. It is ``gradient-pruning`` said
the other way round, the share that is sent instead of the share that is not; without the memory of what was left out,
which a client may keep for its next round.

Promise: fewer bytes. What is sent is true, and what is not shows by its zeros: an attack that compares only the entries
that were sent (``inverting-gradients``, knowing the defence) tells.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from leakscope.contracts.channel import Channel, PruneScope
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction
from leakscope.defenses.gradient_pruning import GradientPruning


@dataclass(frozen=True, kw_only=True)
class TopK(Defense):
    """Send the ``share`` of entries with the largest magnitude, and zeros for the others."""

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
