"""Pruning of small entries of the update.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019; Aji and Heafield, "Sparse Communication for Distributed
Gradient Descent", EMNLP 2017. Theory takes one threshold for the whole update, published code one a tensor: ``scope``.
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
class GradientPruning(Defense):
    """Set the ``fraction`` of entries with the smallest magnitude to zero; exactly floor(fraction * n) of them."""

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
