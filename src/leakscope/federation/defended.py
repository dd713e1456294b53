"""Training by protected updates, for what a defence costs: the updates are those that the protocol's clients send.

In each round every client sends the update of its next batch, made by its protocol with the defence in it, and the
server goes a step along the mean of them: distributed SGD for gradients, McMahan et al., "Communication-Efficient
Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1, for weight updates.

Training that breaks down is a result and no error: see :class:`Diverged`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.errors import UserError
from leakscope.contracts.protocol import Protocol
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Classification, Task
from leakscope.federation.client import UpdateNotFinite
from leakscope.federation.fedsgd import FedSGD
from leakscope.federation.training import Client, Training, mean_loss, named_generator, round_generator


class Diverged(UserError):
    """The training broke down: an update, a weight or a loss is no longer finite."""


@dataclass(frozen=True, kw_only=True)
class DefendedTraining(Training):
    """Each round every client sends the update of its next ``batch_size`` examples, and the server goes one step.

    A client goes through its examples in a shuffled order, anew each epoch; what is left of an epoch that the batch
    size does not divide is dropped. The order depends on the seed and not on the defence or its draws, so that
    trainings under different defences see the same batches. A sum over examples is divided by their number.
    """

    rounds: int = setting(200, "Steps of the server.", ge=1)
    batch_size: int = setting(16, "Examples behind a client's update.", ge=1)
    lr: float = setting(0.1, "Step size of the server.", gt=0)
    protocol: Protocol = field(default_factory=FedSGD)
    task: Task = field(default_factory=Classification)

    def play_round(
        self, model: nn.Module, clients: Sequence[Client], number: int, *, seed: int = 0, defense: Defense | None = None
    ) -> tuple[nn.Module, float]:
        """The model after step ``number``, and the mean loss of its batches before it; Diverged where it breaks."""
        rows = [self.next_batch(len(y), number, seed, place) for place, (_, y) in enumerate(clients)]
        total, losses = sum(map(len, rows)), []
        after: nn.Module | None = None
        for place, ((x, y), own) in enumerate(zip(clients, rows, strict=True)):
            draws = round_generator(seed, number, place)
            client, _ = self.protocol.client_side(model, x[own], y[own], defense, draws, self.task)
            if after is None:  # where the defence changes the model, that one is trained
                after = copy.deepcopy(model if client.shared is None else client.shared)
            losses.append(len(own) / total * mean_loss(client.model, [(client.x, client.y)], self.task))
            if not math.isfinite(losses[-1]):
                raise Diverged(f"round {number}: the loss is {losses[-1]}")
            try:
                sent = self.protocol.send(client)
            except UpdateNotFinite as error:
                raise Diverged(f"round {number}: {error}") from error
            share = len(own) / total / (len(own) if self.protocol.adds_examples else 1)
            _step(after, sent, self.lr * share)
        assert after is not None  # there is a client, or check_clients had refused
        if not all(bool(torch.isfinite(p).all()) for p in after.parameters()):
            raise Diverged(f"round {number}: the weights are not finite")
        return after, math.fsum(losses)

    def next_batch(self, examples: int, number: int, seed: int, client: int) -> Tensor:
        """The rows of a client with so many examples in round ``number``.

        >>> training = DefendedTraining(batch_size=2)
        >>> epoch = torch.cat([training.next_batch(5, number, seed=0, client=0) for number in (1, 2)])
        >>> len(epoch), len(epoch.unique())
        (4, 4)
        """
        size = min(self.batch_size, examples)
        epoch, place = divmod(number - 1, examples // size)
        order = torch.randperm(examples, generator=named_generator("order", seed, client, epoch))
        return order[place * size : (place + 1) * size]

    def passes(self, examples: int) -> int:
        """How often at most each of a client's examples enters a gradient in all rounds.

        >>> DefendedTraining(rounds=200, batch_size=16).passes(800)
        4
        """
        size = min(self.batch_size, examples)
        return math.ceil(self.rounds / (examples // size)) * self.protocol.passes(size)


def _step(model: nn.Module, update: Gradient, size: float) -> None:
    trained = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in update.items():
            trained[name].sub_(value.to(trained[name]), alpha=size)
