"""Controls: attempts whose outcome is known beforehand, so that they tell what an attempt's outcome is worth.

Blind controls have nothing to learn from: what they still recover came from the prior, and an attempt counts by its
lift over the best of them. Positive controls must succeed: an attack that misses what lies open proves no safety.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol as Interface

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Message, Observation, gathered
from leakscope.contracts.protocol import Protocol
from leakscope.results.records import BLIND, HELD_OUT, POSITIVE, ControlKind

#: A held-out image this near to the private one, in mean squared error, is the same record and no other's (40 dB).
SAME_RECORD = 1e-4
#: Positive controls are taken of so many clients: one may be difficult by chance.
POSITIVE_CLIENTS = 2


class Observe(Interface):
    """Makes the undefended update of a client that holds (x, y)."""

    def __call__(
        self, x: Tensor, y: Tensor, *, protocol: Protocol | None = None, knowledge: Knowledge | None = None
    ) -> Observation: ...


@dataclass(frozen=True, eq=False)
class Case:
    """A client as the truth's side knows it, of which a control is made.

    ``x`` and ``y`` are its examples, ``originals`` the same in unit space; ``held_out`` are other examples of the data
    in unit space. ``others(labels)`` are inputs of as many other examples, of the same classes where there are such.
    """

    protocol: Protocol
    knowledge: Knowledge
    x: Tensor
    y: Tensor
    originals: Tensor
    held_out: Tensor
    observation: Callable[[], Observation]
    observe: Observe
    others: Callable[[Tensor], Tensor]
    generator: torch.Generator


@dataclass(frozen=True)
class Control:
    """A kind of control: what the attack sees in place of the update, or the guess that stands in place of an attack.

    ``clients`` and ``seeds`` are how many of each it is taken of; None is all.
    """

    name: str
    summary: str
    kind: ControlKind
    observe: Callable[[Case], Observation] | None = None
    guess: Callable[[Case], Tensor] | None = None
    clients: int | None = None
    seeds: int | None = 1
    #: Whether it says nothing new where the audit has undefended settings.
    stands_for_undefended: bool = False


def noise_of_equal_norm(observation: Observation, generator: torch.Generator) -> Observation:
    """The observation with Gaussian noise of the same norm, tensor by tensor, in place of the update.

    All else the adversary knows stays, so what an attack still recovers did not come from the update.
    """
    return observation.with_facts(messages=gathered(_noise_messages(observation, generator)))


def noise_as_update(case: Case) -> Observation:
    """The client's observation with noise in place of its update."""
    return noise_of_equal_norm(case.observation(), case.generator)


def _noise_messages(observation: Observation, generator: torch.Generator) -> Iterator[Message]:
    for message in observation.messages:
        update = {}
        for name, value in message.update.items():
            # Drawn on the CPU in double, so that the noise is the same for every device and precision.
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float64)
            norm = float(torch.linalg.vector_norm(noise))
            scale = float(torch.linalg.vector_norm(value.double())) / norm if norm else 0.0
            update[name] = (noise * scale).to(value)
        yield dataclasses.replace(message, update=update)


def other_examples(case: Case) -> Observation:
    """The update of another client whose examples have the same labels.

    What an attack still recovers are the looks of a class, or of all data, and nothing of this client.
    """
    return case.observe(case.others(case.y), case.y)


def mean_of_held_out(case: Case) -> Tensor:
    """The best guess of somebody who knows the kind of data and saw nothing."""
    return _held_out(case).mean(0, keepdim=True).expand_as(case.originals)


def nearest_held_out(case: Case) -> Tensor:
    """For each example the nearest of the others: a picture no nearer than that may be anybody's."""
    pool = _held_out(case)
    distances = torch.cdist(case.originals.flatten(1), pool.flatten(1)).square() / case.originals[0].numel()
    distances[distances < SAME_RECORD] = torch.inf
    if not bool(torch.isfinite(distances).any(1).all()):
        raise NotApplicable("every held-out image is a copy of the private one")
    return pool[distances.argmin(1)]


def undefended(case: Case) -> Observation:
    """The update without a defence: an attack that fails here says nothing about a defence."""
    return case.observation()


def planted(case: Case) -> Observation:
    """The easiest update of the same model: no defence, labels and visiting order known.

    It is the gradient of one example, or a weight update of as many examples, batches and local steps as are audited.
    """
    knowledge = dataclasses.replace(case.knowledge, labels="yes", batch_order=True)
    count = case.protocol.easiest_examples(len(case.x))
    return case.observe(case.x[:count], case.y[:count], protocol=case.protocol.easiest(), knowledge=knowledge)


def _held_out(case: Case) -> Tensor:
    if not len(case.held_out):
        raise NotApplicable("the data has no other examples")
    return case.held_out


_ALL = (
    Control(*("noise", "Gaussian noise of the update's norm, per tensor", BLIND), observe=noise_as_update, seeds=None),
    Control("other-examples", "the update of other examples with the same labels", BLIND, observe=other_examples),
    Control("prior-mean", "the mean of held-out examples; no attack", HELD_OUT, guess=mean_of_held_out),
    Control("nearest-neighbour", "the nearest held-out example; no attack", HELD_OUT, guess=nearest_held_out),
    Control(
        *("undefended", "the update without a defence, where no setting is undefended", POSITIVE),
        observe=undefended,
        clients=POSITIVE_CLIENTS,
        stands_for_undefended=True,
    ),
    Control(
        *("planted", "no defence, labels and batch order known; one example, or the local steps audited", POSITIVE),
        observe=planted,
        clients=POSITIVE_CLIENTS,
    ),
)
#: Kinds of controls; a further one is a function and a line here.
CONTROLS: Mapping[str, Control] = MappingProxyType({control.name: control for control in _ALL})
