"""Hold how large a defence's change is beside the update it protects."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leakscope.results.reasons import Scenario
from leakscope.results.records import items, mapping, number

#: A change of so many times the update hides one client's update altogether (ratio of norms). In the defence study,
#: noise of 9 times the update cost 5 points of accuracy, noise of 90 times 55 points; this is between the two.
LOST = 30.0
#: What still points along the update is not lost, whatever its length (cosine).
_ALONG = 0.5


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Hold norms of the first client's update: without the defence, of the change by it, and of what is sent."""

    update: float
    change: float
    sent: float
    cosine: float
    entries: float

    @property
    def ratio(self) -> float:
        """Return the norm of the change in units of the update's.

        >>> Scale(update=0.5, change=5.0, sent=5.0, cosine=0.1, entries=9).ratio
        10.0
        """
        return self.change / self.update if self.update > 0 else math.nan

    @property
    def unchanged(self) -> bool:
        """Check that the defence leaves every bit of the update as it is."""
        return self.change == 0

    @property
    def lost(self) -> bool:
        """Check that nothing of the update is left to speak of: it is zero, or hidden by a far larger change."""
        return self.sent == 0 or (self.ratio >= LOST and not self.cosine >= _ALONG)

    def sigma(self, ratio: float) -> float:
        """Return the standard deviation of noise whose norm is ``ratio`` times the update's."""
        return ratio * self.update / math.sqrt(self.entries) if self.entries > 0 else math.nan

    def as_dict(self, scenario: Scenario) -> dict[str, Any]:
        return {**scenario._asdict(), **dataclasses.asdict(self)}


def read_scales(plan: Mapping[str, Any]) -> dict[Scenario, Scale]:
    """Read what a plan says of its scenarios; those of older versions say nothing."""
    names = [field.name for field in dataclasses.fields(Scale)]
    entries = [mapping(entry) for entry in items(plan.get("scales"))]
    return {
        Scenario(str(entry.get("protocol")), str(entry.get("defense"))): Scale(
            **{n: number(entry.get(n)) for n in names}
        )
        for entry in entries
    }
