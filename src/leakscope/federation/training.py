"""Training over several rounds: federated, by protected updates to see what a defence costs, and in one place.

Federated: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1. Training in one place, unlike federated training, also moves the running statistics of BatchNorm.
"""

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn

from leakscope.contracts.checks import is_whole, refuse, whole
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import Box, InputSpace
from leakscope.contracts.protocol import Protocol, check_batch, client_copy, own_randomness
from leakscope.contracts.settings import Described, setting
from leakscope.contracts.task import Classification, Task, outputs_of
from leakscope.federation.client import UpdateNotFinite
from leakscope.federation.fedavg import FedAvg, FedSGD

Client = tuple[Tensor, Tensor]
Progress = Callable[[int, int, float], None]

LOSS_CHUNK = 512  # examples at once in a measured loss, which bounds memory
_TOLD = 5


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """``models[r]`` is what a client receives in round r; ``losses[r - 1]`` its loss on the drawn clients' examples."""

    models: Mapping[int, nn.Module] = field(repr=False)
    losses: tuple[float, ...]

    @property
    def last(self) -> nn.Module:
        return self.models[max(self.models)]


class Training(Described, ABC):
    """Training in rounds, each of which depends on its number, the seed and the model before it alone."""

    rounds: int
    task: Task
    inputs: InputSpace | None

    @abstractmethod
    def play_round(
        self, model: nn.Module, clients: Sequence[Client], number: int, *, seed: int = 0, defense: Defense | None = None
    ) -> tuple[nn.Module, float]:
        """Play round ``number`` from the global ``model``; return the model after it, as a new object, and the loss."""

    def run(
        self,
        model: nn.Module,
        clients: Sequence[Client],
        *,
        seed: int = 0,
        at: Sequence[int] | None = None,
        defense: Defense | None = None,
        progress: Progress | None = None,
    ) -> TrainingRun:
        """Train ``model`` on ``clients``, each a pair (x, y), and keep it as it is before each round in ``at``.

        Round 1 is the initial model and ``rounds`` + 1, the default, the model after the last round. ``progress`` gets
        (done, total, loss) after each round. The caller's model and torch's global generator stay as they are.
        """
        wanted = self.wanted_rounds(at)
        check_clients(model, clients, seed, self.task, self.inputs)
        current, losses, kept = initial_copy(model), [], {}
        for number in range(1, wanted[-1] + 1):
            if number in wanted:
                kept[number] = current
            if number < wanted[-1]:
                current, loss = self.play_round(current, clients, number, seed=seed, defense=defense)
                losses.append(loss)
                if progress is not None:
                    progress(number, wanted[-1] - 1, loss)
        return TrainingRun(MappingProxyType(kept), tuple(losses))

    def wanted_rounds(self, at: Sequence[int] | None) -> tuple[int, ...]:
        """Check ``at``; return it ascending and each once, and the model after the last round where it is None.

        >>> FederatedTraining(rounds=20).wanted_rounds([5, 1, 5]), FederatedTraining(rounds=20).wanted_rounds(None)
        ((1, 5), (21,))
        """
        if at is None:
            return (self.rounds + 1,)
        wrong = [r for r in at if not is_whole(r) or r > self.rounds + 1]
        if wrong or not len(at):
            raise UserError(
                f"at: expected at least one round from 1, the initial model, to {self.rounds + 1}, the model after "
                f"the last round, got {', '.join(map(repr, wrong)) or 'none'}. Raise rounds for later ones."
            )
        return tuple(sorted(set(at)))


@dataclass(frozen=True, kw_only=True)
class FederatedTraining(Training):
    """In each round some clients train from the global weights; the server subtracts the weighted mean of updates.

    Updates are those of ``protocol.observe``, defence included, and count by their number of examples. Only trainable
    parameters are sent: buffers, such as the running statistics of BatchNorm, stay those of the initial model.
    """

    rounds: int = setting(10, "Rounds of training.", ge=1)
    clients_per_round: int = setting(10, "Clients that the server draws each round.", ge=1)
    protocol: FedAvg = field(default_factory=FedAvg)
    task: Task = field(default_factory=Classification)
    inputs: InputSpace | None = field(default=None, repr=False)

    def play_round(
        self, model: nn.Module, clients: Sequence[Client], number: int, *, seed: int = 0, defense: Defense | None = None
    ) -> tuple[nn.Module, float]:
        chosen = self.draw_clients(len(clients), number, seed)
        total = sum(len(clients[place][1]) for place in chosen)
        mean: Gradient = {}
        for place in chosen:
            (x, y), draws = clients[place], round_generator(seed, number, place)
            try:
                client, _ = self.protocol.client_side(model, x, y, defense, draws, self.task, inputs=self.inputs)
                sent = self.protocol.send(client)
            except ValueError as error:
                raise UserError(f"round {number}, client {place}: {error}") from error
            for name, delta in sent.items():
                # Summed in double precision on the CPU: the mean owes nothing to the device or the number of clients.
                mean[name] = mean.get(name, 0.0) + delta.to("cpu", torch.float64) * (len(y) / total)
        after = copy.deepcopy(client.shared)
        probe = client_copy(after, self.protocol.batchnorm)
        loss = mean_loss(probe, [clients[place] for place in chosen], self.task)
        _step(after, mean, 1.0)
        return after, loss

    def draw_clients(self, count: int, number: int, seed: int = 0) -> tuple[int, ...]:
        """Draw the clients of round ``number`` out of ``count``, ascending; all where there are not enough.

        >>> FederatedTraining(clients_per_round=5).draw_clients(3, number=1)
        (0, 1, 2)
        """
        drawn = torch.randperm(count, generator=named_generator("server", seed, number))[: self.clients_per_round]
        return tuple(sorted(drawn.tolist()))


def round_generator(seed: int, number: int, client: int) -> torch.Generator:
    return named_generator("client", seed, number, client)


def named_generator(*parts: str | int) -> torch.Generator:
    """Return a generator of its own for each purpose, seed and number."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


def initial_copy(model: nn.Module) -> nn.Module:
    """Copy the model for round 1: the caller's own object is never handed on, nor are its gradients."""
    initial = copy.deepcopy(model)
    initial.zero_grad(set_to_none=True)
    return initial


def mean_loss(model: nn.Module, clients: Sequence[Client], task: Task) -> float:
    """Return the mean loss over all examples, in the model's own mode; not finite where the model is broken."""
    total, count = 0.0, 0
    with torch.no_grad(), own_randomness(0):
        for x, y in clients:
            # Chunks of nearly equal size: BatchNorm in train mode cannot read a left-over single example.
            chunks = -(-len(x) // LOSS_CHUNK)
            for inputs, labels in zip(x.tensor_split(chunks), y.tensor_split(chunks), strict=True):
                total += float(task.loss(outputs_of(model(inputs.clone())), labels, "sum"))
            count += len(x)
    return total / count


def check_clients(
    model: nn.Module, clients: Sequence[Client], seed: int, task: Task, space: InputSpace | None = None
) -> None:
    """Raise one ValueError with what is wrong, before a round that runs hours later finds it."""
    problems = whole(0, seed=seed)
    if not len(clients):
        problems.append("clients: expected at least one pair (x, y), got none")
    outputs: tuple[int, ...] = ()
    kind = None
    for number, client in enumerate(clients):
        try:
            x, y = client
            if not isinstance(x, Tensor) or not isinstance(y, Tensor) or len(x) == 0:
                raise UserError("expected a pair (x, y) of tensors with at least one example")
            if kind != (x.shape[1:], x.dtype):
                # The model itself need only be asked once for each kind of input.
                outputs, kind = check_batch(model, x, y, None, task, space), (x.shape[1:], x.dtype)
            wrong = (space or Box(tuple(x.shape[1:]))).problems(x)
            wrong += task.problems_of(y, len(x), outputs)
            if wrong:
                raise UserError(" ".join(wrong))
        except (TypeError, ValueError) as error:
            message = [line.strip().removeprefix("- ") for line in str(error).splitlines()]
            problems.append(f"client {number}: " + " ".join(message))
    refuse("federated training", problems, _TOLD)


class Diverged(UserError):
    """The training broke down: an update, a weight or a loss is no longer finite."""


@dataclass(frozen=True, kw_only=True)
class DefendedTraining(Training):
    """Each round every client sends the update of its next ``batch_size`` examples, and the server goes one step.

    A client goes through its examples in a shuffled order, anew each epoch; the rest of an epoch is dropped. The order
    does not depend on the defence, so that trainings under different defences see the same batches.
    """

    rounds: int = setting(200, "Steps of the server.", ge=1)
    batch_size: int = setting(16, "Examples behind a client's update.", ge=1)
    lr: float = setting(0.1, "Step size of the server.", gt=0)
    protocol: Protocol = field(default_factory=FedSGD)
    task: Task = field(default_factory=Classification)
    inputs: InputSpace | None = field(default=None, repr=False)

    def play_round(
        self, model: nn.Module, clients: Sequence[Client], number: int, *, seed: int = 0, defense: Defense | None = None
    ) -> tuple[nn.Module, float]:
        """Return the model after step ``number``, and the mean loss of its batches before it; raise Diverged."""
        rows = [self.next_batch(len(y), number, seed, place) for place, (_, y) in enumerate(clients)]
        total, losses = sum(map(len, rows)), []
        after: nn.Module | None = None
        for place, ((x, y), own) in enumerate(zip(clients, rows, strict=True)):
            draws = round_generator(seed, number, place)
            client, _ = self.protocol.client_side(model, x[own], y[own], defense, draws, self.task, inputs=self.inputs)
            if after is None:  # where the defence changes the model, that one is trained
                after = copy.deepcopy(client.shared)
            losses.append(len(own) / total * mean_loss(client.model, [(client.x, client.y)], self.task))
            if not math.isfinite(losses[-1]):
                raise Diverged(f"round {number}: the loss is {losses[-1]}")
            try:
                sent = self.protocol.send(client)
            except UpdateNotFinite as error:
                raise Diverged(f"round {number}: {error}") from error
            share = len(own) / total / (len(own) if self.protocol.reduction == "sum" else 1)
            _step(after, sent, self.lr * share)
        assert after is not None  # there is a client, or check_clients had refused
        if not all(bool(torch.isfinite(p).all()) for p in after.parameters()):
            raise Diverged(f"round {number}: the weights are not finite")
        return after, math.fsum(losses)

    def next_batch(self, examples: int, number: int, seed: int, client: int) -> Tensor:
        """Return the rows of a client with so many examples in round ``number``.

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
        """Count how often at most each of a client's examples enters a gradient in all rounds.

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


@dataclass(frozen=True, kw_only=True)
class CentralTraining(Training):
    """A round is one epoch of SGD over all examples; momentum begins anew: a checkpoint needs the weights alone."""

    rounds: int = setting(1, "Epochs of training.", ge=1)
    batch_size: int = setting(64, "Examples in a step.", ge=1)
    lr: float = setting(0.1, "Step size of SGD.", gt=0)
    momentum: float = setting(0.9, "Momentum of SGD.", ge=0, lt=1)
    decay_every: int = setting(50, "Epochs after which the step size falls to a tenth; 0 never.", ge=0)
    task: Task = field(default_factory=Classification)
    inputs: InputSpace | None = field(default=None, repr=False)

    def play_round(
        self, model: nn.Module, clients: Sequence[Client], number: int, *, seed: int = 0, defense: Defense | None = None
    ) -> tuple[nn.Module, float]:
        if defense is not None:
            raise UserError(f"central training: expected no defence, for nothing is sent, got {defense!r}")
        x, y = (torch.cat(parts) for parts in zip(*clients, strict=True))
        after = copy.deepcopy(model).train()
        rate = self.lr * (0.1 ** ((number - 1) // self.decay_every) if self.decay_every else 1.0)
        optimiser = torch.optim.SGD([p for p in after.parameters() if p.requires_grad], rate, self.momentum)
        total, draws = 0.0, round_generator(seed, number, 0)
        with own_randomness(seed):
            for rows in torch.randperm(len(x), generator=draws).tensor_split(-(-len(x) // self.batch_size)):
                optimiser.zero_grad()
                loss = self.task.loss(outputs_of(after(x[rows])), y[rows], "mean")
                loss.backward()
                optimiser.step()
                total += float(loss.detach()) * len(rows)
        after.zero_grad(set_to_none=True)
        return after.train(model.training), total / len(x)
