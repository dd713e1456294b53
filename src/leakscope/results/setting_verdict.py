"""The verdict on one setting, a protocol with a defence: its strongest reconstructions, leaks and doubts."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal

from leakscope.contracts.reconstruction import REMEDIES
from leakscope.metrics import MEASURES, Measure, interval
from leakscope.results.baselines import Baselines
from leakscope.results.coverage import MISSED, Coverage, raised, starved
from leakscope.results.label_leakage import UNCERTAIN_LABELS, LabelLeakage, unresolved_labels
from leakscope.results.policy import Policy
from leakscope.results.reasons import AGAIN, MORE_STEPS, MORE_TIME, OTHER_ATTACKS, WITHOUT_BUDGET, Reason
from leakscope.results.records import NAN, Row, best, counted, highest, mean
from leakscope.results.strength import AttackStrength, gap_doubt
from leakscope.results.strongest import StrongestExample, above_policy, contradicts_its_certificate, strongest, tried

Outcome = Literal["leaks", "within policy", "inconclusive", "nothing audited"]
NO_RESULT = "no attack gave a result"
#: Where the policy does not limit it, identification this much above chance is a doubt.
_IDENTIFIED_ABOVE_CHANCE = 0.5


@dataclass(frozen=True, kw_only=True)
class SettingVerdict:
    """One protocol with one defence."""

    protocol: str
    defense: str
    outcome: Outcome
    reasons: list[Reason] = field(default_factory=list)
    #: What the policy does not limit and people ought to know.
    remarks: list[str] = field(default_factory=list)
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
    #: Why what the attacks did not recover means nothing; empty where it means something, or where they recovered.
    weakness: str = ""
    flags: list[str] = field(default_factory=list)
    done: int = 0
    failed: int = 0
    refused: int = 0
    missing: int = 0

    @property
    def doubts(self) -> list[Reason]:
        """The reasons that are no leaks; a setting that leaks may have them too, where jobs failed or are missing."""
        return [reason for reason in self.reasons if reason.kind == "doubt"]

    @property
    def named_reasons(self) -> list[Reason]:
        """The reasons with the setting's name, as the verdict on the whole audit tells them."""
        place = f"{self.protocol}, defence {self.defense}"
        return [dataclasses.replace(reason, text=f"{place}: {reason.text}") for reason in self.reasons]


@dataclass(frozen=True)
class Expected:
    """What was planned for a setting: attempts, the examples they are on, and findings; 0 where nobody says.

    ``budget``: the time budget that ended before all of it was begun, in words. ``spared``: attempts that it was not
    spent on, for their examples had been recovered exactly before. ``required``: the names of the attacks without which
    nothing passes; None where the plan does not say.
    """

    attempts: int
    examples: int = 0
    findings: int = 0
    findings_missing: int = 0
    budget: str | None = None
    spared: int = 0
    required: frozenset[str] | None = None


class Setting:
    """The rows of one setting, and what speaks against it and against our being sure."""

    def __init__(
        self,
        cell: tuple[str, str],
        rows: list[Row],
        baselines: Baselines,
        strength: AttackStrength,
        allowed: float,
        policy: Policy,
        expected: Expected,
        label_chance: float,
    ) -> None:
        self.protocol, self.defense = cell
        self.rows, self.policy, self.expected = rows, policy, expected
        self.missing = max(0, expected.attempts - expected.spared - len(rows))
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
        least = expected.examples if self.missing else 0
        certain = sum(self.recognised[e.index] for e in measured) / max(len(measured), least, 1)
        limit = policy.max_identification
        self.identified_too_often = limit is not None and certain > limit
        self.labels = LabelLeakage.of(self.done, label_chance, least)
        self.flags = sorted({flag for row in self.done for flag in row.flags})
        limited = [measure.key for measure, _ in self._other_limits()]
        self.coverage = Coverage(rows, strength, self.defense != "none", limited, expected.required)
        self.fates = {status: sum(r.status == status for r in rows) for status in ("done", "failed", "refused")}

    def verdict(self) -> SettingVerdict:
        leaks = {example.index: self._leaks_of(example) for example in self.strongest}
        examples = [dataclasses.replace(e, leaks=bool(leaks[e.index])) for e in self.strongest]
        against = [*self._against(examples, leaks), *self.labels.leaks(self.policy)]
        doubts = self._doubts_of_jobs()
        if not against:  # that a pass would be doubtful does not matter where there is none
            doubts = [
                *self._doubts_of_measures(),
                *self.labels.doubts(self.policy, self.done),
                *self._doubts_of_coverage(),
                *self._doubts_of_what_is_left(),
                *self._doubts_of_powers(),
                *doubts,
            ]
            if self.coverage.uncovered and not doubts:
                doubts = [self._doubt_of_gaps()]
        psnrs = [e.psnr for e in examples if not math.isnan(e.psnr)]
        weakness = self._weakness()
        return SettingVerdict(
            protocol=self.protocol,
            defense=self.defense,
            outcome="leaks" if against else "inconclusive" if doubts else "within policy",
            reasons=[*against, *doubts],
            remarks=self.labels.remarks(self.policy),
            examples=examples,
            mean_psnr=mean(psnrs),
            interval=interval(psnrs),
            baseline_psnr=mean([e.baseline_psnr for e in examples]),
            allowed_psnr=self.allowed,
            identification=self.identification,
            label_accuracy=self.labels.accuracy,
            label_baseline=self.labels.chance,
            weakness="" if against or weakness is None else weakness.text,
            flags=self.flags,
            missing=self.missing,
            **self.fates,
        )

    def _against(self, examples: list[StrongestExample], leaks: dict[int, list[str]]) -> list[Reason]:
        leaking = [example for example in examples if example.leaks]
        against = [
            Reason(f"example {e.index} leaks by {e.attack_name}: {', '.join(leaks[e.index])}", kind="reconstruction")
            for e in leaking
        ]
        if self.identified_too_often:
            limit = self.policy.max_identification
            share = f"{self.identification:.0%} of the examples are identified, the limit is {limit:.0%}"
            against.append(Reason(share, kind="identification"))
        return against

    def _leaks_of(self, example: StrongestExample) -> list[str]:
        """Why an example leaks, in words; nothing where it does not."""
        leaks = []
        if above_policy(example, self.policy):
            lift = "" if math.isnan(example.lift) else f", {example.lift:.1f} dB above its control"
            leaks.append(f"PSNR {example.psnr:.1f} dB{lift}")
        for measure, limit in self._other_limits():
            value = best([t.value(measure.key) for t in self.tries[example.index]], measure.better)
            if value >= limit if measure.better == "higher" else value <= limit:
                leaks.append(f"{measure.label} {value:.2f}")
        if self.identified_too_often and self.recognised[example.index]:
            leaks.append("identified")
        return leaks

    def _other_limits(self) -> list[tuple[Measure, float]]:
        """Measures of single examples that the policy limits, beside PSNR with its lift."""
        limited = [m for m in MEASURES.values() if m.limit is not None and m.per == "example" and m.name != "psnr"]
        limits = [(measure, getattr(self.policy, str(measure.limit))) for measure in limited]
        return [(measure, limit) for measure, limit in limits if limit is not None]

    def _doubts_of_measures(self) -> list[Reason]:
        """Numbers that are missing although something hangs on them, or that say different things."""
        doubts = []
        for example in self.strongest:
            doubts += self._doubts_of_lift(example)
            if any(contradicts_its_certificate(t, self.policy) for t in self.tries[example.index]):
                why = f"example {example.index}: its certificate contradicts the measured PSNR"
                doubts.append(Reason(why, "Report it: either the attack's proof or the measure is wrong"))
        if self.policy.max_identification is not None and self.unrecognisable:
            why = "identification could not be measured for every example, but the policy limits it"
            doubts.append(Reason(why, "Give the data more examples to tell them from, or drop max_identification"))
        chance = self.baselines.identification
        if self.policy.max_identification is None and self.identification - chance > _IDENTIFIED_ABOVE_CHANCE:
            # Poor pixels may still give a person away: that is no leak by this policy, but no pass either.
            share = (
                f"{self.identification:.0%} of the examples are identified, against {chance:.0%} without information"
            )
            doubts.append(Reason(share, "Say in the policy how many may be (max_identification)"))
        return doubts

    def _doubts_of_lift(self, example: StrongestExample) -> list[Reason]:
        if above_policy(example, self.policy):
            return []
        psnr, near = MEASURES["psnr"], f"example {example.index} reaches {example.psnr:.1f} dB, but"
        high = [t for t in self.tries[example.index] if t.psnr >= self.policy.max_psnr]
        if any(math.isnan(t.lift) for t in high):
            why = "no control tells how much of it comes from the update"
            return [Reason(f"{near} {why}", "Leave the controls on (controls: true)")]
        own = [t.psnr - self.baselines.value(t.attack, t.index, psnr, held_out=False) for t in high]
        if any(lift >= self.policy.min_lift for lift in own):
            why = f"a held-out image is nearly as near ({example.baseline_psnr:.1f} dB)"
            return [Reason(f"{near} {why}", "Look at the pictures, and limit identification (max_identification)")]
        return []

    def _weakness(self) -> Reason | None:
        return self.strength.doubt({row.job.attack for row in self.done}) if self.done else None

    def _doubts_of_coverage(self) -> list[Reason]:
        """Say what is wrong with the results on clients that no attempt covers."""
        rows = self.coverage.open_rows
        if not rows:
            return []
        weak = self.strength.doubt({row.job.attack for row in rows})
        doubts = [] if weak is None else [weak]
        doubts += [*_doubts_of_searches(rows), *self._doubts_of_knowledge(rows), *unresolved_labels(rows)]
        flags = {flag for row in rows for flag in raised(row)} - {UNCERTAIN_LABELS}
        doubts += [_flag_doubt(flag, rows) for flag in sorted(flags)]
        return [*doubts, *self._doubts_of_numbers(rows)]

    def _doubts_of_numbers(self, rows: list[Row]) -> list[Reason]:
        """Name the measures that are not numbers although the policy limits them."""
        examples = [example for row in rows for example in row.examples]
        unmeasured = sum(math.isnan(example.value("psnr")) for example in examples)
        doubts = []
        if unmeasured:
            text = f"{counted(unmeasured, 'reconstruction')} could not be measured (PSNR is not a number)"
            doubts.append(Reason(text, "Lower the attack's learning rate, or use dtype: float64"))
        for measure, _ in self._other_limits():
            for index in sorted({e.index for e in examples if math.isnan(e.value(measure.key))}):
                why = f"{measure.label} could not be measured, but the policy limits it"
                doubts.append(Reason(f"example {index}: {why}", f"Drop {measure.limit} from the policy"))
        return doubts

    def _doubts_of_what_is_left(self) -> list[Reason]:
        """Name what no attack explained, what theory allows beyond the attacks, and standard attacks not run."""
        if not self.done:
            return []
        weak = self._weakness() is not None
        gap = None if weak else gap_doubt(self.allowed, highest(e.psnr for e in self.strongest), self.policy)
        doubts = [doubt for doubt in (self.coverage.unexplained(), gap) if doubt is not None]
        names = [] if self.missing or self.expected.spared else self.coverage.not_run
        if names:
            waivers = " ".join(f"--waive {name}" for name in names)
            remedy = f"Run them with --attack standard, or do without them in the policy with {waivers}"
            doubts.append(Reason(f"standard attacks not run: {', '.join(names)}", remedy))
        return doubts

    def _doubt_of_gaps(self) -> Reason:
        count = counted(len(self.coverage.uncovered), "update")
        text = f"{count}: no attack gave a result that could support a pass"
        return Reason(text, OTHER_ATTACKS)

    def _doubts_of_knowledge(self, rows: list[Row]) -> list[Reason]:
        """A defence that no attack knew was not tested, nor by one that finds nothing without it either."""
        if self.defense == "none":
            return []
        knowing = {row.job.attack for row in rows if row.result and row.result.adaptive}
        if knowing:
            weak = None if len(knowing) == len({row.job.attack for row in rows}) else self.strength.doubt(knowing)
            return [] if weak is None else [Reason(f"of the attacks that know this defence: {weak.text}", weak.remedy)]
        text = "no attack that knows this defence was run"
        if any(row.job.knowledge.get("defense") for row in rows):
            why = "the defence has no channel, or no attack here reads it"
            learned = "learning-to-invert, which needs no channel, is for --knowledge informed_server"
            return [Reason(f"{text}: {why}", f"{OTHER_ATTACKS}; {learned}")]
        return [Reason(text, "Let attacks know it with --knowledge adaptive_server")]

    def _doubts_of_powers(self) -> list[Reason]:
        """A server that may choose the model was not tested by attacks that take it as it is."""
        granted = any(
            row.job.knowledge.get(power) for row in self.done for power in ("choose_weights", "choose_structure")
        )
        if not granted or any(row.result and row.result.chose_model for row in self.done):
            return []
        text = "the server may choose the model, and no attack that does so was run"
        return [Reason(text, "Add one, such as --attack robbing-the-fed, or take the server for honest (--knowledge)")]

    def _doubts_of_jobs(self) -> list[Reason]:
        """Say what became of the jobs; those without a result count only where they stand in the way of a pass."""
        broken = [row for row in self.rows if self.coverage.matters(row)]
        failed, lacking = sum(row.status == "failed" for row in broken), sum(map(starved, broken))
        waiting = self.missing and self.expected.budget is not None and not self.rows
        doubts = {
            Reason(NO_RESULT, OTHER_ATTACKS): not self.done and not waiting,
            Reason(f"{counted(failed, 'job')} failed", f"The report says why. {AGAIN}"): failed,
            # A closed form that does not fit the model is no gap; an attack the threat model starves is one.
            Reason(
                f"{counted(lacking, 'job')} refused for want of knowledge",
                "Grant what they ask for (knowledge), or leave these attacks out (standard ones with --waive NAME)",
            ): lacking,
        }
        return [*(doubt for doubt, told in doubts.items() if told), *self._doubts_of_what_is_missing()]

    def _doubts_of_what_is_missing(self) -> list[Reason]:
        """Jobs that were planned and not begun, and why."""
        expected, untold = self.expected, self.expected.findings_missing
        findings = counted(untold, "finding")
        if expected.budget is None:
            jobs, theory, remedy = f"{counted(self.missing, 'job')} missing", f"{findings} missing", AGAIN
        else:
            late, remedy = f"the budget of {expected.budget} ended before", MORE_TIME
            jobs = f"{late} {self.missing} of {expected.attempts} attempts were made"
            theory = f"{late} {findings} {'was' if untold == 1 else 'were'} made"
        told = ((self.missing, jobs), (untold, theory))
        doubts = [Reason(text, remedy) for count, text in told if count]
        if expected.spared:
            was = "attempt was" if expected.spared == 1 else "attempts were"
            text = f"{expected.spared:,} {was} not made, on examples that another attack had recovered exactly before"
            doubts.append(Reason(text, WITHOUT_BUDGET))
        return doubts


def _doubts_of_searches(rows: list[Row]) -> list[Reason]:
    """The doubt about searches that stopped short of what their updates determine."""
    searches: dict[tuple[int, int], set[str]] = defaultdict(set)
    for row in rows:
        if row.result is not None and row.result.diagnosis is not None:
            searches[row.job.seed, row.job.batch].add(row.result.diagnosis.outcome)
    missed = sum(MISSED in told and "recovered" not in told for told in searches.values())
    text = f"{counted(missed, 'update')} of {len(searches)}: the update determines the inputs, but the search missed"
    return [Reason(f"{text} them ({MISSED})", MORE_STEPS)] if missed else []


def _flag_doubt(flag: str, rows: list[Row]) -> Reason:
    count = sum(flag in row.flags for row in rows)
    return Reason(f"{count} of {counted(len(rows), 'attempt')} raised the flag: {flag}", REMEDIES.get(flag, ""))
