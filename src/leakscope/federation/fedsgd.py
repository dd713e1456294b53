"""FedSGD: the client sends one gradient of its whole batch.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from leakscope.federation.base import Defense, Gradient, Protocol, batch_gradient
from leakscope.observation import LocalTraining, Reduction, UpdateKind


@dataclass(frozen=True, kw_only=True)
class FedSGD(Protocol):
    """One gradient of the cross-entropy, averaged (``mean``) or added (``sum``) over the batch."""

    kind: ClassVar[UpdateKind] = "gradient"

    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f"reduction: expected 'mean' or 'sum', got {self.reduction!r}")

    def _train(
        self, client: nn.Module, x: Tensor, y: Tensor, defense: Defense, generator: torch.Generator
    ) -> tuple[Gradient, LocalTraining]:
        gradient = batch_gradient(client, x, y, self.reduction, defense, generator)
        return gradient, LocalTraining(epochs=1)

    def _reduction(self) -> Reduction:
        return self.reduction
