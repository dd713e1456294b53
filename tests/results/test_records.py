"""Records forgive what a store may hold, and write what they are."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from leakscope.results import AttemptRecord, FindingRow, JobRecord, Row, judge, summarise
from leakscope.results.names import Part, parts_of
from leakscope.results.records import ExampleRecord, job_facts, number, plain

DAMAGED: list[Any] = [None, 3, "text", [], [None, "x", 7], {}, {"examples": "x"}, {"examples": [{}, None, 5]}]


@pytest.mark.parametrize("raw", DAMAGED, ids=str)
def test_any_json_is_read_as_a_row(raw: Any) -> None:
    row = Row.read("k", 0, "done", raw, raw)
    assert isinstance(row.job, JobRecord)
    assert (row.job.seed, row.job.batch, row.counts) == (-1, -1, True)
    assert all(math.isnan(example.value("psnr")) for example in row.examples)
    assert judge([row]).outcome in ("nothing audited", "inconclusive")
    assert len(summarise([row])) == 1
    finding = FindingRow.read("k", 0, "floor", "done", raw, raw)
    assert (finding.batch, finding.seed) == (-1, -1)
    assert isinstance(finding.reason, str)


@pytest.mark.parametrize("value", ["21", None, [], {}, math.nan, math.inf, 10**400], ids=lambda v: str(v)[:10])
def test_what_is_no_number_is_nan(value: Any) -> None:
    assert math.isnan(number(value))
    example = ExampleRecord.read({"index": 1, "psnr": value, "mse": 0.5, "score": value})
    assert math.isnan(example.value("psnr"))
    assert math.isnan(example.score)
    assert (example.index, example.value("mse")) == (1, 0.5)
    assert math.isnan(example.value("a measure of the future"))


def test_yes_and_no_are_one_and_zero() -> None:
    example = ExampleRecord.read({"index": True, "identified": True, "label_correct": False, "label": 3})
    assert (example.value("identified"), example.value("label_correct"), example.label) == (1.0, 0.0, 3)
    assert example.index == -1, "true is no index"


def test_a_damaged_part_costs_only_itself() -> None:
    raw = {
        **{"examples": [{"index": 0, "psnr": 20.0, "mse": 0.01}, "lost"], "flags": "mixture", "notes": [1, None]},
        **{"reasons": {"lpips": None, "ssim": "small"}, "info": [], "diagnosis": {"outcome": "magic"}},
        **{"adaptive": "yes", "peak_memory_mb": "much"},
    }
    record = AttemptRecord.read(raw)
    assert (record.best_psnr, len(record.examples)) == (20.0, 1)
    assert record.whole_psnr == pytest.approx(20.0)
    assert (record.flags, record.notes, record.info) == ((), ("1", "None"), {})
    assert (record.reasons, record.diagnosis, record.adaptive) == ({"ssim": "small"}, None, False)
    assert math.isnan(record.peak_memory_mb)
    told = AttemptRecord.read({"diagnosis": {"outcome": "undecided", "reason": "because"}, "adaptive": True})
    assert told.adaptive
    assert told.diagnosis is not None
    assert (told.diagnosis.outcome, told.diagnosis.reason) == ("undecided", "because")


def test_psnr_of_a_whole_update_averages_errors_and_needs_all_of_them() -> None:
    def whole(*errors: float | None) -> float:
        return AttemptRecord.read({"examples": [{"index": i, "mse": e} for i, e in enumerate(errors)]}).whole_psnr

    assert whole(0.01, 0.03) == pytest.approx(-10 * math.log10(0.02))
    assert whole(0.0) == pytest.approx(300.0)
    assert math.isnan(whole(0.01, None))
    assert math.isnan(whole())


def test_a_job_is_read_as_it_was_written() -> None:
    job = JobRecord(
        **{"protocol": "P()", "defense": "none", "attack": "A()", "attack_name": "a", "seed": 1, "batch": 2},
        **{"control": "noise", "indices": (4, 5), "knowledge": {"defense": True}},
    )
    facts = json.loads(json.dumps(job_facts(job)))
    assert JobRecord.read(facts) == job
    assert dataclasses.replace(job, control=None) == JobRecord.read({**facts, "control": None})
    assert JobRecord.read({**facts, "control": False}).control is None, "as an older store has it"


def test_the_reason_is_the_first_line_of_an_error() -> None:
    finding = FindingRow("k", 0, "floor", "failed", "P()", "none", 0, 0, {"reason": "small"})
    assert finding.reason == "small"
    assert dataclasses.replace(finding, error="E: no\nTraceback").reason == "E: no"
    assert Row.read("k", 0, "failed", {}, None, "\nE: no\nTraceback").reason == "E: no"
    assert Row.read("k", 0, "done", {}, {}).reason == ""


def test_json_has_no_nan_and_no_infinity() -> None:
    assert plain({"a": math.nan, 2: (1, math.inf, "x", True)}) == {"a": None, "2": [1, None, "x", True]}


def test_rows_keep_what_a_part_is_beside_its_repr() -> None:
    facts = {"name": "mine:Noise", "class": "Noise", "options": {"sigma": 0.5, "law": "normal"}}
    job = {"protocol": "P()", "defense": "Noise(...)", "attack": "A(steps=3)", "parts": {"defense": facts}}
    parts = parts_of([Row.read("k", 0, "refused", job, None)])
    assert parts["Noise(...)"] == Part("Noise", {"sigma": 0.5, "law": "normal"})
    assert parts["A(steps=3)"] == Part("A", {"steps": 3}), "an older row has only the repr"
    for broken in (None, 3, {"class": 3, "options": {}}, {"class": "A", "options": []}):
        assert Part.read("A(", broken) == Part("A(")
