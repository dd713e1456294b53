"""Findings: what is true of a setting or of one client of it, whatever attack is run.

A protocol names the findings that make sense for it. They are computed at the private inputs, for the report and never
for an attack. That of weight updates has a file of its own (``audit/trajectory.py``).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense
from leakscope.contracts.errors import NotApplicable, UserError
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import BATCHNORM, Protocol, client_copy, own_randomness
from leakscope.contracts.task import Task, outputs_of
from leakscope.equations.embedding import recover_embedding
from leakscope.equations.features import features_of, read_dense_gradient
from leakscope.federation import Vertical
from leakscope.limits import Floor, affordable_floor, cramer_rao, vertical_limits
from leakscope.matching import GradientMap, UnrolledSteps
from leakscope.matching.recipe import client_steps, replay_recipe
from leakscope.metrics.assignment import assign
from leakscope.metrics.features import feature_error, random_span_error
from leakscope.models.split import VerticalModel
from leakscope.network.recorder import inputs_of

#: Where the floor cannot be exact it is estimated from so many random directions and steps.
FLOOR_PROBES, FLOOR_STEPS = 4, 200
#: Errors and losses of so many examples are kept.
MOST_EXAMPLES = 64
#: Entries of a gradient beyond which its span is not looked for.
MOST_ENTRIES = 2**22
#: Above so many samples the decompositions take longer than the attack.
MAX_SAMPLES = 2000
#: Points of a loss curve that are kept.
MAX_POINTS = 200

Per = Literal["setting", "client", "training"]


@dataclass(frozen=True, eq=False)
class Subject:
    """What a finding is about: a client, what it holds, what it sent, and its random draws from the beginning."""

    protocol: Protocol
    defense: Defense | None
    task: Task
    observation: Observation
    x: Tensor
    y: Tensor
    draws: Callable[[], torch.Generator]


@dataclass(frozen=True)
class Finding:
    """A kind of finding, of the first client of each setting, of every client, or of a training without a subject."""

    name: str
    summary: str
    per: Per
    tell: Callable[[Subject], Mapping[str, Any]] | None = None


def describe_floor(subject: Subject) -> dict[str, Any]:
    """Return the Cramér–Rao floor of one observed gradient or weight update; or only a ``reason``.

    The map of a weight update is the client's local steps in their true order, linearised at its examples. Where the
    defence adds no noise, the update's own rounding is the noise, in proportion to the size of each tensor. A server
    that may send another model is not bound by the floor (``model_may_change``).
    """
    defense = Defense() if subject.defense is None else subject.defense
    channel = subject.protocol.channel(defense, len(subject.x))
    if channel is None:
        return {"reason": f"what {type(defense).__name__} does to an update is not known to the calculation"}
    if subject.observation.dropout == "train":
        channel = Channel(inexact=True)
    if channel.beyond_theory is not None:
        return {"reason": channel.beyond_theory}
    wide = subject.observation.without_channel().to(device="cpu", dtype=torch.float64)
    replayed = _local_steps(subject) if wide.message.kind == "weight_delta" else None
    if isinstance(replayed, str):
        return {"reason": replayed}
    mapping = GradientMap.of(wide, subject.y, steps=replayed)
    plan = affordable_floor(mapping, probes=FLOOR_PROBES, steps=FLOOR_STEPS)
    if isinstance(plan, str):
        return {"reason": plan}
    method, steps = plan
    flat = mapping.flat(subject.x.double())
    noisy = channel.with_least_noise(_rounding(subject, mapping, flat))
    floor = cramer_rao(mapping, flat, noisy, method=method, probes=FLOOR_PROBES, steps=steps)
    knowledge = subject.observation.knowledge
    may_change = knowledge.choose_weights or knowledge.choose_structure
    return {**_floor_facts(floor, mapping, channel), "model_may_change": may_change}


def _local_steps(subject: Subject) -> UnrolledSteps | str:
    """Return the client's steps as it took them, repeated with its draws; or why they are not known."""
    seen = subject.observation
    knowing = dataclasses.replace(
        seen.knowledge, num_examples=True, local_epochs=True, batch_size=True, learning_rate=True, batch_order=True
    )
    again = subject.protocol.observe(
        seen.model, subject.x, subject.y, subject.defense, knowing, subject.draws(), task=subject.task
    )
    recipe, order = replay_recipe(again), again.training.batch_order
    if recipe is None or order is None:
        return f"the floor was not computed: {type(subject.protocol).__name__} does not tell the steps of its training"
    return client_steps(again, order, recipe[3], checkpoint=False)


def _rounding(subject: Subject, mapping: GradientMap, flat: Tensor) -> dict[str, float]:
    """Return the noise of rounding on each tensor: an error up to eps / 2 of an entry's size, all equally likely.

    A weight update is a difference of weights that were rounded at each step, so that their size counts.
    """
    rounding = torch.finfo(subject.observation.dtype).eps / math.sqrt(12)
    sizes = {name: float(value.square().mean().sqrt()) for name, value in mapping.update(flat).items()}
    if mapping.steps is not None:
        weights, steps = mapping.victim.tensors.weights, len(mapping.steps.order)
        for name, size in sizes.items():
            sizes[name] = max(size, float(weights[name].square().mean().mul(steps).sqrt()))
    return {name: rounding * (size or 1.0) for name, size in sizes.items()}


def _floor_facts(floor: Floor, mapping: GradientMap, channel: Channel) -> dict[str, Any]:
    return {
        "entries": mapping.entries,
        "unknowns": floor.unknowns,
        "rank": floor.rank,
        "condition": floor.condition,
        "rmse": floor.rmse,
        "infinite": math.isinf(floor.rmse),
        "interval": None if floor.interval is None else list(floor.interval),
        "psnr": floor.psnr,
        "method": floor.method,
        "converged": floor.converged,
        "sigma": max((channel.level(name) for name in mapping.names), default=0.0),
        "rounding_only": not channel.noisy,
        "surviving": floor.surviving,
        "clip_factor": floor.clip_factor,
        "note": floor.reason,
    }


def describe_embedding(subject: Subject) -> dict[str, Any]:
    """Compare the features that follow from the observation alone with the true ones; or a ``reason`` why none do."""
    try:
        found = recover_embedding(subject.observation)
    except NotApplicable as refusal:
        return {"reason": str(refusal), **_span(subject)}
    truth = _true_features(subject, found.layer)
    order = assign(truth, found.features)
    labels = found.labels if subject.task.has_classes else None
    right = None if labels is None else float(subject.task.right(subject.y.cpu(), labels[order]).mean())
    errors = (found.features[order] - truth).norm(dim=1) / truth.norm(dim=1).clamp_min(1e-300)
    return {
        "layer": found.layer,
        "peeled": list(found.peeled),
        "reaches_input": found.reaches_input,
        "examples": len(truth),
        "numbers": truth.shape[1],
        "error": finite(float(errors.max())),
        "errors": [finite(float(error)) for error in errors[:MOST_EXAMPLES]],
        "expected_error": finite(found.error),
        "residual": finite(found.residual),
        "exact": found.exact,
        "labels_right": right,
        "losses": [] if found.losses is None else [finite(float(loss)) for loss in found.losses[:MOST_EXAMPLES]],
        "scale": finite(found.scale),
        "note": "; ".join(found.notes),
    }


def _span(subject: Subject) -> dict[str, Any]:
    """Compare the span of the features in front of the widest dense layer with the true one and a random one."""
    observation = subject.observation
    try:
        layer = read_dense_gradient(observation)
        count = observation.num_examples or len(subject.x)
        if layer.gradient.numel() > MOST_ENTRIES or count > MOST_EXAMPLES:
            return {}
        found = features_of(layer, count=count, methods=("svd", "stein", "refined"))
    except NotApplicable:
        return {}
    truth = _true_features(subject, found.layer)
    return {
        "layer": found.layer,
        "examples": len(truth),
        "numbers": truth.shape[1],
        "span_error": feature_error(truth, found.span),
        "span_baseline": random_span_error(count, truth.shape[1]),
        "span_method": found.method,
    }


def _true_features(subject: Subject, layer: str) -> Tensor:
    model = client_copy(subject.observation.model, subject.observation.batchnorm)
    with torch.no_grad():
        return inputs_of(model.get_submodule(layer), model, subject.x).flatten(1).double().cpu()


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def describe_rounds(subject: Subject) -> dict[str, Any]:
    """Return what theory says of the rounds that were observed: ``found``, or only a ``reason``.

    ``announced``: the adversary knows the batches. Where secure shuffling hides them, ``found`` is what as many known
    batches drawn alike would give away. The equations leave out that the model learns meanwhile (``moves``), that a
    defence changes the gradients (``alters``), and that BatchNorm mixes samples (``mixes``).
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
        *(observation.model, samples, protocol.batch_size, len(observation.messages)),
        sampling=protocol.sampling,
        inputs=subject.x,
        labels=subject.y,
        indices=batches if announced else None,
    )
    return {**facts, "found": limits.as_dict()}


def describe_cost(subject: Subject) -> dict[str, Any]:
    """Train under this defence and return the course of the loss.

    ``points`` are round and loss of its batch before it, ``first`` and ``last_tenth`` the first and the mean of the
    last of these losses; ``before`` and ``after`` are losses on all samples.
    """
    protocol, model = _vertical(subject), subject.observation.model
    run = protocol.train(model, subject.x, subject.y, subject.defense, subject.draws(), task=subject.task)
    losses = run.losses
    last = losses[-max(1, len(losses) // 10) :]
    points = averaged(losses, _stretch(len(losses), len(subject.x) // protocol.batch_size))
    return {
        "rounds": len(losses),
        "points": [list(point) for point in points],
        "first": losses[0],
        "last_tenth": math.fsum(last) / len(last),
        "before": _loss(subject, model),
        "after": _loss(subject, run.last),
    }


def _vertical(subject: Subject) -> Vertical:
    if not isinstance(subject.protocol, Vertical):
        raise UserError(f"expected rounds of vertical learning, got {subject.protocol!r}")
    return subject.protocol


def _stretch(rounds: int, epoch: int) -> int:
    """Return the rounds to average losses over: an epoch where ten points remain, more where there are too many.

    >>> _stretch(30, 4), _stretch(1000, 10), _stretch(8000, 20), _stretch(5, 4)
    (3, 10, 40, 1)
    """
    return max(1, -(-rounds // MAX_POINTS), min(epoch, rounds // 10))


def averaged(values: Sequence[float], length: int) -> list[tuple[float, float]]:
    """Return means over stretches of ``length`` values, each with the middle of its places, counted from 1.

    >>> averaged([4.0, 2.0, 3.0, 1.0, 5.0], 2)
    [(1.5, 3.0), (3.5, 2.0), (5.0, 5.0)]
    """
    stretches = [(start, values[start : start + length]) for start in range(0, len(values), length)]
    return [(start + (len(part) + 1) / 2, math.fsum(part) / len(part)) for start, part in stretches]


def _loss(subject: Subject, model: nn.Module) -> float:
    """Return the mean loss over all samples, in the mode in which the workers train and about as many at a time."""
    protocol, x, y = _vertical(subject), subject.x, subject.y
    client = client_copy(model, protocol.batchnorm)
    parts = max(1, len(x) // protocol.batch_size)
    total = 0.0
    with torch.no_grad(), own_randomness(torch.Generator().manual_seed(0)):
        for inputs, labels in zip(x.tensor_split(parts), y.tensor_split(parts), strict=True):
            total += float(subject.task.loss(outputs_of(client(inputs.clone())), labels, "sum"))
    return total / len(x)


def _trajectory(subject: Subject) -> Mapping[str, Any]:
    from leakscope.audit.trajectory import describe_update  # which itself needs the subject of a finding

    return describe_update(subject)


_ALL = (
    Finding("floor", "the least error that theory allows behind an update", "setting", describe_floor),
    Finding("trajectory", "how nearly the update of many local steps is one gradient", "client", _trajectory),
    Finding("rounds", "which samples announced batches determine", "setting", describe_rounds),
    Finding("cost", "how the training goes under the defence", "setting", describe_cost),
    Finding("utility", "how well the model learns under the defence", "training"),
    Finding("embedding", "the features that the last layers give away by themselves", "setting", describe_embedding),
)
#: Kinds of findings; a further one is a function and a line here, and a protocol that names it.
FINDINGS: Mapping[str, Finding] = MappingProxyType({finding.name: finding for finding in _ALL})
