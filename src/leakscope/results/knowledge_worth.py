"""Measure what knowing the defence is worth to an adversary: the same attack with that knowledge and without it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from leakscope.metrics import interval
from leakscope.results.names import parts_of
from leakscope.results.reasons import InScenario, Scenario
from leakscope.results.records import NAN, Row, highest, mean

Interval = tuple[float, float]
#: Beyond this PSNR pictures look the same (dB): an exact copy leaks no more than one that no eye tells apart.
LEGIBLE = 60.0
#: The option of an attack that leaves out what it knows of the defence.
IGNORES = "ignore_defense"


@dataclass(frozen=True, kw_only=True)
class Worth(InScenario):
    """Hold what knowing a defence was worth to one attack, in dB."""

    protocol: str
    defense: str
    attack_name: str
    gain: float
    interval: Interval
    examples: int


def worth_of_knowing(rows: Iterable[Row]) -> list[Worth]:
    """Compare, for each defence and attack, runs with knowledge of the defence and without: the difference in dB.

    >>> job = {"protocol": "P()", "defense": "D()", "attack_name": "a", "seed": 0, "batch": 0}
    >>> def row(key, ignores, psnr):
    ...     result = {"examples": [{"index": 0, "psnr": psnr}], "adaptive": not ignores}
    ...     return Row.read(key, 0, "done", {**job, "attack": f"A(ignore_defense={ignores})"}, result)
    >>> [worth] = worth_of_knowing([row("a", True, 12.0), row("b", False, 20.5)])
    >>> worth.gain, worth.examples
    (8.5, 1)
    """
    rows = list(rows)
    parts = parts_of(rows)
    best: dict[tuple[Scenario, str, str, bool], dict[int, float]] = defaultdict(dict)
    for row in rows:
        options = parts[row.job.attack].options if row.counts and row.status == "done" else {}
        if IGNORES in options:
            others = str({name: value for name, value in options.items() if name != IGNORES})
            own = best[row.job.scenario, row.job.attack_name, others, options[IGNORES] is True]
            for example in row.examples:
                own[example.index] = highest((own.get(example.index, NAN), example.value("psnr")))
    worths = []
    for (scenario, name, others, ignores), blind in best.items():
        knowing = best.get((scenario, name, others, False))
        if not ignores or knowing is None:
            continue
        pairs = [(knowing[index], psnr) for index, psnr in blind.items() if index in knowing]
        gains = [min(with_it, LEGIBLE) - min(without, LEGIBLE) for with_it, without in pairs]
        gains = [gain for gain in gains if not math.isnan(gain)]
        if gains:
            facts: dict[str, Any] = {**scenario._asdict(), "attack_name": name}
            worths.append(Worth(**facts, gain=mean(gains), interval=interval(gains), examples=len(gains)))
    return worths
