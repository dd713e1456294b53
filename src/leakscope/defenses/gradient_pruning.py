"""Pruning of small entries of the update.

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019; Aji and Heafield, "Sparse Communication for Distributed
Gradient Descent", EMNLP 2017. Theory takes one threshold for the whole update, published code one a tensor: ``scope``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakscope.federation import Defense
from leakscope.federation.base import Gradient


@dataclass(frozen=True, kw_only=True)
class GradientPruning(Defense):
    """Set the ``fraction`` of entries with the smallest magnitude to zero; exactly floor(fraction * n) of them."""

    fraction: float = 0.9
    scope: Literal["tensor", "global"] = "tensor"

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise ValueError(f"fraction: expected 0 <= fraction < 1, got {self.fraction}")
        if self.scope not in ("tensor", "global"):
            raise ValueError(f"scope: expected 'tensor' or 'global', got {self.scope!r}")

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        if self.scope == "tensor":
            return {name: self._prune(value.flatten()).reshape(value.shape) for name, value in update.items()}
        pieces = self._prune(torch.cat([v.flatten() for v in update.values()]))
        parts = pieces.split([v.numel() for v in update.values()])
        return {name: part.reshape(v.shape) for (name, v), part in zip(update.items(), parts, strict=True)}

    def _prune(self, flat: Tensor) -> Tensor:
        # A stable sort makes ties, such as many exact zeros, deterministic.
        drop = torch.sort(flat.abs(), stable=True).indices[: int(self.fraction * flat.numel())]
        pruned = flat.clone()
        pruned[drop] = 0
        return pruned
