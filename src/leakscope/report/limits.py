"""The section on theory: what each setting allows in principle, beside what the best attack reached."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from leakscope.attacks.base import RECOVERED
from leakscope.audit.store import Row
from leakscope.report import rounds as vertical
from leakscope.report import words
from leakscope.report.words import fixed, number

_RECOVERED_PSNR = -20 * math.log10(RECOVERED)
OUTCOMES = ("recovered", "optimiser failed", "not identifiable", "undecided")


def limits_section(rows: Sequence[Row], settings: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One line a setting whose rows tell a floor or a diagnosis; empty where no row does.

    Settings of vertical learning have ``rounds`` instead, for which there is no floor.
    """
    lines: list[dict[str, Any]] = []
    rounds: list[dict[str, Any]] = []
    for setting in settings:
        own = [row for row in rows if not row.job.get("control") and _place(row) == _place_of(setting)]
        told = next((row for row in own if _limits(row)), None)
        found = {} if told is None else _limits(told)
        counts = _outcomes(own, told)
        if not found and not counts:
            continue
        best = _best_psnr(own, told)
        line = {
            "setting": setting,
            "best": _error(best, 10 ** (-best / 20)),
            "outcomes": [{"name": name, "jobs": counts[name]} for name in OUTCOMES if counts.get(name)],
        }
        if found.get("kind") == "vertical":
            rounds.append({**line, **vertical.describe(found)})
        else:
            lines.append({**line, "floor": _floor(found), "sentence": _sentence(found, best)})
    ranked = any(line["floor"]["seen"] != words.DASH for line in lines)
    return {"lines": lines, "ranked": ranked, "rounds": rounds, "sentences": vertical.shared(rounds)}


def _floor(found: dict[str, Any]) -> dict[str, str]:
    """The numbers of the floor as text; dashes where there are none."""
    rank, unknowns = number(found.get("rank")), number(found.get("unknowns"))
    shown = _error(number(found.get("psnr")), number(found.get("rmse")), str(found.get("method") or ""))
    if found.get("infinite"):
        shown = {"psnr": "infinite error", "small": "some directions leave no trace"}
    low, high = _pair(found.get("interval"))
    noise = words.DASH
    if found.get("rounding_only"):
        noise = "rounding only"
    elif "sigma" in found:
        noise = f"{number(found['sigma']):.3g} an entry"
    return {
        **shown,
        "interval": "" if math.isnan(low) else f"{low:.2g} to {high:.2g}",
        "seen": words.DASH if math.isnan(rank) or math.isnan(unknowns) else f"{rank:,.0f} of {unknowns:,.0f}",
        "noise": noise,
    }


def _error(psnr: float, rmse: float, method: str = "") -> dict[str, str]:
    if math.isnan(psnr):
        return {"psnr": words.DASH, "small": ""}
    return {"psnr": f"{fixed(psnr)} dB", "small": f"RMSE {rmse:.2g}" + (f", {method}" if method else "")}


def _sentence(found: dict[str, Any], best: float) -> str:
    """What floor and best attack say together."""
    if found.get("reason"):
        return f"Not computed: {found['reason']}."
    if found.get("infinite") and not best >= _RECOVERED_PSNR:
        return "In some directions the inputs leave no trace: without prior knowledge they cannot all be recovered."
    floor = number(found.get("psnr"))
    if (math.isnan(floor) and not found.get("infinite")) or math.isnan(best):
        return ""
    if best >= _RECOVERED_PSNR:
        said = "The inputs were recovered; between the best attack and the floor are digits only."
    elif best > floor + 1:
        said = (
            "The best attack is above the floor of attacks without prior knowledge: what it knows of pictures helps it."
        )
    elif _unsettled(found):
        said = "Theory does not exclude a better attack."
    elif floor - best > 10 and floor >= _RECOVERED_PSNR:
        said = (
            f"Theory allows {floor - best:.0f} dB more than the best attack reached: this setting does not protect "
            "the inputs, it only withstood the attacks that were run."
        )
    else:
        said = "The best attack is near what theory allows."
    note = found.get("note")
    return f"{said} The floor is a lower estimate of the error: {note}." if note else said


def _best_psnr(rows: Sequence[Row], told: Row | None) -> float:
    """The highest PSNR of a whole update: on the client that theory speaks of where it does, else on any."""
    batch = None if told is None else told.job.get("batch")
    found = []
    for row in rows:
        if row.status != "done" or (batch is not None and row.job.get("batch") != batch):
            continue
        found.append(_psnr(row))
    return max((psnr for psnr in found if not math.isnan(psnr)), default=math.nan)


def _psnr(row: Row) -> float:
    """PSNR of a whole update: errors are averaged before decibels are taken, as the floor's are."""
    errors = [number(example.get("mse")) for example in (row.result or {}).get("examples", [])]
    if not errors or any(math.isnan(error) for error in errors):
        return math.nan
    return -10 * math.log10(max(sum(errors) / len(errors), 1e-30))


def _outcomes(rows: Sequence[Row], told: Row | None) -> dict[str, int]:
    counts: dict[str, int] = {}
    for row in rows:
        outcome = ((row.result or {}).get("diagnosis") or {}).get("outcome")
        if row.status == "done" and outcome in OUTCOMES:
            known = told is not None and row.job.get("batch") == told.job.get("batch")
            outcome = _settled(outcome, _psnr(row), _limits(told) if known and told is not None else {})
            counts[outcome] = counts.get(outcome, 0) + 1
    return counts


def _settled(outcome: str, psnr: float, floor: dict[str, Any]) -> str:
    """The attack's own opinion where the truth agrees; else truth tells if it recovered, and the floor if it could."""
    if psnr >= _RECOVERED_PSNR:
        return "recovered"
    if outcome not in ("recovered", "undecided"):
        return outcome
    if floor.get("infinite"):
        return "not identifiable"
    allowed = number(floor.get("psnr"))
    if math.isnan(psnr) or math.isnan(allowed) or _unsettled(floor):
        return "undecided"
    if allowed >= _RECOVERED_PSNR:
        return "optimiser failed"
    # The noise of rounding is known to its order only.
    return "undecided" if floor.get("rounding_only") else "not identifiable"


def _unsettled(floor: dict[str, Any]) -> bool:
    """Whether the estimate stopped early: the true floor is higher, nobody knows by how much."""
    return number(floor.get("converged")) < 1


def _limits(row: Row) -> dict[str, Any]:
    found = (row.result or {}).get("limits")
    return found if isinstance(found, dict) else {}


def _place(row: Row) -> tuple[str, str]:
    return str(row.job.get("protocol")), str(row.job.get("defense"))


def _place_of(setting: dict[str, Any]) -> tuple[str, str]:
    return setting["protocol"], setting["defense"]


def _pair(value: Any) -> tuple[float, float]:
    if isinstance(value, list) and len(value) == 2:
        return number(value[0]), number(value[1])
    return math.nan, math.nan
