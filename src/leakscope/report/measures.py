"""The table of all measures of a setting, each with its interval and the zero-information baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from leakscope.audit.summary import MeasureSummary, SettingSummary
from leakscope.report import words

# Name and unit, and the digits after the point; None for a share.
_SHOWN: dict[str, tuple[str, int | None]] = {
    "mse": ("MSE", 4),
    "rmse": ("RMSE", 4),
    "rmse_maxnorm": ("RMSE, max-norm", 4),
    "psnr": ("PSNR, dB", 1),
    "ssim": ("SSIM", 3),
    "lpips": ("LPIPS", 3),
    "label_accuracy": ("Labels", None),
    "identification": ("Identified", None),
}


def measures_section(
    summaries: Sequence[SettingSummary], settings: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Each setting of the page with the lines of its table; no lines where nothing was measured at all."""
    found = {(str(s.protocol), str(s.defense)): s.measures for s in summaries}
    return [
        (setting, [_line(m) for m in found.get((setting["protocol"], setting["defense"]), []) if setting["examples"]])
        for setting in settings
    ]


def _line(measure: MeasureSummary) -> dict[str, Any]:
    name, digits = _SHOWN.get(measure.name, (measure.name, 3))
    why, baseline_why = measure.reason or "", measure.baseline_reason or ""
    return {
        "name": name,
        "better": measure.better,
        "cells": [
            _cell(_figure(measure.mean, digits), why),
            _cell(_range(measure.interval, measure.count, digits), why),
            _cell(_figure(measure.baseline, digits), baseline_why),
            _cell(_range(measure.baseline_interval, measure.baseline_count, digits), baseline_why),
            # Fewer examples than there are: the reason belongs to the number, too.
            {"text": _count(measure.count, measure.baseline_count), "title": why or baseline_why},
        ],
    }


def _cell(text: str, why: str) -> dict[str, str]:
    return {"text": text, "title": why if text == words.DASH else ""}


def _figure(value: float, digits: int | None) -> str:
    """A share or a number; one too small for its digits in powers of ten, lest it look like nothing.

    >>> _figure(0.25, None), _figure(0.01234, 4), _figure(0.0000021, 4), _figure(0.0, 4), _figure(math.nan, 4)
    ('25 %', '0.0123', '2e−06', '0.0000', '–')
    """
    if digits is None:
        return words.percent(value)
    if 0 < abs(value) < 0.5 * 10**-digits:
        return f"{value:.0e}".replace("-", "−")
    return words.fixed(value, digits)


def _range(interval: tuple[float, float], count: int, digits: int | None) -> str:
    """An interval in words; one example has no spread.

    >>> _range((12.0, 15.5), 4, 1), _range((0.0, 0.5), 4, None), _range((1.0, 1.0), 1, 1)
    ('12.0 to 15.5', '0 % to 50 %', 'one example')
    """
    low, high = interval
    if math.isnan(low):
        return words.DASH
    return "one example" if count == 1 else f"{_figure(low, digits)} to {_figure(high, digits)}"


def _count(count: int, baseline_count: int) -> str:
    """How many examples were measured, and how many without information where that differs.

    >>> _count(4, 4), _count(4, 3), _count(4, 0)
    ('4', '4, without 3', '4')
    """
    return f"{count}, without {baseline_count}" if baseline_count not in (0, count) else str(count)
