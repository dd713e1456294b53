"""The section on what the last layers give away."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fabricate import NOISE, SGD, fabricate, finding, setting

from leakscope.report.findings import embedding_section
from leakscope.report.page import render

SETTINGS = [setting("S1", SGD, "none"), setting("S2", SGD, NOISE)]
CONTENT = {"layer": "fc", "examples": 4, "numbers": 2048, "error": 1e-7, "residual": 3e-12, "exact": True}


def told(content: dict[str, Any]) -> dict[str, Any]:
    (entry,) = embedding_section([finding("embedding", content, (SGD, "none"))], SETTINGS)
    return entry


def test_features_in_one_sentence() -> None:
    entry = told({**CONTENT, "labels_right": 1.0, "peeled": ["fc1"], "note": "it ends at 'fc'"})
    assert entry["sentence"] == (
        "The 2,048 features in front of fc of each of 4 examples follow from the update, to 1e-07; certificate 3e-12."
    )
    assert entry["small"] == "1 dense layer below the head solved as well; 100 % of the labels right; it ends at 'fc'"


def test_inputs_and_approximations() -> None:
    assert told({**CONTENT, "examples": 1, "reaches_input": True})["sentence"].startswith(
        "The examples themselves, the 2,048 inputs of fc of the one example, follow from"
    )
    assert "follow roughly from" in told({**CONTENT, "exact": False})["sentence"]


def test_a_refusal_and_content_of_any_kind() -> None:
    assert told({"reason": "10 examples and 10 classes"})["sentence"] == "Nothing follows: 10 examples and 10 classes."
    assert "unknown error" in told({"layer": 3, "examples": "x", "peeled": 4})["sentence"]
    assert embedding_section([finding("floor", {}, (SGD, "none"))], SETTINGS) == []


def test_a_span_in_place_of_single_features() -> None:
    content = {"reason": "12 examples", "layer": "fc1", "examples": 12, "numbers": 512}
    entry = told({**content, "span_error": 0.123, "span_baseline": 0.99})
    assert entry["sentence"] == (
        "Single features do not follow: 12 examples. The span of the 512 features in front of fc1 of 12 examples "
        "follows to 0.12 (a random span: 0.99)."
    )
    assert told({**content, "span_error": "x", "span_baseline": None})["sentence"] == "Nothing follows: 12 examples."


def test_the_page_shows_it_escaped(tmp_path: Path) -> None:
    built = fabricate(examples=1, seeds=1)
    built.find("embedding", (SGD, "none"), {**CONTENT, "layer": "<b>fc"})
    page = render(built.write(tmp_path / "audit"))
    assert "What the last layers give away" in page
    assert "in front of &lt;b&gt;fc of each of 4 examples" in page
    assert 'href="#embedding"' in page
