"""Say which clients of a scenario were attacked well enough for a pass, and which updates no attack explains.

An attempt covers its client if it gave a measured result without a flag that explains the update, if it knew the
defence where there is one, and if its attack passed the positive control. Flags, failed searches and weak attacks count
only for clients that no attempt covers. More attacks therefore never take a pass away, and fewer attacks never buy one.

Whether an attack that recovered nothing was weak shows in what it makes of the update without the defence, of the
easiest case of the same model, and in what theory says is in the update. What attacks learn of the labels is a leak of
its own, and an obstacle to recovering the inputs.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from leakscope.contracts.reconstruction import FLAG_REMEDIES
from leakscope.metrics import MEASURES
from leakscope.results.baselines import Baselines
from leakscope.results.policy import Policy
from leakscope.results.reasons import Reason, Scenario, because
from leakscope.results.records import NAN, POSITIVE, ExampleRecord, FindingRow, Row, highest, mean

#: A reconstruction this good is beyond doubt, whatever the policy allows (dB).
BEYOND_DOUBT = 30.0
#: What theory allows beyond the best attack is a doubt from here on (dB).
WIDE_GAP = 3.0
#: Variance of a grey value of which nothing is known, in units of the squared range.
_UNKNOWN_VARIANCE = 1 / 12


def allowed_psnr(floor: FindingRow) -> float:
    """Return the highest PSNR that theory allows; NaN where it says nothing.

    Directions that leave no trace in the update cost what is unknown of a grey value, the others nothing.
    """
    value, rank, unknowns = floor.value("psnr"), floor.value("rank"), floor.value("unknowns")
    if not math.isnan(value) or not floor.content.get("infinite") or math.isnan(rank) or not unknowns > rank:
        return value
    return -10 * math.log10((unknowns - rank) / unknowns * _UNKNOWN_VARIANCE)


@dataclass(frozen=True, eq=False)
class AttackStrength:
    """Say what positive controls and theory tell of the attacks on one protocol.

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
    ) -> Self:
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
        """Return the PSNR from which on a positive control has succeeded (dB)."""
        return min(self.policy.max_psnr, BEYOND_DOUBT)

    def doubt(self, attacks: set[str]) -> Reason | None:
        """Say why a failure of these attacks would mean nothing; None where it means something."""
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
    """Doubt where theory allows a leak that no attack came near to."""
    if not (allowed >= policy.max_psnr and allowed - reached > WIDE_GAP):
        return None
    return because("gap", "more-steps", "stronger-defence", measure="psnr", value=reached, limit=allowed)


def _best(rows: list[Row]) -> float:
    return highest(example.value("psnr") for row in rows for example in row.examples)


#: By this share the square of a residual may exceed that of the true examples. Both hold the same noise, so only the
#: products of noise and signal differ: a few times sqrt(2 / entries), which is below 2 % from 10,000 entries on.
NOISE_MARGIN = 0.02
#: A residual this small is rounding, whatever the true examples leave: float32 through a deep network keeps 3 digits.
ROUNDING = 1e-3
#: The diagnosis of a search that stopped short of what its update determines.
MISSED = "optimiser failed"

Client = tuple[int, int]


class Coverage:
    """Hold the attempts on one scenario by client, which is a seed and a batch.

    ``required`` names attacks that must run on every client, those that ran where it is None. ``measures``: the keys of
    the measures that the policy limits.
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
        needed = {row.job.attack_name for row in self._all()} if required is None else set(required)
        attacks = {row.job.attack for row in self._all()}
        self._proven = {attack for attack in attacks if strength.doubt({attack}) is None}
        self.uncovered = {client for client, tries in self._clients.items() if not any(map(self._covers, tries))}
        self._lacking = {
            (client, name)
            for client, tries in self._clients.items()
            for name in needed - {r.job.attack_name for r in tries if r.status != "failed" and not r.starved}
        }

    @property
    def open_rows(self) -> list[Row]:
        """Return the results on clients that no attempt covers."""
        return [row for row in self._all() if row.status == "done" and _client(row) in self.uncovered]

    @property
    def not_run(self) -> list[str]:
        """Return the required attacks without any row on a client."""
        ran = {(_client(row), row.job.attack_name) for row in self._all()}
        return sorted({name for client, name in self._lacking if (client, name) not in ran})

    def matters(self, row: Row) -> bool:
        """Check whether a job without a result stands in the way of a pass."""
        return _client(row) in self.uncovered or (_client(row), row.job.attack_name) in self._lacking

    def unexplained(self) -> Reason | None:
        """Doubt updates that no attack explains, where residuals were computed and exceed the noise."""
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
    """Return the flags of a result; guessed labels do not count where they did not matter."""
    return [flag for flag in row.flags if flag != UNCERTAIN_LABELS or not settled(row)]


def explained(unexplained: float, by_truth: float) -> bool:
    """Check that noise and rounding account for the residual of a result; both are shares of the update's norm.

    No inputs at all leave 1, so that a result that leaves more is no worse than none.

    >>> explained(1.3, 0.9999), explained(0.8, 1e-6), explained(9e-4, 0.0)
    (True, False, True)
    """
    return min(unexplained, 1.0) ** 2 <= (1 + NOISE_MARGIN) * by_truth**2 + ROUNDING**2


def _residuals(row: Row) -> list[tuple[float, float]]:
    pair = (math.nan, math.nan) if row.result is None else (row.result.unexplained, row.result.unexplained_by_truth)
    return [] if any(map(math.isnan, pair)) else [pair]


def _client(row: Row) -> Client:
    return row.job.seed, row.job.batch


#: The flag of attacks that guessed the labels.
UNCERTAIN_LABELS = "labels uncertain"


@dataclass(frozen=True)
class Share:
    """Hold a share of the examples of a scenario, such as those whose labels are named.

    ``certain`` is the share if every example that was not attacked yet is none of them. ``chance`` is the share without
    information; NaN where the limit of the policy does not ask for it.
    """

    value: float = NAN
    certain: float = NAN
    chance: float = NAN

    def exceeds(self, limit: float) -> bool:
        return self.certain > limit and not self.certain <= self.chance


def label_share(done: list[Row], chance: float, examples: int = 0) -> Share:
    """Return the share of labels that the best attack and seed names, of at least ``examples``; NaN where they are
    known.
    """
    named: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in done:
        if row.job.knowledge.get("labels") != "yes":
            named[row.job.attack, row.job.seed] += [example.value("label_correct") for example in row.examples]
    if not named:
        return Share()
    right = {attempt: [value for value in values if not math.isnan(value)] for attempt, values in named.items()}
    certain = [math.fsum(values) / max(len(values), examples) for values in right.values() if values]
    return Share(highest(map(mean, named.values())), highest(certain), chance)


def label_remarks(share: Share, policy: Policy) -> list[Reason]:
    """Remark labels that leak although the policy does not limit them."""
    if policy.max_label_accuracy is not None or math.isnan(share.value) or share.value <= share.chance:
        return []
    return [because("labels-unlimited", measure="label_accuracy", value=share.value, baseline=share.chance)]


def label_doubts(share: Share, policy: Policy, done: list[Row]) -> list[Reason]:
    doubts = []
    if policy.max_label_accuracy is not None and done and math.isnan(share.value):
        known = all(row.job.knowledge.get("labels") == "yes" for row in done)
        doubts.append(because("labels-known", "withhold-labels") if known else because("no-labels", "label-attack"))
    return doubts + _only_labels_hide(policy, done)


def unresolved_labels(rows: list[Row]) -> list[Reason]:
    unresolved = [row for row in rows if UNCERTAIN_LABELS in row.flags and not settled(row)]
    remedies = FLAG_REMEDIES[UNCERTAIN_LABELS]
    return [because("labels-wrong", *remedies, count=len(unresolved), total=len(rows))] if unresolved else []


def settled(row: Row) -> bool:
    """Check that uncertain labels did not matter: they were right, or the attack was also run with the right ones."""
    right = [example.value("label_correct") for example in row.examples]
    return bool(row.result and row.result.given_labels) or (bool(right) and all(value == 1 for value in right))


def _only_labels_hide(policy: Policy, done: list[Row]) -> list[Reason]:
    """Doubt examples that cross the limit as soon as the attack is told the labels, which it may also guess."""
    told: dict[int, float] = {}
    for row in done:
        for example in row.result.given_labels if row.result else ():
            told[example.index] = highest([told.get(example.index, NAN), example.value("psnr")])
    crossed = {index: psnr for index, psnr in told.items() if psnr >= policy.max_psnr}
    if not crossed:
        return []
    facts = {"measure": "psnr", "value": max(crossed.values()), "limit": policy.max_psnr}
    return [because("labels-hide", "judge-with-labels", count=len(crossed), **facts)]
