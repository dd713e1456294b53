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
            span = _span(own)
            sentence, small = (f"Nothing follows: {own.reason}.", "") if own.reason else (meaning(own), _small(own))
            if own.reason and span:
                sentence = f"Single features do not follow: {own.reason}. {span}"
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


def _span(finding: FindingRow) -> str:
    """What is known of the span of features that do not follow one by one; empty where nothing is.

    >>> content = {"layer": "fc1", "examples": 12, "numbers": 512, "span_error": 1e-7, "span_baseline": 0.988}
    >>> _span(FindingRow("k", 0, "embedding", "done", "FedSGD()", "none", 0, 0, content))
    'The span of the 512 features in front of fc1 of 12 examples follows to 1e-07 (a random span: 0.99).'
    """
    error, baseline = finding.value("span_error"), finding.value("span_baseline")
    if math.isnan(error) or math.isnan(baseline):
        return ""
    numbers, examples = _whole(finding.value("numbers")), _whole(finding.value("examples"))
    size = _power(error) if error < 0.01 else f"{error:.2f}"
    what = f"The span of the {numbers} features in front of {finding.content.get('layer') or 'a layer'}"
    return f"{what} of {examples} examples follows to {size} (a random span: {baseline:.2f})."


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
