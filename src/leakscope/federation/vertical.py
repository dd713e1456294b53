"""Vertical federated learning: workers own different features of the same samples, and train one model together.

Jin, Chen, Hsu, Yu, Chen, "CAFE: Catastrophic Data Leakage in Vertical Federated Learning", NeurIPS 2021, section 2. In
each round the server announces which samples are in the batch (index alignment) and sees the mean gradient of every
parameter. It knows the weights: those of later rounds follow from the gradients and the learning rate.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.errors import UserError
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import LocalTraining, Message, UpdateKind, gathered
from leakscope.contracts.protocol import ClientSide, Protocol, batch_gradient, own_randomness
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Task, outputs_of
from leakscope.federation.client import batchnorm_statistics, protected
from leakscope.federation.training import Progress, TrainingRun
from leakscope.models.split import VerticalModel


class Round(NamedTuple):
    """One round: the samples of the batch, the loss before it, and the update that was sent."""

    indices: Tensor
    loss: float | None
    update: Gradient


@dataclass(frozen=True, kw_only=True)
class Vertical(Protocol):
    """``rounds`` batches of ``batch_size`` samples of a ``VerticalModel``.

    ``sampling``: "uniform" draws each batch anew, without replacement, as the paper has it; "epochs" goes through
    shuffled samples. After each round every weight moves by ``lr`` times the protected gradient; with 0 the model is
    static, which is the adversary's best case. ``whole_rounds`` saves memory where the model is static.
    """

    kind: ClassVar[UpdateKind] = "gradient"
    sends_rounds: ClassVar[bool] = True
    default_knowledge: ClassVar[Knowledge] = Knowledge.vertical_server

    batch_size: int = setting(8, "Samples in a batch.", ge=1)
    rounds: int | None = setting(None, "Batches; None is a quarter more than an adversary needs at least.", ge=1)
    lr: float = setting(0.0, "Learning rate between rounds; with 0 the model stands still.", ge=0)
    sampling: Sampling = setting("uniform", "Batches drawn anew, or passes through shuffled samples.")
    whole_rounds: int | None = setting(None, "Rounds kept whole; of later ones only gradients of biases.", ge=1)

    def problems(self) -> list[str]:
        if self.whole_rounds is not None and self.lr:
            return ["whole_rounds: expected None where lr > 0, for the weights follow from whole gradients"]
        return []

    def findings(self) -> tuple[str, ...]:
        return ("rounds", "cost") if self.lr > 0 else ("rounds",)

    def rehearsal(self) -> Vertical:
        """Take the first of its rounds, of which there may be hundreds."""
        return dataclasses.replace(self, rounds=1, whole_rounds=None)

    def passes(self, examples: int) -> int:
        return self.count_rounds(examples)

    def easiest(self) -> Vertical:
        """Let the model stand still, which is the adversary's best case."""
        return dataclasses.replace(super().easiest(), lr=0.0)

    def channel(self, defense: Defense, examples: int) -> Channel | None:
        return super().channel(defense, self.batch_size)

    def train(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        defense: Defense | None = None,
        generator: torch.Generator | None = None,
        progress: Progress | None = None,
        task: Task | None = None,
    ) -> TrainingRun:
        """Train with the rounds of :meth:`observe`; return the loss of each round's batch, and the model after all."""
        client, _ = self.client_side(model, x, y, defense, generator, task)
        rounds, losses = self.count_rounds(len(x)), []
        for played in self.play(client, losses=True):
            losses.append(float("nan") if played.loss is None else played.loss)
            if progress is not None:
                progress(len(losses), rounds, losses[-1])
        final = copy.deepcopy(client.shared)
        final.load_state_dict(client.model.state_dict())
        return TrainingRun(MappingProxyType({rounds + 1: final}), tuple(losses))

    def play(self, client: ClientSide, losses: bool = False) -> Iterator[Round]:
        """Play each round in turn; the client's model moves on after it was taken."""
        samples = len(client.x)
        drawn = draw_batches(samples, self.batch_size, self.count_rounds(samples), self.sampling, client.generator)
        for indices in drawn:
            now, loss = client.at(indices), None
            with own_randomness(client.generator):
                if losses:
                    # On a copy, with numbers drawn apart: looking at the loss must not change the training.
                    with torch.no_grad(), torch.random.fork_rng(devices=[]):
                        loss = float(now.task.loss(outputs_of(copy.deepcopy(now.model)(now.x.clone())), now.y))
                update = batch_gradient(now)
            update = protected(client, update)
            yield Round(indices, loss, update)
            if self.lr:
                with torch.no_grad():
                    for name, parameter in client.model.named_parameters():
                        if name in update:
                            parameter.sub_(self.lr * update[name])

    def count_rounds(self, samples: int) -> int:
        return default_rounds(samples, self.batch_size, self.sampling) if self.rounds is None else self.rounds

    def _exchange(self, client: ClientSide, knowledge: Knowledge) -> tuple[tuple[Message, ...], LocalTraining]:
        training = LocalTraining(batch_size=self.batch_size, learning_rate=self.lr, optimizer="sgd")
        return gathered(self._messages(client, knowledge)), training

    def _messages(self, client: ClientSide, knowledge: Knowledge) -> Iterator[Message]:
        kept = {name for name, value in client.trained.items() if value.dim() == 1}
        for number, (indices, _, update) in enumerate(self.play(client)):
            statistics = None
            if knowledge.batchnorm_statistics:
                statistics = batchnorm_statistics(client.model, client.at(indices).x)
            partial = bool(kept) and self.whole_rounds is not None and number >= self.whole_rounds
            yield Message(
                update={name: value for name, value in update.items() if name in kept} if partial else update,
                kind=self.kind,
                indices=tuple(indices.tolist()) if knowledge.batch_indices else None,
                partial=partial,
                batchnorm_statistics=statistics,
            )

    def check(self, model: nn.Module, x: Tensor) -> None:
        if not isinstance(model, VerticalModel):
            raise UserError(
                f"Vertical: expected a VerticalModel, whose workers own the features, got {type(model).__name__}; "
                "build 'cafe-cnn' or 'vertical-mlp', or put your own parts into leakscope.VerticalModel"
            )
        if not isinstance(x, Tensor) or x.dim() < 2:
            return  # check_batch says what is wrong with it
        if tuple(x.shape[1:]) != model.input_shape:
            raise UserError(
                f"x: expected samples of shape {model.input_shape} as in the model, got {tuple(x.shape[1:])}"
            )
        if self.batch_size > len(x) > 0:
            raise UserError(
                f"batch_size: expected at most the {len(x)} samples there are, got {self.batch_size}; "
                "lower it or give more samples"
            )


Sampling = Literal["uniform", "epochs"]


def draw_batches(
    samples: int, batch: int, rounds: int, sampling: Sampling, generator: torch.Generator
) -> Iterator[Tensor]:
    """Draw the sample numbers that a server announces each round, in rising order; the rest of an epoch is dropped."""
    order = torch.empty(0, dtype=torch.long)
    for _ in range(rounds):
        if sampling == "uniform" or len(order) < batch:
            order = torch.randperm(samples, generator=generator)
        yield order[:batch].sort().values
        order = order[batch:]


def default_rounds(samples: int, batch: int, sampling: Sampling) -> int:
    """Return a quarter more rounds than it takes at least for the batches to determine every sample.

    Batches drawn anew leave a sample out once in a hundred times at most. The batches of one epoch add up to all
    samples, so each further epoch tells one fact less than it has batches.

    >>> default_rounds(80, 8, "uniform"), default_rounds(80, 8, "epochs"), default_rounds(20, 2, "uniform")
    (100, 110, 73)
    """
    batches = samples // batch
    if sampling == "uniform" and batch < samples:
        covered = math.log(100 * samples) / -math.log1p(-batch / samples)
        return math.ceil(max(1.25 * samples, covered))
    if batches < 2:
        return math.ceil(1.25 * samples)
    return math.ceil(1.25 * (samples - 1) / (batches - 1)) * batches
