"""Measure what inputs leave of an update, a gradient or weight update, captured or simulated.

The unit is the root mean square of all entries, each relative to that of its tensor: 0 explains everything, 1 is as
good as an update of zeros. A weight update whose recipe is known is compared with the client's local steps, replayed;
another one with a gradient between the weights before and after, whatever its length.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.observation import Observation
from leakscope.matching.orders import Order, candidate_orders
from leakscope.matching.recipe import client_steps, reliable_update, replay_recipe
from leakscope.matching.simulations import SegmentGradient, UnrolledSteps
from leakscope.matching.victim import Tensors, Victim

#: Orders that are replayed where nobody says which one it was: a second of a small network.
MOST_REPLAYS = 32
#: Points between the weights before (0) and after (1) whose gradient is tried where the recipe is not known.
SEGMENT = (0.0, 0.5, 1.0)
#: Share that a result may leave beyond what the truth or known noise leaves. It does not tell right from wrong: FedAvg
#: results above 20 dB left .03 to .31, those below it .10 to .45 (benchmarks/fedavg_orders.py).
UNEXPLAINED_SHARE = 0.1
#: ... or so many standard deviations of what noise leaves: chance exceeds them once in a thousand times.
DEVIATIONS = 3.0

#: An observed tensor below this share of the largest (root mean squares) is rounding, if inputs leave it zero to that
#: share of itself: the key's bias of attention, say, whose gradient the softmax cancels.
ROUNDING_ALONE = 1e-6


def unexplained(observation: Observation, inputs: Tensor, targets: Tensor, *, order: Order | None = None) -> float:
    """Return what inputs leave of the update, visited in ``order``, the known one, or the best of a few candidates."""
    return explain(observation, inputs, targets, order=order).left


@dataclass(frozen=True)
class Explanation:
    """Hold what inputs leave of an update, and of one ``stretch`` times as long; None where its length says nothing."""

    left: float
    left_at_best_length: float
    stretch: float | None


def explain(observation: Observation, inputs: Tensor, targets: Tensor, *, order: Order | None = None) -> Explanation:
    victim, observed = Victim.of(observation), reliable_update(observation)
    recipe = replay_recipe(observation)
    updates: Iterable[Tensors]
    if observation.message.kind == "gradient":
        gradient, _ = victim.gradient(victim.tensors, inputs, targets)
        updates, free = [victim.sent_update(gradient, victim.tensors)], False
    elif recipe is None or recipe[0] != len(inputs):
        points = [SegmentGradient(beta=beta, step=0) for beta in SEGMENT]
        updates, free = (point(victim, victim.tensors, inputs, targets, {})[0] for point in points), True
    else:
        ways = [client_steps(observation, way, recipe[3]) for way in _orders(observation, order, recipe)]
        updates, free = (_replayed(way, victim, inputs, targets) for way in ways), False
    left, update = min(((_left(observed, one, free), one) for one in updates), key=lambda pair: pair[0])
    if free:
        return Explanation(left, left, None)
    return Explanation(left, _left(observed, update, True), _scale(update, observed))


@torch.no_grad()
def _replayed(steps: UnrolledSteps, victim: Victim, inputs: Tensor, targets: Tensor) -> Tensors:
    return steps(victim, victim.tensors, inputs, targets, {})[0]


def noise_share(observation: Observation) -> float:
    channel, squares, count = observation.channel, 0.0, 0
    for name, value in reliable_update(observation).items():
        size = float(value.square().mean())
        if size > 0:
            squares += 0.0 if channel is None else channel.level(name) ** 2 / size * value.numel()
            count += value.numel()
    return math.sqrt(squares / max(count, 1))


def is_unexplained(left: float, least: float, entries: int) -> bool:
    """Check that ``left`` is more than the truth or noise leave (``least``); squared it fluctuates by sqrt(2 / N).

    >>> is_unexplained(0.8, 1e-7, 5000), is_unexplained(0.05, 1e-7, 5000)
    (True, False)
    >>> is_unexplained(0.92, 0.9, 5000), is_unexplained(0.94, 0.9, 5000)
    (False, True)
    """
    beyond = left**2 - least**2
    return beyond > max(UNEXPLAINED_SHARE**2, DEVIATIONS * math.sqrt(2 / max(entries, 1)) * least**2)


def _orders(observation: Observation, order: Order | None, recipe: tuple[int, int, int, float]) -> Sequence[Order]:
    examples, epochs, batch_size, _ = recipe
    known = observation.training.batch_order if order is None else order
    if known is not None:
        return [tuple(tuple(batch) for batch in known)]
    # These inputs are no longer free to change places, so each is of a class of its own.
    draws = torch.Generator().manual_seed(0)
    return candidate_orders(range(examples), batch_size, epochs, MOST_REPLAYS, draws)[0]


def _left(observed: Mapping[str, Tensor], update: Tensors, free_scale: bool) -> float:
    """``free_scale``: a gradient is compared with a weight update, whose length says nothing of it."""
    scale, squares, count = _scale(update, observed) if free_scale else 1.0, 0.0, 0
    largest = max((float(value.square().mean()) for value in observed.values()), default=0.0)
    for name, value in observed.items():
        size = float(value.square().mean())
        if size > 0 and not _rounding_alone(size, float(update[name].square().mean()), largest):
            squares += float((scale * update[name] - value).square().sum()) / size
            count += value.numel()
    left = math.sqrt(squares / max(count, 1))
    return left if math.isfinite(left) else math.inf


def _rounding_alone(observed: float, found: float, largest: float) -> bool:
    """Tell from mean squares whether a tensor is zero but for rounding, in what was observed and in what was found.

    >>> _rounding_alone(1e-16, 1e-32, 1.0), _rounding_alone(1e-16, 1e-17, 1.0), _rounding_alone(1e-8, 0.0, 1.0)
    (True, False, False)
    """
    return observed <= ROUNDING_ALONE**2 * largest and found <= ROUNDING_ALONE**2 * observed


def _scale(update: Mapping[str, Tensor], observed: Mapping[str, Tensor]) -> float:
    product = sum(float((update[name] * value).sum()) for name, value in observed.items())
    size = sum(float(update[name].square().sum()) for name in observed)
    return product / size if size > 0 else 1.0
