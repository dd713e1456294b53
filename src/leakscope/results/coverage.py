"""Say which clients of a scenario were attacked well enough for a pass, and which updates no attack explains.

An attempt covers its client if it gave a measured result without a flag that explains the update, if it knew the
defence where there is one, and if its attack passed the positive control. Flags, failed searches and weak attacks count
only for clients that no attempt covers. More attacks therefore never take a pass away, and fewer attacks never buy one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable

from leakscope.results.label_leakage import UNCERTAIN_LABELS, settled
from leakscope.results.reasons import Reason, because
from leakscope.results.records import Row
from leakscope.results.strength import AttackStrength

#: By this share the square of a residual may exceed that of the true examples. Both hold the same noise, so only the
#: products of noise and signal differ: a few times sqrt(2 / entries), which is below 2 % from 10,000 entries on.
NOISE_MARGIN = 0.02
#: A residual this small is rounding, whatever the true examples leave: float32 through a deep network keeps 3 digits.
ROUNDING = 1e-3
#: The diagnosis of a search that stopped short of what its update determines.
MISSED = "optimiser failed"

Client = tuple[int, int]


class Coverage:
    """The attempts on one scenario by client, which is a seed and a batch.

    ``required`` names attacks that must have been run on every client; None where the plan does not say, and then those
    that were run. ``measures`` are the keys of the measures that the policy limits.
    """

    def __init__(
        self,
        rows: Iterable[Row],
        strength: AttackStrength,
        defended: bool,
        measures: Collection[str],
        required: Collection[str] | None,
    ) -> None:
        self._clients: dict[Client, list[Row]] = defaultdict(list)
        for row in rows:
            self._clients[_client(row)].append(row)
        self._strength, self._defended, self._measures = strength, defended, measures
        ran = {row.job.attack_name for row in self._all()}
        self._required = ran if required is None else set(required)
        attacks = {row.job.attack for row in self._all()}
        self._proven = {attack for attack in attacks if strength.doubt({attack}) is None}
        self.uncovered = {client for client, tries in self._clients.items() if not any(map(self._covers, tries))}
        self._lacking = {
            (client, name)
            for client, tries in self._clients.items()
            for name in self._required - {row.job.attack_name for row in tries if _had_its_turn(row)}
        }

    @property
    def open_rows(self) -> list[Row]:
        """The results on clients that no attempt covers."""
        return [row for row in self._all() if row.status == "done" and _client(row) in self.uncovered]

    @property
    def not_run(self) -> list[str]:
        """The required attacks without any row on a client."""
        ran = {(_client(row), row.job.attack_name) for row in self._all()}
        return sorted({name for client, name in self._lacking if (client, name) not in ran})

    def matters(self, row: Row) -> bool:
        """Whether a job without a result stands in the way of a pass."""
        return _client(row) in self.uncovered or (_client(row), row.job.attack_name) in self._lacking

    def unexplained(self) -> Reason | None:
        """The doubt about updates that no attack explains; None where the noise accounts for what is left.

        Where residuals were computed for no attack, as for rounds, there is no such doubt.
        """
        left: list[tuple[float, float]] = []
        for tries in self._clients.values():
            pairs = [pair for row in tries if self._knows(row) for pair in _residuals(row)]
            if pairs and not any(explained(*pair) for pair in pairs):
                left.append(min(pairs))
        if not left:
            return None
        most, by_truth = max(left)
        facts = {"count": len(left), "total": len(self._clients), "value": most, "baseline": by_truth}
        return because("unexplained", "grant-client", "more-steps", **facts)

    def _all(self) -> list[Row]:
        return [row for tries in self._clients.values() for row in tries]

    def _knows(self, row: Row) -> bool:
        return row.result is not None and (row.result.adaptive or not self._defended)

    def _covers(self, row: Row) -> bool:
        result = row.result
        if row.status != "done" or result is None or row.job.attack not in self._proven or not self._knows(row):
            return False
        missed = result.diagnosis is not None and result.diagnosis.outcome == MISSED
        values = [example.value(key) for example in result.examples for key in ("psnr", *self._measures)]
        left = not all(explained(*pair) for pair in _residuals(row))
        return bool(values) and not (left or missed or raised(row) or any(map(math.isnan, values)))


def raised(row: Row) -> list[str]:
    """The flags of a result; guessed labels do not count where they did not matter."""
    return [flag for flag in row.flags if flag != UNCERTAIN_LABELS or not settled(row)]


def explained(unexplained: float, by_truth: float) -> bool:
    """Whether noise and rounding account for the residual of a result; both are shares of the update's norm.

    No inputs at all leave 1, so that a result that leaves more is no worse than none.

    >>> explained(1.3, 0.9999), explained(0.8, 1e-6), explained(9e-4, 0.0)
    (True, False, True)
    """
    return min(unexplained, 1.0) ** 2 <= (1 + NOISE_MARGIN) * by_truth**2 + ROUNDING**2


def _residuals(row: Row) -> list[tuple[float, float]]:
    """What the result and what the true examples leave of the update, where both were computed."""
    pair = (math.nan, math.nan) if row.result is None else (row.result.unexplained, row.result.unexplained_by_truth)
    return [] if any(map(math.isnan, pair)) else [pair]


def _had_its_turn(row: Row) -> bool:
    """Whether the attack gave a result, or was refused because it does not apply to the model."""
    return row.status == "done" or (row.status == "refused" and not row.starved)


def _client(row: Row) -> Client:
    return row.job.seed, row.job.batch
