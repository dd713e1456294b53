"""A few hundred of the hostile cases of tests/hostile_cases.py, and values that hypothesis thinks of."""

from __future__ import annotations

import contextlib
import json
import resource
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

import hostile_cases
from leakscope.attacks import ATTACKS
from leakscope.audit import AuditSpec, SpecError, read_yaml
from leakscope.contracts.files import read_observation_files
from leakscope.contracts.observation import Observation
from leakscope.contracts.settings import settings_of
from leakscope.defenses import DEFENSES
from leakscope.federation import PROTOCOLS
from leakscope.models import build_model

QUICK = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
KEYS = sorted(AuditSpec.model_fields)


@pytest.mark.parametrize("kind", list(hostile_cases.KINDS))
def test_hostile_cases_end_in_a_result_or_one_clear_error(kind: str) -> None:
    share = hostile_cases.KINDS[kind][1]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    outcomes = [hostile_cases.run_case(kind, seed) for seed in range(6 * share)]
    # Of a whole suite in one process the peak may be another test's.
    assert [o for o in outcomes if o.problem and not (o.problem.endswith(" MB") and peak > 1000)] == []


def test_the_watch_sees_code_that_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setitem(hostile_cases.KINDS, "demo", (lambda chance, folder: os.system("true"), 1))
    assert "code was run: os.system" in hostile_cases.run_case("demo", 0).problem
    monkeypatch.setitem(hostile_cases.KINDS, "demo", (lambda chance, folder: [][1], 1))
    assert "IndexError" in hostile_cases.run_case("demo", 0).problem


@pytest.mark.slow
@QUICK
@given(st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=4))
def test_any_value_in_a_spec(changes: dict[str, Any]) -> None:
    base: dict[str, Any] = {"model": "logistic", "data": "tiles"}
    with contextlib.suppress(SpecError):
        AuditSpec.parse({**base, **changes})


@QUICK
@given(st.text(alphabet="ab:-{}[]&*!|>'\"# \n\t%@,?1.e_~<=", max_size=60))
def test_any_text_as_yaml(text: str) -> None:
    with contextlib.suppress(SpecError):
        read_yaml(text)


@QUICK
@given(st.data())
def test_any_setting_of_any_part(data: st.DataObject) -> None:
    table = data.draw(st.sampled_from((ATTACKS, DEFENSES, PROTOCOLS)))
    cls = table[data.draw(st.sampled_from(sorted(table)))].target
    known = [one.name for one in settings_of(cls)]
    if not known:
        return
    options = data.draw(st.dictionaries(st.sampled_from(known), JSON | st.integers(0, 10**40), max_size=3))
    with contextlib.suppress(ValueError):
        cls.build(options)


@QUICK
@given(st.dictionaries(st.sampled_from(sorted(hostile_cases._observations()[0][1])), JSON, min_size=1, max_size=3))
def test_any_fact_beside_an_observation(changes: dict[str, Any]) -> None:
    tensors, facts = hostile_cases._observations()[0]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "update.safetensors")
        path.write_bytes(tensors)
        path.with_suffix(".json").write_text(json.dumps({**facts, **changes}))
        message = folder
        try:
            read_observation_files(path)
        except ValueError as error:
            message = str(error)
    assert folder in message


def test_a_spec_may_say_everything_that_a_case_is_made_from() -> None:
    for spec in hostile_cases.SPECS:
        AuditSpec.parse(read_yaml(yaml.safe_dump(spec)))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"num_examples": 10**12}, "inputs and outputs of all examples: expected at most 1,073,741,824 bytes"),
        ({"inputs": {"kind": "box", "shape": [10**6, 10**6], "range": None}}, "expected at most 1,073,741,824 bytes"),
        ({"output_shape": [10**9]}, "expected at most 1,073,741,824 bytes"),
        ({"training": {"epochs": 10**9, "batch_size": 1}}, "training.local steps: expected at most 1,000,000 of them"),
        ({"training": {"epochs": "many"}}, "training.epochs: Input should be a valid integer"),
        ({"training": {"speed": 1}}, "training.speed: Unexpected keyword argument"),
        ({"training": {"batch_order": [[0, 5]]}}, "training.batch_order: expected batches of sample numbers in 0..1"),
        ({"knowledge": {"labels": 3}}, "labels: expected"),
    ],
    ids=str,
)
def test_facts_that_no_update_has(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    tensors, facts = hostile_cases._observations()[1]
    path = tmp_path / "update.safetensors"
    path.write_bytes(tensors)
    path.with_suffix(".json").write_text(json.dumps({**facts, **change}))
    net = build_model("mlp", input_shape=(3, 4, 4), num_classes=9, hidden=(5,))
    with pytest.raises(ValueError, match=words):
        Observation.load(path, net)


def test_labels_that_the_model_has_no_output_for(tmp_path: Path) -> None:
    tensors, facts = hostile_cases._observations()[0]
    path = tmp_path / "update.safetensors"
    path.write_bytes(save({**load(tensors), "labels": torch.tensor([3, 99])}))
    path.with_suffix(".json").write_text(json.dumps(facts))
    net = build_model("mlp", input_shape=(3, 4, 4), num_classes=9, hidden=(5,))
    with pytest.raises(ValueError, match=r"labels: y: labels must lie in 0\.\.8"):
        Observation.load(path, net)
