"""The finding "floor": what theory allows of a client's update, to stand beside what attacks made of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from leakscope.audit.findings import Subject
from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense
from leakscope.limits import Floor, affordable_floor, cramer_rao
from leakscope.matching import GradientMap, UnrolledSteps
from leakscope.matching.recipe import client_steps, replay_recipe

#: Where the floor cannot be exact it is estimated from so many random directions and steps.
PROBES = 4
STEPS = 200


def describe_floor(subject: Subject) -> dict[str, Any]:
    """The Cramér–Rao floor of one observed gradient or weight update; or only a ``reason``.

    The map of a weight update is the client's local steps in their true order, linearised at its examples.

    Where the defence adds no noise, the update's own rounding is the noise, taken to be in proportion to the size of
    each tensor: a floor of 110 dB says that in principle everything is there. It is that of the model as it is: a
    server that may send another one is not bound by it (``model_may_change``).
    """
    defense = Defense() if subject.defense is None else subject.defense
    channel = subject.protocol.channel(defense, len(subject.x))
    if channel is None:
        return {"reason": f"what {type(defense).__name__} does to an update is not known to the calculation"}
    if channel.beyond_theory is not None:
        return {"reason": channel.beyond_theory}
    wide = subject.observation.without_channel().to(device="cpu", dtype=torch.float64)
    replayed = _local_steps(subject) if wide.message.kind == "weight_delta" else None
    if isinstance(replayed, str):
        return {"reason": replayed}
    mapping = GradientMap.of(wide, subject.y, steps=replayed)
    plan = affordable_floor(mapping, probes=PROBES, steps=STEPS)
    if isinstance(plan, str):
        return {"reason": plan}
    method, steps = plan
    flat = mapping.flat(subject.x.double())
    floor = cramer_rao(
        mapping,
        flat,
        channel.with_least_noise(_rounding(subject, mapping, flat)),
        method=method,
        probes=PROBES,
        steps=steps,
    )
    knowledge = subject.observation.knowledge
    may_change = knowledge.choose_weights or knowledge.choose_structure
    return {**_facts(floor, mapping, channel), "model_may_change": may_change}


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


def _rounding(subject: Subject, mapping: GradientMap, flat: torch.Tensor) -> dict[str, float]:
    """The noise of rounding on each tensor.

    To the nearest: an error up to eps / 2 of an entry's size, all of them equally likely. Sizes differ much from layer
    to layer, less within one. A weight update is a difference of weights that were rounded at each step, so that it is
    their size that counts.
    """
    rounding = torch.finfo(subject.observation.dtype).eps / math.sqrt(12)
    sizes = {name: float(value.square().mean().sqrt()) for name, value in mapping.update(flat).items()}
    if mapping.steps is not None:
        weights, steps = mapping.victim.tensors.weights, len(mapping.steps.order)
        sizes = {
            name: max(size, float(weights[name].square().mean().mul(steps).sqrt())) for name, size in sizes.items()
        }
    return {name: rounding * (size or 1.0) for name, size in sizes.items()}


def _facts(floor: Floor, mapping: GradientMap, channel: Channel) -> dict[str, Any]:
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
