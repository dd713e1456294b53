"""The verdict on an audit's rows: cautious, so that doubt is never a pass.

The strongest attack on each example counts. An example leaks when its PSNR reaches the limit and exceeds, by
the lift asked for, what the same attack makes out of pure noise. Flags, failed and missing jobs, and numbers
that could not be computed turn "within policy" into "inconclusive".
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from leakscope.audit.spec import Policy
from leakscope.audit.store import Row, Store

Outcome = Literal["leaks", "within policy", "inconclusive", "nothing audited"]
EXIT_CODES: Mapping[str, int] = {"leaks": 1, "within policy": 0, "inconclusive": 5, "nothing audited": 5}
NAN = float("nan")


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
    psnr: float
    ssim: float = NAN
    mse: float = NAN
    rmse: float = NAN
    rmse_maxnorm: float = NAN
    lpips: float = NAN
    identified: bool | None = None
    label: int | None = None
    label_guess: int | None = None
    label_correct: bool | None = None
    baseline_psnr: float = NAN
    lift: float = NAN
    leaks: bool = False


@dataclass(frozen=True, kw_only=True)
class SettingVerdict:
    """One protocol with one defence."""

    protocol: str
    defense: str
    outcome: Outcome
    reasons: list[str] = field(default_factory=list)
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


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The whole audit; ``exit_code`` is that of the command line."""

    outcome: Outcome
    reasons: list[str] = field(default_factory=list)
    settings: list[SettingVerdict] = field(default_factory=list)
    worst: StrongestExample | None = None

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]


def judge_store(store: Store) -> Verdict:
    """The verdict on everything ``store`` holds, under its own policy, with missing jobs noticed."""
    return judge(store.rows(), store.meta("policy"), store.meta("plan"))


def judge(
    rows: Iterable[Row],
    policy: Policy | Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | int | None = None,
) -> Verdict:
    """The verdict on ``rows``; with ``plan`` (the store's, or a number of jobs) missing jobs are noticed."""
    limits = policy if isinstance(policy, Policy) else Policy(**(policy or {}))
    rows = list(rows)
    total, expected = _expectations(rows, plan)
    cells: dict[tuple[str, str], list[Row]] = {cell: [] for cell in expected}
    for row in rows:
        if not row.job["control"]:
            cells.setdefault((row.job["protocol"], row.job["defense"]), []).append(row)
    controls = [row for row in rows if row.job["control"]]
    settings = [
        _judge_setting(cell, found, controls, limits, max(0, expected.get(cell, 0) - len(found)))
        for cell, found in cells.items()
    ]
    reasons = [
        f"{setting.protocol}, defence {setting.defense}: {reason}" for setting in settings for reason in setting.reasons
    ]
    doubts = []
    broken = sum(row.status == "failed" for row in controls)
    if broken:
        doubts.append(f"{_count(broken, 'control job')} failed")
    missing = max(total - len(rows), sum(setting.missing for setting in settings))
    if missing:
        doubts.append(f"{missing} of {max(total, len(rows) + missing)} jobs have not been run")
    every = [example for setting in settings for example in setting.examples]
    outcome: Outcome
    if not every:
        outcome = "nothing audited"
        reasons = reasons or ["no attack gave a result"]
    elif any(setting.outcome == "leaks" for setting in settings):
        outcome = "leaks"
    elif doubts or any(setting.outcome != "within policy" for setting in settings):
        outcome = "inconclusive"
    else:
        outcome = "within policy"
    worst = max(every, key=lambda e: (e.leaks, -math.inf if math.isnan(e.psnr) else e.psnr), default=None)
    return Verdict(outcome=outcome, reasons=[*reasons, *doubts], settings=settings, worst=worst)


def _expectations(rows: list[Row], plan: Mapping[str, Any] | int | None) -> tuple[int, dict[tuple[str, str], int]]:
    """How many jobs there should be, in all and a setting; without a plan the rows' own grid is the guide."""
    grid: dict[tuple[str, str], set[tuple[Any, ...]]] = defaultdict(set)
    for row in rows:
        job = row.job
        if not job["control"]:
            grid[job["protocol"], job["defense"]].add((job["attack"], job["seed"], job["batch"]))
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


def _judge_setting(
    cell: tuple[str, str], rows: list[Row], controls: list[Row], policy: Policy, missing: int
) -> SettingVerdict:
    protocol, defense = cell
    done = [row for row in rows if row.status == "done"]
    failed = sum(row.status == "failed" for row in rows)
    refused = sum(row.status == "refused" for row in rows)
    baselines = _Baselines([row for row in controls if row.job["protocol"] == protocol])
    measured: dict[int, list[StrongestExample]] = defaultdict(list)
    unmeasured = 0
    for row in done:
        for numbers in (row.result or {}).get("examples", []):
            example = _example(row, numbers, baselines)
            measured[example.index].append(example)
            unmeasured += math.isnan(example.psnr)
    strongest = [_strongest(found, policy) for _, found in sorted(measured.items())]
    # One attack that recognises an example is enough, even if another comes nearer in pixels.
    recognised = {index: any(e.identified for e in found) for index, found in measured.items()}
    rate = _mean([float(recognised[e.index]) for e in strongest if e.identified is not None])
    identified_too_often = policy.max_identification is not None and rate > policy.max_identification
    examples, leaks, doubts = [], [], []
    for example in strongest:
        why, doubt = _against(example, measured[example.index], policy)
        if identified_too_often and recognised[example.index]:
            why.append("identified")
        examples.append(dataclasses.replace(example, leaks=bool(why)))
        if why:
            leaks.append(f"example {example.index} leaks by {example.attack_name}: {', '.join(why)}")
        doubts += doubt
    if identified_too_often:
        leaks.append(f"{rate:.0%} of the examples are identified, the limit is {policy.max_identification:.0%}")
    if policy.max_identification is not None and any(e.identified is None for e in strongest):
        doubts.append("identification could not be measured for every example, but the policy limits it")
    chance = baselines.identified()
    if policy.max_identification is None and not math.isnan(chance) and rate - chance > 0.5:
        # Poor pixels may still give a person away: that is no leak by this policy, but no pass either.
        doubts.append(f"{rate:.0%} of the examples are identified, against {chance:.0%} without information")
    flags = sorted({flag for row in done for flag in (row.result or {}).get("flags", [])})
    if not done:
        doubts.append("no attack gave a result")
    if unmeasured:
        doubts.append(f"{_count(unmeasured, 'reconstruction')} could not be measured (PSNR is not a number)")
    if flags:
        doubts.append(f"raised flags: {', '.join(flags)}")
    if failed:
        doubts.append(f"{_count(failed, 'job')} failed")
    # A closed form that does not fit the model is no gap; an attack the threat model starves is one.
    starved = sum(row.status == "refused" and (row.error or "").startswith("MissingKnowledge") for row in rows)
    if starved:
        doubts.append(f"{_count(starved, 'job')} refused for want of knowledge")
    if missing:
        doubts.append(f"{_count(missing, 'job')} missing")
    known = [e.psnr for e in examples if not math.isnan(e.psnr)]
    outcome: Outcome = "leaks" if leaks else "inconclusive" if doubts else "within policy"
    return SettingVerdict(
        protocol=protocol,
        defense=defense,
        outcome=outcome,
        reasons=[*leaks, *doubts],
        examples=examples,
        mean_psnr=_mean(known),
        interval=_interval(known),
        baseline_psnr=_mean([e.baseline_psnr for e in examples if not math.isnan(e.baseline_psnr)]),
        identification=rate,
        label_accuracy=_mean([float(e.label_correct) for e in examples if e.label_correct is not None]),
        flags=flags,
        done=len(done),
        failed=failed,
        refused=refused,
        missing=missing,
    )


def _against(example: StrongestExample, tries: list[StrongestExample], policy: Policy) -> tuple[list[str], list[str]]:
    """Why an example leaks, and what keeps us from being sure that it does not."""
    leaks, doubts = [], []
    if _above(example, policy):
        lift = "" if math.isnan(example.lift) else f", {example.lift:.1f} dB above its control"
        leaks.append(f"PSNR {example.psnr:.1f} dB{lift}")
    elif any(t.psnr >= policy.max_psnr and math.isnan(t.lift) for t in tries):
        doubts.append(
            f"example {example.index} reaches {example.psnr:.1f} dB, but no control tells how much of it "
            "comes from the update"
        )
    if policy.max_ssim is not None:
        known = [t.ssim for t in tries if not math.isnan(t.ssim)]
        if known and max(known) >= policy.max_ssim:
            leaks.append(f"SSIM {max(known):.2f}")
        if len(known) < len(tries):
            doubts.append(f"example {example.index}: SSIM could not be measured, but the policy limits it")
    return leaks, doubts


class _Baselines:
    """Mean PSNR of each attack's control on each example; where it has none, the best of the others'."""

    def __init__(self, controls: list[Row]) -> None:
        found: dict[tuple[str, int], list[float]] = defaultdict(list)
        self._identified: list[float] = []
        for row in controls:
            for numbers in (row.result or {}).get("examples", []) if row.status == "done" else []:
                found[row.job["attack"], numbers["index"]].append(_number(numbers.get("psnr")))
                if numbers.get("identified") is not None:
                    self._identified.append(float(numbers["identified"]))
        self._own = {cell: _mean([v for v in values if not math.isnan(v)]) for cell, values in found.items()}

    def identified(self) -> float:
        """Share of examples identified from no information, by luck or by the prior alone."""
        return _mean(self._identified)

    def psnr(self, attack: str, index: int) -> float:
        own = self._own.get((attack, index))
        if own is not None:
            return own
        others = [value for (_, place), value in self._own.items() if place == index and not math.isnan(value)]
        return max(others, default=NAN)


def _example(row: Row, numbers: Mapping[str, Any], baselines: _Baselines) -> StrongestExample:
    job = row.job
    index = int(numbers["index"])
    psnr = _number(numbers.get("psnr"))
    baseline = baselines.psnr(job["attack"], index)
    return StrongestExample(
        index=index,
        attack=job["attack"],
        attack_name=job["attack_name"],
        seed=job["seed"],
        key=row.key,
        protocol=job["protocol"],
        defense=job["defense"],
        psnr=psnr,
        identified=numbers.get("identified"),
        label=numbers.get("label"),
        label_guess=numbers.get("label_guess"),
        label_correct=numbers.get("label_correct"),
        baseline_psnr=baseline,
        lift=psnr - baseline,
        ssim=_number(numbers.get("ssim")),
        mse=_number(numbers.get("mse")),
        rmse=_number(numbers.get("rmse")),
        rmse_maxnorm=_number(numbers.get("rmse_maxnorm")),
        lpips=_number(numbers.get("lpips")),
    )


def _strongest(found: list[StrongestExample], policy: Policy) -> StrongestExample:
    """The highest PSNR; above the limit, the highest with the lift too, lest a strong prior hide a leak."""
    # max keeps the first of equals, so the order of the plan decides ties.
    return max(found, key=lambda e: (_above(e, policy), -math.inf if math.isnan(e.psnr) else e.psnr))


def _above(example: StrongestExample, policy: Policy) -> bool:
    return example.psnr >= policy.max_psnr and (policy.min_lift <= 0 or example.lift >= policy.min_lift)


def _number(value: Any) -> float:
    return NAN if value is None or isinstance(value, bool) else float(value)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else NAN


def _interval(values: list[float]) -> tuple[float, float]:
    from leakscope.metrics import interval

    if not values:
        return NAN, NAN
    low, high = interval(values)
    return float(low), float(high)


def _count(number: int, noun: str) -> str:
    """A number with its noun.

    >>> _count(1, "job"), _count(2, "job")
    ('1 job', '2 jobs')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
