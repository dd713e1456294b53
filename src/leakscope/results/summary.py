"""Summarise every measure of every setting: mean, interval, and what the attack makes of no information at all.

Each example enters with the attempt that the verdict calls its strongest and with that attack's controls. What could
not be measured is left out, counted and explained.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from leakscope.metrics import MEASURES, Measure, interval
from leakscope.results.baselines import Baselines
from leakscope.results.records import NAN, ExampleRecord, Row, mean
from leakscope.results.setting_verdict import SettingVerdict
from leakscope.results.verdict import Verdict, judge

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
