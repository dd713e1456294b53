"""An audit in a notebook or a script: small escaped tables, data frames, and data as people have it."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import jsonschema
import numpy as np
import pytest
import torch
from audit_doubles import run
from torch.utils.data import DataLoader, TensorDataset

import leakscope as ls
from leakscope.audit import Audit
from leakscope.audit.progress import listener
from leakscope.contracts.reconstruction import Diagnosis, Reconstruction
from leakscope.contracts.tables import data_frame, html_facts, html_table, latex_table
from leakscope.report import show
from leakscope.report.export import schema
from sarif_schema import sarif_problems

QUICK: dict[str, Any] = {"attacks": [doubles.Quotient()], "defenses": None, "findings": False, "controls": False}
#: What HTML never closes.
_VOID = {"img", "br", "hr"}


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.names.add(tag)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def tags_of(html: str) -> set[str]:
    parser = _Tags()
    parser.feed(html)
    parser.close()
    assert not parser.open
    return parser.names


@pytest.fixture(scope="module")
def audit(tmp_path_factory: pytest.TempPathFactory) -> Audit:
    return run(tmp_path_factory.mktemp("run"), **{**QUICK, "controls": True})


def test_an_audit_and_its_verdict_are_small_tables(audit: Audit) -> None:
    for value in (audit, audit.verdict):
        html = value._repr_html_()
        assert tags_of(html) == {"table", "caption", "b", "thead", "tr", "th", "tbody", "td", "div"}
        assert len(html) < 5000
        assert "Verdict: leaks" in html
        assert "no defence" in html
    assert "data:image" not in audit._repr_html_()


def test_text_of_others_is_escaped() -> None:
    evil = "<script>alert(1)</script>&\"'"
    for html in (html_table(evil, [{evil: evil}], [evil]), html_facts(evil, {evil: [evil]}, [evil])):
        assert "script" not in tags_of(html)
    diagnosis = Diagnosis(outcome="undecided", reason=evil, unknowns=4)
    reconstruction = Reconstruction(torch.zeros(1, 1, 2, 2), None, torch.zeros(1), notes=(evil,), diagnosis=diagnosis)
    assert "script" not in tags_of(reconstruction._repr_html_())


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames_hold_every_example_of_every_job(audit: Audit, library: str) -> None:
    pytest.importorskip(library)
    frame = audit.to_frame(library)
    assert type(frame).__module__.startswith(library)
    assert len(frame) == sum(len(row.examples) or 1 for row in audit.rows)
    assert {"attack_name", "psnr", "setting", "status"} <= set(frame.columns)
    assert "label" not in frame.columns
    settings = audit.verdict.to_frame(library)
    assert len(settings) == len(audit.verdict.settings)
    assert max(settings["worst_psnr"]) == pytest.approx(audit.worst.psnr if audit.worst else 0)


def test_without_a_library_of_frames_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("pandas", "polars") else real(name))
    with pytest.raises(ImportError, match="needs pandas or polars, which is not installed: pip install pandas"):
        data_frame([{"a": 1}])
    with pytest.raises(ImportError, match="needs polars"):
        data_frame([{"a": 1}], "polars")
    with pytest.raises(ValueError, match="expected pandas or polars, got 'numpy'"):
        data_frame([{"a": 1}], "numpy")


def test_polars_bears_columns_that_begin_with_nothing() -> None:
    pytest.importorskip("polars")
    assert data_frame([{"a": None}] * 200 + [{"a": 1.5}], "polars")["a"][-1] == 1.5


def test_json_keeps_the_schema_by_an_independent_validator(audit: Audit) -> None:
    told = json.loads(audit.to_json())
    jsonschema.Draft202012Validator.check_schema(schema("audit"))
    jsonschema.validate(told, schema("audit"))
    assert {reason["kind"] for setting in told["settings"] for reason in setting["reasons"]} >= {"reconstruction"}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**told, "outcome": 3}, schema("audit"))
    brief = json.loads(audit.verdict.to_json())
    assert brief["outcome"] == told["outcome"]
    assert len(brief["settings"]) == len(told["settings"])


def test_sarif_of_an_audit_from_python_points_to_its_model(audit: Audit) -> None:
    log = json.loads(audit.to_sarif())
    assert sarif_problems(log) == []
    place = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]
    assert not Path(place["uri"]).is_absolute()


def test_latex_is_escaped_and_balanced(audit: Audit) -> None:
    for text in (audit.to_latex(), latex_table([{"a_b": "50 % & \\ ~ ^ {x} $ #"}]), latex_table([])):
        assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
        rows = [line for line in text.splitlines() if line.endswith(r"\\")]
        assert len({row.replace(r"\&", "").count("&") for row in rows}) <= 1
        bare = text.replace(r"\{", "").replace(r"\}", "")
        assert bare.count("{") == bare.count("}")
    assert r"no defence & " in audit.to_latex()


def test_reconstructions_show_no_picture_unless_asked() -> None:
    x = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    observation = ls.FedSGD().observe(doubles.net(), x[:1], torch.tensor([1]))
    reconstruction = Reconstruction(x, torch.tensor([1, 2]), torch.tensor([0.5, 0.25]), flags=("mixture",))
    html = reconstruction._repr_html_()
    assert "img" not in tags_of(html)
    assert "2 of shape 1 x 4 x 4" in html
    assert "mixture" in html
    assert show(reconstruction, observation)._repr_html_().count("<img") == 2
    assert show(reconstruction, observation, most=1)._repr_html_().count("<img") == 1
    empty = Reconstruction(torch.zeros(0, 1, 4, 4), None, torch.zeros(0))
    assert "0 of shape" in empty._repr_html_()


def test_limits_are_a_small_table() -> None:
    facts = ls.limits.limits(doubles.net(), (1, 4, 4), batch=1)
    assert tags_of(facts._repr_html_()) == {"table", "caption", "b", "tbody", "tr", "th", "td", "div"}
    assert "Identifiable" in facts._repr_html_()
    assert json.loads(facts.to_json())["unknowns"] == 16
    assert "unknowns & 16" in facts.to_latex()
    net = ls.build_model("vertical-mlp", input_shape=(10,), num_classes=3, slices={"a": ["0-5"], "b": ["6-9"]})
    vertical = ls.limits.vertical_limits(net, samples=8, batch=3)
    assert tags_of(vertical._repr_html_()) >= {"table", "td"}
    assert json.loads(vertical.to_json())["workers"]


def test_data_as_people_have_it_gives_the_same_audit(tmp_path: Path) -> None:
    x, y = doubles.examples(3)
    dataset = TensorDataset(x, y)
    kinds: dict[str, Any] = {
        "tensors": (x, y),
        "arrays": (x.numpy(), y.numpy()),
        "wide arrays": [x.numpy().astype(np.float64), y.numpy().astype(np.int32)],
        "dataset": dataset,
        "loader": DataLoader(dataset, batch_size=2),
        "shuffled loader": DataLoader(dataset, batch_size=2, shuffle=True),
    }
    worst = {}
    for name, data in kinds.items():
        result = ls.audit(model=doubles.net(), data=data, examples=3, progress=False, **QUICK)
        worst[name] = [round(example.psnr) for example in result.verdict.settings[0].examples]
    assert len({tuple(psnrs) for psnrs in worst.values()}) == 1, worst


# -- progress --


def test_scripts_get_a_line_now_and_then_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("leakscope.audit.progress.PAUSE", 0.05)
    facts = {"attack_name": "dlg", "finding": None}
    with listener(None) as (tell, _):
        assert tell is not None
        tell({"event": "planned", "total": 40, "finished": 3})
        tell({"event": "advanced", "key": "a", "done": 7, "total": 100, "job": facts})
        assert stream.getvalue() == ""
        deadline = time.monotonic() + 20
        while not stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert stream.getvalue().startswith("[3/40] now dlg, step 7 of 100; after ")


def test_progress_goes_to_standard_error_and_off_with_one_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("leakscope.audit.progress.PAUSE", 0.01)
    run(tmp_path / "loud", **QUICK)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("[")
    run(tmp_path / "silent", **QUICK, progress=False)
    assert capsys.readouterr() == ("", "")


def test_lines_cost_no_estimate() -> None:
    with listener(None) as (tell, estimates):
        assert tell is not None
        assert not estimates
    with listener(False) as (tell, estimates):
        assert tell is None
    with listener(lambda event: None) as (tell, estimates):
        assert estimates
