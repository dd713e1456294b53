"""The methods of CAFE, one class each: how rounds become data (see cafe.py)."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from leakscope.attacks.cafe_data import Data, RoundSearch, invert
from leakscope.attacks.cafe_rounds import Rounds, RunningSteps, settle, solve, unexplained_by
from leakscope.contracts.attack import Progress

if TYPE_CHECKING:
    from leakscope.attacks.cafe import CAFE


@dataclass(frozen=True, eq=False)
class Evidence:
    """What steps I and II say of their own result.

    ``determined`` (workers, samples): whose representation follows from the rounds. ``unexplained`` is the share of
    the gradients that the result does not explain, ``least_unexplained`` that of the best solution there is;
    ``expected_error`` that of the representations, relative to them, where it is known.
    """

    determined: Tensor
    unexplained: float
    least_unexplained: float
    expected_error: float | None = None


@dataclass(frozen=True, eq=False)
class Method(ABC):
    """One way from rounds to data. ``targets`` are the labels, None where they are not known."""

    #: Whether it simulates gradients, for which it needs labels and the weights of every round.
    simulates: ClassVar[bool] = True

    settings: CAFE
    rounds: Rounds
    targets: Tensor | None

    @abstractmethod
    def run(self, generator: torch.Generator, progress: Progress | None) -> tuple[Data, Evidence | None]:
        """The data, and evidence where there were steps I and II."""

    def _search(self, generator: torch.Generator) -> RoundSearch:
        return RoundSearch(self.settings, self.rounds, self.targets, generator)

    def _tables(self, generator: torch.Generator) -> list[RunningSteps]:
        rounds = self.rounds
        return [RunningSteps.start(self.settings, rounds.samples, layer, generator) for layer in rounds.layers]

    def _evidence(self, tables: list[RunningSteps]) -> Evidence:
        # What can be determined is a matter of the rounds, not of how far the loop came.
        best = solve(self.rounds)
        return Evidence(best.determined, unexplained_by(self.rounds, tables), best.unexplained)


class Direct(Method):
    """Steps I and II by linear least squares, then each sample by itself from its representations."""

    simulates = False

    def run(self, generator: torch.Generator, progress: Progress | None) -> tuple[Data, Evidence]:
        tables = solve(self.rounds)
        settings = self._trusting(tables.error)
        data = invert(settings, self.rounds, tables.inputs, tables.determined, generator, progress)
        return data, Evidence(tables.determined, tables.unexplained, tables.unexplained, tables.error)

    def _trusting(self, error: float) -> CAFE:
        """Settings for representations with this relative error: the larger it is, the more the prior counts."""
        error = min(error, 1.0)
        representation = self.settings.representation * (1 - error**2)
        return dataclasses.replace(self.settings, representation=representation, fade=max(self.settings.fade, error))


class Nested(Method):
    """Algorithm 3: step I over many rounds, then step II, then step III."""

    def run(self, generator: torch.Generator, progress: Progress | None) -> tuple[Data, Evidence]:
        tables = self._tables(generator)
        settle(self.rounds, tables, self.settings.first_iterations)
        data = self._search(generator).run(tables, progress)
        return data, self._evidence(tables)


class SingleLoop(Method):
    """Algorithm 4: each round moves all three, so that the model may train meanwhile."""

    def run(self, generator: torch.Generator, progress: Progress | None) -> tuple[Data, Evidence]:
        tables = self._tables(generator)
        data = self._search(generator).run(tables, progress, move_tables=True)
        return data, self._evidence(tables)


class Gradients(Method):
    """Plain gradient matching on the same rounds, without steps I and II: the comparison in the paper."""

    def run(self, generator: torch.Generator, progress: Progress | None) -> tuple[Data, None]:
        return self._search(generator).run((), progress), None


METHODS: Mapping[str, type[Method]] = MappingProxyType(
    {"direct": Direct, "nested": Nested, "single-loop": SingleLoop, "gradients": Gradients}
)
