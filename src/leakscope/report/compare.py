"""Two audits side by side: the same setting and attack in each, and whether their intervals overlap."""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from leakscope.contracts.errors import UserError
from leakscope.metrics import MEASURES, interval
from leakscope.report import words
from leakscope.report.template import FileName, fill, write_page
from leakscope.results.names import short_names
from leakscope.results.records import NAN, ExampleRecord, Row, mapping, mean
from leakscope.results.store import Store
from leakscope.results.verdict import Verdict, judge_store

STRONGEST = "strongest for each example"
NOTHING = words.DASH
PRIVATE = "cannot be compared (private)"
#: PSNR of the examples, and how many of them are certified.
_Entry = tuple[list[float], int]
_Table = dict[tuple[str, str, str], _Entry]
#: Protocol and defence.
_Setting = tuple[str, str]
_Side = tuple[float, tuple[float, float], int, int]


@dataclass(frozen=True)
class Comparison:
    """Mean PSNR of an attack in a setting in A and in B; NaN where one of them lacks it.

    ``defense_b`` is that of B, another one where audits before and after a defence are compared. ``certified_a`` and
    ``certified_b`` count the examples with a certificate that holds, of any seed.
    """

    protocol: str
    defense: str
    defense_b: str
    attack: str
    psnr_a: float
    interval_a: tuple[float, float]
    examples_a: int
    certified_a: int
    psnr_b: float
    interval_b: tuple[float, float]
    examples_b: int
    certified_b: int

    @property
    def sides(self) -> tuple[_Side, _Side]:
        """Mean, interval, number of examples and of certified ones in A and in B."""
        return (
            (self.psnr_a, self.interval_a, self.examples_a, self.certified_a),
            (self.psnr_b, self.interval_b, self.examples_b, self.certified_b),
        )

    @property
    def place(self) -> tuple[str, str, str]:
        return self.protocol, self.defense, self.defense_b

    @property
    def setting(self) -> str:
        then = "" if self.defense_b == self.defense else f" in A, {self.defense_b} in B"
        return f"{self.protocol}, defence {self.defense}{then}"

    @property
    def difference(self) -> float:
        """B minus A in dB: positive means that B leaks more."""
        return self.psnr_b - self.psnr_a

    @property
    def overlap(self) -> bool | None:
        """Whether the intervals overlap; None where one of them is not known."""
        if not all(map(math.isfinite, (*self.interval_a, *self.interval_b))):
            return None
        return self.interval_a[0] <= self.interval_b[1] and self.interval_b[0] <= self.interval_a[1]


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Bootstrap interval of the mean; NaN for fewer than two values.

    >>> spread([1.0, 2.0, 3.0, 4.0])
    (1.5, 3.5)
    >>> spread([10.0])
    (nan, nan)
    """
    return interval(values) if len(values) > 1 else (NAN, NAN)


@dataclass(frozen=True)
class Difference:
    """What one audit has otherwise than the other; NOTHING where it has nothing of the kind."""

    name: str
    first: str
    second: str


@dataclass(frozen=True)
class _Audit:
    """What is compared of one audit; ``facts`` by kind, to be told apart where they differ."""

    rows: list[Row]
    verdict: Verdict
    facts: dict[str, Any]
    salt: str

    @classmethod
    def read(cls, directory: FileName) -> Self:
        with Store.open(Path(directory)) as store:
            model, data, versions = (mapping(store.meta(key)) for key in ("model", "data", "versions"))
            rows = store.rows()
            facts = {
                "spec": mapping(store.meta("spec")),
                "weights": {"fingerprint": str(model.get("fingerprint") or NOTHING)[:16]},
                "data": {"fingerprint": str(data.get("fingerprint") or NOTHING)[:16], "examples": data.get("count")},
                "version": versions,
                "jobs": {status: sum(row.status == status for row in rows) for status in ("done", "failed", "refused")},
            }
            return cls(rows, judge_store(store), facts, str(store.meta("salt") or ""))

    @property
    def attempts(self) -> list[Row]:
        return [row for row in self.rows if row.status == "done" and row.counts]

    def crowded(self) -> set[str]:
        """Names that stand for more than one attack."""
        attacks = {(row.job.attack_name, row.job.attack) for row in self.attempts}
        return {name for name, count in Counter(name for name, _ in attacks).items() if count > 1}

    def table(self, crowded: set[str]) -> _Table:
        """PSNR of every example by setting and attack: the strongest, then each with its mean over seeds."""
        table: _Table = {
            (setting.protocol, setting.defense, STRONGEST): (
                [example.psnr for example in setting.examples],
                sum(example.certified for example in setting.examples),
            )
            for setting in self.verdict.settings
        }
        seeds: dict[tuple[str, str, str], dict[int, list[ExampleRecord]]] = {}
        for row in self.attempts:
            attack = row.job.attack if row.job.attack_name in crowded else row.job.attack_name
            examples = seeds.setdefault((*row.job.scenario, attack), {})
            for example in row.examples:
                examples.setdefault(example.index, []).append(example)
        for place, tries in seeds.items():
            psnrs = [mean(example.value("psnr") for example in each) for each in tries.values()]
            table[place] = psnrs, sum(any(example.certified for example in each) for each in tries.values())
        return {place: ([v for v in values if not math.isnan(v)], count) for place, (values, count) in table.items()}


def compare_differences(dir_a: FileName, dir_b: FileName) -> list[Difference]:
    """What the two audits have otherwise: keys of the spec, weights, data, versions, and how many jobs are done."""
    return _between(_Audit.read(dir_a), _Audit.read(dir_b))


def _between(first: _Audit, second: _Audit) -> list[Difference]:
    """List what differs; fingerprints of private data have a salt for each folder, so that none is like another."""
    found = _differences(first.facts, second.facts)
    if first.salt == second.salt:
        return found
    return [Difference(one.name, PRIVATE, PRIVATE) if one.name == "data: fingerprint" else one for one in found]


def _differences(first: Any, second: Any, name: str = "") -> list[Difference]:
    """One line a place in which two JSON values differ; parts of a list are told apart by their names.

    >>> _differences({"spec": {"seeds": [0], "batch": 1}}, {"spec": {"seeds": [0, 1], "batch": 1}})
    [Difference(name='spec: seeds', first='[0]', second='[0, 1]')]
    >>> a, b = [{"name": "dlg", "options": {"lr": 1}}], [{"name": "dlg", "options": {"lr": 2}}, {"name": "sme"}]
    >>> [(d.name, d.first, d.second) for d in _differences({"attacks": a}, {"attacks": b})]
    [('attacks: dlg options lr', '1', '2'), ('attacks: sme', '–', 'present')]
    """
    first, second = _by_name(first), _by_name(second)
    if isinstance(first, dict) and isinstance(second, dict):
        keys = list(dict.fromkeys((*first, *second)))
        places = {key: f"{name}: {key}" if name and ":" not in name else f"{name} {key}".strip() for key in keys}
        found = [_differences(first.get(key), second.get(key), places[key]) for key in keys]
        return [difference for each in found for difference in each]
    return [] if first == second else [Difference(name, _told(first), _told(second))]


def _by_name(value: Any) -> Any:
    """A list of parts as a mapping, where each part has a name of its own."""
    names = [mapping(part).get("name") for part in value] if isinstance(value, list) else []
    if not names or len(set(map(str, names))) < len(names) or not all(isinstance(name, str) for name in names):
        return value
    return {name: {key: part[key] for key in part if key != "name"} for name, part in zip(names, value, strict=True)}


def _told(value: Any) -> str:
    if value is None:
        return NOTHING
    return "present" if isinstance(value, dict) else value if isinstance(value, str) else json.dumps(value)


def compare_tables(dir_a: FileName, dir_b: FileName) -> list[Comparison]:
    """One line for each setting and attack that A or B measured, in the order of A, then of B.

    An attack's PSNR is its mean over seeds for each example, then over the examples; controls do not count. Attacks
    are matched by name where it is unique in both audits, so that hyper-parameters can be compared, else by repr.
    Where the audits share no defence under a protocol and one of them has a single one, as before and after a defence,
    this one stands beside each of the other's.
    """
    return _compared(_Audit.read(dir_a), _Audit.read(dir_b))


def _compared(first: _Audit, second: _Audit) -> list[Comparison]:
    crowded = first.crowded() | second.crowded()
    table_a, table_b = first.table(crowded), second.table(crowded)
    attacks = {
        place: list(dict.fromkeys(key[2] for key in (*table_a, *table_b) if key[:2] in place))
        for place in _paired(table_a, table_b)
    }
    lines = []
    for (before, after), names in attacks.items():
        for attack in sorted(names, key=lambda name: name != STRONGEST):
            sides = *_side(table_a.get((*before, attack))), *_side(table_b.get((*after, attack)))
            lines.append(Comparison(*(*before, after[1], attack, *sides)))
    return lines


def _paired(table_a: _Table, table_b: _Table) -> list[tuple[_Setting, _Setting]]:
    """Pair the settings of A and B by protocol and defence; by protocol alone before and after a defence."""
    in_a, in_b = (list(dict.fromkeys(place[:2] for place in table)) for table in (table_a, table_b))
    pairs: list[tuple[_Setting, _Setting]] = []
    for protocol in dict.fromkeys(name for name, _ in (*in_a, *in_b)):
        first, second = ([one for one in settings if one[0] == protocol] for settings in (in_a, in_b))
        if first and second and not {*first} & {*second} and 1 in (len(first), len(second)):
            pairs += [(before, after) for before in first for after in second]
        else:
            pairs += [(one, one) for one in dict.fromkeys((*first, *second))]
    return pairs


def _side(entry: _Entry | None) -> _Side:
    values, certified = entry or ([], 0)
    return mean(values), spread(values), len(values), certified


def compare(directories: Sequence[FileName]) -> str:
    """The HTML page that compares two audits."""
    if len(directories) != 2:
        raise UserError(f"expected two folders of audits to compare, got {len(directories)}")
    first, second = (_Audit.read(directory) for directory in directories)
    lines = _compared(first, second)
    parts = {**first.verdict.parts, **second.verdict.parts}
    outcomes = (first.verdict.outcome, second.verdict.outcome)
    context = {
        "measure": MEASURES["psnr"],
        "audits": list(zip("AB", folder_names(directories), outcomes, strict=True)),
        "differences": _between(first, second),
        "shared": [line for line in lines if line.examples_a and line.examples_b],
        "alone": [line for line in lines if not (line.examples_a and line.examples_b)],
        "protocols": short_names((line.protocol for line in lines), parts),
        "defenses": short_names((name for line in lines for name in (line.defense, line.defense_b)), parts),
        "strongest": STRONGEST,
    }
    return fill("compare.html.j2", context)


def folder_names(directories: Sequence[FileName]) -> list[str]:
    """The folders by as much of their end as tells them apart; what lies before may name people.

    >>> folder_names(["/home/jo/runs/a", "/home/jo/runs/b"]), folder_names(["/home/jo/1/out", "/home/jo/2/out"])
    (['a', 'b'], ['1/out', '2/out'])
    """
    parts = [Path(directory).resolve().parts for directory in directories]
    tails = (["/".join(part[-count:]) for part in parts] for count in range(1, max(map(len, parts))))
    apart = (names for names in tails if len(set(names)) == len(set(parts)))
    return next(apart, ["/".join(part) for part in parts])


def write_comparison(dir_a: FileName, dir_b: FileName, path: FileName) -> Path:
    """Write the page that compares two audits to ``path``."""
    return write_page(path, compare([dir_a, dir_b]))
