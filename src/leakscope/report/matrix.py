"""Every attack in every setting: mean PSNR with its interval, and what an attack makes of no information."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from leakscope.metrics import interval
from leakscope.report.settings import PSNR, Setting
from leakscope.report.words import fixed, span
from leakscope.results.baselines import Baselines
from leakscope.results.knowledge_worth import IGNORES
from leakscope.results.names import Part, parts_of, telling_options
from leakscope.results.records import Row, highest, mean

#: Lifts in dB from which on a cell is coloured, each more strongly.
HEAT = (3.0, 6.0, 12.0, 20.0)


@dataclass(frozen=True)
class Cell:
    """A mean with its interval, or the fate of the jobs where there is none; ``heat`` is 0 for none up to 4."""

    text: str
    interval: str = ""
    lift: str = ""
    heat: int = 0
    note: str = ""
    why: str = ""


def heat(lift: float) -> int:
    """How strongly a lift is coloured.

    >>> heat(math.nan), heat(-1.0), heat(3.0), heat(19.0), heat(150.0)
    (0, 0, 1, 3, 4)
    """
    return sum(lift >= step for step in HEAT)


def matrix_section(rows: Sequence[Row], settings: Sequence[Setting]) -> dict[str, Any]:
    """One line an attack with a cell a setting; the baseline of each protocol; the strongest of all."""
    attempts = [row for row in rows if row.counts]
    attacks = list(dict.fromkeys((row.job.attack_name, row.job.attack) for row in attempts))
    protocols = list(dict.fromkeys(setting.protocol for setting in settings))
    baselines = {
        protocol: Baselines(row for row in rows if not row.counts and row.job.protocol == protocol)
        for protocol in protocols
    }
    parts = parts_of(attempts)
    options = _options(attacks, parts)
    lines = []
    whys: dict[tuple[str, str, str], list[str]] = {}
    for name, attack in attacks:
        own = [row for row in attempts if row.job.attack == attack]
        cells = []
        for setting in settings:
            jobs = [row for row in own if row.job.setting == setting.cell]
            ignores = parts[attack].options.get(IGNORES) is True
            cell = _cell(jobs, attack, baselines[setting.protocol], ignores)
            cells.append(cell)
            if cell.why:
                whys.setdefault((name, cell.text, cell.why), []).append(setting.name)
        blind = [_blind(own, attack, protocol, baselines[protocol]) for protocol in protocols]
        lines.append({"name": name, "options": options[attack], "attack": attack, "cells": cells, "blind": blind})
    return {
        "lines": lines,
        "strongest": [_strongest(setting) for setting in settings] if len(attacks) > 1 else [],
        "protocols": [", ".join(s.name for s in settings if s.protocol == protocol) for protocol in protocols],
        "whys": [(name, fate, ", ".join(names), why) for (name, fate, why), names in whys.items()],
    }


def _options(attacks: Sequence[tuple[str, str]], parts: Mapping[str, Part]) -> dict[str, str]:
    """What tells attacks of the same name apart."""
    names = Counter(name for name, _ in attacks)
    told = telling_options((attack for _, attack in attacks), parts)
    return {attack: ", ".join(told[attack]) if names[name] > 1 else "" for name, attack in attacks}


def _cell(jobs: Sequence[Row], attack: str, baselines: Baselines, ignores: bool) -> Cell:
    """For each example its best seed, as the verdict counts it; then the mean over the examples."""
    fates = Counter(row.status for row in jobs)
    if not jobs and ignores:
        return Cell("nothing to ignore")
    if not fates["done"]:
        fate = " and ".join(fate for fate in ("refused", "failed") if fates[fate]) or "not run"
        return Cell(fate, why=next((row.refusal for row in jobs if row.reason), ""))
    seeds: dict[int, list[float]] = {}
    for row in jobs:
        for example in row.examples:
            seeds.setdefault(example.index, []).append(example.value(PSNR.key))
    best = {index: highest(values) for index, values in seeds.items()}
    lift = mean(psnr - baselines.value(attack, index, PSNR) for index, psnr in best.items())
    values = [psnr for psnr in best.values() if not math.isnan(psnr)]
    note = ", ".join(f"{fates[fate]} {fate}" for fate in ("failed", "refused") if fates[fate])
    return _measured(mean(values), interval(values), len(values), lift, note)


def _strongest(setting: Setting) -> Cell:
    verdict = setting.verdict
    lift = mean(example.lift for example in verdict.examples)
    return _measured(verdict.mean_psnr, verdict.interval, len(verdict.examples), lift)


def _measured(psnr: float, ends: tuple[float, float], count: int, lift: float, note: str = "") -> Cell:
    if math.isnan(psnr):
        return Cell("no number", note=note)
    gain = "" if math.isnan(lift) else f"{'+' if lift >= 0 else ''}{fixed(lift)}"
    return Cell(fixed(psnr), span(ends, count), gain, heat(lift), note)


def _blind(own: Sequence[Row], attack: str, protocol: str, baselines: Baselines) -> str:
    indices = dict.fromkeys(e.index for row in own if row.job.protocol == protocol for e in row.examples)
    return fixed(mean(baselines.value(attack, index, PSNR) for index in indices))
