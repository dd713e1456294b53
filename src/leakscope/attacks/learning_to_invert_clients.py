"""Clients that an adversary plays for itself, for ``learning-to-invert``: its own examples, the victim's protocol, the
real defence.

An adversary who knows recipe and defence can do what a client does with any examples it has. The steps and hooks are
those of the protocols (``contracts/step.py``), so that a played client sends what a real one with the same examples and
draws would, to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import ClientSide, client_copy
from leakscope.contracts.step import batch_gradient, own_randomness, train_locally, visits
from leakscope.contracts.task import Task

#: What must be known of a recipe to replay it.
_RECIPE = ("epochs", "batch_size", "learning_rate", "optimizer")


@dataclass(frozen=True, eq=False)
class PlayedClient:
    """A client of the observed protocol with the observed model and defence, which trains on any examples."""

    observation: Observation
    model: nn.Module
    weights: dict[str, Tensor]
    task: Task
    defense: Defense

    @classmethod
    def of(cls, observation: Observation) -> PlayedClient:
        """NotApplicable where the protocol or the defence is not known well enough to play it."""
        if observation.defense is None:
            raise NotApplicable(
                "the observation does not carry the defence's code, only at most its channel (files do not hold it). "
                "Give it with dataclasses.replace(observation, defense=...), Defense() where there is none"
            )
        trained = {name for name, parameter in observation.model.named_parameters() if parameter.requires_grad}
        if trained != set(observation.message.update):
            raise NotApplicable("the update is not of all tensors that the model trains, and of no others")
        unknown = [name for name in _RECIPE if getattr(observation.training, name) is None]
        if observation.message.kind == "weight_delta" and unknown:
            raise NotApplicable(
                f"the client's recipe cannot be replayed: {', '.join(unknown)} not known. Grant local_epochs, "
                "batch_size and learning_rate in the knowledge"
            )
        model = observation.defense.protect_copy(client_copy(observation.model, observation.batchnorm))
        weights = copy.deepcopy(model.state_dict())
        return cls(observation, model, weights, observation.task, observation.defense)

    def update(self, x: Tensor, y: Tensor, generator: torch.Generator) -> Gradient:
        """What is sent of these examples."""
        self.model.load_state_dict(self.weights)  # local steps move the weights, BatchNorm its statistics
        client = ClientSide(self.model, x, y, self.task, self.defense, generator)
        with own_randomness(generator):
            update = self._trained(client)
        return self.defense.protect_message(update, generator)

    def _trained(self, client: ClientSide) -> Gradient:
        if self.observation.message.kind == "gradient":
            return batch_gradient(client, self.observation.reduction)
        recipe, count = self.observation.training, len(client.x)
        assert recipe.epochs is not None
        assert recipe.batch_size is not None
        assert recipe.learning_rate is not None
        batches: Iterator[Tensor] = visits(count, recipe.batch_size, recipe.epochs, client.generator)
        if recipe.batch_order is not None:
            batches = (torch.tensor(step) for step in recipe.batch_order)
        return train_locally(client, batches, recipe.learning_rate, recipe.optimizer or "sgd", recipe.momentum or 0)[0]


def drawn_batches(examples: int, size: int, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """At most ``count`` batches of ``size`` of so many examples: passes through them in random order.

    Single examples are passed through once, for a second time would tell nothing new.

    >>> draws = torch.Generator().manual_seed(0)
    >>> [len(batch) for batch in drawn_batches(5, 2, 3, draws)], len(list(drawn_batches(5, 1, 9, draws)))
    ([2, 2, 2], 5)
    """
    made = 0
    while made < count:
        for batch in torch.randperm(examples, generator=generator)[: examples - examples % size].split(size):
            if made == count:
                return
            yield batch
            made += 1
        if size == 1:
            return


def in_order(x: Tensor, y: Tensor) -> Tensor:
    """Places of a batch's examples by class, those of one class by their mean: in which order a batch is learned.

    Of targets that are no classes only the mean counts.

    >>> in_order(torch.tensor([[3.0], [1.0], [0.0]]), torch.tensor([0, 0, 7])).tolist()
    [1, 0, 2]
    """
    by_mean = torch.argsort(x.flatten(1).mean(1), stable=True)
    if y.is_floating_point() or y.dim() != 1:
        return by_mean
    return by_mean[torch.argsort(y[by_mean], stable=True)]
