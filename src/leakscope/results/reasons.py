"""Why a verdict is what it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AGAIN = "Run the same command again: what is done stays"
MORE_TIME = "Raise --budget, or run the same command again: what is done is kept"
WITHOUT_BUDGET = "Run the same command without --budget to have them too"
MORE_STEPS = "Give the attack more steps or restarts, or add others (leakscope list attacks)"
OTHER_ATTACKS = "Add attacks that fit (leakscope list attacks), or --attack standard"

#: What a reason is about: a leak of one of three kinds, or a doubt that stands in the way of a pass.
ReasonKind = Literal["reconstruction", "identification", "labels", "doubt"]


@dataclass(frozen=True)
class Reason:
    """Why a verdict is what it is, in one sentence, and what the user can do about it, in another (or nothing).

    >>> print(Reason("2 jobs failed", "Run the same command again"))
    2 jobs failed. Run the same command again.
    """

    text: str
    remedy: str = ""
    kind: ReasonKind = "doubt"

    def __str__(self) -> str:
        return f"{self.text}. {self.remedy}." if self.remedy else self.text
