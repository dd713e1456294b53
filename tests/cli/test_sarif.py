"""``--sarif``, and the file of a repository that is not run unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from leakscope.cli import app
from sarif_schema import sarif_problems

SPEC = """\
model: {name: mlp, options: {hidden: [8]}}
data: {name: tiles, limit: 6}
examples: 1
attacks: [linear-layer]
findings: false
protocols:
  - fedsgd
defenses:
  - none
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "leakscope.yaml").write_text(SPEC)
    return tmp_path


def places(file: Path) -> list[tuple[str, int]]:
    log = json.loads(file.read_text())
    assert sarif_problems(log) == []
    found = [result["locations"][0]["physicalLocation"] for result in log["runs"][0]["results"]]
    return [(place["artifactLocation"]["uri"], place["region"]["startLine"]) for place in found]


def test_audit_and_report_write_the_same_findings_at_the_lines_of_the_spec(folder: Path) -> None:
    command = ["audit", "leakscope.yaml", "--out", "run", "--serial", "-q", "--sarif", "new/findings.sarif"]
    assert CliRunner().invoke(app, command).exit_code == 1
    first = (folder / "new" / "findings.sarif").read_bytes()
    assert [oct(one.stat().st_mode & 0o777) for one in (folder / "new", folder / "new" / "findings.sarif")] == [
        "0o700",
        "0o600",
    ]
    assert str(folder).encode() not in first
    assert places(folder / "new" / "findings.sarif")[0] == ("leakscope.yaml", 9)
    again = CliRunner().invoke(app, ["report", "run", "--sarif", "again.sarif", "--json"])
    assert again.exit_code == 0
    assert json.loads(again.stdout)["outcome"] == "leaks"
    assert (folder / "again.sarif").read_bytes() == first


def test_a_setting_that_was_typed_is_not_sought_in_the_file(folder: Path) -> None:
    command = ["audit", "leakscope.yaml", "--out", "run", "--serial", "-q", "--sarif", "s", "--defense", "top-k"]
    CliRunner().invoke(app, command)
    assert set(places(folder / "s")) == {("leakscope.yaml", 7)}  # the protocol's line


@pytest.mark.slow
def test_the_file_of_a_repository_is_not_run_unasked(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leakscope.audit.spec.DEFAULT_SPEC", {**_small(), "model": "logistic"})
    told = CliRunner().invoke(app, ["audit", "--out", "run"])
    assert "yours is run by: leakscope audit leakscope.yaml" in told.stderr
    for silent in (["--serial"], ["-q"]):
        assert "yours is run by" not in CliRunner().invoke(app, ["audit", "--out", "run", *silent]).stderr


def _small() -> dict[str, object]:
    return {"data": {"name": "tiles", "limit": 2}, "examples": 1, "attacks": "linear-layer", "findings": False}
