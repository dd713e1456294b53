"""The tables of ``strength.py``: what the measured rows say, as Markdown. Reads its file and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leakscope.metrics import interval

Row = Mapping[str, Any]
BASELINE, OURS = "inverting-gradients", "head-first"
#: A row of theory beside those of attacks.
FLOOR = "floor"
#: With a certificate below the first a reconstruction claims to be exact; in truth it is above the second (dB).
CERTIFIED, EXACT = 1e-6, 80.0
_CELL = ("model", "state", "batch", "labels", "disturbance", "knowledge", "known_labels")
_ORDER = {"distinct": 0, "repeated": 1, "equal": 2}
NONE, NOTHING = "none", "Nothing has been measured yet."


def read_rows(file: Path) -> list[Row]:
    """The newest row of each batch and attack, in the order in which they were first measured; none without a file."""
    if not file.exists():
        return []
    rows: dict[tuple[Any, ...], Row] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.strip():
            row = json.loads(line)
            rows[key_of(row)] = row
    return list(rows.values())


def key_of(row: Row) -> tuple[Any, ...]:
    """Which batch and attack a row is of."""
    return tuple(row[name] for name in (*_CELL, "number", "attack"))


def brief(row: Row) -> str:
    """A row in a line, as progress tells it.

    >>> brief({"attack": "idlg", "refused": None, "psnr": [30.0, 32.0], "certificate": [], "seconds": 2.0})
    'idlg 31.0 dB, 2.0 s'
    """
    if row["refused"]:
        return f"{row['attack']} refused: {row['refused']}"
    claim = f", certificate {max(row['certificate']):.1e}" if all_numbers(row["certificate"]) else ""
    return f"{row['attack']} {mean(row['psnr']):.1f} dB{claim}, {row['seconds']:.1f} s"


class Result:
    """What one attack did in one cell."""

    def __init__(self, rows: Sequence[Row], baseline: Sequence[Row]) -> None:
        self.done = [row for row in rows if not row["refused"]]
        self.refused = len(rows) - len(self.done)
        means = [mean(row["psnr"]) for row in self.done]
        self.psnr, self.interval = mean(means), interval(means)
        claims = [pair for row in self.done for pair in zip(row["certificate"], row["psnr"], strict=False)]
        certified = [psnr for claim, psnr in claims if claim is not None and claim < CERTIFIED]
        self.images = sum(len(row["psnr"]) for row in self.done)
        self.exact = sum(psnr > EXACT for psnr in certified)
        self.false_claims = len(certified) - self.exact
        by_number = {row["number"]: row for row in baseline if not row["refused"]}
        pairs = [(row, by_number[row["number"]]) for row in self.done if row["number"] in by_number]
        self.ratio = math.exp(mean([math.log(ratio(*pair)) for pair in pairs])) if pairs else math.nan

    def __str__(self) -> str:
        if not self.done:
            return "refused"
        low, high = self.interval
        text = f"{self.psnr:.1f} [{low:.1f}, {high:.1f}]"
        return f"{text}, {self.refused} refused" if self.refused else text


def ratio(row: Row, other: Row) -> float:
    """How much longer ``row`` took than ``other`` on the same batch.

    >>> slow, fast = {"run": "a", "seconds": 6.0, "pace": 2.0}, {"run": "b", "seconds": 1.0, "pace": 1.0}
    >>> ratio(slow, fast), ratio(slow, {**fast, "run": "a"})
    (3.0, 6.0)
    """
    if row["run"] == other["run"]:
        return max(row["seconds"], 1e-3) / max(other["seconds"], 1e-3)
    return max(row["seconds"], 1e-3) / row["pace"] / (max(other["seconds"], 1e-3) / other["pace"])


def results(rows: Iterable[Row]) -> dict[tuple[Any, ...], dict[str, Result]]:
    """For each cell, as its rows name it, what each attack did there."""
    cells: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        cells.setdefault(tuple(row[name] for name in _CELL), {}).setdefault(row["attack"], []).append(row)
    return {
        cell: {attack: Result(found, attacks.get(BASELINE, [])) for attack, found in attacks.items()}
        for cell, attacks in cells.items()
    }


def tables(rows: Iterable[Row]) -> str:
    """A table a model of updates as they are, baseline and ours in each cell; then, line by line, other attacks and
    settings, and disturbed updates.
    """
    found = results(row for row in rows if row["knowledge"] == "honest_server" and row["known_labels"] == "no")
    plain = {cell: attacks for cell, attacks in found.items() if cell[4] == NONE and {BASELINE, OURS} <= set(attacks)}
    disturbed = {cell: attacks for cell, attacks in found.items() if cell[4] != NONE}
    parts = []
    for model in dict.fromkeys(cell[0] for cell in plain):
        here = {cell[1:4]: attacks for cell, attacks in plain.items() if cell[0] == model}
        states = sorted({state for state, _, _ in here}, key=lambda state: 0 if state == "untrained" else int(state))
        lines = []
        for batch, labels in sorted({(batch, labels) for _, batch, labels in here}, key=lambda b: (b[0], _ORDER[b[1]])):
            cells = (here.get((state, batch, labels)) for state in states)
            lines.append([_batch(batch, labels), *("" if cell is None else _compared(cell) for cell in cells)])
        parts += [f"**{model}**", markdown(["batch", *map(_state, states)], lines)]
    others = {
        cell: {attack: result for attack, result in attacks.items() if attack not in (BASELINE, OURS)}
        for cell, attacks in found.items()
        if cell[4] == NONE
    }
    for title, lines_of in (("Other settings", others), ("Disturbed updates", disturbed)):
        lines_text = _lines(lines_of)
        parts += [f"**{title}**", lines_text] if lines_text else []
    return "\n\n".join(parts) or NOTHING


def every_line(rows: Iterable[Row]) -> str:
    """All that was measured, a line a cell and attack."""
    return _lines(results(rows)) or NOTHING


def _lines(found: Mapping[tuple[Any, ...], Mapping[str, Result]]) -> str:
    lines = [
        [*_place(cell), attack, str(result), _exact(result), _time(result)]
        for cell, attacks in found.items()
        for attack, result in sorted(attacks.items(), key=lambda item: (item[0] == OURS, item[0] != BASELINE))
    ]
    heads = ["model", "weights", "batch", "update", "attack", "dB [95 %]", "exact, certified", "time"]
    return markdown(heads, lines) if lines else ""


def _compared(attacks: Mapping[str, Result]) -> str:
    """The baseline and ours in one cell of a table."""
    ours = attacks[OURS]
    facts = [f"{attacks[BASELINE]} → {ours}", f"exact {_exact(ours)}" if ours.exact or ours.false_claims else ""]
    return "; ".join(fact for fact in [*facts, f"time {_time(ours)}" if _time(ours) else ""] if fact)


def summary(rows: Iterable[Row]) -> str:
    """A line a model: the mean dB of the baseline and of ours, undisturbed, in the cells that most people ask for."""
    found = results(row for row in rows if row["disturbance"] == NONE)
    states = {"untrained": "untrained", "1": "1 epoch", "6": "6 epochs"}
    heads = {(s, size): f"{name}, {word}" for size, word in ((1, "one"), (4, "four")) for s, name in states.items()}
    lines: dict[str, dict[tuple[str, int], str]] = {}
    for (model, state, batch, labels, *_), attacks in found.items():
        if labels == "distinct" and (state, batch) in heads and {BASELINE, OURS} <= set(attacks):
            before, after = (_mean_text(attacks[name]) for name in (BASELINE, OURS))
            lines.setdefault(model, {})[state, batch] = f"{before} → {after}"
    if not lines:
        return NOTHING
    return markdown(["model", *heads.values()], [[m, *(cells.get(c, "") for c in heads)] for m, cells in lines.items()])


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (heads, ["---"] * len(heads), *lines))


def _place(cell: tuple[Any, ...]) -> list[str]:
    model, state, batch, labels, disturbance, knowledge, known = cell
    notes = [] if known == "no" else [f"labels known: {known}"]
    notes += [] if knowledge == "honest_server" else [knowledge]
    return [
        model,
        _state(state),
        _batch(batch, labels),
        ", ".join(["as it is" if disturbance == NONE else disturbance, *notes]),
    ]


def _state(state: str) -> str:
    """Training in words.

    >>> _state("untrained"), _state("1"), _state("6")
    ('untrained', '1 epoch', '6 epochs')
    """
    return state if state == "untrained" else f"{state} epoch{'' if state == '1' else 's'}"


def _batch(size: int, labels: str) -> str:
    return f"{size}, {labels}" if size > 1 else "1"


def _exact(result: Result) -> str:
    false = f", {result.false_claims} false" if result.false_claims else ""
    return f"{result.exact}/{result.images}{false}" if result.done else ""


def _time(result: Result) -> str:
    return "" if math.isnan(result.ratio) else f"{result.ratio:.2f}"


def _mean_text(result: Result) -> str:
    return f"{result.psnr:.1f}" if result.done else "refused"


def mean(values: Sequence[float]) -> float:
    """NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def all_numbers(values: Sequence[float | None]) -> bool:
    return bool(values) and all(value is not None for value in values)
