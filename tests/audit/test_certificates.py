"""A certificate reaches everything that people and machines read of an audit."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from leakscope.audit import Audit
from leakscope.cli import app
from leakscope.contracts.certificate import Certificate
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.federation import FedSGD

pytestmark = pytest.mark.slow

PROVER = '''
"""An attack that proves its result, or says what it leaves open."""
from dataclasses import dataclass

import torch
from torch import nn

import leakscope as ls
from leakscope.contracts.certificate import Certificate


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3))


def data():
    return torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(1)), torch.arange(3)


@dataclass(frozen=True, kw_only=True)
class Prover(ls.Attack):
    """The quotient of the gradients of weight and bias."""

    free: int = ls.setting(0, "Directions that stay free.", ge=0)
    wrong: bool = ls.setting(False, "Certify something else.")

    def run(self, observation, generator, progress=None):
        update = observation.message.update
        bias = update["1.bias"]
        unit = int(bias.abs().argmax())
        x = (update["1.weight"][unit] / bias[unit]).reshape(1, *observation.input_shape)
        proof = Certificate(residual=0.4, tolerance=1.0, free_directions=self.free, method="quotient")
        labels = update["3.bias"].argmin()[None]
        return ls.Reconstruction(1 - x if self.wrong else x, labels, torch.zeros(1), certificates=(proof,))
'''


@pytest.fixture
def mine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(folder)
    (folder / "prover.py").write_text(PROVER)
    return folder


def audited(attack: str) -> tuple[Any, dict[str, Any], str, dict[str, Any], list[dict[str, str]], str]:
    """Run one audit as somebody types it; return the process, JSON, page, SARIF, CSV and console."""
    parts = ["--model", "prover:model", "--data", "prover:data", "--examples", "1"]
    parts += ["--defense", "none", "--attack", attack, "--serial", "--no-findings"]
    run = CliRunner().invoke(app, ["audit", *parts, "--out", "run", "--json"])
    assert run.exit_code in (0, 1, 5), run.stderr
    made = CliRunner().invoke(app, ["report", "run", "--csv", "--sarif", "run/findings.sarif"])
    log = json.loads(Path("run/findings.sarif").read_text())
    page = Path("run/report.html").read_text(encoding="utf-8")
    return run, json.loads(run.stdout), page, log, list(csv.DictReader(io.StringIO(made.stdout))), run.stderr


def test_recovered_and_certified_is_said_everywhere(mine: Path) -> None:
    _everywhere("prover:Prover", "quotient")


def test_so_it_is_of_head_first_on_an_mlp(mine: Path) -> None:
    _everywhere("head-first", None)


def _everywhere(attack: str, method: str | None) -> None:
    run, told, page, log, lines, console = audited(attack)
    assert run.exit_code == 1
    certified = "1 of 1 example: recovered, certified"
    assert certified in " ".join(console.split())
    assert certified in page
    assert "Certificate: recovered, certified" in page
    (leak,) = (one for one in log["runs"][0]["results"] if one["ruleId"] == "LS001")
    assert certified in leak["message"]["text"]
    assert leak["properties"]["certified_examples"] == [told["worst"]["index"]]
    attempt = next(job for job in told["jobs"] if job["control"] is None)
    assert attempt["diagnosis"]["outcome"] == "recovered"
    assert attempt["diagnosis"]["reason"].startswith("certified")
    proof = attempt["examples"][0]["certificate"]
    assert attempt["examples"][0]["certified"] is told["worst"]["certified"] is True
    assert proof == told["worst"]["certificate"] == told["settings"][0]["examples"][0]["certificate"]
    assert (told["settings"][0]["certified"], proof["free_directions"]) == (1, 0)
    assert method in (None, proof["method"])
    assert next(line["certified"] for line in lines if not line["control"]) == "True"
    audit = Audit(Path("run"))
    assert audit.worst is not None
    assert audit.worst.certified
    assert json.loads(audit.verdict.to_json())["settings"][0]["certified"] == 1


def test_what_is_explained_and_not_determined_is_no_recovery(mine: Path) -> None:
    _, told, page, log, _, console = audited("prover:Prover:free=2304")
    open_ = "explains the update, but 2,304 directions of the input are not determined"
    assert open_ in " ".join(console.split())
    assert open_ in page
    assert "recovered, certified" not in page + console
    attempt = next(job for job in told["jobs"] if job["control"] is None)
    assert attempt["diagnosis"]["outcome"] == "not identifiable"
    assert attempt["examples"][0]["certified"] is told["worst"]["certified"] is False
    assert told["worst"]["certificate"]["free_directions"] == 2304
    facts = [one["properties"] for one in log["runs"][0]["results"] if one["properties"]]
    assert all(one["certified_examples"] == [] for one in facts)
    assert {one["certificates"][0]["free_directions"] for one in facts} == {2304}


def test_the_truth_has_the_last_word(mine: Path) -> None:
    """A certificate of something else is shown for what it is."""
    *_, page, _, _, console = audited("prover:Prover:wrong=true")
    assert "recovered, certified" not in page + console
    assert "certified, but the original differs" in page
    assert "certified, but the original differs" in " ".join(console.split())


@pytest.mark.parametrize("options, truth", [("", False), ("", True), (":free=5", False), (":wrong=true", True)])
def test_a_captured_update_tells_its_certificates(options: str, truth: bool, mine: Path) -> None:
    import prover  # type: ignore[import-not-found]

    x, y = (values[:1] for values in prover.data())
    FedSGD().observe(prover.model(), x, y).save(mine / "seen.safetensors")
    np.savez(mine / "truth.npz", x=x.numpy(), y=y.numpy())
    command = ["attack", "seen.safetensors", "--model", "prover:model", "--attack", f"prover:Prover{options}"]
    done = CliRunner().invoke(app, [*command, "--out", "found", *(["--truth", "truth.npz"] if truth else [])])
    assert done.exit_code == 0, done.stderr
    told = json.loads((mine / "found" / "reconstruction.json").read_text())
    page = (mine / "found" / "report.html").read_text(encoding="utf-8")
    holds, right = "free" not in options, not options
    proof = {"residual": 0.4, "tolerance": 1.0, "free_directions": 0 if holds else 5, "method": "quotient"}
    assert (told["certified"], told["certificates"]) == (int(holds), [proof])
    assert told["diagnosis"]["outcome"] == ("recovered" if holds else "not identifiable")
    assert told["diagnosis"]["hidden"] == proof["free_directions"]
    assert told["confidence"].startswith("Looks recovered: certified") == right
    if "wrong" in options:
        assert told["outcome"] == "probably not recovered"
    assert f"<dt>Certified</dt><dd>{int(holds)} of 1</dd>" in page
    for text in (page, " ".join(done.stdout.split())):
        assert ("recovered, certified" in text) == right
        assert ("5 directions of the input are not determined" in text) == (not holds)
        assert ("the original differs" in text) == ("wrong" in options)


def test_a_notebook_counts_them() -> None:
    proof = Certificate(residual=0.4, tolerance=1.0, free_directions=0, method="quotient")
    x = torch.zeros(2, 3)
    assert "1 of 2" in Reconstruction(x, None, x[:, 0], certificates=(proof, None))._repr_html_()
    assert "certified" not in Reconstruction(x, None, x[:, 0])._repr_html_()
