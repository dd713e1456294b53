"""Judge one scenario, a protocol with a defence: its strongest reconstructions, leaks and doubts."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from leakscope.contracts.reconstruction import FLAG_REMEDIES
from leakscope.metrics import MEASURES, interval
from leakscope.results.baselines import Baselines
from leakscope.results.coverage import (
    BEYOND_DOUBT,
    MISSED,
    UNCERTAIN_LABELS,
    AttackStrength,
    Coverage,
    Share,
    gap_doubt,
    label_doubts,
    label_remarks,
    label_share,
    raised,
    unresolved_labels,
)
from leakscope.results.policy import Limit, Policy
from leakscope.results.reasons import InScenario, Reason, Remedy, Scenario, because
from leakscope.results.records import NAN, ExampleRecord, Row, best, highest, mean
from leakscope.results.scale import Scale

Outcome = Literal["leaks", "within policy", "inconclusive", "nothing audited"]
#: Where the policy does not limit it, identification this much above chance is a doubt (share). A limit of as much
#: makes a leak of it, for then more than this share are identified.
IDENTIFIED_ABOVE_CHANCE = 0.5


@dataclass(frozen=True, kw_only=True)
class StrongestExample(ExampleRecord, InScenario):
    """Hold the best reconstruction of one example, over attacks and seeds, by PSNR."""

    values: Mapping[str, float] = field(repr=False)
    attack: str
    attack_name: str
    seed: int
    key: str
    protocol: str
    defense: str
    baseline_psnr: float = NAN
    leaks: bool = False

    @property
    def psnr(self) -> float:
        return self.value("psnr")

    @property
    def ssim(self) -> float:
        return self.value("ssim")

    @property
    def exposure(self) -> float:
        """Return PSNR for ordering; what was not measured comes last."""
        return -math.inf if math.isnan(self.psnr) else self.psnr

    @property
    def lift(self) -> float:
        """Return PSNR above the control of the same attack."""
        return self.psnr - self.baseline_psnr

    @property
    def identified(self) -> bool | None:
        value = self.value("identified")
        return None if math.isnan(value) else value > 0

    def __str__(self) -> str:
        return f"example {self.index} at {self.psnr:.1f} dB by {self.attack_name}, defence {self.defense}"


def above_policy(example: StrongestExample, policy: Policy) -> bool:
    """Check that PSNR reaches the limit, and that there is the lift, or a certificate, which needs no baseline."""
    lifted = policy.min_lift <= 0 or example.lift >= policy.min_lift
    return example.psnr >= policy.max_psnr and (example.certified or lifted)


def tried(row: Row, example: ExampleRecord, baselines: Baselines) -> StrongestExample:
    baseline = baselines.value(row.job.attack, example.index, MEASURES["psnr"])
    same = {name: getattr(row.job, name) for name in ("attack", "attack_name", "seed", "protocol", "defense")}
    return StrongestExample(key=row.key, baseline_psnr=baseline, **vars(example), **same)


def strongest(tries: list[StrongestExample], policy: Policy) -> StrongestExample:
    """Return the highest PSNR; first what is above the policy and certified, lest a strong prior hide a leak."""

    def order(example: StrongestExample) -> tuple[bool, bool, float]:
        above = above_policy(example, policy)
        return above, above and example.certified, example.exposure

    return max(tries, key=order)  # keeps the first of equals, so the order of the plan decides ties


@dataclass(frozen=True, kw_only=True)
class SettingVerdict(InScenario):
    protocol: str
    defense: str
    outcome: Outcome
    #: Short names beside the other settings of the verdict, which sets them.
    name: str = field(default="", compare=False)
    protocol_short: str = field(default="", compare=False)
    defense_short: str = field(default="", compare=False)
    reasons: list[Reason] = field(default_factory=list)
    #: What the policy does not limit and people ought to know.
    remarks: list[Reason] = field(default_factory=list)
    examples: list[StrongestExample] = field(default_factory=list)
    mean_psnr: float = NAN
    interval: tuple[float, float] = (NAN, NAN)
    baseline_psnr: float = NAN
    #: The highest PSNR that theory allows; NaN where it says nothing.
    allowed_psnr: float = NAN
    identification: float = NAN
    #: Share of labels that the best attack named, and that it names from nothing; NaN where labels are known anyway.
    label_accuracy: float = NAN
    label_baseline: float = NAN
    #: Why what the attacks did not recover means nothing; None where it means something, or where they recovered.
    weakness: Reason | None = None
    #: How large the defence's change is beside the update; None where nobody measured it.
    scale: Scale | None = None
    flags: list[str] = field(default_factory=list)
    done: int = 0
    failed: int = 0
    refused: int = 0
    missing: int = 0

    @property
    def title(self) -> str:
        return f"{self.protocol}, defence {self.defense}"

    @property
    def short(self) -> str:
        return f"{self.protocol_short} · {self.defense_short}"

    @property
    def defense_parts(self) -> tuple[str, str]:
        """Split the defence into its name and its options."""
        name, _, options = self.defense_short.partition("(")
        return name, options.removesuffix(")")

    @property
    def doubts(self) -> list[Reason]:
        """Return the reasons that are no leaks; a scenario that leaks may have them too, where jobs failed or are
        missing.
        """
        return [reason for reason in self.reasons if reason.kind == "doubt"]


@dataclass(frozen=True)
class Expected:
    """Say what was planned for a setting; 0 where nobody says.

    ``budget``: the time budget that ended first, in words. ``spared``: attempts on examples that had been recovered
    exactly before. ``stopped``: attempts that were not made because the scenario exceeded the policy before.
    ``required``: the attacks without which nothing passes; None where the plan does not say.
    """

    attempts: int
    examples: int = 0
    findings: int = 0
    findings_missing: int = 0
    budget: str | None = None
    spared: int = 0
    stopped: int = 0
    required: frozenset[str] | None = None


class Judge:
    """Weigh the rows of one scenario: what leaks, and what makes us unsure."""

    def __init__(
        self,
        scenario: Scenario,
        rows: list[Row],
        baselines: Baselines,
        strength: AttackStrength,
        allowed: float,
        policy: Policy,
        expected: Expected,
        label_chance: float,
    ) -> None:
        self.scenario, self.defended = scenario, scenario.defense != "none"
        self.rows, self.policy, self.expected = rows, policy, expected
        self.missing = max(0, expected.attempts - expected.spared - expected.stopped - len(rows))
        self.baselines, self.strength, self.allowed = baselines, strength, allowed
        self.done = [row for row in rows if row.status == "done"]
        self.tries: dict[int, list[StrongestExample]] = defaultdict(list)
        for row in self.done:
            for example in row.examples:
                self.tries[example.index].append(tried(row, example, self.baselines))
        self.strongest = [strongest(tries, policy) for _, tries in sorted(self.tries.items())]
        # One attack that recognises an example is enough, even if another comes nearer in pixels.
        self.recognised = {index: any(e.identified for e in tries) for index, tries in self.tries.items()}
        self.unrecognisable = [i for i, tries in self.tries.items() if all(e.identified is None for e in tries)]
        measured = [e for e in self.strongest if e.index not in self.unrecognisable]
        self.identification = mean([float(self.recognised[e.index]) for e in measured])
        # Of shares, what is still missing might lower them: by the limits they are shares of all that was planned.
        least = expected.examples if self.missing or expected.stopped else 0
        certain = sum(self.recognised[e.index] for e in measured) / max(len(measured), least, 1)
        self.labels = label_share(self.done, label_chance, least)
        self.shares = {"identification": Share(self.identification, certain), "label_accuracy": self.labels}
        self.flags = sorted({flag for row in self.done for flag in row.flags})
        keys = [limit.measure.key for limit in self._other_limits()]
        self.coverage = Coverage(rows, strength, self.defended, keys, expected.required)
        self.fates: dict[str, Any] = {
            status: sum(r.status == status for r in rows) for status in ("done", "failed", "refused")
        }

    def verdict(self) -> SettingVerdict:
        leaks = {example.index: self._leaks_of(example) for example in self.strongest}
        examples = [dataclasses.replace(e, leaks=bool(leaks[e.index])) for e in self.strongest]
        against = [*(reason for each in leaks.values() for reason in each), *self._leaking_shares()]
        doubts = self._doubts_of_jobs()
        if not against:  # that a pass would be doubtful does not matter where there is none
            doubts = [
                *self._doubts_of_measures(),
                *label_doubts(self.labels, self.policy, self.done),
                *self._doubts_of_coverage(),
                *self._doubts_of_what_is_left(),
                *self._doubts_of_powers(),
                *doubts,
            ]
            if self.coverage.uncovered and not doubts:
                doubts = [because("no-support", "other-attacks", count=len(self.coverage.uncovered))]
        psnrs = [e.psnr for e in examples if not math.isnan(e.psnr)]
        return SettingVerdict(
            protocol=self.scenario.protocol,
            defense=self.scenario.defense,
            outcome="leaks" if against else "inconclusive" if doubts else "within policy",
            reasons=[dataclasses.replace(reason, scenario=self.scenario) for reason in (*against, *doubts)],
            remarks=label_remarks(self.labels, self.policy),
            examples=examples,
            mean_psnr=mean(psnrs),
            interval=interval(psnrs),
            baseline_psnr=mean([e.baseline_psnr for e in examples]),
            allowed_psnr=self.allowed,
            identification=self.identification,
            label_accuracy=self.labels.value,
            label_baseline=self.labels.chance,
            weakness=None if against else self._weakness(),
            flags=self.flags,
            missing=self.missing,
            **self.fates,
        )

    def _leaks_of(self, example: StrongestExample) -> list[Reason]:
        leaks = []
        for limit in self.policy.limits:
            measure, facts = limit.measure, {"example": example.index, "attack": example.attack_name}
            if measure.name == "psnr":
                value, leaking = example.psnr, above_policy(example, self.policy)
                facts["baseline"] = example.baseline_psnr
            elif measure.per == "example":
                value = best([t.value(measure.key) for t in self.tries[example.index]], measure.better)
                leaking = limit.reached(value)
            else:
                value = float(measure.name == "identification" and self.recognised[example.index])
                leaking = value > 0 and self.shares[measure.name].exceeds(limit.value)
            if leaking:
                leaks.append(because("reconstruction", measure=measure.name, value=value, limit=limit.value, **facts))
        return leaks

    def _leaking_shares(self) -> list[Reason]:
        leaks = []
        for limit in self.policy.limits:
            measure = limit.measure
            if measure.per == "setting" and (share := self.shares[measure.name]).exceeds(limit.value):
                facts = {"measure": measure.name, "value": share.value, "limit": limit.value, "baseline": share.chance}
                leaks.append(because("labels" if measure.of == "labels" else measure.name, **facts))
        return leaks

    def _other_limits(self) -> list[Limit]:
        return [x for x in self.policy.limits if x.measure.per == "example" and x.measure.name != "psnr"]

    def _doubts_of_measures(self) -> list[Reason]:
        doubts = []
        for example in self.strongest:
            doubts += self._doubts_of_lift(example)
            # Of a certificate and a PSNR that is low or unknown one is wrong.
            likely = min(self.policy.max_psnr, BEYOND_DOUBT)
            if any(t.certified and not t.psnr >= likely for t in self.tries[example.index]):
                doubts.append(because("certificate-contradicted", "report-defect", example=example.index))
        drop, define = (Remedy(kind, {"limit": "max_identification"}) for kind in ("drop-limit", "set-limit"))
        if self.policy.max_identification is not None and self.unrecognisable:
            doubts.append(because("identification-unmeasured", "more-data", drop, measure="identification"))
        chance = self.baselines.identification
        if self.policy.max_identification is None and self.identification - chance > IDENTIFIED_ABOVE_CHANCE:
            # Poor pixels may still give a person away: that is no leak by this policy, but no pass either.
            facts = {"measure": "identification", "value": self.identification, "baseline": chance}
            doubts.append(because("identified-above-chance", define, **facts))
        return doubts

    def _doubts_of_lift(self, example: StrongestExample) -> list[Reason]:
        if above_policy(example, self.policy):
            return []
        high = [t for t in self.tries[example.index] if t.psnr >= self.policy.max_psnr]
        facts: dict[str, Any] = {"example": example.index, "measure": "psnr", "value": example.psnr}
        if any(math.isnan(t.lift) for t in high):
            return [because("no-control", "keep-controls", **facts)]
        own = [t.psnr - self.baselines.value(t.attack, t.index, MEASURES["psnr"], held_out=False) for t in high]
        if not any(lift >= self.policy.min_lift for lift in own):
            return []
        remedies = "look-at-pictures", Remedy("set-limit", {"limit": "max_identification"})
        return [because("near-held-out", *remedies, baseline=example.baseline_psnr, **facts)]

    def _weakness(self) -> Reason | None:
        return self.strength.doubt({row.job.attack for row in self.done}) if self.done else None

    def _doubts_of_coverage(self) -> list[Reason]:
        rows = self.coverage.open_rows
        if not rows:
            return []
        weak = self.strength.doubt({row.job.attack for row in rows})
        doubts = [] if weak is None else [weak]
        doubts += [*_doubts_of_searches(rows), *self._doubts_of_knowledge(rows), *unresolved_labels(rows)]
        for flag in sorted({flag for row in rows for flag in raised(row)} - {UNCERTAIN_LABELS}):
            facts = {"names": (flag,), "count": sum(flag in row.flags for row in rows), "total": len(rows)}
            doubts.append(because("flag", *FLAG_REMEDIES.get(flag, ()), **facts))
        return [*doubts, *self._doubts_of_numbers(rows)]

    def _doubts_of_numbers(self, rows: list[Row]) -> list[Reason]:
        examples = [example for row in rows for example in row.examples]
        unmeasured = sum(math.isnan(example.value("psnr")) for example in examples)
        unread = because("psnr-unmeasured", "lower-learning-rate", measure="psnr", count=unmeasured)
        doubts = [unread] if unmeasured else []
        for limit in self._other_limits():
            drop = Remedy("drop-limit", {"limit": limit.measure.limit})
            for index in sorted({e.index for e in examples if math.isnan(e.value(limit.measure.key))}):
                doubts.append(because("measure-missing", drop, example=index, measure=limit.measure.name))
        return doubts

    def _doubts_of_what_is_left(self) -> list[Reason]:
        if not self.done:
            return []
        weak = self._weakness() is not None
        gap = None if weak else gap_doubt(self.allowed, highest(e.psnr for e in self.strongest), self.policy)
        doubts = [doubt for doubt in (self.coverage.unexplained(), gap) if doubt is not None]
        names = [] if self.missing or self.expected.spared or self.expected.stopped else self.coverage.not_run
        if names:
            remedies = "standard-attacks", Remedy("waive", {"attacks": tuple(names)})
            doubts.append(because("standard-not-run", *remedies, names=tuple(names)))
        return doubts

    def _doubts_of_knowledge(self, rows: list[Row]) -> list[Reason]:
        """Doubt a defence that no attack knew, or only attacks that find nothing without it either."""
        if not self.defended:
            return []
        knowing = {row.job.attack for row in rows if row.result and row.result.adaptive}
        if knowing:
            weak = None if len(knowing) == len({row.job.attack for row in rows}) else self.strength.doubt(knowing)
            return [] if weak is None else [dataclasses.replace(weak, knowing=True)]
        if any(row.job.knowledge.get("defense") for row in rows):
            return [because("defence-unread", "other-attacks", "learn-defence")]
        return [because("defence-unknown", "know-defence")]

    def _doubts_of_powers(self) -> list[Reason]:
        """Doubt a server that may choose the model, if every attack took it as it is."""
        powers = ("choose_weights", "choose_structure")
        granted = any(row.job.knowledge.get(power) for row in self.done for power in powers)
        chosen = any(row.result and row.result.chose_model for row in self.done)
        return [because("model-not-chosen", "choose-model", "honest-server")] if granted and not chosen else []

    def _doubts_of_jobs(self) -> list[Reason]:
        """Count jobs without a result only where they stand in the way of a pass."""
        broken = [row for row in self.rows if self.coverage.matters(row)]
        failed, starved = sum(row.status == "failed" for row in broken), [row for row in broken if row.starved]
        wanted = tuple(sorted({name for row in starved for name in row.lacks}))
        waiting = self.missing and self.expected.budget is not None and not self.rows
        doubts = {
            because("no-result", "other-attacks"): not self.done and not waiting,
            because("job-failed", "retry", count=failed): failed,
            # A closed form that does not fit the model is no gap; an attack the threat model starves is one.
            because("job-starved", "grant-knowledge", count=len(starved), names=wanted): starved,
        }
        return [*(doubt for doubt, told in doubts.items() if told), *self._doubts_of_what_is_missing()]

    def _doubts_of_what_is_missing(self) -> list[Reason]:
        expected, lost, total = self.expected, self.expected.findings_missing, self.expected.attempts
        budget, remedy = expected.budget, "again" if expected.budget is None else "more-time"
        doubts = {
            because("attempts-missing", remedy, count=self.missing, total=total, budget=budget): self.missing,
            because("findings-missing", remedy, count=lost, budget=budget): lost,
            because("spared", "without-budget", count=expected.spared): expected.spared,
            because("stopped", "whole-scenario", count=expected.stopped, total=total): expected.stopped,
        }
        return [doubt for doubt, told in doubts.items() if told]


def _doubts_of_searches(rows: list[Row]) -> list[Reason]:
    searches: dict[tuple[int, int], set[str]] = defaultdict(set)
    for row in rows:
        if row.result is not None and row.result.diagnosis is not None:
            searches[row.job.seed, row.job.batch].add(row.result.diagnosis.outcome)
    missed = sum(MISSED in told and "recovered" not in told for told in searches.values())
    return [because("search-missed", "more-steps", count=missed, total=len(searches))] if missed else []
