"""Read an observation for replaying the client: what of the update counts, and whether its local steps are known."""

from typing import Literal

from torch import Tensor

from leakscope.contracts.observation import Observation
from leakscope.labels import local_steps
from leakscope.matching.orders import Order
from leakscope.matching.simulations import UnrolledSteps


def reliable_update(observation: Observation) -> dict[str, Tensor]:
    """The update, zero where the adversary knows that it says nothing of the examples, or something false."""
    update = observation.message.update
    return dict(update) if observation.channel is None else observation.channel.reliable(update)


def several_steps(observation: Observation) -> bool:
    facts, examples = observation.training, observation.num_examples
    if observation.message.kind == "gradient":
        return False
    if examples is None or facts.epochs is None or facts.batch_size is None:
        return True
    # The first step of momentum is a plain one.
    return local_steps(examples, facts.epochs, facts.batch_size) != 1 or facts.optimizer not in (None, "sgd")


def plain_steps(observation: Observation) -> int | None:
    """Return how many plain steps, each on all examples, made the update; None for other clients."""
    facts, examples = observation.training, observation.num_examples
    if not several_steps(observation):
        return 1
    if examples is None or facts.epochs is None or facts.batch_size is None or facts.batch_size < examples:
        return None
    return None if facts.optimizer not in (None, "sgd") or facts.momentum else facts.epochs


def replay_recipe(observation: Observation) -> tuple[int, int, int, float] | None:
    """Examples, epochs, batch size and learning rate, where they are known and the optimiser can be replayed."""
    facts, examples = observation.training, observation.num_examples
    epochs, size, rate = facts.epochs, facts.batch_size, facts.learning_rate
    known = facts.optimizer in (None, "sgd", "adam")
    if examples is None or epochs is None or size is None or rate is None or not known:
        return None
    return examples, epochs, size, rate


def client_steps(
    observation: Observation, order: Order, rate: float, *, checkpoint: bool = True, compiled: bool = False
) -> UnrolledSteps:
    facts = observation.training
    optimizer: Literal["sgd", "adam"] = "adam" if facts.optimizer == "adam" else "sgd"
    return UnrolledSteps(rate, order, checkpoint, optimizer, facts.momentum or 0.0, compiled)
