"""Findings: what is true of a setting or of one client of it, whatever attack is run.

A protocol names the findings that make sense for it; each is planned once, runs once, has its own row and progress, and
can be switched off. The truth's side: computed at the private inputs, for the report and never for an attack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from leakscope.contracts.defense import Defense
from leakscope.contracts.observation import Observation
from leakscope.contracts.protocol import Protocol
from leakscope.contracts.task import Task


@dataclass(frozen=True, eq=False)
class Subject:
    """What a finding is about: one client, what it holds, and what it sent.

    ``draws()`` are the client's draws from the beginning, for what has to be repeated.
    """

    protocol: Protocol
    defense: Defense | None
    task: Task
    observation: Observation
    x: Tensor
    y: Tensor
    draws: Callable[[], torch.Generator]


@dataclass(frozen=True)
class Finding:
    """A kind of finding: taken of the first client of each setting, of every client, or of a training of its own.

    One of a training is made once for each protocol, defence and seed of the section ``utility``, and is about no
    client (``audit/utility.py``): there is nothing to ``tell`` of a subject.
    """

    name: str
    summary: str
    per: Literal["setting", "client", "training"]
    tell: Callable[[Subject], Mapping[str, Any]] | None = None


def _floor(subject: Subject) -> Mapping[str, Any]:
    from leakscope.audit.floor import describe_floor

    return describe_floor(subject)


def _trajectory(subject: Subject) -> Mapping[str, Any]:
    from leakscope.audit.trajectory import describe_update

    return describe_update(subject)


def _rounds(subject: Subject) -> Mapping[str, Any]:
    from leakscope.audit.rounds import describe_rounds

    return describe_rounds(subject)


def _cost(subject: Subject) -> Mapping[str, Any]:
    from leakscope.audit.rounds import describe_cost

    return describe_cost(subject)


def _embedding(subject: Subject) -> Mapping[str, Any]:
    from leakscope.audit.embedding import describe_embedding

    return describe_embedding(subject)


#: Kinds of findings; a further one is a function and a line here, and a protocol that names it.
FINDINGS: Mapping[str, Finding] = MappingProxyType(
    {
        finding.name: finding
        for finding in (
            Finding("floor", "the least error that theory allows behind an update", "setting", _floor),
            Finding("trajectory", "how nearly the update of many local steps is one gradient", "client", _trajectory),
            Finding("rounds", "which samples announced batches determine", "setting", _rounds),
            Finding("cost", "how the training goes under the defence", "setting", _cost),
            Finding("utility", "how well the model learns under the defence", "training"),
            Finding("embedding", "the features that the last layers give away by themselves", "setting", _embedding),
        )
    }
)
