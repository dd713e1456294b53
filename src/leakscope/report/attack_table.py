"""The table that papers print: attacks by defences, with the spread over seeds; as lines, CSV and LaTeX."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import stdev
from typing import Any

from leakscope.contracts.errors import UserError
from leakscope.contracts.tables import latex_text
from leakscope.metrics import MEASURES
from leakscope.report.export import csv_text
from leakscope.results.names import parts_of, short_names
from leakscope.results.records import NAN, Row, mean, plain


@dataclass(frozen=True)
class AttackCell:
    """One attack on one scenario: the mean over seeds of the mean over examples, and its deviation over seeds.

    ``deviation`` is NaN for a single seed.
    """

    protocol: str
    defense: str
    attack: str
    seeds: int
    examples: int
    mean: float
    deviation: float


@dataclass(frozen=True)
class AttackTable:
    """All cells in the order of the audit, of one ``measure``."""

    measure: str
    cells: tuple[AttackCell, ...]

    def lines(self) -> list[dict[str, Any]]:
        return [{"measure": self.measure, **plain(asdict(cell))} for cell in self.cells]

    def to_csv(self) -> str:
        return csv_text(self.lines())

    def to_latex(self) -> str:
        """Return a LaTeX ``tabular`` without packages; the strongest attack of each scenario is bold."""
        axes = ("protocol", "defense", "attack")
        protocols, defenses, attacks = ([*dict.fromkeys(getattr(cell, name) for cell in self.cells)] for name in axes)
        placed = {(cell.protocol, cell.attack, cell.defense): cell for cell in self.cells}
        width = len(defenses) + 1
        lines = [rf"% {latex_text(MEASURES[self.measure].label)}: mean and deviation over seeds"]
        lines += [rf"\begin{{tabular}}{{l{'r' * len(defenses)}}}", r"\hline"]
        lines += [_joined(["attack", *map(latex_text, defenses)]), r"\hline"]
        for protocol in protocols:
            lines += [rf"\multicolumn{{{width}}}{{l}}{{{latex_text(protocol)}}} \\"] if len(protocols) > 1 else []
            best = {one: self._strongest(protocol, one) for one in defenses}
            for attack in attacks:
                row = [placed.get((protocol, attack, defense)) for defense in defenses]
                if any(row):
                    lines.append(_joined([latex_text(attack), *(_shown(cell, best.values()) for cell in row)]))
        return "\n".join([*lines, r"\hline", r"\end{tabular}"]) + "\n"

    def _strongest(self, protocol: str, defense: str) -> AttackCell | None:
        measured = [c for c in self.cells if (c.protocol, c.defense) == (protocol, defense) and math.isfinite(c.mean)]
        sign = 1 if MEASURES[self.measure].better == "higher" else -1
        return max(measured, key=lambda cell: sign * cell.mean, default=None)


def attack_table(rows: Sequence[Row], measure: str = "psnr") -> AttackTable:
    """Average each attack in each scenario over its examples, then over seeds; controls are left out."""
    if measure not in MEASURES:
        raise UserError(f"measure: expected one of {', '.join(MEASURES)}, got {measure!r}")
    done = [row for row in rows if row.status == "done" and row.counts]
    parts = parts_of(done)
    names = [
        short_names(dict.fromkeys(getattr(row.job, kind) for row in done), parts)
        for kind in ("protocol", "defense", "attack")
    ]
    found: dict[tuple[str, str, str], dict[int, list[float]]] = {}
    for row in done:
        place = tuple(name[text] for name, text in zip(names, (*row.job.scenario, row.job.attack), strict=True))
        seeds = found.setdefault(place, {})  # type: ignore[arg-type]
        seeds.setdefault(row.job.seed, []).extend(example.value(measure) for example in row.examples)
    cells = []
    for place, seeds in found.items():
        means = [value for values in seeds.values() if not math.isnan(value := mean(values))]
        examples = max(len(values) for values in seeds.values())
        cells.append(AttackCell(*place, len(means), examples, mean(means), stdev(means) if len(means) > 1 else NAN))
    return AttackTable(measure, tuple(cells))


def _joined(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def _shown(cell: AttackCell | None, best: Any) -> str:
    if cell is None or not math.isfinite(cell.mean):
        return "--"
    spread = "" if math.isnan(cell.deviation) else rf" \pm {cell.deviation:.1f}"
    number = f"{cell.mean:.1f}"
    return f"$\\mathbf{{{number}}}{spread}$" if any(cell is one for one in best) else f"${number}{spread}$"
