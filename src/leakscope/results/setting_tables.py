"""A verdict as a small table, a line for each setting: for notebooks, papers and data frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from leakscope.contracts.tables import html_table
from leakscope.results.names import Setting, name_settings
from leakscope.results.records import highest, plain

if TYPE_CHECKING:
    from leakscope.results.verdict import Verdict


def setting_lines(verdict: Verdict) -> list[dict[str, Any]]:
    """Every setting with its outcome and numbers; None where there is none."""
    return [plain(_line(setting)) for setting in name_settings(verdict)]


def _line(setting: Setting) -> dict[str, Any]:
    verdict = setting.verdict
    low, high = verdict.interval
    return {
        "setting": setting.name,
        "protocol": setting.protocol_short,
        "defense": setting.defense_short,
        "outcome": verdict.outcome,
        "leaking": sum(example.leaks for example in verdict.examples),
        "certified": sum(example.certified for example in verdict.examples),
        "examples": len(verdict.examples),
        "worst_psnr": highest(example.psnr for example in verdict.examples),
        "mean_psnr": verdict.mean_psnr,
        "psnr_low": low,
        "psnr_high": high,
        "baseline_psnr": verdict.baseline_psnr,
        "identification": verdict.identification,
        "label_accuracy": verdict.label_accuracy,
    }


#: Columns of the table for people, and what they are called there.
_SHOWN = {
    "setting": "setting",
    "protocol": "protocol",
    "defense": "defence",
    "worst_psnr": "worst PSNR (dB)",
    "mean_psnr": "mean PSNR (dB)",
    "baseline_psnr": "no information (dB)",
    "leaking": "leaking",
    "certified": "certified",
    "outcome": "outcome",
}


def shown_lines(verdict: Verdict) -> list[dict[str, Any]]:
    """The same for people to read: fewer columns, with the words of the report."""
    return [{title: line[name] for name, title in _SHOWN.items()} for line in setting_lines(verdict)]


def verdict_html(verdict: Verdict, *more: str) -> str:
    """The outcome, the table, and the verdict in words; ``more`` sentences last."""
    return html_table(f"Verdict: {verdict.outcome}", shown_lines(verdict), [str(verdict), *more])
