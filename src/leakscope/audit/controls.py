"""Controls: attempts whose outcome is known beforehand.

Blind controls have nothing to learn from: what they still recover came from the prior, and an attempt counts by its
lift over the best of them. Positive controls must succeed, or the attack is too weak to judge a defence by.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

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


@dataclass(frozen=True, eq=False)
class Case:
    """A client as the truth's side knows it, of which a control is made."""

    protocol: Protocol
    knowledge: Knowledge
    x: Tensor
    y: Tensor
    originals: Tensor  # x in unit space
    held_out: Tensor  # other examples of the data, in unit space
    observation: Callable[[], Observation]
    observe: Callable[..., Observation]  # of a client that holds (x, y), undefended
    others: Callable[[Tensor], Tensor]  # inputs of other examples with these labels, as far as there are such
    generator: torch.Generator


@dataclass(frozen=True)
class Control:
    """A kind of control: what the attack sees in place of the update, or a guess in place of an attack."""

    name: str
    summary: str
    kind: ControlKind
    observe: Callable[[Case], Observation] | None = None
    guess: Callable[[Case], Tensor] | None = None
    clients: int | None = None  # how many it is taken of; None: all
    seeds: int | None = 1
    stands_for_undefended: bool = False  # says nothing new where the audit has undefended settings


def noise_of_equal_norm(observation: Observation, generator: torch.Generator) -> Observation:
    """Replace the update by Gaussian noise of the same norm, tensor by tensor; all else that is known stays."""
    return observation.with_facts(messages=gathered(_noise_messages(observation, generator)))


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
    """Make the update of other examples with the same labels: what is still recovered are the looks of a class."""
    return case.observe((case.others(case.y), case.y))


def mean_of_held_out(case: Case) -> Tensor:
    """Return the best guess of somebody who knows the kind of data and saw nothing."""
    return _held_out(case).mean(0, keepdim=True).expand_as(case.originals)


def nearest_held_out(case: Case) -> Tensor:
    """Return the nearest held-out example of each: an image no nearer than that may be anybody's."""
    pool = _held_out(case)
    distances = torch.cdist(case.originals.flatten(1), pool.flatten(1)).square() / case.originals[0].numel()
    distances[distances < SAME_RECORD] = torch.inf
    if not bool(torch.isfinite(distances).any(1).all()):
        raise NotApplicable("every held-out image is a copy of the private one")
    return pool[distances.argmin(1)]


def planted(case: Case) -> Observation:
    """Make the easiest update of the same model: no defence, labels and visiting order known."""
    knowledge = dataclasses.replace(case.knowledge, labels="yes", batch_order=True)
    count = case.protocol.easiest_examples(len(case.x))
    examples = case.x[:count], case.y[:count]
    return case.observe(examples, protocol=case.protocol.easiest(), knowledge=knowledge)


def _held_out(case: Case) -> Tensor:
    if not len(case.held_out):
        raise NotApplicable("the data has no other examples")
    return case.held_out


_ALL = (
    Control(
        *("noise", "Gaussian noise of the update's norm, per tensor", BLIND),
        observe=lambda case: noise_of_equal_norm(case.observation(), case.generator),
        seeds=None,
    ),
    Control("other-examples", "the update of other examples with the same labels", BLIND, observe=other_examples),
    Control("prior-mean", "the mean of held-out examples; no attack", HELD_OUT, guess=mean_of_held_out),
    Control("nearest-neighbour", "the nearest held-out example; no attack", HELD_OUT, guess=nearest_held_out),
    Control(
        *("undefended", "the update without a defence, where no setting is undefended", POSITIVE),
        observe=lambda case: case.observation(),
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
