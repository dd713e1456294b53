"""The sections of the page that come from the rows: settings, charts, curves, jobs, flags."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from leakscope.audit.setup import MAX_CANDIDATES
from leakscope.audit.store import Row, Store
from leakscope.audit.verdict import Verdict
from leakscope.report import svg, words
from leakscope.report.words import fixed, mean, number, percent

MAX_CURVES = 12
MAX_DETAILED_EXAMPLES = 24


def settings_section(verdict: Verdict, data: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a setting (protocol x defence), in the order of the verdict."""
    protocols = words.short_names(str(s.protocol) for s in verdict.settings)
    defenses = words.short_names(str(s.defense) for s in verdict.settings)
    # A blind guess picks one of the candidates that every reconstruction is compared with.
    count = min(number(data.get("candidates", data.get("count"))), MAX_CANDIDATES)
    entries = []
    for position, setting in enumerate(verdict.settings, start=1):
        protocol, defense = str(setting.protocol), str(setting.defense)
        examples = setting.examples
        psnrs = [number(e.psnr) for e in examples]
        low, high = (number(v) for v in setting.interval)
        lift = mean(number(e.lift) for e in examples)
        entries.append(
            {
                "name": f"S{position}",
                "protocol": protocol,
                "defense": defense,
                "short": f"{protocols[protocol]} · {defenses[defense]}",
                "protocol_short": protocols[protocol],
                "defense_short": defenses[defense],
                "defense_name": defenses[defense].partition("(")[0],
                "defense_options": defenses[defense].partition("(")[2].removesuffix(")"),
                "outcome": setting.outcome,
                "reasons": [str(reason) for reason in setting.reasons],
                "examples": len(examples),
                "leaking": sum(bool(e.leaks) for e in examples),
                "psnr": fixed(number(setting.mean_psnr)),
                "interval": _range(low, high, len(examples)),
                "best": fixed(max((p for p in psnrs if not math.isnan(p)), default=math.nan)),
                "ssim": fixed(mean(number(e.ssim) for e in examples), 2),
                "identification": percent(number(setting.identification)),
                "chance": percent(1 / count) if count >= 1 else words.DASH,
                "labels": percent(number(setting.label_accuracy)),
                "baseline": fixed(number(setting.baseline_psnr)),
                "lift": fixed(lift) if math.isnan(lift) or lift < 0 else "+" + fixed(lift),
                "flags": [str(flag) for flag in setting.flags],
                "done": setting.done,
                "failed": setting.failed,
                "refused": setting.refused,
                "missing": setting.missing,
                "row": svg.DotRow(
                    label=f"S{position} {defenses[defense]} · {protocols[protocol]}",
                    outcome=setting.outcome,
                    value=number(setting.mean_psnr),
                    low=low,
                    high=high,
                    baseline=number(setting.baseline_psnr),
                    points=tuple(psnrs),
                ),
            }
        )
    return entries


def charts(settings: list[dict[str, Any]], policy: float) -> dict[str, Any]:
    """The dot plot twice, for wide and for narrow screens; the style sheet shows one of them."""
    rows = [entry["row"] for entry in settings]
    if not rows:
        return {"wide": "", "narrow": ""}
    room = min(380, max(120, 20 + 8 * max(len(row.label) for row in rows)))
    return {
        "wide": svg.dot_plot(rows, policy=policy, identity="dots-wide", width=960, label_width=room),
        "narrow": svg.dot_plot(rows, policy=policy, identity="dots-narrow", width=340, label_width=0),
    }


def curves_section(store: Store, rows: list[Row], settings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each attack the objective of the job that came closest to an example, one line a restart."""
    attacks: dict[str, list[Row]] = {}
    for row in rows:
        if row.status == "done" and not row.job.get("control"):
            attacks.setdefault(str(row.job.get("attack")), []).append(row)
    short = words.short_names(attacks)
    found: list[dict[str, Any]] = []
    for attack, candidates in attacks.items():
        for row in sorted(candidates, key=lambda r: (-_best(r), r.position)):
            curves, measure = _curves(store, row.key)
            if curves:
                title = f"{measure} of {row.job.get('attack_name')}"
                best = _best(row)
                found.append(
                    {
                        "name": str(row.job.get("attack_name")),
                        "short": short[attack],
                        "attack": attack,
                        "setting": _setting_name(row, settings),
                        "seed": row.job.get("seed"),
                        "psnr": fixed(best if math.isfinite(best) else math.nan),
                        "restarts": len(curves),
                        "drawing": svg.curve_plot(curves, title=title, identity=f"curve-{len(found)}"),
                    }
                )
                break
    return found


def jobs_section(rows: list[Row], settings: list[dict[str, Any]], data: dict[str, Any]) -> dict[str, Any]:
    """The table of all jobs; each line is a list of cells with the value to sort by."""
    several = any(len(_examples(row)) > 1 for row in rows)
    names = ["#", "Status", "Setting", "Attack", "Seed", "Batch"]
    names += [
        "PSNR, dB",
        *(["Best PSNR, dB"] if several else []),
        "SSIM",
        "Identified",
        "Labels",
        "Seconds",
        "Flags",
    ]
    return {
        "columns": [{"name": name, "numeric": name not in _WORDS} for name in names],
        "lines": [_job_line(n, row, settings, data, several) for n, row in enumerate(rows, start=1)],
    }


_WORDS = frozenset({"Status", "Setting", "Attack", "Flags"})


def _job_line(
    position: int, row: Row, settings: list[dict[str, Any]], data: dict[str, Any], several: bool
) -> dict[str, Any]:
    job, result = row.job, row.result or {}
    examples = _examples(row)
    reasons = result.get("reasons") if isinstance(result.get("reasons"), dict) else {}
    error = str(row.error or "")
    first = error.strip().splitlines()[0] if error.strip() else ""
    flags = [str(flag) for flag in result.get("flags") or []]

    def measured(text: str, value: float, name: str) -> dict[str, Any]:
        why = ""
        if math.isnan(value):
            why = str((reasons or {}).get(name) or first or "not measured by this job")
        return _cell(text, value, why, numeric=True)

    psnrs = [number(e.get("psnr")) for e in examples]
    psnr, ssim = mean(psnrs), mean(number(e.get("ssim")) for e in examples)
    best = max((p for p in psnrs if not math.isnan(p)), default=math.nan)
    identified = words.share(e.get("identified") for e in examples)
    labels = words.share(e.get("label_correct") for e in examples)
    seconds = number(row.seconds)
    control, name = bool(job.get("control")), str(job.get("attack_name"))
    cells = [
        _cell(str(position), position, numeric=True),
        _cell(row.status, row.status, badge=row.status),
        _cell(_setting_name(row, settings), _setting_name(row, settings), _full_setting(job)),
        _cell(name, f"{name} control" if control else name, str(job.get("attack")), note="control" * control),
        _cell(str(job.get("seed")), number(job.get("seed")), numeric=True),
        _cell(str(job.get("batch")), number(job.get("batch")), numeric=True),
        measured(fixed(psnr), psnr, "psnr"),
        *([measured(fixed(best), best, "psnr")] if several else []),
        measured(fixed(ssim, 2), ssim, "ssim"),
        measured(_yes(identified, len(examples)), identified, "identified"),
        measured(_yes(labels, len(examples)), labels, "label_correct"),
        _cell(fixed(seconds), seconds, numeric=True),
        _cell("", " ".join(flags), chips=flags),
    ]
    return {
        "status": row.status,
        "control": control,
        "cells": cells,
        "reason": first if row.status != "done" else "",
        "repr": str(job.get("attack")),
        "key": row.key,
        "error": error,
        "facts": [
            ("Job key", row.key),
            ("Attack", str(job.get("attack"))),
            ("Protocol", str(job.get("protocol"))),
            ("Defence", str(job.get("defense"))),
            ("Examples", ", ".join(str(i) for i in job.get("indices") or [])),
            ("Knowledge", _plain(job.get("knowledge"))),
            ("Why", _why(result.get("diagnosis"))),
            ("Notes", "; ".join(str(note) for note in result.get("notes") or [])),
            ("Run", _plain(result.get("info"))),
            ("Not measured", "; ".join(f"{k}: {v}" for k, v in (reasons or {}).items())),
            ("Finished", str(row.finished or "")),
        ],
        "examples": [_example_line(e, data) for e in examples[:MAX_DETAILED_EXAMPLES]],
        "left_out": max(0, len(examples) - MAX_DETAILED_EXAMPLES),
    }


def _why(diagnosis: Any) -> str:
    """What became of the attack, and the reason."""
    if not isinstance(diagnosis, dict):
        return ""
    return f"{diagnosis.get('outcome')}: {diagnosis.get('reason')}"


def _example_line(example: dict[str, Any], data: dict[str, Any]) -> list[str]:
    names = data.get("class_names")

    def label(value: Any) -> str:
        if not isinstance(value, int):
            return words.DASH
        return str(names[value]) if isinstance(names, list) and 0 <= value < len(names) else str(value)

    return [
        str(example.get("index")),
        label(example.get("label")),
        label(example.get("label_guess")),
        fixed(number(example.get("psnr"))),
        fixed(number(example.get("ssim")), 2),
        fixed(number(example.get("mse")), 4),
        fixed(number(example.get("lpips")), 3),
        _yes(words.share([example.get("identified")]), 1),
        fixed(number(example.get("score")), 4),
    ]


def flags_section(verdict: Verdict, rows: list[Row]) -> list[dict[str, Any]]:
    """Every flag that occurs, in how many jobs, and what it means."""
    counts: dict[str, int] = {}
    for row in rows:
        for flag in (row.result or {}).get("flags") or []:
            counts[str(flag)] = counts.get(str(flag), 0) + 1
    for setting in verdict.settings:
        for flag in setting.flags:
            counts.setdefault(str(flag), 0)
    return [{"name": name, "jobs": counts[name], "meaning": words.explain_flag(name)} for name in sorted(counts)]


def _curves(store: Store, key: str) -> tuple[list[tuple[str, list[float]]], str]:
    """The curves of a job by name, and the measure; nothing where the history is absent or damaged."""
    try:
        history = store.history(key)
    except (ValueError, KeyError, TypeError, OSError):
        return [], ""
    names = [n for n in ("objective", *sorted(history)) if isinstance(history.get(n), list) and history[n]]
    if not names:
        return [], ""
    value = history[names[0]]
    curves: Sequence[Any] = value if isinstance(value[0], list) else [value]
    lines = [
        (f"restart {n}", [number(v) for v in curve])
        for n, curve in enumerate(curves[:MAX_CURVES], start=1)
        if isinstance(curve, list) and curve
    ]
    return lines, names[0]


def _examples(row: Row) -> list[dict[str, Any]]:
    found = (row.result or {}).get("examples")
    return [e for e in found if isinstance(e, dict)] if isinstance(found, list) else []


def _best(row: Row) -> float:
    """The highest PSNR in a row; minus infinity where none was measured."""
    psnrs = [number(e.get("psnr")) for e in _examples(row)]
    return max((p for p in psnrs if not math.isnan(p)), default=-math.inf)


def _setting_name(row: Row, settings: list[dict[str, Any]]) -> str:
    place = (str(row.job.get("protocol")), str(row.job.get("defense")))
    return next((s["name"] for s in settings if (s["protocol"], s["defense"]) == place), words.DASH)


def _full_setting(job: dict[str, Any]) -> str:
    return f"{job.get('protocol')}, defence {job.get('defense')}"


def _cell(
    text: str,
    value: Any,
    title: str = "",
    *,
    numeric: bool = False,
    badge: str = "",
    note: str = "",
    chips: Sequence[str] = (),
) -> dict[str, Any]:
    if isinstance(value, float):
        value = "" if math.isnan(value) else f"{value:.6g}"
    return {
        **{"text": text, "value": value, "title": title, "numeric": numeric},
        **{"badge": badge, "note": note, "chips": chips},
    }


def _range(low: float, high: float, count: int) -> str:
    """An interval in words; one example has no spread.

    >>> _range(12.0, 15.5, 4), _range(12.0, 12.0, 1), _range(math.nan, math.nan, 0)
    ('12.0 to 15.5', 'one example', '–')
    """
    if count == 1:
        return "one example"
    return f"{fixed(low)} to {fixed(high)}" if not math.isnan(low) else words.DASH


def _yes(value: float, count: int) -> str:
    """A share of one example is a yes or a no.

    >>> _yes(1.0, 1), _yes(0.0, 1), _yes(0.5, 2), _yes(math.nan, 1)
    ('yes', 'no', '50 %', '–')
    """
    if math.isnan(value) or count != 1:
        return percent(value)
    return "yes" if value > 0.5 else "no"


def _plain(value: Any) -> str:
    """A mapping in one line, as a person would write it.

    >>> _plain({"steps": 5, "device": "cpu"})
    'steps: 5, device: cpu'
    """
    if not isinstance(value, dict):
        return "" if value is None else str(value)
    return ", ".join(f"{k}: {v if isinstance(v, str) else json.dumps(v)}" for k, v in value.items())
