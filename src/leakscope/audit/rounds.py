"""What is told of a vertical protocol beside its attacks: what the rounds give away, and what a defence costs.

The truth's side: computed at the private samples, for the report and never for an attack, once for each setting.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.defenses import Defense
from leakscope.federation import Vertical
from leakscope.federation.base import BATCHNORM, client_copy, own_randomness
from leakscope.limits import vertical_limits
from leakscope.loss import client_loss
from leakscope.observation import Observation
from leakscope.vertical import VerticalModel

#: Above so many samples the decompositions take longer than the attack.
MAX_SAMPLES = 2000
#: Points of a loss curve that are kept.
MAX_POINTS = 200


def describe_rounds(
    protocol: Vertical, observation: Observation, x: Tensor, y: Tensor, defense: Defense | None
) -> dict[str, Any]:
    """What theory says of the rounds in ``observation``; plain JSON values, ``found`` or only a ``reason``.

    ``announced``: whether the adversary knows the batches. Where secure shuffling hides them, ``found`` is what as many
    batches would give away that are drawn alike and known. ``moves``, ``alters`` and ``mixes`` name what the equations
    leave out: that the model learns meanwhile, that a defence changes the gradients, that BatchNorm mixes samples.
    """
    batches = [message.indices for message in observation.messages if message.indices is not None]
    announced = len(batches) == len(observation.messages)
    facts = {
        "kind": "vertical",
        "announced": announced,
        "moves": protocol.lr > 0,
        "alters": defense is not None and type(defense) is not Defense,
        "mixes": protocol.batchnorm == "train" and any(isinstance(m, BATCHNORM) for m in observation.model.modules()),
    }
    if len(x) > MAX_SAMPLES:
        return {**facts, "reason": f"the calculation is for at most {MAX_SAMPLES} samples, and there are {len(x)}"}
    try:
        assert isinstance(observation.model, VerticalModel)  # or the protocol had refused it
        found = vertical_limits(
            observation.model,
            len(x),
            protocol.batch_size,
            len(observation.messages),
            sampling=protocol.sampling,
            inputs=x,
            labels=y,
            indices=batches if announced else None,
        )
    except Exception as error:  # noqa: BLE001 - the attack's result is worth keeping whatever goes wrong here
        return {**facts, "reason": f"{type(error).__name__}: {error}"}
    return {**facts, "found": found.as_dict()}


def describe_cost(
    protocol: Vertical, model: nn.Module, x: Tensor, y: Tensor, defense: Defense | None, generator: torch.Generator
) -> dict[str, Any]:
    """How the training goes under this defence; plain JSON values, or only a ``reason``.

    ``generator`` must stand where the one of the observation stood, so that the rounds are the same. ``points`` are
    round and loss of its batch before it, ``first`` and ``last_tenth`` the first and the mean of the last of these
    losses; ``before`` and ``after`` are losses on all samples, which owe nothing to the draw of the last batches.
    """
    try:
        run = protocol.train(model, x, y, defense, generator)
        before, after = (_loss(protocol, net, x, y) for net in (model, run.last))
    except Exception as error:  # noqa: BLE001 - as above
        return {"reason": f"{type(error).__name__}: {error}"}
    losses = run.losses
    last = losses[-max(1, len(losses) // 10) :]
    points = averaged(losses, _stretch(len(losses), len(x) // protocol.batch_size))
    return {
        "rounds": len(losses),
        "points": [[place, _finite(loss)] for place, loss in points],
        "first": _finite(losses[0]),
        "last_tenth": _finite(math.fsum(last) / len(last)),
        "before": _finite(before),
        "after": _finite(after),
    }


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


def _loss(protocol: Vertical, model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Mean loss over all samples, in the mode in which the workers train and about as many at a time."""
    client = client_copy(model, protocol.batchnorm)
    parts = max(1, len(x) // protocol.batch_size)
    total = 0.0
    with torch.no_grad(), own_randomness(torch.Generator().manual_seed(0)):
        for inputs, labels in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            total += float(client_loss(client(inputs.clone()), labels, "sum"))
    return total / len(x)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
