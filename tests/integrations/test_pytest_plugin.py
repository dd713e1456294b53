"""The pytest plug-in, in repositories of their own: what is within policy or accepted passes, nothing is skipped."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import yaml

from sarif_schema import sarif_problems

pytestmark = pytest.mark.slow

pytest_plugins = ["pytester"]
#: Whether or not the package is installed with its entry point, the plug-in under test is this one, once.
PLUGIN = ("-p", "no:leakscope", "-p", "leakscope.integrations.pytest_plugin", "-p", "no:cacheprovider")

NETS = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(36 * 36, 16), nn.Tanh(), nn.Linear(16, 4))

def load():
    return torch.rand(24, 1, 36, 36, generator=torch.Generator().manual_seed(1)), torch.arange(24) % 4
"""
SPEC = """
model: nets:make
data: nets:load
examples: 1
defenses:
  - DEFENSE
knowledge: adaptive_server
findings: [floor]
attacks: ATTACKS
"""
#: Every standard attack, for a pass needs them all, with steps for seconds: that they find enough has tests of its own.
BRIEF = """
  - linear-layer
  - cocktail-party
  - gauss-newton
  - {head-first: {iterations: 20, tries: 1}}
  - {inverting-gradients: {iterations: 20}}
  - {idlg: {iterations: 20}}
"""
SPEC = SPEC.replace("ATTACKS", BRIEF.rstrip())
PROTECTED = "dp-sgd: {noise_multiplier: 4, clip: 1}"
SMALL = """
import pytest, torch
from torch import nn

def small(audit, *spec, count=1, weight=1.0, **settings):
    x = torch.rand(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    data = (x, torch.arange(6) % 3)
    asked = dict(model=net, data=data, examples=count, attacks=["linear-layer"], findings=False)
    return audit(*spec, **{**asked, **settings})
"""


def outcomes(file: Path) -> dict[str, tuple[str, dict[str, str], str]]:
    """For each test of a JUnit file what became of it, its properties and its message."""
    told = {}
    for case in ElementTree.parse(file).getroot().iter("testcase"):
        failure = case.find("failure") if case.find("failure") is not None else case.find("error")
        properties = {str(p.get("name")): str(p.get("value")) for p in case.iter("property")}
        message = "" if failure is None else f"{failure.get('message')}\n{failure.text}"
        told[str(case.get("name"))] = ("passed" if failure is None else "failed", properties, message)
    return told


def run(pytester: pytest.Pytester, *arguments: str) -> tuple[Any, dict[str, tuple[str, dict[str, str], str]]]:
    result = pytester.runpytest_inprocess(*PLUGIN, "--junitxml", "junit.xml", *arguments)
    return result, outcomes(pytester.path / "junit.xml")


PROVED = """
from dataclasses import dataclass
import leakscope as ls
from leakscope.contracts.certificate import Certificate

@dataclass(frozen=True, kw_only=True)
class Prover(ls.Attack):
    def run(self, observation, generator, progress=None):
        bias, weight = observation.message.update["1.bias"], observation.message.update["1.weight"]
        x = (weight[0] / bias[0]).reshape(1, *observation.input_shape)
        proof = Certificate(residual=0.4, tolerance=1.0, free_directions=0, method="quotient")
        return ls.Reconstruction(x, bias.argmin()[None], torch.zeros(1), certificates=(proof,))

def test_proved(leakscope_audit):
    small(leakscope_audit, attacks=[Prover()])
"""


@pytest.fixture
def repository(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    def forget_own_modules(_: Any) -> None:
        """Only those of the repository: torch does not bear being imported twice, as pytester would have it."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None) or "").startswith(str(pytester.path)):
                del sys.modules[name]

    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", forget_own_modules)
    (pytester.path / "nets.py").write_text(NETS)
    return pytester


def test_a_repository_fails_with_a_leaking_model_and_passes_with_a_protected_one(repository: pytest.Pytester) -> None:
    spec = repository.path / "leakscope.yaml"
    spec.write_text(SPEC.replace("DEFENSE", "none"))
    result, told = run(repository, "--leakscope-report", "reports")
    result.assert_outcomes(failed=1)
    outcome, properties, message = told["audit"]
    assert outcome == "failed"
    assert properties["leakscope_outcome"] == "leaks"
    assert float(properties["leakscope_worst_psnr"]) > 100
    assert "LEAKS" in message
    assert "example 0 leaks at 60 dB or more" in message

    log = json.loads((repository.path / "reports" / "leakscope.yaml-audit.sarif").read_text())
    assert sarif_problems(log) == []
    first = log["runs"][0]["results"][0]
    place = first["locations"][0]["physicalLocation"]
    assert first["ruleId"] == "LS001"
    assert place["artifactLocation"]["uri"] == "leakscope.yaml"
    assert "none" in spec.read_text().splitlines()[place["region"]["startLine"] - 1]
    assert (repository.path / "reports" / "leakscope.yaml-audit.html").exists()

    spec.write_text(SPEC.replace("DEFENSE", PROTECTED))
    result, told = run(repository, "--leakscope-report", "reports")
    result.assert_outcomes(passed=1)
    assert told["audit"][1]["leakscope_outcome"] == "within policy"
    log = json.loads((repository.path / "reports" / "leakscope.yaml-audit.sarif").read_text())
    assert sarif_problems(log) == []
    assert {result["level"] for result in log["runs"][0]["results"]} <= {"note"}
    assert not (repository.path / "leakscope-baseline.json").exists()


def test_certified_examples_are_told(repository: pytest.Pytester) -> None:
    repository.makepyfile(test_audits=SMALL + PROVED)
    _, told = run(repository)
    outcome, properties, message = told["test_proved"]
    assert (outcome, properties["leakscope_certified"]) == ("failed", "1")
    assert "1 of 1 example: recovered, certified (quotient)" in message


def test_the_example_of_the_docs_runs(repository: pytest.Pytester) -> None:
    text = (Path(__file__).parents[2] / "docs" / "ci.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (repository.path / "mypackage.py").write_text(NETS)
    (repository.path / "leakscope.yaml").write_text(SPEC.replace("DEFENSE", PROTECTED))
    # Theory takes longest, long searches come next.
    brief = f"examples=1, findings=['floor'], attacks={yaml.safe_load(BRIEF)!r},"
    repository.makepyfile(example.replace("examples=2,", brief))
    result, _ = run(repository, "-k", "test_")
    result.assert_outcomes(passed=2, deselected=1)


TESTS = (
    SMALL
    + """
def test_leaks(leakscope_audit):
    small(leakscope_audit)

def test_returns_the_audit_where_nothing_is_checked(leakscope_audit):
    assert small(leakscope_audit, check=False).verdict.outcome == "leaks"

def test_inconclusive(leakscope_audit):
    small(leakscope_audit, defenses=[{"gradient-noise": {"sigma": 1.0}}])

def test_inconclusive_accepted(leakscope_audit):
    small(leakscope_audit, defenses=[{"gradient-noise": {"sigma": 1.0}}], accept_inconclusive=True)

@pytest.mark.leakscope(accept_inconclusive=True, attacks=["rgap"])
def test_nothing_audited(leakscope_audit):
    net = nn.Sequential(nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 3))
    leakscope_audit(model=net, data=(torch.rand(2, 1, 4, 4), torch.tensor([0, 1])), examples=1, findings=False)

def test_never_calls(leakscope_audit):
    pass

@pytest.mark.leakscope("leakscope.yaml")
def test_marked_and_never_asks():
    pass

def test_keeps_no_folder(leakscope_audit):
    small(leakscope_audit, out="here")

def test_knows_no_such_spec(leakscope_audit):
    leakscope_audit("nowhere.yaml")

def test_needs_data(leakscope_audit):
    leakscope_audit(model=nn.Linear(2, 2))

def test_ordinary():
    assert True
"""
)


def test_every_test_that_asks_for_an_audit_passes_by_its_verdict_alone(repository: pytest.Pytester) -> None:
    (repository.path / "leakscope.yaml").write_text(SPEC.replace("DEFENSE", "none"))
    repository.makepyfile(TESTS)
    result, told = run(repository, "--deselect", "leakscope.yaml::audit", "--leakscope-report", "reports")
    passed = {name for name, (outcome, _, _) in told.items() if outcome == "passed"}
    assert passed == {
        "test_returns_the_audit_where_nothing_is_checked",
        "test_inconclusive_accepted",
        "test_ordinary",
    }
    assert "no attack that knows this defence was run" in told["test_inconclusive"][2]
    assert told["test_inconclusive"][1]["leakscope_outcome"] == "inconclusive"
    assert told["test_nothing_audited"][1]["leakscope_outcome"] == "nothing audited"
    for name in ("test_never_calls", "test_marked_and_never_asks"):
        assert "asks for an audit and ran none" in told[name][2]
    assert "always run anew" in told["test_keeps_no_folder"][2]
    assert "nowhere.yaml" in told["test_knows_no_such_spec"][2]
    text = "\n".join(result.outlines)
    assert "inconclusive, accepted: FedSGD" in text
    assert "leakscope.yaml was not audited in this run" in text
    for name in ("test_leaks", "test_inconclusive"):  # findings without a spec point to the test
        (file,) = (repository.path / "reports").glob(f"*-{name}.sarif")
        log = json.loads(file.read_text())
        assert sarif_problems(log) == []
        place = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]
        source = (repository.path / place["artifactLocation"]["uri"]).read_text().splitlines()
        assert f"def {name}" in source[place["region"]["startLine"] - 1]


KNOWN = (
    SMALL
    + """
import pathlib

@pytest.mark.parametrize("number", [1, 2])
def test_known(leakscope_audit, number):
    small(leakscope_audit, count=number)
"""
)


def test_a_baseline_is_written_by_workers_and_accepts_what_it_was_taken_of(repository: pytest.Pytester) -> None:
    file = repository.makepyfile(KNOWN)
    baseline = repository.path / "leakscope-baseline.json"
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-n", "2", "--leakscope-update-baseline"]
    done = subprocess.run(command, cwd=repository.path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "baseline updated, 1 accepted leaks" in done.stdout
    assert len(json.loads(baseline.read_text())["audits"]) == 2
    before = baseline.read_bytes()

    result, _ = run(repository)
    result.assert_outcomes(passed=2)
    assert "as the baseline accepts" in "\n".join(result.outlines)

    file.write_text(KNOWN.replace("count=number", "count=2"))  # an example more: another audit under a known name
    result, told = run(repository)
    result.assert_outcomes(passed=1, failed=1)
    assert "taken of another audit: examples: the baseline has 1, now 2" in told["test_known[1]"][2]

    file.write_text(KNOWN.replace("count=number", 'count=number, protocol="fedavg"'))  # another setting leaks
    result, told = run(repository)
    assert all("not in the baseline" in message for _, _, message in told.values())
    assert baseline.read_bytes() == before

    baseline.write_text("{}")
    result, told = run(repository)
    assert all("is no baseline that can be read" in message for _, _, message in told.values())


def test_what_a_baseline_cannot_accept_is_not_accepted_by_updating_it(repository: pytest.Pytester) -> None:
    repository.makepyfile(
        SMALL
        + "def test_it(leakscope_audit):\n"
        + "    small(leakscope_audit, defenses=['none', {'gradient-noise': {'sigma': 1.0}}])\n"
    )
    result, told = run(repository, "--leakscope-update-baseline")
    result.assert_outcomes(failed=1)
    assert "inconclusive: FedSGD · GradientNoise" in told["test_it"][2]


def test_a_spec_from_elsewhere_is_data(repository: pytest.Pytester, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Code of the repository is trusted, which pytest imports anyway; that a stranger's spec names is not."""
    text = "model: sarif_schema:sarif_problems\ndata: tiles\n"  # an importable module that lies in neither folder
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "spec.yaml"
    elsewhere.write_text(text)
    (repository.path / "own.yaml").write_text(text)
    repository.makepyfile(
        f"def test_stranger(leakscope_audit):\n    leakscope_audit({str(elsewhere)!r})\n"
        "def test_own(leakscope_audit):\n    leakscope_audit('own.yaml')\n"
    )
    _, told = run(repository)
    assert "A spec is data" in told["test_stranger"][2]
    assert told["test_own"][0] == "failed"
    assert "A spec is data" not in told["test_own"][2]


def test_starting_pytest_loads_nothing_heavy(tmp_path: Path) -> None:
    (tmp_path / "test_light.py").write_text(
        "import sys\n\ndef test_light():\n"
        "    assert not {'torch', 'numpy', 'yaml', 'pydantic', 'leakscope.audit'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-m", "pytest", *PLUGIN, "-p", "no:anyio", "-p", "no:hypothesispytest", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout


def test_markers_select_audits(repository: pytest.Pytester) -> None:
    (repository.path / "leakscope.yaml").write_text(SPEC.replace("DEFENSE", "none"))
    result = repository.runpytest_inprocess(*PLUGIN, "--strict-markers", "-m", "not leakscope", "--collect-only", "-q")
    assert "1 deselected" in "\n".join(result.outlines)
    assert "was not audited" not in "\n".join(result.outlines)
