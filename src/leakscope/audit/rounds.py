"""The findings "rounds" and "cost" of vertical learning: what the rounds give away, and what a defence costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from leakscope.audit.findings import Subject
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import UserError
from leakscope.contracts.protocol import BATCHNORM, client_copy
from leakscope.contracts.task import outputs_of
from leakscope.federation import Vertical
from leakscope.federation.client import own_randomness
from leakscope.limits import vertical_limits
from leakscope.models.split import VerticalModel

#: Above so many samples the decompositions take longer than the attack.
MAX_SAMPLES = 2000
#: Points of a loss curve that are kept.
MAX_POINTS = 200


def describe_rounds(subject: Subject) -> dict[str, Any]:
    """What theory says of the rounds that were observed; ``found``, or only a ``reason``.

    ``announced``: whether the adversary knows the batches. Where secure shuffling hides them, ``found`` is what as many
    batches would give away that are drawn alike and known. ``moves``, ``alters`` and ``mixes`` name what the equations
    leave out: that the model learns meanwhile, that a defence changes the gradients, that BatchNorm mixes samples.
    """
    protocol, observation, samples = _vertical(subject), subject.observation, len(subject.x)
    batches = [message.indices for message in observation.messages if message.indices is not None]
    announced = len(batches) == len(observation.messages)
    facts = {
        "kind": "vertical",
        "announced": announced,
        "moves": protocol.lr > 0,
        "alters": subject.defense is not None and type(subject.defense) is not Defense,
        "mixes": protocol.batchnorm == "train" and any(isinstance(m, BATCHNORM) for m in observation.model.modules()),
    }
    if samples > MAX_SAMPLES:
        return {**facts, "reason": f"the calculation is for at most {MAX_SAMPLES} samples, and there are {samples}"}
    if not subject.task.has_classes:
        return {**facts, "reason": f"the calculation is for classification, not for {subject.task!r}"}
    assert isinstance(observation.model, VerticalModel)  # or the protocol had refused it
    limits = vertical_limits(
        observation.model,
        samples,
        protocol.batch_size,
        len(observation.messages),
        sampling=protocol.sampling,
        inputs=subject.x,
        labels=subject.y,
        indices=batches if announced else None,
    )
    return {**facts, "found": limits.as_dict()}


def describe_cost(subject: Subject) -> dict[str, Any]:
    """How the training goes under this defence.

    ``points`` are round and loss of its batch before it, ``first`` and ``last_tenth`` the first and the mean of the
    last of these losses; ``before`` and ``after`` are losses on all samples, which owe nothing to the draw of the last
    batches.
    """
    protocol, model = _vertical(subject), subject.observation.model
    run = protocol.train(model, subject.x, subject.y, subject.defense, subject.draws(), task=subject.task)
    before, after = (_loss(subject, net) for net in (model, run.last))
    losses = run.losses
    last = losses[-max(1, len(losses) // 10) :]
    points = averaged(losses, _stretch(len(losses), len(subject.x) // protocol.batch_size))
    return {
        "rounds": len(losses),
        "points": [[place, loss] for place, loss in points],
        "first": losses[0],
        "last_tenth": math.fsum(last) / len(last),
        "before": before,
        "after": after,
    }


def _vertical(subject: Subject) -> Vertical:
    if not isinstance(subject.protocol, Vertical):
        raise UserError(f"expected rounds of vertical learning, got {subject.protocol!r}")
    return subject.protocol


def _stretch(rounds: int, epoch: int) -> int:
    """Rounds over which losses are averaged: an epoch where ten points remain, more where there are too many.

    >>> _stretch(30, 4), _stretch(1000, 10), _stretch(8000, 20), _stretch(5, 4)
    (3, 10, 40, 1)
    """
    return max(1, -(-rounds // MAX_POINTS), min(epoch, rounds // 10))


def averaged(values: Sequence[float], length: int) -> list[tuple[float, float]]:
    """Means over stretches of so many values, each with the middle of its places, counted from 1.

    >>> averaged([4.0, 2.0, 3.0, 1.0, 5.0], 2)
    [(1.5, 3.0), (3.5, 2.0), (5.0, 5.0)]
    """
    stretches = [(start, values[start : start + length]) for start in range(0, len(values), length)]
    return [(start + (len(part) + 1) / 2, math.fsum(part) / len(part)) for start, part in stretches]


def _loss(subject: Subject, model: nn.Module) -> float:
    """Mean loss over all samples, in the mode in which the workers train and about as many at a time."""
    protocol, x, y = _vertical(subject), subject.x, subject.y
    client = client_copy(model, protocol.batchnorm)
    parts = max(1, len(x) // protocol.batch_size)
    total = 0.0
    with torch.no_grad(), own_randomness(torch.Generator().manual_seed(0)):
        for inputs, labels in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            total += float(subject.task.loss(outputs_of(client(inputs.clone())), labels, "sum"))
    return total / len(x)
