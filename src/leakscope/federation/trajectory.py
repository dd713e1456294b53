"""The way a client's training took. The audit's own knowledge: it never enters an Observation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from leakscope.contracts.checks import refuse
from leakscope.contracts.errors import UserError


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """Weights before some of the local steps and after the last one, and how long each step's gradient was.

    ``weights[n]`` are those before step ``kept[n]``, the first step being 0; ``after`` are those at the end, so that
    ``weights[0] - after`` is the update before a defence of the message. ``norms`` has one norm for every step: of
    the mini-batch gradient that the client stepped along, after the defence.
    """

    kept: tuple[int, ...]
    weights: tuple[Mapping[str, Tensor], ...] = field(repr=False)
    after: Mapping[str, Tensor] = field(repr=False)
    norms: tuple[float, ...] = field(repr=False)

    def __post_init__(self) -> None:
        problems = []
        if len(self.kept) != len(self.weights):
            problems.append(f"weights: expected one set for each of {len(self.kept)} steps, got {len(self.weights)}")
        if not self.kept or self.kept[0] != 0 or self.kept[-1] != len(self.norms) - 1:
            problems.append(f"kept: expected steps from 0 to the last of {len(self.norms)}, got {self.kept}")
        refuse("Trajectory", problems)

    @property
    def steps(self) -> int:
        """How many local steps there were."""
        return len(self.norms)


def chosen_steps(total: int, limit: int) -> tuple[int, ...]:
    """At most ``limit`` of ``total`` steps, evenly spread, with the first and the last.

    >>> chosen_steps(3, 50), chosen_steps(100, 4)
    ((0, 1, 2), (0, 33, 66, 99))
    """
    if total < 1 or limit < 2:
        raise UserError(f"expected at least 1 step and a limit of at least 2, got {total} and {limit}")
    if total <= limit:
        return tuple(range(total))
    return tuple(round(place * (total - 1) / (limit - 1)) for place in range(limit))
