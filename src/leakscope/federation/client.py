"""The client's side of a round: what is sent of its update, and the statistics of its batch."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakscope.contracts.defense import Gradient
from leakscope.contracts.errors import UserError
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import LocalTraining, Message
from leakscope.contracts.protocol import BATCHNORM, ClientSide, Protocol, batch_gradient, own_randomness
from leakscope.network.recorder import record_layers

__all__ = ["OneMessage", "batch_gradient", "batchnorm_statistics", "own_randomness", "protected"]


class UpdateNotFinite(UserError):
    """What a client would send has NaN or infinite entries: its training diverged."""


@dataclass(frozen=True, kw_only=True)
class OneMessage(Protocol):
    """Base of protocols whose client sends one message on all its examples."""

    def _exchange(self, client: ClientSide, knowledge: Knowledge) -> tuple[tuple[Message, ...], LocalTraining]:
        with own_randomness(client.generator):
            statistics = batchnorm_statistics(client.model, client.x) if knowledge.batchnorm_statistics else None
            update, recipe = self._train(client)
        return (Message(update=protected(client, update), kind=self.kind, batchnorm_statistics=statistics),), recipe

    @abstractmethod
    def _train(self, client: ClientSide) -> tuple[Gradient, LocalTraining]:
        """Compute the update before ``protect_message``, and the recipe; ``observe`` withholds what is unknown."""


def protected(client: ClientSide, update: Gradient) -> Gradient:
    """Return the update as it is sent; raise UpdateNotFinite where it is not finite, before or after the defence."""
    _check_finite(update)
    update = client.defense.protect_message(update, client.generator)
    _check_finite(update)
    return update


def _check_finite(update: Gradient) -> None:
    broken = [name for name, value in update.items() if not bool(torch.isfinite(value).all())]
    if broken:
        raise UpdateNotFinite(
            f"the client's update is not finite in {', '.join(broken)}: its training diverged. "
            "Lower the learning rate or check the inputs."
        )


def batchnorm_statistics(client: nn.Module, x: Tensor) -> Mapping[str, Tensor] | None:
    """Return mean and biased variance of the inputs of each BatchNorm layer on the private batch."""
    if not any(isinstance(module, BATCHNORM) for module in client.modules()):
        return None
    # What a random model draws here must not change its training: the update is the same whoever looks at it.
    with torch.random.fork_rng(devices=[]):
        record = record_layers(client, x, lambda _, module: isinstance(module, BATCHNORM))
    statistics: dict[str, Tensor] = {}
    for call in record.calls:
        z = call.inputs.detach()
        axes = [0, *range(2, z.dim())]
        statistics[f"{call.name}.mean"] = z.mean(axes)
        statistics[f"{call.name}.var"] = z.var(axes, unbiased=False)
    return statistics
