"""SARIF logs: they keep the standard, point into the repository, say the same tomorrow, and tell nobody's folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from leakscope.audit.yaml_text import item_lines
from leakscope.report.sarif import RULES, Place, Source, place_of, sarif_log
from leakscope.results import Store, judge_store
from leakscope.results.records import Row
from sarif_schema import official_schema, sarif_problems

SGD, NOISE = "FedSGD(batchnorm='eval')", "GradientNoise(sigma=1.0)"
SOURCE = {
    "whole": {"file": "audits/leakscope.yaml", "line": 2},
    "defenses": {"none": {"file": "audits/leakscope.yaml", "line": 7}},
    "model": {"file": "src/my nets.py", "line": 3, "installed": False},
}


def store_of(folder: Path, *examples: tuple[str, float], **meta: Any) -> Store:
    """A store in which each defence's single example was recovered that well, 8 dB being the control's."""
    facts = {"policy": {"max_psnr": 20.0}, "plan": {}, "model": {"name": "mlp"}, "source": SOURCE, **meta}
    store = Store.create(folder, facts)
    job = {"protocol": SGD, "attack": "A()", "attack_name": "a", "seed": 0, "batch": 0}
    for number, (defense, psnr) in enumerate(examples):
        result = {"examples": [{"index": 0, "psnr": psnr, "label_correct": True}]}
        store.record(Row.read(f"r{number}", number, "done", {**job, "defense": defense}, result))
    blind = {"examples": [{"index": 0, "psnr": 8.0}]}
    control = {**job, "defense": "none", "control": "noise", "control_kind": "blind"}
    store.record(Row.read("c", len(examples), "done", control, blind))
    return store


def log_of(store: Store, source: Source | None = None) -> dict[str, Any]:
    return json.loads(json.dumps(sarif_log(store, judge_store(store), source)))


def test_the_schema_of_the_standard_refuses_what_is_wrong(tmp_path: Path) -> None:
    if official_schema() is None:
        pytest.skip("the schema of the standard is not here and no index can be reached: tools/sarif_schema.py")
    log = log_of(store_of(tmp_path / "run", ("none", 30.0)))
    assert sarif_problems(log) == []
    log["runs"][0]["results"][0]["level"] = "fatal"
    assert len(sarif_problems(log)) == 1
    del log["runs"][0]["tool"]["driver"]["name"]
    assert len(sarif_problems(log)) == 2


def test_a_leak_is_an_error_and_a_doubt_a_warning_each_at_its_line(tmp_path: Path) -> None:
    log = log_of(store_of(tmp_path / "run", ("none", 30.0), (NOISE, 9.0)))
    assert sarif_problems(log) == []
    run = log["runs"][0]
    told = [(r["ruleId"], r["level"], _place(r)) for r in run["results"] if r["level"] != "note"]
    assert told == [
        ("LS001", "error", ("audits/leakscope.yaml", 7)),
        ("LS004", "warning", ("audits/leakscope.yaml", 2)),
    ]
    leak, doubt = (r["message"]["text"] for r in run["results"] if r["level"] != "note")
    assert "example 0 leaks by a: PSNR 30.0 dB, 22.0 dB above its control" in leak
    assert "no attack that knows this defence was run. Let attacks know the defence" in doubt
    assert run["properties"]["outcome"] == "leaks"
    assert run["invocations"][0]["exitCode"] == 1
    related = run["results"][0]["relatedLocations"][0]["physicalLocation"]
    assert related["artifactLocation"]["uri"] == "src/my%20nets.py"


def _place(result: dict[str, Any]) -> tuple[str, int]:
    place = result["locations"][0]["physicalLocation"]
    return place["artifactLocation"]["uri"], place["region"]["startLine"]


def test_what_was_proved_of_an_example_is_told(tmp_path: Path) -> None:
    proof = {"residual": 0.4, "tolerance": 1.0, "free_directions": 0, "method": "masks decoded"}
    proofs = [proof, {**proof, "free_directions": 2304}, None]
    result = {"examples": [{"index": n, "psnr": 40.0, "certificate": one} for n, one in enumerate(proofs)]}
    job = {"protocol": SGD, "defense": "none", "attack": "A()", "attack_name": "a", "seed": 0, "batch": 0}
    store = Store.create(tmp_path / "run", {"policy": {"max_psnr": 20.0, "min_lift": 0.0}, "source": SOURCE})
    store.record(Row.read("a", 0, "done", job, result))
    log = log_of(store)
    assert sarif_problems(log) == []
    (leak,) = (one for one in log["runs"][0]["results"] if one["ruleId"] == "LS001")
    assert "1 of 3 examples: recovered, certified (masks decoded)." in leak["message"]["text"]
    assert "2,304 directions" in leak["message"]["text"]
    assert leak["properties"]["certified_examples"] == [0]
    assert leak["properties"]["certificates"] == [
        {"example": 0, "certified": True, **proof},
        {"example": 1, "certified": False, **proof, "free_directions": 2304},
    ]


def test_nothing_audited_is_no_clean_log(tmp_path: Path) -> None:
    store = store_of(tmp_path / "run")
    log = log_of(store)
    assert sarif_problems(log) == []
    assert [result["ruleId"] for result in log["runs"][0]["results"]] == ["LS005"]


def test_fingerprints_stay_while_numbers_and_lines_change(tmp_path: Path) -> None:
    moved = {**SOURCE, "defenses": {"none": {"file": "audits/leakscope.yaml", "line": 99}}}
    stores = [
        store_of(tmp_path / "one", ("none", 30.0)),
        store_of(tmp_path / "two", ("none", 45.0), source=moved),
        store_of(tmp_path / "three", (NOISE, 30.0)),
    ]
    first, second, third = (log_of(store)["runs"][0]["results"][0]["partialFingerprints"] for store in stores)
    assert first == second != third


@pytest.mark.parametrize(
    "source", [None, {}, {"whole": 3}, {"whole": {"file": ""}}, {"whole": {"file": "a", "line": -1}}]
)
def test_a_store_that_does_not_say_where_it_is_from_still_has_places(tmp_path: Path, source: Any) -> None:
    log = log_of(store_of(tmp_path / "run", ("none", 30.0), source=source))
    assert sarif_problems(log) == []
    assert _place(log["runs"][0]["results"][0])[0] in ("leakscope.yaml", "a")


def test_every_kind_of_finding_has_help_and_a_level() -> None:
    assert len({rule.id for rule in RULES.values()}) == len(RULES)
    for rule in RULES.values():
        told = rule.as_dict()
        assert told["help"]["text"] in told["help"]["markdown"]
        assert told["defaultConfiguration"]["level"] in ("error", "warning", "note")
    assert all((rule.severity is not None) == (rule.level == "error") for rule in RULES.values())


def test_places_are_told_without_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / ".git").mkdir(parents=True)
    (tmp_path / "project" / "deep").mkdir()
    assert place_of(tmp_path / "project" / "deep" / "spec.yaml") == Place(file="deep/spec.yaml")
    monkeypatch.chdir(tmp_path)
    assert place_of(tmp_path / "elsewhere" / "spec.yaml") == Place(file="elsewhere/spec.yaml")
    monkeypatch.chdir(tmp_path / "project")
    assert place_of(tmp_path / "elsewhere" / "spec.yaml") == Place(file="spec.yaml")
    assert place_of("../elsewhere/spec.yaml") == Place(file="spec.yaml")
    monkeypatch.chdir("/")
    assert place_of(tmp_path / "elsewhere" / "spec.yaml") == Place(file="spec.yaml")


def test_lines_of_anything_but_a_mapping_are_none() -> None:
    assert item_lines("- a\n- b\n") == {}
    assert item_lines("a: [b") == {}
    assert item_lines("") == {}
    assert item_lines("defenses: [none,\n  top-k]\nprotocols: fedsgd\n") == {"defenses": [1, 2], "protocols": [3]}
