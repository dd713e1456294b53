"""What attacks that know of MixUp do with it (:mod:`leakscope.equations.mixtures`).

The gradient of the head gives the soft label of every mixture. A solver's mixtures are taken apart as they are; a
search looks for the parts themselves, so that its prior is one of pictures and not of their sums.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.certificate import Certificate
from leakscope.contracts.channel import Channel
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting
from leakscope.equations.embedding import recover_mixtures
from leakscope.equations.mixtures import MOST_GROWTH, Shares, possible_shares, take_apart

#: The error that mixtures without a certificate are taken to have, in units of the range.
SEARCHED = 0.1
#: An attack on an observation.
Run = Callable[[Observation], Reconstruction]


@dataclass(frozen=True, kw_only=True)
class KnownShares(Channel):
    """The channel of a client whose mixtures are known: ``shares``, one row a mixture, one column an example."""

    shares: tuple[tuple[float, ...], ...] = setting((), "The share of each example in each mixture.")

    def mix(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        matrix = x.new_tensor(self.shares)
        return torch.tensordot(matrix, x, dims=1), matrix.to(targets) @ targets


@dataclass(frozen=True, eq=False)
class Mixing:
    """The update as one of examples that are mixtures, their soft labels known, and how they may be made of parts."""

    observation: Observation
    ways: tuple[Shares, ...]
    notes: tuple[str, ...]


def is_mixed(observation: Observation) -> bool:
    channel = observation.channel
    return channel is not None and channel.mixed > 1 and (observation.num_examples or 1) > 1


def read_mixing(observation: Observation, generator: torch.Generator) -> Mixing:
    """Read the mixtures off the head; without ways where that fails, and a note says why."""
    assert observation.channel is not None
    bare = observation.with_facts(channel=dataclasses.replace(observation.channel, mixed=1))
    try:
        head = recover_mixtures(observation, generator)
    except NotApplicable as error:
        return Mixing(bare, (), (f"the shares of the mixtures are not known: {error}",))
    assert head.labels is not None
    like = next(iter(observation.message.update.values()))
    known = dataclasses.replace(observation.knowledge, labels="yes")
    seen = bare.with_facts(knowledge=known, labels=head.labels.to(like), label_counts=None)
    try:
        return Mixing(seen, tuple(possible_shares(head.labels, observation.channel.mixed)), head.notes)
    except NotApplicable as error:
        return Mixing(seen, (), (*head.notes, str(error)))


def search_parts(observation: Observation, generator: torch.Generator, search: Run) -> Reconstruction:
    """Search for the parts themselves; for the mixtures, taken apart, where several divisions are open."""
    mixing = read_mixing(observation, generator)
    channel = mixing.observation.channel
    assert channel is not None
    if len(mixing.ways) != 1 or channel.clips_examples:
        return _apart(mixing, search(mixing.observation), SEARCHED)
    way = mixing.ways[0]
    shares = tuple(map(tuple, way.matrix.tolist()))
    labels = torch.nn.functional.one_hot(way.labels, observation.num_classes)
    like = next(iter(observation.message.update.values()))
    facts = {field.name: getattr(channel, field.name) for field in dataclasses.fields(Channel)}
    seen = dataclasses.replace(mixing.observation, channel=KnownShares(**facts, shares=shares), labels=labels.to(like))
    result = search(seen)
    note = "the parts of the mixtures were searched, their shares known from the head"
    return dataclasses.replace(
        result,
        labels=way.labels.to(observation.device),
        notes=(*result.notes, *mixing.notes, note),
        info={**result.info, "labels": "head"},
        defence_undone=way.certain and way.growth <= MOST_GROWTH,
    )


def solve_parts(observation: Observation, generator: torch.Generator, solve: Run) -> Reconstruction:
    """Solve for the mixtures and take them apart; the residual tells how near they are."""
    mixing = read_mixing(observation, generator)
    result = solve(mixing.observation)
    return _apart(mixing, result, SEARCHED if result.residual is None else min(result.residual, SEARCHED))


def _apart(mixing: Mixing, result: Reconstruction, error: float) -> Reconstruction:
    space, notes = mixing.observation.inputs, (*result.notes, *mixing.notes)
    if not mixing.ways:
        return dataclasses.replace(result, notes=(*notes, "what was found are mixtures"), certificates=())
    try:
        parts = take_apart(space.to_unit(result.inputs), mixing.ways, error=error, bounded=space.bounded)
    except NotApplicable as refusal:
        why = f"what was found are mixtures: {refusal}"
        return dataclasses.replace(result, notes=(*notes, why), certificates=())
    growth = parts.shares.growth
    note = f"the mixtures were taken apart; their errors grow by up to {growth:.1f}"
    if not parts.forced:
        note += f", in the division of {len(mixing.ways)} that looks most like pictures"
    return dataclasses.replace(
        result,
        inputs=space.from_unit(parts.pictures.to(result.inputs)),
        labels=parts.shares.labels.to(result.inputs.device),
        notes=(*notes, note),
        info={**result.info, "labels": "head"},
        # Mixtures that are not certified were damped on their way back: others that explain the update may tell more.
        defence_undone=parts.forced and error < SEARCHED,
        certificates=_of_parts(result.certificates, growth, len(parts.pictures)) if parts.forced else (),
    )


def _of_parts(mixtures: tuple[Certificate | None, ...], growth: float, count: int) -> tuple[Certificate | None, ...]:
    """Certify the parts: each is a combination of all mixtures, whose errors have grown."""
    proofs = [one for one in mixtures if one is not None]
    if not proofs or len(proofs) < len(mixtures):
        return ()
    counts = [math.inf if one.free_directions is None else one.free_directions for one in proofs]
    free = None if math.inf in counts else int(max(counts))
    worst = max(proofs, key=lambda one: one.residual)
    return (dataclasses.replace(worst, residual=growth * worst.residual, free_directions=free),) * count
