"""Documents for machines keep their schema, hold no NaN, and leave out what is private."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest

from json_schema import violations
from leakscope.metrics import MEASURES
from leakscope.report.export import VERSIONS, audit_document, audit_table, csv_text, document, json_text, schema
from leakscope.results import Store, judge_store
from leakscope.results.records import FindingRow, Row

SGD, PRUNING = "FedSGD(batchnorm='eval')", "GradientPruning(fraction=0.9, scope='tensor')"


@pytest.fixture
def store(tmp_path: Path) -> Any:
    meta = {
        "policy": {"max_psnr": 20.0},
        "plan": {"total": 4},
        "versions": {"leakscope": "0"},
        "model": {"name": "mlp", "parameters": 7, "fingerprint": "f", "training": None, "repr": "/home/ada/model"},
        "data": {"name": "mine", "private": True, "shape": [1, 4, 4], "class_names": ["ill", "well"], "count": 8},
        "threat_model": ["It sees all."],
        "audited": [{"text": "random weights", "warning": True}],
        "created": "now",
    }
    store = Store.create(tmp_path / "run", meta)
    job = {"protocol": SGD, "defense": "none", "attack": "A()", "attack_name": "a", "seed": 0, "batch": 0}
    example = {
        "index": 0,
        "psnr": 30.0,
        "ssim": None,
        "label": 1,
        "label_guess": 1,
        "label_correct": True,
        "score": 0.5,
    }
    store.record(Row.read("a", 0, "done", job, {"examples": [example, {**example, "index": 1}], "flags": ["odd", "x"]}))
    blind = {"examples": [{"index": 0, "psnr": 8.0}]}
    store.record(Row.read("b", 1, "done", {**job, "control": "noise"}, blind, None, math.nan))
    error = "RuntimeError: broke\n  File /home/ada/secret.py"
    store.record(Row.read("c", 2, "failed", {**job, "defense": PRUNING}, None, error, 1.0, "now"))
    store.record_finding(FindingRow("f", 3, "floor", "done", SGD, "none", 0, 0, {"rmse": math.inf}))
    yield store
    store.close()


RETRY = {"kind": "retry", "arguments": {}, "changes": None}


def test_the_document_of_an_audit_keeps_its_schema(store: Any) -> None:
    told = json.loads(json_text(audit_document(store, judge_store(store), {"report": "run/report.html"})))
    assert violations(told, schema("audit")) == []
    assert told["schema"] == "leakscope/audit/1"
    assert (told["outcome"], told["exit_code"]) == ("leaks", 1)
    assert [setting["name"] for setting in told["settings"]] == ["S1", "S2"]
    assert [job["setting"] for job in told["jobs"]] == ["S1", None, "S2"]
    assert told["worst"]["values"]["psnr"] == 30.0
    assert told["worst"]["lift"] == 22.0
    assert told["settings"][1]["mean_psnr"] is None  # NaN there
    assert told["findings"][0]["content"] == {"rmse": None}
    assert told["audited"][0] == {"text": "random weights", "warning": True}
    assert any(reason["settings"] == ["S1"] for reason in told["reasons"])
    leak = told["settings"][0]["reasons"][0]
    assert {
        name: leak[name] for name in ("kind", "code", "example", "attack", "measure", "value", "limit", "baseline")
    } == {
        **{"kind": "reconstruction", "code": "reconstruction", "example": 0, "attack": "a", "measure": "psnr"},
        **{"value": 30.0, "limit": 20.0, "baseline": 8.0},
    }
    assert leak["scenario"] == {"protocol": SGD, "defense": "none"}
    failed = next(reason for reason in told["settings"][1]["reasons"] if reason["code"] == "job-failed")
    assert (failed["kind"], failed["count"], failed["remedies"]) == ("doubt", 1, [RETRY])


def test_certificates_are_in_the_document_and_in_the_table(tmp_path: Path) -> None:
    job = {"protocol": SGD, "defense": "none", "attack": "A()", "attack_name": "a", "seed": 0, "batch": 0}
    proof = {"residual": 0.4, "tolerance": 1.0, "free_directions": 0, "method": "masks decoded"}
    proofs = [proof, {**proof, "free_directions": 2304}, {**proof, "residual": None, "free_directions": None}, None]
    examples = [{"index": n, "psnr": 40.0, "certificate": one} for n, one in enumerate(proofs)]
    old = [{"index": n, "psnr": 10.0} for n in range(4)]  # as versions before 0.12 wrote them
    why = {"outcome": "not identifiable", "reason": "see /home/ada/model.py"}
    with Store.create(tmp_path / "run", {"policy": {"max_psnr": 20.0}, "plan": {"total": 2}}) as store:
        store.record(Row.read("a", 0, "done", job, {"examples": examples, "diagnosis": why}))
        store.record(Row.read("b", 1, "done", {**job, "seed": 1}, {"examples": old}))
        told = json.loads(json_text(audit_document(store, judge_store(store), {})))
        lines = list(csv.DictReader(io.StringIO(csv_text(audit_table(store, judge_store(store))))))
    assert violations(told, schema("audit")) == []
    new, before = (one["examples"] for one in told["jobs"])
    assert [(one["certified"], one["certificate"]) for one in new] == [
        (True, proof),
        *((False, other) for other in proofs[1:]),
    ]
    assert [(one["certified"], one["certificate"]) for one in before] == [(False, None)] * 4
    assert [job["diagnosis"] for job in told["jobs"]] == [{**why, "reason": "see model.py"}, None]
    setting = told["settings"][0]
    assert setting["certified"] == 1
    assert [one["certificate"] for one in setting["examples"]] == proofs
    assert told["worst"]["certified"] is True
    columns = ("certified", *(f"certificate_{name}" for name in proof))
    assert [tuple(line[name] for name in columns) for line in lines[:5]] == [
        ("True", "0.4", "1.0", "0", "masks decoded"),
        ("False", "0.4", "1.0", "2304", "masks decoded"),
        ("False", "", "1.0", "", "masks decoded"),
        ("", "", "", "", ""),
        ("", "", "", "", ""),
    ]


def test_nothing_private_is_in_it(store: Any) -> None:
    text = json_text(audit_document(store, judge_store(store), {})) + csv_text(audit_table(store, judge_store(store)))
    for private in ("/home", "secret.py", "well", '"label"', "label_guess"):
        assert private not in text


def test_a_schema_notices_what_is_wrong(store: Any) -> None:
    told = audit_document(store, judge_store(store), {})
    for broken in (
        {**told, "schema": "leakscope/audit/2"},
        {**told, "outcome": "fine"},
        {**told, "exit_code": 2},
        {key: value for key, value in told.items() if key != "settings"},
        {**told, "settings": [{**told["settings"][0], "mean_psnr": "high"}]},
        {**told, "worst": {"setting": "S1"}},
    ):
        assert violations(broken, schema("audit"))


def test_the_table_has_a_line_for_each_example_and_each_job_without_result(store: Any) -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(audit_table(store, judge_store(store))))))
    assert [(line["key"], line["index"], line["psnr"]) for line in lines] == [
        ("a", "0", "30.0"),
        ("a", "1", "30.0"),
        ("b", "0", "8.0"),
        ("c", "", ""),
    ]
    assert {measure.key for measure in MEASURES.values()} <= lines[0].keys()
    assert lines[0]["ssim"] == lines[2]["seconds"] == ""
    assert lines[0]["flags"] == "odd; x"
    assert lines[3]["reason"] == "RuntimeError: broke"


@pytest.mark.parametrize("kind", VERSIONS)
def test_every_kind_has_a_schema_that_names_itself(kind: str) -> None:
    told = document(kind, {})
    assert schema(kind)["properties"]["schema"] == {"const": told["schema"]}
    assert schema(kind)["required"][:2] == list(told) == ["schema", "leakscope"]
