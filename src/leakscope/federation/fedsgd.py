"""FedSGD: the client sends one gradient of its whole batch.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from dataclasses import dataclass
from typing import ClassVar

from leakscope.contracts.defense import Gradient
from leakscope.contracts.observation import LocalTraining, UpdateKind
from leakscope.contracts.protocol import ClientSide, batch_gradient
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction
from leakscope.federation.client import OneMessage


@dataclass(frozen=True, kw_only=True)
class FedSGD(OneMessage):
    """One gradient of the client's loss, averaged (``mean``) or added (``sum``) over the batch."""

    kind: ClassVar[UpdateKind] = "gradient"

    reduction: Reduction = setting("mean", "Whether the examples' gradients are averaged or added.")

    def findings(self) -> tuple[str, ...]:
        return ("floor", "embedding", "utility")

    def _train(self, client: ClientSide) -> tuple[Gradient, LocalTraining]:
        return batch_gradient(client, self.reduction), LocalTraining(epochs=1)
