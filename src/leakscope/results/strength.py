"""Whether attacks were strong enough for their failure to mean something, and what theory allows beyond them.

An update from which nothing was recovered is safe, or the attack was weak. Three things tell which: what the same
attack makes of the update without the defence, of the easiest case of the same model, and what theory says is in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from leakscope.metrics import MEASURES
from leakscope.results.baselines import Baselines
from leakscope.results.policy import Policy
from leakscope.results.reasons import Reason, Scenario, because
from leakscope.results.records import NAN, POSITIVE, ExampleRecord, FindingRow, Row, highest

#: A reconstruction this good is beyond doubt, whatever the policy allows (dB).
BEYOND_DOUBT = 30.0
#: What theory allows beyond the best attack is a doubt from here on (dB).
WIDE_GAP = 3.0
#: Variance of a grey value of which nothing is known, in units of the squared range.
_UNKNOWN_VARIANCE = 1 / 12


def allowed_psnr(floor: FindingRow) -> float:
    """The highest PSNR that theory allows; NaN where it says nothing.

    Directions that leave no trace in the update cost what is unknown of a grey value, the others nothing.
    """
    value, rank, unknowns = floor.value("psnr"), floor.value("rank"), floor.value("unknowns")
    if not math.isnan(value) or not floor.content.get("infinite") or math.isnan(rank) or not unknowns > rank:
        return value
    return -10 * math.log10((unknowns - rank) / unknowns * _UNKNOWN_VARIANCE)


@dataclass(frozen=True, eq=False)
class AttackStrength:
    """What positive controls and theory say of the attacks on one protocol.

    ``has_floor``: theory can say something of this protocol; ``floor`` is what it allows of the undefended update.
    ``broken``: controls that failed; their attacks prove nothing.
    """

    undefended: list[Row]
    planted: list[Row]
    baselines: Baselines
    policy: Policy
    has_floor: bool = False
    floor: float = NAN
    broken: tuple[Row, ...] = ()

    @classmethod
    def of(
        cls,
        protocol: str,
        rows: Iterable[Row],
        baselines: Baselines,
        policy: Policy,
        floors: Mapping[Scenario, float],
        has_floor: bool,
    ) -> AttackStrength:
        every = [row for row in rows if row.job.protocol == protocol]
        own = [row for row in every if row.status == "done"]
        positive = [row for row in own if row.job.control_kind == POSITIVE]
        bare = [row for row in own if row.counts and row.job.defense == "none"]
        bare += [row for row in positive if row.job.control == "undefended"]
        easy = [row for row in positive if row.job.control == "planted"]
        broken = tuple(row for row in every if not row.counts and row.status == "failed")
        return cls(bare, easy, baselines, policy, has_floor, floors.get(Scenario(protocol, "none"), NAN), broken)

    @property
    def bar(self) -> float:
        """From here on a positive control has succeeded (dB)."""
        return min(self.policy.max_psnr, BEYOND_DOUBT)

    def doubt(self, attacks: set[str]) -> Reason | None:
        """Why a failure of these attacks would mean nothing; None where it means something."""
        broken = [row for row in self.broken if row.job.attack in attacks]
        attacks = attacks - {row.job.attack for row in broken}
        if broken and not attacks:
            return because("control-failed", "again", count=len(broken))
        if self._succeeds(self.undefended, attacks):
            return None
        easy = [row for row in self.planted if row.job.attack in attacks]
        if not easy:
            return because("no-positive-control", "keep-controls", "other-attacks")
        if not self._succeeds(easy, attacks):
            return because("weak-on-easy-case", "more-steps", measure="psnr", value=_best(easy), limit=self.bar)
        if not self.has_floor or self.floor < self.policy.max_psnr:
            return None
        if math.isnan(self.floor):
            return because("weak-without-theory", "keep-findings", "more-steps")
        return because("weak-undefended", "more-steps", measure="psnr", value=_best(self.undefended), limit=self.floor)

    def _succeeds(self, rows: list[Row], attacks: set[str]) -> bool:
        return any(self._found(row, example) for row in rows if row.job.attack in attacks for example in row.examples)

    def _found(self, row: Row, example: ExampleRecord) -> bool:
        psnr = example.value("psnr")
        lift = psnr - self.baselines.value(row.job.attack, example.index, MEASURES["psnr"])
        return psnr >= self.bar and (self.policy.min_lift <= 0 or lift >= self.policy.min_lift)


def gap_doubt(allowed: float, reached: float, policy: Policy) -> Reason | None:
    """Where theory allows a leak that no attack came near to."""
    if not (allowed >= policy.max_psnr and allowed - reached > WIDE_GAP):
        return None
    return because("gap", "more-steps", "stronger-defence", measure="psnr", value=reached, limit=allowed)


def _best(rows: list[Row]) -> float:
    return highest(example.value("psnr") for row in rows for example in row.examples)
