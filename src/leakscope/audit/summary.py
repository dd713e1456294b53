"""Every measure of every setting: mean, interval, and what the attack makes of no information at all.

Each example enters with the attempt that the verdict calls its strongest, and with that attack's controls, so
the two columns compare like with like. What could not be measured is left out, counted and explained.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from leakscope.audit.spec import Policy
from leakscope.audit.store import Row
from leakscope.audit.verdict import SettingVerdict, StrongestExample, judge

Better = Literal["higher", "lower"]
NAN = float("nan")
NO_RESULT = "no attack gave a result"
NO_CONTROL = "no control was measured"
NOT_TOLD = "not measured, and the job does not say why"
NO_GUESS = "the attack guesses no labels"


@dataclass(frozen=True, kw_only=True)
class MeasureSummary:
    """One measure over the examples of a setting.

    ``better`` is the direction in which the adversary gains. ``count`` examples enter the mean; ``reason`` says
    why others, or all, do not. The ``baseline`` is the same for control rows, where nothing was to be learnt.
    """

    name: str
    better: Better
    mean: float = NAN
    interval: tuple[float, float] = (NAN, NAN)
    baseline: float = NAN
    baseline_interval: tuple[float, float] = (NAN, NAN)
    count: int = 0
    reason: str | None = None
    baseline_count: int = 0
    baseline_reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class SettingSummary:
    """One protocol with one defence."""

    protocol: str
    defense: str
    measures: list[MeasureSummary] = field(default_factory=list)


@dataclass(frozen=True)
class _Measure:
    name: str
    key: str  # in the rows' results and in StrongestExample
    better: Better
    otherwise: str = NOT_TOLD


_MEASURES = (
    _Measure("mse", "mse", "lower"),
    _Measure("rmse", "rmse", "lower"),
    _Measure("rmse_maxnorm", "rmse_maxnorm", "lower"),
    _Measure("psnr", "psnr", "higher"),
    _Measure("ssim", "ssim", "higher"),
    _Measure("lpips", "lpips", "lower"),
    _Measure("label_accuracy", "label_correct", "higher", NO_GUESS),
    _Measure("identification", "identified", "higher"),
)


def summarise(rows: Iterable[Row], policy: Policy | Mapping[str, Any] | None = None) -> list[SettingSummary]:
    """Each setting's measures, in the order of the verdict; ``policy`` has a say in which attempt is strongest.

    >>> job = {"protocol": "P()", "defense": "none", "attack": "A()", "attack_name": "a", "seed": 0, "batch": 0}
    >>> result = {"examples": [{"index": 0, "psnr": 24.0, "identified": True}, {"index": 1, "psnr": 16.0}]}
    >>> blind = {"examples": [{"index": 0, "psnr": 9.0, "identified": False}, {"index": 1, "psnr": 7.0}]}
    >>> rows = [Row("a", 0, "done", {**job, "control": False}, result)]
    >>> rows += [Row("b", 1, "done", {**job, "control": True}, blind)]
    >>> (setting,) = summarise(rows)
    >>> psnr = next(m for m in setting.measures if m.name == "psnr")
    >>> psnr.mean, psnr.interval, psnr.baseline, psnr.baseline_interval, psnr.count
    (20.0, (16.0, 24.0), 8.0, (7.0, 9.0), 2)
    >>> identification = setting.measures[-1]
    >>> identification.mean, identification.baseline, identification.count
    (1.0, 0.0, 1)
    """
    rows = list(rows)
    reasons = {row.key: _reasons(row) for row in rows}
    return [
        _summarise_setting(setting, reasons, _Controls(rows, setting.protocol))
        for setting in judge(rows, policy).settings
    ]


class _Controls:
    """The control rows of one protocol, by attack and example; they are made once, for all its defences."""

    def __init__(self, rows: Iterable[Row], protocol: str) -> None:
        self._found: dict[tuple[str, int], list[tuple[Mapping[str, Any], Mapping[str, str]]]] = defaultdict(list)
        for row in rows:
            if row.job["control"] and row.job["protocol"] == protocol and row.status == "done":
                for numbers in (row.result or {}).get("examples", []):
                    self._found[row.job["attack"], int(numbers["index"])].append((numbers, _reasons(row)))

    def baseline(self, example: StrongestExample, measure: _Measure) -> tuple[float, str]:
        """The same attack's control, averaged over seeds, else the best of the others'; why it is NaN, if so."""
        own = self._found.get((example.attack, example.index))
        if own is not None:
            tries = [own]
        else:
            tries = [found for (_, index), found in self._found.items() if index == example.index]
        values = [_mean([_number(numbers.get(measure.key)) for numbers, _ in found]) for found in tries]
        known = [value for value in values if not math.isnan(value)]
        if known:
            best: Callable[[list[float]], float] = max if measure.better == "higher" else min
            return best(known), ""
        texts = [why.get(measure.key, measure.otherwise) for found in tries for _, why in found]
        return NAN, _joined(texts) or NO_CONTROL


def _summarise_setting(
    setting: SettingVerdict, reasons: Mapping[str, Mapping[str, str]], controls: _Controls
) -> SettingSummary:
    measures = []
    for measure in _MEASURES:
        values = [_number(getattr(example, measure.key)) for example in setting.examples]
        baselines = [controls.baseline(example, measure) for example in setting.examples]
        left_out = [
            reasons[example.key].get(measure.key, measure.otherwise)
            for example, value in zip(setting.examples, values, strict=True)
            if math.isnan(value)
        ]
        nothing = None if setting.examples else NO_RESULT
        measures.append(
            MeasureSummary(
                name=measure.name,
                better=measure.better,
                mean=_mean(values),
                interval=_interval(values),
                baseline=_mean([value for value, _ in baselines]),
                baseline_interval=_interval([value for value, _ in baselines]),
                count=len(values) - len(left_out),
                reason=_joined(left_out) or nothing,
                baseline_count=sum(not math.isnan(value) for value, _ in baselines),
                baseline_reason=_joined(why for _, why in baselines) or nothing,
            )
        )
    return SettingSummary(protocol=setting.protocol, defense=setting.defense, measures=measures)


def _reasons(row: Row) -> dict[str, str]:
    found = (row.result or {}).get("reasons")
    return {str(name): str(text) for name, text in found.items() if text} if isinstance(found, dict) else {}


def _joined(texts: Iterable[str]) -> str:
    """Each text once.

    >>> _joined(["no weights", "", "too small", "no weights"])
    'no weights; too small'
    """
    return "; ".join(text for text in dict.fromkeys(texts) if text)


def _number(value: Any) -> float:
    """A yes counts 1 and a no 0, so that their mean is a share."""
    return NAN if value is None else float(value)


def _mean(values: Iterable[float]) -> float:
    """Mean of what is not NaN; NaN of nothing.

    >>> _mean([1.0, NAN, 3.0]), _mean([])
    (2.0, nan)
    """
    known = [value for value in values if not math.isnan(value)]
    return math.fsum(known) / len(known) if known else NAN


def _interval(values: list[float]) -> tuple[float, float]:
    from leakscope.metrics import interval

    return interval(values)
