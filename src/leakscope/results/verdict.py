"""Judge an audit's rows: cautious, so that doubt is never a pass, and monotone, so that fewer attacks never buy one.

The strongest attack on each example counts. An example leaks when its PSNR reaches the limit and it is certified, or
exceeds by the lift asked for the best that comes out without information. A pass needs, on every client, a result that
can be trusted (:mod:`leakscope.results.coverage`), an update that is explained as far as its noise allows, the standard
attacks of the protocol or a waiver, and nothing missing.

Outcomes are ordered: pass < doubt by evidence that looks like a leak < leak. More attacks can only move a pass up this
order. Evidence that looks like a leak is identification far above chance, a high PSNR without a lift to compare, labels
that alone hide a leak, and a certificate that contradicts the measured PSNR. More attacks remove all other doubts.

A summary has every measure of every setting: mean, interval, and what the attack makes of no information at all. Each
example enters with the attempt that the verdict calls its strongest and with that attack's controls. What could not be
measured is left out, counted and explained.
"""

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from leakscope.contracts.tables import data_frame, html_table, in_words, latex_table
from leakscope.metrics import MEASURES, Measure, interval
from leakscope.results.advice import Advice, Adviser, Asked
from leakscope.results.baselines import Baselines
from leakscope.results.coverage import AttackStrength, allowed_psnr
from leakscope.results.names import Part, parts_of, short_names
from leakscope.results.policy import Policy
from leakscope.results.reasons import Reason, Scenario, because
from leakscope.results.records import (
    NAN,
    UTILITY,
    ExampleRecord,
    FindingRow,
    Row,
    highest,
    mapping,
    mean,
    number,
    plain,
    texts,
)
from leakscope.results.scale import read_scales
from leakscope.results.setting_verdict import Expected, Judge, Outcome, SettingVerdict, StrongestExample
from leakscope.results.store import Store

EXIT_CODES: Mapping[str, int] = {"leaks": 1, "within policy": 0, "inconclusive": 5, "nothing audited": 5}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Judge the whole audit; ``exit_code`` is that of the command line, ``parts`` are by repr."""

    outcome: Outcome
    reasons: list[Reason] = field(default_factory=list)
    settings: list[SettingVerdict] = field(default_factory=list)
    worst: StrongestExample | None = None
    #: What to do next; None where nobody says what was asked for.
    advice: Advice | None = None
    #: Every protocol, defence and attack by its repr.
    parts: Mapping[str, Part] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Name each setting S1, S2 and so on, its protocol and defence by what tells them from the others."""
        protocols = short_names((setting.protocol for setting in self.settings), self.parts)
        defenses = short_names((setting.defense for setting in self.settings), self.parts)
        named = []
        for position, setting in enumerate(self.settings, start=1):
            protocol, defense = protocols[setting.protocol], defenses[setting.defense]
            short = dataclasses.replace(setting, name=f"S{position}", protocol_short=protocol, defense_short=defense)
            named.append(short)
        object.__setattr__(self, "settings", named)

    @property
    def names(self) -> dict[Scenario, str]:
        return {setting.scenario: setting.name for setting in self.settings}

    @property
    def doubts_of_all(self) -> list[Reason]:
        """Return the reasons that belong to no one scenario, such as controls that failed."""
        return [reason for reason in self.reasons if reason.scenario is None]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def __str__(self) -> str:
        return in_words(self)

    def to_frame(self, library: str | None = None) -> Any:
        """Return a data frame of pandas or polars, whichever is installed, with a line for each setting."""
        return data_frame(setting_lines(self), library)

    def to_latex(self) -> str:
        """Return the table of settings as a LaTeX ``tabular``."""
        return latex_table(shown_lines(self))

    def to_json(self) -> str:
        """Return outcome, reasons and the table of settings; the document of the whole audit is ``Audit.to_json``."""
        reasons = [reason.as_dict() for reason in self.reasons]
        facts = {"outcome": self.outcome, "exit_code": self.exit_code, "reasons": reasons}
        return json.dumps(plain({**facts, "settings": setting_lines(self)}), indent=1, allow_nan=False) + "\n"

    def _repr_html_(self) -> str:
        return verdict_html(self)


def judge_store(store: Store) -> Verdict:
    """Judge everything ``store`` holds under its own policy; missing jobs are noticed."""
    return judge(store.rows(), store.meta("policy"), store.meta("plan"), store.findings(), store.meta("spec"))


def judge(
    rows: Iterable[Row],
    policy: Policy | Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | int | None = None,
    findings: Iterable[FindingRow] = (),
    spec: Mapping[str, Any] | None = None,
) -> Verdict:
    """Judge ``rows`` and ``findings``. With ``plan`` (the store's, or a number of jobs) missing jobs are noticed.

    With ``spec`` (the store's) remedies are changes of it, none of which was made already.
    """
    limits = policy if isinstance(policy, Policy) else Policy(**(policy or {}))
    rows = list(rows)
    known: Mapping[str, Any] = plan if isinstance(plan, Mapping) else {"total": plan or 0}
    # What a defence costs says nothing about what leaks.
    findings = [finding for finding in findings if finding.kind != UTILITY]
    total, cells, with_floor = _expectations(rows, known, limits)
    floors = {finding.scenario: allowed_psnr(finding) for finding in findings if finding.kind == "floor"}
    label_chance = number(known.get("label_chance"))
    scales = read_scales(known)
    settings = []
    for protocol in dict.fromkeys(cell.protocol for cell in cells):
        baselines = Baselines(row for row in rows if not row.counts and row.job.protocol == protocol)
        strength = AttackStrength.of(protocol, rows, baselines, limits, floors, protocol in with_floor)
        for cell, planned in cells.items():
            if cell.protocol == protocol:
                attempts = [row for row in rows if row.counts and row.job.scenario == cell]
                left = planned.findings - sum(finding.scenario == cell for finding in findings)
                expected = dataclasses.replace(planned, findings_missing=max(0, left))
                chance = label_chance if not math.isnan(label_chance) else baselines.label_accuracy
                judge_ = Judge(cell, attempts, baselines, strength, floors.get(cell, NAN), limits, expected, chance)
                settings.append(dataclasses.replace(judge_.verdict(), scale=scales.get(cell)))
    settings.sort(key=lambda setting: list(cells).index(setting.scenario))
    reasons = [reason for setting in settings for reason in setting.reasons]
    skipped = sum(left_out(known, why)[1] for why in ("spared", "stopped"))
    doubts = _doubts_of_all(rows, total - skipped, settings, _ended_budget(known))
    every = [example for setting in settings for example in setting.examples]
    outcomes = {setting.outcome for setting in settings}
    outcome: Outcome = "leaks" if "leaks" in outcomes else "inconclusive"
    if not every:
        outcome, reasons = "nothing audited", reasons or [because("no-result", "other-attacks")]
    elif outcomes == {"within policy"} and not doubts:
        outcome = "within policy"
    worst = max(every, key=lambda example: (example.leaks, example.exposure), default=None)
    reasons, advice = [*reasons, *doubts], None
    if isinstance(spec, Mapping):
        adviser = Adviser(Asked.read(spec, known, limits), {one.scenario: one.outcome for one in settings})
        settings = [dataclasses.replace(one, reasons=[*map(adviser.settle, one.reasons)]) for one in settings]
        reasons = [*map(adviser.settle, reasons)]
        advice = adviser.advise(outcome, reasons)
    told: dict[str, Any] = {"settings": settings, "worst": worst, "advice": advice, "parts": parts_of(rows)}
    return Verdict(outcome=outcome, reasons=reasons, **told)


def _doubts_of_all(rows: list[Row], total: int, settings: list[SettingVerdict], budget: str | None) -> list[Reason]:
    # A failed control of an attack costs that attack its word (AttackStrength); one without an attack serves them all.
    broken = sum(row.status == "failed" for row in rows if not row.counts and row.job.attack == "none")
    missing = max(total - len(rows), sum(setting.missing for setting in settings))
    doubts = [because("control-failed", "again", count=broken)] * bool(broken)
    if missing:
        remedy, total = "again" if budget is None else "more-time", max(total, len(rows) + missing)
        doubts.append(because("jobs-missing", remedy, count=missing, total=total, budget=budget))
    return doubts


def _ended_budget(plan: Mapping[str, Any]) -> str | None:
    budget = plan.get("budget")
    return budget if isinstance(budget, str) else None


def left_out(plan: Mapping[str, Any], why: str) -> tuple[dict[Scenario, tuple[int, int]], int]:
    """Count attempts and findings that were not made on purpose, by scenario, and all such jobs but findings.

    ``spared``: a time budget was not spent on them. ``stopped``: their scenario exceeded the policy before.
    """
    told = mapping(plan.get(why))
    entries = [mapping(entry) for entry in told.get("attempts") or ()]
    cells = {
        Scenario(str(entry["protocol"]), str(entry["defense"])): (int(entry["jobs"]), int(entry.get("findings", 0)))
        for entry in entries
    }
    return cells, sum(jobs for jobs, _ in cells.values()) + int(told.get("controls") or 0)


def _expectations(
    rows: list[Row], plan: Mapping[str, Any], policy: Policy
) -> tuple[int, dict[Scenario, Expected], set[str]]:
    """Count the jobs that should be there, in all and per setting; name the protocols with a floor by theory."""
    grid: dict[Scenario, set[tuple[Any, ...]]] = defaultdict(set)
    for row in rows:
        if row.counts:
            grid[row.job.scenario].add((row.job.attack, row.job.seed, row.job.batch))
    widest = len(set().union(*grid.values())) if grid else 0
    # Positions count the plan from 0, so a gap in them is a job without a row.
    total = max((row.position + 1 for row in rows), default=0)
    total, entries = max(total, int(plan.get("total", 0))), plan.get("settings", [])
    facts: dict[str, Any] = {"examples": int(plan.get("examples", 0)), "budget": _ended_budget(plan)}
    (spared, _), (stopped, _) = left_out(plan, "spared"), left_out(plan, "stopped")
    standard, waived = mapping(plan.get("standard")), set(policy.waive)
    cells = {
        cell: Expected(
            int(entry["jobs"]),
            findings=int(entry.get("findings", 0)) - stopped.get(cell, (0, 0))[1],
            spared=spared.get(cell, (0, 0))[0],
            stopped=stopped.get(cell, (0, 0))[0],
            # Standard attacks that the policy does not waive; plans of older versions do not name them.
            required=None if (names := standard.get(entry["protocol"])) is None else frozenset(texts(names)) - waived,
            **facts,
        )
        for entry in entries
        for cell in [Scenario(entry["protocol"], entry["defense"])]
    }
    with_floor = {entry["protocol"] for entry in entries if entry.get("has_floor")}
    return total, {**dict.fromkeys(grid, Expected(widest)), **cells}, with_floor


def setting_lines(verdict: Verdict) -> list[dict[str, Any]]:
    """List every setting with its outcome and numbers; None where there is none."""
    return [plain(_line(setting)) for setting in verdict.settings]


def _line(setting: SettingVerdict) -> dict[str, Any]:
    low, high = setting.interval
    return {
        "setting": setting.name,
        "protocol": setting.protocol_short,
        "defense": setting.defense_short,
        "outcome": setting.outcome,
        "leaking": sum(example.leaks for example in setting.examples),
        "certified": sum(example.certified for example in setting.examples),
        "examples": len(setting.examples),
        "worst_psnr": highest(example.psnr for example in setting.examples),
        "mean_psnr": setting.mean_psnr,
        "psnr_low": low,
        "psnr_high": high,
        "baseline_psnr": setting.baseline_psnr,
        "identification": setting.identification,
        "label_accuracy": setting.label_accuracy,
    }


#: Columns of the table for people, and what they are called there.
_SHOWN = {
    "setting": "setting",
    "protocol": "protocol",
    "defense": "defence",
    "worst_psnr": "worst PSNR (dB)",
    "mean_psnr": "mean PSNR (dB)",
    "baseline_psnr": "no information (dB)",
    "leaking": "leaking",
    "certified": "certified",
    "outcome": "outcome",
}


def shown_lines(verdict: Verdict) -> list[dict[str, Any]]:
    """Rename and select the columns of the report."""
    return [{title: line[name] for name, title in _SHOWN.items()} for line in setting_lines(verdict)]


def verdict_html(verdict: Verdict, *more: str) -> str:
    return html_table(f"Verdict: {verdict.outcome}", shown_lines(verdict), [str(verdict), *more])


NO_CONTROL, NO_RESULT = "no control was measured", "no attack gave a result"


@dataclass(frozen=True, kw_only=True)
class MeasureSummary:
    """Summarise one measure over the examples of a setting, and over controls as the ``baseline``.

    ``count`` examples enter the mean; ``reason`` says why others, or all, do not.
    """

    measure: Measure
    mean: float = NAN
    interval: tuple[float, float] = (NAN, NAN)
    baseline: float = NAN
    baseline_interval: tuple[float, float] = (NAN, NAN)
    count: int = 0
    reason: str | None = None
    baseline_count: int = 0
    baseline_reason: str | None = None

    @property
    def name(self) -> str:
        return self.measure.name


@dataclass(frozen=True, kw_only=True)
class SettingSummary:
    protocol: str
    defense: str
    measures: list[MeasureSummary] = field(default_factory=list)


def summarise(rows: Iterable[Row], verdict: Verdict | None = None) -> list[SettingSummary]:
    """Summarise each setting's measures in the order of the verdict, which is made here where none is given.

    >>> job = {"protocol": "P()", "defense": "none", "attack": "A()", "attack_name": "a", "seed": 0, "batch": 0}
    >>> result = {"examples": [{"index": 0, "psnr": 24.0, "identified": True}, {"index": 1, "psnr": 16.0}]}
    >>> blind = {"examples": [{"index": 0, "psnr": 9.0, "identified": False}, {"index": 1, "psnr": 7.0}]}
    >>> rows = [Row.read("a", 0, "done", job, result), Row.read("b", 1, "done", {**job, "control": "noise"}, blind)]
    >>> (setting,) = summarise(rows)
    >>> psnr = next(m for m in setting.measures if m.name == "psnr")
    >>> psnr.mean, psnr.interval, psnr.baseline, psnr.baseline_interval, psnr.count
    (20.0, (16.0, 24.0), 8.0, (7.0, 9.0), 2)
    >>> identification = setting.measures[-1]
    >>> identification.mean, identification.baseline, identification.count
    (1.0, 0.0, 1)
    """
    rows = list(rows)
    reasons = {row.key: {} if row.result is None else dict(row.result.reasons) for row in rows}
    controls = [row for row in rows if not row.counts]
    summaries = []
    for setting in (judge(rows) if verdict is None else verdict).settings:
        baselines = Baselines([row for row in controls if row.job.protocol == setting.protocol])
        measures = [_summarise(measure, setting, reasons, baselines) for measure in measures_of(setting.examples)]
        summaries.append(SettingSummary(protocol=setting.protocol, defense=setting.defense, measures=measures))
    return summaries


def measures_of(examples: Iterable[ExampleRecord]) -> list[Measure]:
    """Return the measures of inputs, and of labels or targets whichever the examples have."""
    far = any(MEASURES["target_error"].key in example.values for example in examples)
    left_out = "labels" if far else "targets"
    return [measure for measure in MEASURES.values() if measure.of != left_out]


def _summarise(
    measure: Measure, setting: SettingVerdict, reasons: dict[str, dict[str, str]], baselines: Baselines
) -> MeasureSummary:
    examples = setting.examples
    values = [example.value(measure.key) for example in examples]
    blind = [baselines.value(example.attack, example.index, measure) for example in examples]
    unmeasured = [example for example, value in zip(examples, values, strict=True) if math.isnan(value)]
    missing = [reasons[example.key].get(measure.key, measure.otherwise) for example in unmeasured]
    unmeasured = [example for example, value in zip(examples, blind, strict=True) if math.isnan(value)]
    blind_missing = [_joined(baselines.why_missing(e.attack, e.index, measure)) or NO_CONTROL for e in unmeasured]
    nothing = None if examples else NO_RESULT
    return MeasureSummary(
        measure=measure,
        mean=mean(values),
        interval=interval(values),
        baseline=mean(blind),
        baseline_interval=interval(blind),
        count=len(values) - len(missing),
        reason=_joined(missing) or nothing,
        baseline_count=len(blind) - len(blind_missing),
        baseline_reason=_joined(blind_missing) or nothing,
    )


def _joined(texts: Iterable[str]) -> str:
    """Each text once.

    >>> _joined(["no weights", "", "too small", "no weights"])
    'no weights; too small'
    """
    return "; ".join(text for text in dict.fromkeys(texts) if text)
