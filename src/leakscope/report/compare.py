"""Two audits side by side: the same setting and attack in each, and whether their intervals overlap."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leakscope.audit.store import Row, Store
from leakscope.audit.verdict import judge_store
from leakscope.metrics import interval
from leakscope.observation_files import atomic_write
from leakscope.report import words
from leakscope.report.page import fill
from leakscope.report.words import fixed, mean, number

STRONGEST = "strongest for each example"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One line: mean PSNR of an attack in a setting in A and in B; NaN where one of them lacks it."""

    protocol: str
    defense: str
    attack: str
    psnr_a: float
    psnr_b: float
    interval_a: tuple[float, float]
    interval_b: tuple[float, float]
    examples_a: int
    examples_b: int

    @property
    def setting(self) -> str:
        return f"{self.protocol}, defence {self.defense}"

    @property
    def difference(self) -> float:
        """B minus A in dB: positive means that B leaks more."""
        return self.psnr_b - self.psnr_a

    @property
    def overlap(self) -> bool | None:
        """Whether the intervals overlap; None where one of them is not known."""
        ends = (*self.interval_a, *self.interval_b)
        if not all(math.isfinite(end) for end in ends):
            return None
        return self.interval_a[0] <= self.interval_b[1] and self.interval_b[0] <= self.interval_a[1]


def known_interval(values: Sequence[float]) -> tuple[float, float]:
    """Bootstrap interval of the mean; NaN for fewer than two values, of which no spread can be told.

    >>> known_interval([1.0, 2.0, 3.0, 4.0])
    (1.5, 3.5)
    >>> known_interval([10.0])
    (nan, nan)
    """
    return interval(values) if len(values) > 1 else (math.nan, math.nan)


def compare_tables(dir_a: str | os.PathLike[str], dir_b: str | os.PathLike[str]) -> list[Comparison]:
    """One line for each setting and attack that A or B measured, in the order of A, then of B.

    An attack's PSNR is its mean over seeds for each example, then over the examples; controls do not count.
    Attacks are matched by their name where it is unique in both audits, so that other hyper-parameters can be
    compared, and by their full repr where it is not.
    """
    (first, rows_a), (second, rows_b) = _measure(dir_a), _measure(dir_b)
    crowded = _crowded(rows_a) | _crowded(rows_b)
    table_a = first | _by_attack(rows_a, crowded)
    table_b = second | _by_attack(rows_b, crowded)
    places = list(dict.fromkeys((*table_a, *table_b)))
    settings = list(dict.fromkeys((protocol, defense) for protocol, defense, _ in places))
    places.sort(key=lambda place: (settings.index(place[:2]), place[2] != STRONGEST))
    lines = []
    for protocol, defense, attack in places:
        values = [table.get((protocol, defense, attack), []) for table in (table_a, table_b)]
        lines.append(
            Comparison(
                protocol=protocol,
                defense=defense,
                attack=attack,
                psnr_a=mean(values[0]),
                psnr_b=mean(values[1]),
                interval_a=known_interval(values[0]),
                interval_b=known_interval(values[1]),
                examples_a=len(values[0]),
                examples_b=len(values[1]),
            )
        )
    return lines


def compare(directories: Sequence[str | os.PathLike[str]]) -> str:
    """The HTML page that compares two audits."""
    if len(directories) != 2:
        raise ValueError(f"expected two folders of audits to compare, got {len(directories)}")
    audits = [_audit(directory) for directory in directories]
    lines = compare_tables(*directories)
    protocols = words.short_names(line.protocol for line in lines)
    defenses = words.short_names(line.defense for line in lines)
    return fill(
        "compare.html.j2",
        {
            "audits": audits,
            "facts": _differing_facts(audits),
            "lines": [_line(line, protocols[line.protocol], defenses[line.defense]) for line in lines],
        },
    )


def write_comparison(
    dir_a: str | os.PathLike[str], dir_b: str | os.PathLike[str], path: str | os.PathLike[str]
) -> Path:
    """Write the page that compares two audits to ``path``."""
    target = Path(path)
    content = compare([dir_a, dir_b]).encode("utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, content)
    return target


_Table = dict[tuple[str, str, str], list[float]]


def _measure(directory: str | os.PathLike[str]) -> tuple[_Table, list[Row]]:
    """The strongest attack for each example of each setting, and the rows."""
    with Store.open(Path(directory)) as store:
        rows = store.rows()
        verdict = judge_store(store)
    table: _Table = {}
    for setting in verdict.settings:
        values = [number(example.psnr) for example in setting.examples]
        table[str(setting.protocol), str(setting.defense), STRONGEST] = [v for v in values if v == v]
    return table, [row for row in rows if row.status == "done" and not row.job.get("control")]


def _crowded(rows: list[Row]) -> set[str]:
    """Names that stand for more than one attack."""
    reprs: dict[str, set[str]] = {}
    for row in rows:
        reprs.setdefault(str(row.job.get("attack_name")), set()).add(str(row.job.get("attack")))
    return {name for name, found in reprs.items() if len(found) > 1}


def _by_attack(rows: list[Row], crowded: set[str]) -> _Table:
    seeds: dict[tuple[str, str, str], dict[Any, list[float]]] = {}
    for row in rows:
        name = str(row.job.get("attack_name"))
        attack = str(row.job.get("attack")) if name in crowded else name
        place = (str(row.job.get("protocol")), str(row.job.get("defense")), attack)
        for example in (row.result or {}).get("examples") or []:
            seeds.setdefault(place, {}).setdefault(example.get("index"), []).append(number(example.get("psnr")))
    table = {place: [mean(values) for values in examples.values()] for place, examples in seeds.items()}
    return {place: [v for v in values if v == v] for place, values in table.items()}


def _audit(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """What the head of the page says about one audit."""
    with Store.open(Path(directory)) as store:
        rows = store.rows()
        verdict = judge_store(store)
        model, data = store.meta("model") or {}, store.meta("data") or {}
        versions = store.meta("versions") or {}
        return {
            "outcome": verdict.outcome,
            "facts": {
                "Model": str(model.get("name")),
                "Data": str(data.get("name")),
                "Data fingerprint": str(data.get("fingerprint"))[:16],
                "Spec hash": str(store.meta("spec_hash"))[:16],
                "Jobs": str(len(rows)),
                "Created": str(store.meta("created")),
                "Versions": ", ".join(f"{name} {value}" for name, value in versions.items()),
            },
        }


def _differing_facts(audits: list[dict[str, Any]]) -> list[tuple[str, str, str, bool]]:
    first, second = (audit["facts"] for audit in audits)
    return [(name, first[name], second[name], first[name] != second[name]) for name in first]


def _line(line: Comparison, protocol: str, defense: str) -> dict[str, Any]:
    difference = line.difference
    sign = "+" if difference > 0 and fixed(difference) != "0.0" else ""
    apart = {True: "overlap", False: "apart", None: words.DASH}[line.overlap]
    return {
        "setting": line.setting,
        "protocol": protocol,
        "defense": defense,
        "attack": line.attack,
        "strongest": line.attack == STRONGEST,
        "psnr": [fixed(line.psnr_a), fixed(line.psnr_b)],
        "interval": [
            f"{fixed(low)} to {fixed(high)}" if math.isfinite(low) else f"{words.counted(count, 'example')}"
            for (low, high), count in (
                (line.interval_a, line.examples_a),
                (line.interval_b, line.examples_b),
            )
        ],
        "difference": sign + fixed(difference),
        "tone": "" if line.overlap is not False else ("more" if difference > 0 else "less"),
        "overlap": apart,
    }
