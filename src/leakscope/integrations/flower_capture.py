"""From Flower's records to an observation: which array is which parameter, and what became of it.

``Capture`` says once what is true of every update of a federation: the model's structure, the shape and range of its
inputs, the clients' recipe, the defence. Client mod and strategy wrapper share it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from leakscope.contracts.captured import batchnorm_mode, with_weights
from leakscope.contracts.captured_state import CapturedState, plain_names, read_state
from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import refuse, whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import Box, ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import BatchNormMode, LocalTraining, Message, Observation, UpdateKind
from leakscope.contracts.running_statistics import RunningMovement, running_movement
from leakscope.contracts.task import Classification, Task

Sends = Literal["weights", "difference", "gradient"]
#: Keys under which clients tell how many examples they trained on, in Flower's own words, new and old.
NUM_EXAMPLES = ("num-examples", "num_examples")
ROUND = "server-round"


@dataclass(frozen=True, kw_only=True, eq=False)
class Capture:
    """What is true of every update of a federation, and where recordings go.

    ``model`` gives the structure; weights come from the messages. ``sends`` is what clients put into their reply: the
    new "weights", the "difference" new minus old, or a "gradient". ``training`` is the clients' recipe as far as the
    server knows it. ``channel`` is the defence between the client's update and what is seen at this place, where one
    acts: an attack that is not told of it is no test of it. ``batchnorm`` is the mode the clients train in, "train"
    unless told. ``arrays`` names the ArrayRecord of the weights where a message has several. ``every`` records every
    nth round.
    """

    folder: str | Path
    model: nn.Module = field(repr=False)
    input_shape: Sequence[int]
    num_classes: int
    value_range: ValueRange | None = None
    training: LocalTraining = field(default_factory=LocalTraining)
    channel: Channel | None = None
    knowledge: Knowledge | None = None
    task: Task = Classification()
    sends: Sends = "weights"
    batchnorm: BatchNormMode | None = None
    arrays: str | None = None
    every: int = 1

    def __post_init__(self) -> None:
        problems = whole(every=self.every, num_classes=self.num_classes)
        if self.sends not in ("weights", "difference", "gradient"):
            problems.append(f"sends: expected 'weights', 'difference' or 'gradient', got {self.sends!r}")
        if not isinstance(self.model, nn.Module):
            problems.append(f"model: expected an nn.Module, got {type(self.model).__name__}")
        refuse("not a valid capture", problems)

    @property
    def known(self) -> Knowledge:
        """The threat model: that of a server which knows the defence, where there is one."""
        if self.knowledge is not None:
            return self.knowledge
        return Knowledge.honest_server if self.channel is None else Knowledge.adaptive_server

    def records(self, number: int) -> bool:
        """Whether the update of this round, counted from 1, is recorded."""
        return (number - 1) % self.every == 0

    def observation(
        self, received: Mapping[str, Any], sent: Mapping[str, Any], num_examples: int | None
    ) -> tuple[Observation, tuple[str, ...]]:
        """The observation of one exchange, and what is to be noted about it."""
        weights = self.sends == "weights"
        # A client whose training diverged is recorded like any other; who attacks it is told.
        first, second = (in_order_or_by_name(arrays, self.model) for arrays in (received, sent))
        before, problems = read_state("received", first, self.model, finite=False)
        after, more = read_state("sent", second, self.model, trained_only=not weights, finite=False)
        refuse("the arrays do not fit the model that Capture was given", problems + more)
        sign = -1 if self.sends == "difference" else 1
        update = {
            name: (before.parameters[name] - after.parameters[name] if weights else sign * after.parameters[name])
            for name in self._trained
        }
        model = with_weights(self.model, before)
        movement = self._movement(model, before, after, num_examples) if weights else RunningMovement(None)
        # A defence alters buffers as it alters weights, and then they tell no batch.
        granted = self.channel is None and (self.knowledge is None or self.knowledge.batchnorm_statistics)
        statistics = movement.statistics if granted else None
        known = replace(self.known, batchnorm_statistics=True) if statistics else self.known
        kind: UpdateKind = "gradient" if self.sends == "gradient" else "weight_delta"
        parameters = dict(model.named_parameters())
        tensors = {name: value.to(parameters[name]) for name, value in update.items()}
        observation = Observation(
            model=model,
            messages=(Message(update=tensors, kind=kind, batchnorm_statistics=statistics),),
            inputs=Box(tuple(self.input_shape), self.value_range if known.normalisation else None),
            num_classes=self.num_classes,
            num_examples=num_examples if known.num_examples else None,
            knowledge=known,
            training=self.training.granted(known),
            channel=self.channel if known.defense else None,
            task=self.task,
            batchnorm=self.batchnorm or batchnorm_mode(model, movement),
        )
        return observation, (movement.note,) if movement.note and (granted or not movement.statistics) else ()

    def _movement(
        self, model: nn.Module, before: CapturedState, after: CapturedState, examples: int | None
    ) -> RunningMovement:
        """What the buffers of BatchNorm that travel with the weights tell of the client's batches."""
        epochs, size = self.training.epochs, self.training.batch_size
        batch = examples if examples is None or size is None else min(examples, size)
        steps = None if examples is None or epochs is None or not size else epochs * math.ceil(examples / size)
        return running_movement(model, before.buffers, after.buffers, tuple(self.input_shape), batch, steps)

    @property
    def _trained(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]


def in_order_or_by_name(arrays: Mapping[str, Any], model: nn.Module) -> Any:
    """Arrays by name where some of the names are the model's; else they are numbered, and their order tells.

    >>> in_order_or_by_name({"0": 1.0, "1": 2.0}, nn.Linear(2, 1)), in_order_or_by_name({"bias": 1.0}, nn.Linear(2, 1))
    ([1.0, 2.0], {'bias': 1.0})
    """
    named, _ = plain_names(arrays, model)
    return dict(arrays) if set(named) & set(model.state_dict()) else list(arrays.values())


def weights_in(content: Any, record: str | None, what: str) -> dict[str, Any]:
    """The arrays of the ArrayRecord of this name, or of the only one, by key, as numpy arrays."""
    records = content.array_records
    name = record if record is not None else next(iter(records), None)
    if name not in records or (record is None and len(records) != 1):
        held = ", ".join(records) or "none"
        wanted = "one ArrayRecord" if record is None else f"an ArrayRecord {record!r}"
        raise UserError(f"the message {what}: expected {wanted}, got {held}. Name the right one: Capture(arrays=...)")
    return {key: array.numpy() for key, array in records[name].items()}


def told_examples(content: Any) -> int | None:
    """The number of examples that a client's metrics tell; None where they do not."""
    for record in content.metric_records.values():
        for key in NUM_EXAMPLES:
            if key in record and not isinstance(record[key], list) and int(record[key]) > 0:
                return int(record[key])
    return None


def told_round(content: Any) -> int | None:
    """The round that a server's config tells; None where it does not."""
    for record in content.config_records.values():
        if isinstance(record.get(ROUND), int):
            return int(record[ROUND])
    return None


def channel_of_local_dp(mod: Any) -> Channel:
    """What Flower's ``LocalDpMod`` does to an update, for an attack that knows it: clipping, then Gaussian noise.

    >>> from types import SimpleNamespace
    >>> channel_of_local_dp(SimpleNamespace(clipping_norm=1.0, sensitivity=0.1, epsilon=2.0, delta=1e-5)).describe()
    'clipped to 1, noise 0.24224'
    """
    if mod.epsilon <= 0 or mod.delta <= 0:
        raise UserError(f"LocalDpMod: expected epsilon and delta above 0, got {mod.epsilon} and {mod.delta}")
    sigma = mod.sensitivity * math.sqrt(2 * math.log(1.25 / mod.delta)) / mod.epsilon
    return Channel(clip=float(mod.clipping_norm), noise=float(sigma))
