"""The finding "trajectory": what many local steps hide of an update; see :mod:`leakscope.limits.surrogate`.

All gradients are of the mean loss on the client's whole data, in the protocol's mode of the model.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from leakscope.audit.findings import Subject, finite
from leakscope.contracts.defense import Defense
from leakscope.contracts.protocol import ClientSide, batch_gradient, client_copy, own_randomness
from leakscope.contracts.task import outputs_of
from leakscope.federation import FedAvg
from leakscope.federation.fedavg import Trajectory
from leakscope.limits import GRADIENTS_WORK, cosine_profile, drift_bound, effort_of, leading_shares

#: Local steps that are looked at.
MIN_STEPS, MAX_STEPS = 3, 50
#: Gradients that the segment along the update takes: twenty-one places, and the search between two of them.
PROFILE_GRADIENTS = 35
#: Entries of all gradients (and again of all weights) held at a time: 200 MB each in float32.
MAX_ENTRIES = 50_000_000

Weights = Mapping[str, Tensor]


def describe_update(subject: Subject) -> dict[str, Any]:
    """Tell how nearly the observed weight update is one gradient; or only a ``reason``.

    The segment runs along the update as it was sent; ``message_cosine`` is its cosine with what the training did, below
    1 only where a defence changed the message. Losses, shares and the bound are those of the training, repeated.
    """
    message, protocol = subject.observation.message, subject.protocol
    if message.kind != "weight_delta":
        return {"reason": f"the message is a {message.kind}, not a weight update"}
    if not isinstance(protocol, FedAvg):
        return {"reason": f"{type(protocol).__name__} does not tell the steps of its training"}
    size = sum(value.numel() for value in message.update.values())
    limit = max(MIN_STEPS, min(MAX_STEPS, MAX_ENTRIES // size))
    model = subject.observation.model  # the one the client was sent
    gradients = limit + PROFILE_GRADIENTS + protocol.epochs
    effort = effort_of(model, subject.observation.input_shape, len(subject.x))
    if (refusal := effort.refusal("this", 3 * gradients, GRADIENTS_WORK, numbers=math.inf)) is not None:
        return {"reason": refusal}
    held = subject.x, subject.y, subject.defense, subject.draws()
    path = protocol.trajectory(model, *held, limit=limit, task=subject.task)
    client, start = _Client(subject, protocol), path.weights[0]
    shares, constants = _along(path, client)
    trained = {name: start[name] - path.after[name] for name in start}
    facts = {
        "steps": path.steps,
        "chosen": list(path.kept),
        "shares": shares,
        "share_min": min(shares),
        "loss_before": finite(client.loss(start)),
        "loss_after": finite(client.loss(path.after)),
        "message_cosine": finite(_cosine(message.update, trained)),
        **constants,
    }
    profile = cosine_profile(
        message.update,
        lambda beta: client.gradient({name: start[name] - beta * value for name, value in message.update.items()}),
    )
    bound, why = _bound(protocol, path, facts)
    return {
        **facts,
        "betas": list(profile.betas),
        "cosines": [finite(value) for value in profile.cosines],
        "best_beta": finite(profile.best_beta),
        "max_cosine": finite(profile.best_cosine),
        "start_cosine": finite(profile.cosines[0]),
        "bound": bound,
        "bound_reason": why,
    }


class _Client:
    """Compute loss and gradient of the client's whole data at any weights; random models draw the same each time."""

    def __init__(self, subject: Subject, protocol: FedAvg) -> None:
        self._model = client_copy(subject.observation.model, protocol.batchnorm, protocol.dropout)
        self._trained = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        self._x, self._y, self._task = subject.x.detach(), subject.y, subject.task

    def gradient(self, weights: Weights) -> dict[str, Tensor]:
        self._load(weights)
        draws = torch.Generator().manual_seed(0)
        with own_randomness(draws):
            return batch_gradient(ClientSide(self._model, self._x, self._y, self._task, Defense(), draws, self._model))

    def loss(self, weights: Weights) -> float:
        self._load(weights)
        with torch.no_grad(), own_randomness(torch.Generator().manual_seed(0)):
            return float(self._task.loss(outputs_of(self._model(self._x.clone())), self._y))

    def _load(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, p in self._trained.items():
                p.copy_(weights[name])


def _along(path: Trajectory, client: _Client) -> tuple[list[float], dict[str, float | None]]:
    """Return the share of each kept step's gradient in the two leading directions, and the bound's constants."""
    places = (*path.weights, path.after)
    size = sum(value.numel() for value in path.after.values())
    rows = next(iter(path.after.values())).new_empty(len(places), size)
    for row, weights in zip(rows, places, strict=True):
        torch.cat([value.flatten() for value in client.gradient(weights).values()], out=row)
    smoothness = 0.0
    for number, (one, other) in enumerate(pairwise(places)):
        moved = math.sqrt(sum(_norm(value - other[name]) ** 2 for name, value in one.items()))
        if moved > 0:
            smoothness = max(smoothness, _norm(rows[number] - rows[number + 1]) / moved)
    # The weights at the end give one more secant, but no step started there.
    shares: list[float] = leading_shares(rows[:-1]).tolist()
    longest = max(_norm(row) for row in rows)
    constants = {"gradient_norm": max(longest, *path.norms), "lipschitz": longest, "smoothness": smoothness}
    return shares, {name: finite(value) for name, value in constants.items()}


def _bound(protocol: FedAvg, path: Trajectory, known: Mapping[str, Any]) -> tuple[float | None, str | None]:
    """Return the bound of Theorem 4.3 with the constants seen on the way, or why there is none."""
    if protocol.optimizer != "sgd" or protocol.momentum:
        used = protocol.optimizer + (f" with momentum {protocol.momentum:g}" if protocol.momentum else "")
        return None, f"the bound assumes plain SGD, and this client uses {used}"
    names = ("gradient_norm", "lipschitz", "smoothness", "loss_before", "loss_after")
    constants = {name: known[name] for name in names}
    if None in constants.values():
        return None, "a loss or a gradient on the way is not finite"
    bound = drift_bound(learning_rate=protocol.lr, steps=path.steps, **constants)
    if math.isfinite(bound):
        return bound, None
    if known["loss_before"] <= known["loss_after"]:
        return None, "the loss did not fall"
    return None, "the learning rate times the smoothness of the loss is 2 or more"


def _cosine(one: Weights, other: Weights) -> float:
    product = sum(float((value.double() * other[name].double()).sum()) for name, value in one.items())
    lengths = [math.sqrt(sum(_norm(value) ** 2 for value in each.values())) for each in (one, other)]
    return min(1.0, max(-1.0, product / math.prod(lengths))) if all(lengths) else math.nan


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value, dtype=torch.float64))
