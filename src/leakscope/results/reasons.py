"""Say why a verdict is what it is, and what can be done about it, as facts; ``report`` writes the sentences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from leakscope.contracts.tables import in_words

#: What a reason is about: a leak of one of three kinds, or a doubt that stands in the way of a pass.
ReasonKind = Literal["reconstruction", "identification", "labels", "doubt"]


class Scenario(NamedTuple):
    """Pair a protocol with a defence, each by its repr; the defence is "none" where there is none."""

    protocol: str
    defense: str


class InScenario:
    protocol: str
    defense: str

    @property
    def scenario(self) -> Scenario:
        return Scenario(self.protocol, self.defense)


@dataclass(frozen=True)
class Remedy:
    """Say what can be done about a reason: the kind of action, its arguments, and the next best remedy.

    ``changes`` of the spec make an audit that tries it; None where it is for a person to do.
    """

    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)
    otherwise: Remedy | None = None
    changes: Mapping[str, Any] | None = field(default=None, hash=False)

    @property
    def alternatives(self) -> list[Remedy]:
        """Return this one and the others, the best first, each by itself."""
        own = dataclasses.replace(self, otherwise=None)
        return [own] if self.otherwise is None else [own, *self.otherwise.alternatives]

    def __str__(self) -> str:
        return in_words(self)


@dataclass(frozen=True, kw_only=True)
class Reason:
    """Give one reason of a verdict; what does not apply is None.

    ``value`` of ``measure`` is held against ``limit``; ``baseline`` is without information. ``count`` of ``total``
    jobs, attempts, updates or examples are concerned. ``names``: the flag, or the attacks, that it is about.
    ``knowing``: only of attacks that know the defence.

    >>> Reason(code="job-failed", count=2).kind, Reason(code="labels", value=0.9, limit=0.5).kind
    ('doubt', 'labels')
    """

    code: str
    scenario: Scenario | None = None
    example: int | None = None
    attack: str | None = None
    measure: str | None = None
    value: float | None = None
    limit: float | None = None
    baseline: float | None = None
    count: int | None = None
    total: int | None = None
    names: tuple[str, ...] = ()
    budget: str | None = None
    knowing: bool = False
    remedy: Remedy | None = None

    @property
    def kind(self) -> ReasonKind:
        return next((kind for kind in get_args(ReasonKind) if kind == self.code), "doubt")

    def as_dict(self) -> dict[str, Any]:
        facts = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        remedies = [] if self.remedy is None else self.remedy.alternatives
        return {
            "text": in_words(dataclasses.replace(self, scenario=None, remedy=None)),
            "kind": self.kind,
            **facts,
            "scenario": None if self.scenario is None else self.scenario._asdict(),
            "remedy": "" if self.remedy is None else str(self.remedy),
            "remedies": [
                {"kind": remedy.kind, "arguments": dict(remedy.arguments), "changes": remedy.changes}
                for remedy in remedies
            ],
        }

    def __str__(self) -> str:
        return in_words(self)


def because(code: str, *remedies: str | Remedy, **facts: Any) -> Reason:
    """Make a reason with its remedies, the best first, those without arguments by their kind; NaN is None.

    >>> reason = because("gap", "more-steps", "stronger-defence", value=12.0, limit=math.nan)
    >>> reason.limit is None, [remedy.kind for remedy in reason.remedy.alternatives]
    (True, ['more-steps', 'stronger-defence'])
    """
    unknown = {name: None for name, value in facts.items() if isinstance(value, float) and math.isnan(value)}
    remedy = chained([Remedy(one) if isinstance(one, str) else one for one in remedies])
    return Reason(code=code, remedy=remedy, **{**facts, **unknown})


def chained(remedies: Sequence[Remedy]) -> Remedy | None:
    """Return the first remedy with the others as its alternatives; None where there is none."""
    remedy: Remedy | None = None
    for one in reversed(remedies):
        remedy = dataclasses.replace(one, otherwise=remedy)
    return remedy
