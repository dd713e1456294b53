"""Turn Flower's records into an observation; nothing of Flower is imported here."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import nn

from leakscope.capture.observe import CaptureFacts, observe_captured
from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import refuse, whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import BatchNormMode, LocalTraining, Observation
from leakscope.contracts.task import Classification, Task

Sends = Literal["weights", "difference", "gradient"]
#: Keys under which clients tell how many examples they trained on, in Flower's own words, new and old.
NUM_EXAMPLES = ("num-examples", "num_examples")
ROUND = "server-round"


@dataclass(frozen=True, kw_only=True, eq=False)
class Capture:
    """Say what is true of every update of a federation, and where recordings go.

    ``model`` gives the structure; weights come from the messages. ``sends`` is what clients put into their reply: the
    new "weights", the "difference" new minus old, or a "gradient". ``training`` is the clients' recipe as far as the
    server knows it. ``channel`` is the defence between the client's update and what is seen here: an attack that is not
    told of it is no test of it. ``batchnorm`` is the mode the clients train in, "train" unless told. ``arrays`` names
    the ArrayRecord of the weights where a message has several. ``every`` records every nth round.
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
        """Return the threat model: that of a server which knows the defence, where there is one."""
        if self.knowledge is not None:
            return self.knowledge
        return Knowledge.honest_server if self.channel is None else Knowledge.adaptive_server

    def records(self, number: int) -> bool:
        return (number - 1) % self.every == 0

    def observation(
        self, received: Mapping[str, Any], sent: Mapping[str, Any], num_examples: int | None
    ) -> Observation:
        """Observe one exchange; a client whose training diverged is recorded like any other."""
        # BatchNorm buffers travel with the weights, so that whoever sees these knows what they tell.
        known = self.knowledge or replace(self.known, batchnorm_statistics=True)
        facts = CaptureFacts(
            input_shape=tuple(self.input_shape),
            num_classes=self.num_classes,
            num_examples=num_examples,
            **vars(self.training),
            value_range=self.value_range,
            batchnorm=self.batchnorm,
            task=self.task,
            channel=self.channel,
            knowledge=known,
            running=True,
            made_by="leakscope.capture.flower",
        )
        return observe_captured(sent, self.sends, received, self.model, facts)


def weights_in(content: Any, record: str | None, what: str) -> dict[str, Any]:
    """Return the arrays of the ArrayRecord of this name, or of the only one, by key."""
    records = content.array_records
    name = record if record is not None else next(iter(records), None)
    if name not in records or (record is None and len(records) != 1):
        held = ", ".join(records) or "none"
        wanted = "one ArrayRecord" if record is None else f"an ArrayRecord {record!r}"
        raise UserError(f"the message {what}: expected {wanted}, got {held}. Name the right one: Capture(arrays=...)")
    return {key: array.numpy() for key, array in records[name].items()}


def told_examples(content: Any) -> int | None:
    for record in content.metric_records.values():
        for key in NUM_EXAMPLES:
            if key in record and not isinstance(record[key], list) and int(record[key]) > 0:
                return int(record[key])
    return None


def told_round(content: Any) -> int | None:
    for record in content.config_records.values():
        if isinstance(record.get(ROUND), int):
            return int(record[ROUND])
    return None


def channel_of_local_dp(mod: Any) -> Channel:
    """Describe what Flower's ``LocalDpMod`` does to an update, for an attack that knows it: clipping, then Gaussian
    noise.

    >>> from types import SimpleNamespace
    >>> channel_of_local_dp(SimpleNamespace(clipping_norm=1.0, sensitivity=0.1, epsilon=2.0, delta=1e-5)).describe()
    'clipped to 1, noise 0.24224'
    """
    if mod.epsilon <= 0 or mod.delta <= 0:
        raise UserError(f"LocalDpMod: expected epsilon and delta above 0, got {mod.epsilon} and {mod.delta}")
    sigma = mod.sensitivity * math.sqrt(2 * math.log(1.25 / mod.delta)) / mod.epsilon
    return Channel(clip=float(mod.clipping_norm), noise=float(sigma))
