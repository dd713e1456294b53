"""The section on what the last layers give away by themselves: the features in front of them, without any search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from leakscope.results.names import Setting
from leakscope.results.records import FindingRow, counted


def embedding_section(findings: Sequence[FindingRow], settings: Sequence[Setting]) -> list[dict[str, Any]]:
    """One entry a setting that has the finding: a sentence, and a smaller line below it."""
    entries = []
    for setting in settings:
        own = next((f for f in findings if f.kind == "embedding" and f.setting == setting.cell), None)
        if own is not None:
            sentence, small = (f"Nothing follows: {own.reason}.", "") if own.reason else (meaning(own), _small(own))
            entries.append({"setting": setting, "sentence": sentence, "small": small, "leaks": not own.reason})
    return entries


def meaning(finding: FindingRow) -> str:
    """The finding in one sentence.

    >>> content = {"layer": "fc", "examples": 4, "numbers": 2048, "error": 1e-7, "residual": 3e-12, "exact": True}
    >>> meaning(FindingRow("k", 0, "embedding", "done", "FedSGD()", "none", 0, 0, content))
    'The 2,048 features in front of fc of each of 4 examples follow from the update, to 1e-07; certificate 3e-12.'
    """
    content = finding.content
    examples, numbers = finding.value("examples"), finding.value("numbers")
    each = "of the one example" if examples == 1 else f"of each of {_whole(examples)} examples"
    layer = str(content.get("layer") or "the last layer")
    if content.get("reaches_input") is True:
        what = f"The examples themselves, the {_whole(numbers)} inputs of {layer} {each},"
    else:
        what = f"The {_whole(numbers)} features in front of {layer} {each}"
    how = "follow" if content.get("exact") is True else "follow roughly"
    error, residual = (_power(finding.value(name)) for name in ("error", "residual"))
    return f"{what} {how} from the update, to {error}; certificate {residual}."


def _small(finding: FindingRow) -> str:
    content, words = finding.content, []
    peeled = content.get("peeled")
    if isinstance(peeled, list) and peeled:
        words.append(f"{counted(len(peeled), 'dense layer')} below the head solved as well")
    right = finding.value("labels_right")
    if not math.isnan(right):
        words.append(f"{100 * right:.0f} % of the labels right")
    if content.get("note"):
        words.append(str(content["note"]))
    return "; ".join(words)


def _whole(value: float) -> str:
    return "?" if math.isnan(value) else f"{value:,.0f}"


def _power(value: float) -> str:
    return "an unknown error" if math.isnan(value) else f"{value:.0e}"
