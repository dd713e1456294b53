"""From Flower's records to an observation: which array is which parameter, and what became of it.

``Capture`` says once what is true of every update of a federation: the model's structure, the shape and range of its
inputs, the clients' recipe, the defence. Client mod and strategy wrapper share it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import refuse, whole
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import BatchNormMode, LocalTraining, Observation
from leakscope.contracts.protocol import BATCHNORM
from leakscope.contracts.task import Classification, Task

Sends = Literal["weights", "difference", "gradient"]
#: Keys under which clients tell how many examples they trained on, in Flower's own words, new and old.
NUM_EXAMPLES = ("num-examples", "num_examples")
ROUND = "server-round"
BUFFERS_SENT = "buffers ({}) travel with the weights; statistics of the client's data in them were not attacked"


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
        before = aligned(received, self.model, "received")
        if self.sends == "weights":
            after = aligned(sent, self.model, "sent")
            update = {n: before[n] - after[n] for n in self._trained}
        else:
            sign = -1 if self.sends == "difference" else 1
            update = {n: sign * v for n, v in aligned(sent, self.model, "sent").items() if n in self._trained}
        model = copy.deepcopy(self.model)
        model.load_state_dict(before, strict=False)
        mixes = any(isinstance(module, BATCHNORM) for module in model.modules())
        buffers = [name for name, _ in model.named_buffers() if name in before]
        notes = (BUFFERS_SENT.format(", ".join(buffers)),) if buffers and self.sends == "weights" else ()
        known = self.known
        observation = Observation.from_update(
            model,
            update,
            input_shape=tuple(self.input_shape),
            num_classes=self.num_classes,
            num_examples=num_examples if known.num_examples else None,
            kind="gradient" if self.sends == "gradient" else "weight_delta",
            knowledge=known,
            value_range=self.value_range if known.normalisation else None,
            training=self.training.granted(known),
            channel=self.channel if known.defense else None,
            task=self.task,
            batchnorm=self.batchnorm or ("train" if mixes else "eval"),
        )
        return observation, notes

    @property
    def _trained(self) -> list[str]:
        return [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]


def aligned(arrays: Mapping[str, Any], model: nn.Module, what: str) -> dict[str, Tensor]:
    """Arrays by the model's own names: by name where the names are those of its state dict, else by their order.

    By order means all of the state dict, or the parameters alone, each in the model's order and shape. A missing or
    extra name, or another shape, are told together.

    >>> import numpy as np
    >>> net = nn.Linear(2, 1)
    >>> [name for name in aligned({"0": np.zeros((1, 2)), "1": np.zeros(1)}, net, "sent")]
    ['weight', 'bias']
    """
    state = model.state_dict()
    parameters = {name for name, _ in model.named_parameters()}
    if set(arrays) <= set(state) and parameters <= set(arrays):
        named = {name: arrays[name] for name in state if name in arrays}
    elif set(arrays) & set(state) or len(arrays) not in (len(state), len(parameters)):
        missing, extra = sorted(parameters - set(arrays)), sorted(set(arrays) - set(state))
        raise ValueError(
            f"the arrays {what} do not fit the model: missing {', '.join(missing) or 'none'}; extra "
            f"{', '.join(extra) or 'none'}. Give Capture the model that the federation trains."
        )
    else:
        names = list(state) if len(arrays) == len(state) else [name for name in state if name in parameters]
        named = dict(zip(names, arrays.values(), strict=True))
    tensors = {name: torch.tensor(value).to(state[name].dtype) for name, value in named.items()}
    problems = [
        f"{name}: expected shape {tuple(state[name].shape)}, got {tuple(value.shape)}"
        for name, value in tensors.items()
        if value.shape != state[name].shape
    ]
    refuse(f"the arrays {what} do not fit the model", problems)
    return tensors


def weights_in(content: Any, record: str | None, what: str) -> dict[str, Any]:
    """The arrays of the ArrayRecord of this name, or of the only one, by key, as numpy arrays."""
    records = content.array_records
    name = record if record is not None else next(iter(records), None)
    if name not in records or (record is None and len(records) != 1):
        held = ", ".join(records) or "none"
        wanted = "one ArrayRecord" if record is None else f"an ArrayRecord {record!r}"
        raise ValueError(f"the message {what}: expected {wanted}, got {held}. Name the right one: Capture(arrays=...)")
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
        raise ValueError(f"LocalDpMod: expected epsilon and delta above 0, got {mod.epsilon} and {mod.delta}")
    sigma = mod.sensitivity * math.sqrt(2 * math.log(1.25 / mod.delta)) / mod.epsilon
    return Channel(clip=float(mod.clipping_norm), noise=float(sigma))
