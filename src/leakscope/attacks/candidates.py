"""Candidates: inputs that some stage of an attack found, the one ranking among them, and their certificates.

A layer's equations may be met by inputs that are not the client's: one unit alone explains any gradient, and a layer
that is used twice, a mixture of examples or a defence change the update in ways that its own equations do not show. The
gradient of the solved inputs through the whole model is therefore replayed before anything is certified.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from leakscope.contracts.certificate import EXPLAINED, Certificate
from leakscope.contracts.observation import Observation
from leakscope.labels import recover_labels
from leakscope.matching import GradientMap
from leakscope.matching.determinacy import ACCURATE, free_directions
from leakscope.matching.priors import total_variation
from leakscope.matching.unexplained import unexplained

#: What solved inputs may leave of the whole update, each tensor relative to its size. Rounding leaves 1e-7 to 1e-5; an
#: update that is off by more says less than 80 dB of an input that one unit alone determines. A residual below this
#: also tells more than the whole update, in which one wrong mask outweighs all pixels.
REPLAYED = ACCURATE
#: A picture of least squares may be so many times as rough as another one before that counts against it: on a ViT that
#: was not trained they leave half of what a search leaves and are 3 dB behind it, sixteen times as rough.
ROUGHER = 3.0

Counts = Sequence[int | None]
#: What the stages of an attack share.
Case = TypeVar("Case")


@dataclass(frozen=True, eq=False, kw_only=True)
class Candidate:
    """Inputs in the model's space, the ``method`` that found them, and what speaks for them.

    ``distance``: what they leave of the whole update; ``residual``: of the equations that were solved. ``surprise``:
    minus the logarithm of their probability, where known noise gives them one. ``fair``: what the method leaves of
    noise, relative to what the true inputs leave; below one for least squares. Of ``pictures`` roughness counts.
    ``settles``: no search comes nearer, certified or not.
    """

    inputs: Tensor
    method: str
    distance: float
    residual: float = math.inf
    surprise: float = 0.0
    fair: float = 1.0
    pictures: bool = True
    settles: bool = False
    certificates: tuple[Certificate, ...] = ()
    labels: Tensor | None = None
    score: float | None = None
    curve: tuple[float, ...] = ()
    flags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    info: Mapping[str, Any] = field(default_factory=dict)

    @property
    def proved(self) -> bool:
        """Return whether there is a certificate of every example, and each holds."""
        return bool(self.certificates) and all(one.holds for one in self.certificates)

    def better_than(self, other: Candidate | None) -> bool:
        """Prefer the more probable, the smaller residual where it is small, then what leaves less of the update.

        Least squares must leave less than their fit of noise explains, and where they are far rougher still less.
        """
        return other is None or self._rank(other) < other._rank(self)

    def _rank(self, other: Candidate) -> tuple[float, bool, float]:
        if self.residual < REPLAYED:
            return self.surprise, False, self.residual
        distance = self.distance if math.isfinite(self.distance) else math.inf
        if self.fair < 1:
            handicap = max(1.0, rougher(self.inputs, other.inputs) / ROUGHER) if self.pictures else 1.0
            distance = distance / self.fair * handicap if self.fair else math.inf
        return self.surprise, True, distance


class Stage(ABC, Generic[Case]):
    """One step of an attack on a case: it may add to what is known there, and proposes candidates."""

    #: Whether it belongs to the rounds that are repeated until nothing is left to gain.
    repeats: ClassVar[bool] = False

    @abstractmethod
    def applies(self, case: Case) -> bool:
        """Return whether there is anything to do."""

    @abstractmethod
    def propose(self, case: Case) -> Iterator[Candidate]:
        """Find candidates; each is compared with the best before the next is looked for."""


def rougher(pictures: Tensor, others: Tensor) -> float:
    """Return how many times as much neighbours differ as in other pictures.

    >>> stripes = torch.tensor([[[[0.0, 1.0], [0.0, 1.0]]]])
    >>> rougher(stripes, stripes / 4)
    4.0
    """
    own, other = (float(total_variation(one, "l1mean_avg")) for one in (pictures, others))
    return own / other if other else math.inf


def certify(
    observation: Observation,
    inputs: Tensor,
    labels: Tensor | None,
    share: float,
    free: Counts | Callable[[], Counts] | None,
    method: str,
    tolerance: float = EXPLAINED,
    *,
    replay: bool = True,
) -> tuple[Certificate, ...]:
    """Certify each of the ``inputs``, which leave this ``share`` of the equations that were solved.

    There are none where the equations are not explained, or, with ``replay``, where the inputs do not give the whole
    update. ``free``: the directions left to each example, or how to count them; None for those of the whole update.
    """
    explained = share <= tolerance and len(inputs) == observation.num_examples
    if not explained or (replay and not gives_update(observation, inputs, labels)):
        return ()
    if free is None:
        targets = _targets(observation, labels)
        assert targets is not None  # or the update would not have been replayed
        wide = observation.to(dtype=torch.float64)
        mapping = GradientMap.of(wide, targets.to(wide.device))
        # 200 products suffice: the equations behind a first dense layer are well conditioned.
        free = free_directions(mapping, mapping.flat(inputs.detach().to(wide.device).double()), limit=200)
    counts = free() if callable(free) else free
    return tuple(Certificate.of_share(share, count, method, tolerance) for count in counts)


def gives_update(observation: Observation, inputs: Tensor, labels: Tensor | None) -> bool:
    """Return whether the update of these inputs, computed in float64, is the observed one but for rounding."""
    targets = _targets(observation, labels)
    if targets is None:
        return False
    try:
        wide = observation.to(dtype=torch.float64)
        left = unexplained(wide, inputs.detach().to(wide.device).double(), targets.to(wide.device))
    except RuntimeError:  # a model that insists on float32
        return False
    return left <= REPLAYED


def _targets(observation: Observation, labels: Tensor | None) -> Tensor | None:
    if observation.labels is not None or labels is not None:
        return labels if observation.labels is None else observation.labels
    try:
        return recover_labels(observation).labels
    except ValueError:
        return None
