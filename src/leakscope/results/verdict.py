"""The verdict on an audit's rows: cautious, so that doubt is never a pass.

The strongest attack on each example counts. An example leaks when its PSNR reaches the limit and exceeds, by
the lift asked for, what the same attack makes out of pure noise. Flags, failed and missing jobs, numbers that could not
be computed, and defences that no attack knew turn "within policy" into "inconclusive".
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from leakscope.metrics import MEASURES, Measure, interval
from leakscope.results.policy import Policy
from leakscope.results.records import NAN, ExampleRecord, Row, counted, mean
from leakscope.results.store import Store

Outcome = Literal["leaks", "within policy", "inconclusive", "nothing audited"]
EXIT_CODES: Mapping[str, int] = {"leaks": 1, "within policy": 0, "inconclusive": 5, "nothing audited": 5}
#: Where the policy does not limit it, identification this much above chance is a doubt.
_IDENTIFIED_ABOVE_CHANCE = 0.5


@dataclass(frozen=True)
class Reason:
    """Why a verdict is what it is, in one sentence, and what the user can do about it, in another (or nothing).

    >>> print(Reason("2 jobs failed", "Run the same command again"))
    2 jobs failed. Run the same command again.
    """

    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text}. {self.remedy}." if self.remedy else self.text


@dataclass(frozen=True, kw_only=True)
class StrongestExample:
    """The best reconstruction of one example, over attacks and seeds, by PSNR."""

    index: int
    attack: str
    attack_name: str
    seed: int
    key: str
    protocol: str
    defense: str
    values: Mapping[str, float] = field(repr=False)
    label: Any = None
    label_guess: Any = None
    baseline_psnr: float = NAN
    leaks: bool = False

    def value(self, key: str) -> float:
        """The measure with this key; NaN where it is missing."""
        return self.values.get(key, NAN)

    @property
    def psnr(self) -> float:
        return self.value("psnr")

    @property
    def ssim(self) -> float:
        return self.value("ssim")

    @property
    def exposure(self) -> float:
        """PSNR for ordering; what was not measured comes last."""
        return -math.inf if math.isnan(self.psnr) else self.psnr

    @property
    def lift(self) -> float:
        """PSNR above the control of the same attack."""
        return self.psnr - self.baseline_psnr

    @property
    def identified(self) -> bool | None:
        value = self.value("identified")
        return None if math.isnan(value) else value > 0

    def __str__(self) -> str:
        return f"example {self.index} at {self.psnr:.1f} dB by {self.attack_name}, defence {self.defense}"


@dataclass(frozen=True, kw_only=True)
class SettingVerdict:
    """One protocol with one defence."""

    protocol: str
    defense: str
    outcome: Outcome
    reasons: list[Reason] = field(default_factory=list)
    examples: list[StrongestExample] = field(default_factory=list)
    mean_psnr: float = NAN
    interval: tuple[float, float] = (NAN, NAN)
    baseline_psnr: float = NAN
    identification: float = NAN
    label_accuracy: float = NAN
    flags: list[str] = field(default_factory=list)
    done: int = 0
    failed: int = 0
    refused: int = 0
    missing: int = 0

    @property
    def named_reasons(self) -> list[Reason]:
        """The reasons with the setting's name, as the verdict on the whole audit tells them."""
        place = f"{self.protocol}, defence {self.defense}"
        return [Reason(f"{place}: {reason.text}", reason.remedy) for reason in self.reasons]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The whole audit; ``exit_code`` is that of the command line."""

    outcome: Outcome
    reasons: list[Reason] = field(default_factory=list)
    settings: list[SettingVerdict] = field(default_factory=list)
    worst: StrongestExample | None = None

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def __str__(self) -> str:
        from leakscope.results.reasons import paragraph

        return paragraph(self)


def judge_store(store: Store) -> Verdict:
    """The verdict on everything ``store`` holds, under its own policy, with missing jobs noticed."""
    return judge(store.rows(), store.meta("policy"), store.meta("plan"))


def judge(
    rows: Iterable[Row], policy: Policy | Mapping[str, Any] | None = None, plan: Mapping[str, Any] | int | None = None
) -> Verdict:
    """The verdict on ``rows``; with ``plan`` (the store's, or a number of jobs) missing jobs are noticed."""
    limits = policy if isinstance(policy, Policy) else Policy(**(policy or {}))
    rows = list(rows)
    total, expected = _expectations(rows, plan)
    cells: dict[tuple[str, str], list[Row]] = {cell: [] for cell in expected}
    for row in rows:
        if row.counts:
            cells.setdefault(row.job.setting, []).append(row)
    controls = [row for row in rows if not row.counts]
    settings = [
        _Setting(cell, attempts, controls, limits, max(0, expected.get(cell, 0) - len(attempts))).verdict()
        for cell, attempts in cells.items()
    ]
    reasons = [reason for setting in settings for reason in setting.named_reasons]
    doubts = _doubts_of_all(rows, controls, total, settings)
    every = [example for setting in settings for example in setting.examples]
    outcomes = {setting.outcome for setting in settings}
    outcome: Outcome = "leaks" if "leaks" in outcomes else "inconclusive"
    if not every:
        outcome, reasons = "nothing audited", reasons or [Reason("no attack gave a result")]
    elif outcomes == {"within policy"} and not doubts:
        outcome = "within policy"
    worst = max(every, key=lambda example: (example.leaks, example.exposure), default=None)
    return Verdict(outcome=outcome, reasons=[*reasons, *map(Reason, doubts)], settings=settings, worst=worst)


def _doubts_of_all(rows: list[Row], controls: list[Row], total: int, settings: list[SettingVerdict]) -> list[str]:
    """Doubts that belong to no one setting."""
    broken = sum(row.status == "failed" for row in controls)
    missing = max(total - len(rows), sum(setting.missing for setting in settings))
    unrun = f"{missing} of {max(total, len(rows) + missing)} jobs have not been run"
    return [*([f"{counted(broken, 'control job')} failed"] if broken else []), *([unrun] if missing else [])]


def _expectations(rows: list[Row], plan: Mapping[str, Any] | int | None) -> tuple[int, dict[tuple[str, str], int]]:
    """How many jobs there should be, in all and per setting; without a plan the rows' own grid is the guide."""
    grid: dict[tuple[str, str], set[tuple[Any, ...]]] = defaultdict(set)
    for row in rows:
        if row.counts:
            grid[row.job.setting].add((row.job.attack, row.job.seed, row.job.batch))
    widest = len(set().union(*grid.values())) if grid else 0
    expected = dict.fromkeys(grid, widest)
    # Positions count the plan from 0, so a gap in them is a job without a row.
    total = max((row.position + 1 for row in rows), default=0)
    if isinstance(plan, int):
        total = max(total, plan)
    elif plan is not None:
        total = max(total, int(plan.get("total", 0)))
        for entry in plan.get("settings", []):
            expected[entry["protocol"], entry["defense"]] = int(entry["jobs"])
    return total, expected


class _Setting:
    """The rows of one setting, and what speaks against it and against our being sure."""

    def __init__(self, cell: tuple[str, str], rows: list[Row], controls: list[Row], policy: Policy, missing: int):
        self.protocol, self.defense = cell
        self.rows, self.policy, self.missing = rows, policy, missing
        self.done = [row for row in rows if row.status == "done"]
        self.baselines = Baselines([row for row in controls if row.job.protocol == self.protocol])
        self.tries: dict[int, list[StrongestExample]] = defaultdict(list)
        for row in self.done:
            for example in row.examples:
                self.tries[example.index].append(_attempt(row, example, self.baselines))
        self.strongest = [_strongest(tries, policy) for _, tries in sorted(self.tries.items())]
        # One attack that recognises an example is enough, even if another comes nearer in pixels.
        self.recognised = {index: any(e.identified for e in tries) for index, tries in self.tries.items()}
        measured = [e for e in self.strongest if e.identified is not None]
        self.identification = mean([float(self.recognised[e.index]) for e in measured])
        limit = policy.max_identification
        self.identified_too_often = limit is not None and self.identification > limit
        self.flags = sorted({flag for row in self.done for flag in row.flags})
        self.fates = {status: sum(r.status == status for r in rows) for status in ("done", "failed", "refused")}

    def verdict(self) -> SettingVerdict:
        leaks = {example.index: self._leaks_of(example) for example in self.strongest}
        examples = [dataclasses.replace(e, leaks=bool(leaks[e.index])) for e in self.strongest]
        leaking = [example for example in examples if example.leaks]
        against = [f"example {e.index} leaks by {e.attack_name}: {', '.join(leaks[e.index])}" for e in leaking]
        if self.identified_too_often:
            limit = self.policy.max_identification
            against.append(f"{self.identification:.0%} of the examples are identified, the limit is {limit:.0%}")
        doubts = [*self._doubts_of_measures(), *self._doubts_of_knowledge(), *self._doubts_of_jobs()]
        psnrs = [e.psnr for e in examples if not math.isnan(e.psnr)]
        return SettingVerdict(
            protocol=self.protocol,
            defense=self.defense,
            outcome="leaks" if against else "inconclusive" if doubts else "within policy",
            reasons=list(map(Reason, [*against, *doubts])),
            examples=examples,
            mean_psnr=mean(psnrs),
            interval=interval(psnrs),
            baseline_psnr=mean([e.baseline_psnr for e in examples]),
            identification=self.identification,
            label_accuracy=mean([e.value("label_correct") for e in examples]),
            flags=self.flags,
            missing=self.missing,
            **self.fates,
        )

    def _leaks_of(self, example: StrongestExample) -> list[str]:
        """Why an example leaks, in words; nothing where it does not."""
        leaks = []
        if above_policy(example, self.policy):
            lift = "" if math.isnan(example.lift) else f", {example.lift:.1f} dB above its control"
            leaks.append(f"PSNR {example.psnr:.1f} dB{lift}")
        for measure, limit in self._other_limits():
            best = _best([t.value(measure.key) for t in self.tries[example.index]], measure)
            if best >= limit if measure.better == "higher" else best <= limit:
                leaks.append(f"{measure.label} {best:.2f}")
        if self.identified_too_often and self.recognised[example.index]:
            leaks.append("identified")
        return leaks

    def _other_limits(self) -> list[tuple[Measure, float]]:
        """Measures of single examples that the policy limits, beside PSNR with its lift."""
        limited = [m for m in MEASURES.values() if m.limit is not None and m.per == "example" and m.name != "psnr"]
        limits = [(measure, getattr(self.policy, str(measure.limit))) for measure in limited]
        return [(measure, limit) for measure, limit in limits if limit is not None]

    def _doubts_of_measures(self) -> list[str]:
        """Numbers that are missing although something hangs on them."""
        doubts = []
        for example in self.strongest:
            tries = self.tries[example.index]
            unlifted = any(t.psnr >= self.policy.max_psnr and math.isnan(t.lift) for t in tries)
            if unlifted and not above_policy(example, self.policy):
                unknown = "no control tells how much of it comes from the update"
                doubts.append(f"example {example.index} reaches {example.psnr:.1f} dB, but {unknown}")
            for measure, _ in self._other_limits():
                if any(math.isnan(t.value(measure.key)) for t in tries):
                    why = f"{measure.label} could not be measured, but the policy limits it"
                    doubts.append(f"example {example.index}: {why}")
        if self.policy.max_identification is not None and any(e.identified is None for e in self.strongest):
            doubts.append("identification could not be measured for every example, but the policy limits it")
        chance = self.baselines.identification
        if self.policy.max_identification is None and self.identification - chance > _IDENTIFIED_ABOVE_CHANCE:
            # Poor pixels may still give a person away: that is no leak by this policy, but no pass either.
            share = f"{self.identification:.0%} of the examples are identified"
            doubts.append(f"{share}, against {chance:.0%} without information")
        return doubts

    def _doubts_of_knowledge(self) -> list[str]:
        """A defence that no attack knew was not tested."""
        if self.defense == "none" or not self.done or any(row.result and row.result.adaptive for row in self.done):
            return []
        why = "let attacks know it with knowledge adaptive_server"
        if any(row.job.knowledge.get("defense") for row in self.done):
            why = "the defence has no channel, or no attack here reads it"
        return [f"no attack that knows this defence was run: {why}"]

    def _doubts_of_jobs(self) -> list[str]:
        """What became of the jobs."""
        unmeasured = sum(math.isnan(t.psnr) for tries in self.tries.values() for t in tries)
        # A closed form that does not fit the model is no gap; an attack the threat model starves is one.
        starved = sum(row.status == "refused" and (row.error or "").startswith("MissingKnowledge") for row in self.rows)
        fates = {"failed": self.fates["failed"], "refused for want of knowledge": starved, "missing": self.missing}
        doubts = {
            "no attack gave a result": not self.done,
            f"{counted(unmeasured, 'reconstruction')} could not be measured (PSNR is not a number)": unmeasured,
            f"raised flags: {', '.join(self.flags)}": self.flags,
            **{f"{counted(count, 'job')} {fate}": count for fate, count in fates.items()},
        }
        return [doubt for doubt, raised in doubts.items() if raised]


class Baselines:
    """Every measure of each attack's controls on each example, averaged over seeds; they serve all defences."""

    def __init__(self, controls: list[Row]) -> None:
        self._blind: dict[tuple[str, int], list[tuple[ExampleRecord, Mapping[str, str]]]] = defaultdict(list)
        for row in controls:
            if row.status == "done" and row.result is not None:
                for example in row.examples:
                    self._blind[row.job.attack, example.index].append((example, row.result.reasons))

    @property
    def identification(self) -> float:
        """Share of examples identified from no information, by luck or by the prior alone."""
        return mean(example.value("identified") for seeds in self._blind.values() for example, _ in seeds)

    def value(self, attack: str, index: int, measure: Measure) -> float:
        """The same attack's control, else the best of the others'; NaN where there is none."""
        controls = self._controls(attack, index)
        return _best([mean(example.value(measure.key) for example, _ in seeds) for seeds in controls], measure)

    def why_missing(self, attack: str, index: int, measure: Measure) -> list[str]:
        """Why there is no such value, once for each control."""
        controls = self._controls(attack, index)
        return [reasons.get(measure.key, measure.otherwise) for seeds in controls for _, reasons in seeds]

    def _controls(self, attack: str, index: int) -> list[list[tuple[ExampleRecord, Mapping[str, str]]]]:
        own = self._blind.get((attack, index))
        return [own] if own else [seeds for place, seeds in self._blind.items() if place[1] == index]


def above_policy(example: StrongestExample, policy: Policy) -> bool:
    """Whether its PSNR reaches the limit with the lift that is asked for."""
    return example.psnr >= policy.max_psnr and (policy.min_lift <= 0 or example.lift >= policy.min_lift)


def _attempt(row: Row, example: ExampleRecord, baselines: Baselines) -> StrongestExample:
    job, baseline = row.job, baselines.value(row.job.attack, example.index, MEASURES["psnr"])
    same = {name: getattr(example, name) for name in ("index", "values", "label", "label_guess")}
    same |= {name: getattr(job, name) for name in ("attack", "attack_name", "seed", "protocol", "defense")}
    return StrongestExample(key=row.key, baseline_psnr=baseline, **same)


def _strongest(tries: list[StrongestExample], policy: Policy) -> StrongestExample:
    """The highest PSNR; above the limit, the highest with the lift too, lest a strong prior hide a leak."""
    # max keeps the first of equals, so the order of the plan decides ties.
    return max(tries, key=lambda example: (above_policy(example, policy), example.exposure))


def _best(values: list[float], measure: Measure) -> float:
    """The best for the adversary of what is not NaN; NaN of nothing."""
    best = max if measure.better == "higher" else min
    return best((value for value in values if not math.isnan(value)), default=NAN)
