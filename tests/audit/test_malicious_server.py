"""An audit of a server that chooses the model: from the command line to the report, controls and theory included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import typed
from safetensors.torch import save_file

import leakscope as ls
from leakscope.attacks import RobbingTheFed
from leakscope.report.limits import _sentence, settled

SERVER: dict[str, Any] = {"knowledge": "malicious_server", "executor": "serial"}
NET: dict[str, Any] = {"name": "mlp", "options": {"hidden": [8]}}


def run(out: Path, **changes: Any) -> Any:
    spec = {"model": NET, "data": {"name": "tiles", "limit": 12}, "batch": 4, "examples": 4, **SERVER, **changes}
    return ls.audit.audit(**spec, out=out)


def test_every_example_leaks_and_the_controls_do_not(tmp_path: Path) -> None:
    done = run(tmp_path, attacks=["robbing-the-fed"])
    assert {row.status for row in done.rows} == {"done"}
    attempts = [row for row in done.rows if row.job.control is None]
    blind = [row for row in done.rows if row.job.control in ("noise", "other-examples")]
    planted = [row for row in done.rows if row.job.control == "planted"]
    assert all(e.value("psnr") > 60 for row in [*attempts, *planted] for e in row.result.examples)
    assert blind
    assert all(e.value("psnr") < 30 for row in blind for e in row.result.examples)
    assert attempts[0].result.diagnosis.outcome == "recovered"
    assert done.verdict.outcome == "leaks"


def test_an_honest_server_is_refused_and_a_vertical_model_too(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"attacks": ["robbing-the-fed"], "controls": False, "findings": False}
    (row,) = run(tmp_path / "honest", **{**quick, "knowledge": "honest_server"}).rows
    assert row.status == "refused"
    assert "choose_structure" in row.error
    vertical = {
        "model": "vertical-mlp",
        "data": (torch.rand(8, 16), torch.arange(8) % 2),
        "protocols": [{"vertical": {"batch_size": 2, "rounds": 4}}],
    }
    for row in run(tmp_path / "vertical", **{**quick, **vertical}).rows:
        assert row.status == "refused"
        assert "NotApplicable" in row.error


@pytest.mark.slow
def test_theory_is_told_of_the_model_as_it_is(tmp_path: Path) -> None:
    """Noise that hides the inputs of this model hides nothing of the one that the server sends."""
    done = run(
        tmp_path,
        model={"name": "dlg-lenet"},
        attacks=[{"robbing-the-fed": {"gain": 1e-6}}],
        defenses=[{"gradient-noise": {"sigma": 0.01}}],
        batch=1,
        examples=1,
        controls=False,
        findings=["floor"],
    )
    (floor,) = done.findings
    assert floor.content["model_may_change"] is True
    page = done.report(tmp_path / "report.html").read_text()
    assert "does better than theory allows of the model as it is" in page
    assert "what it knows of pictures helps it" not in page


def test_a_floor_of_another_model_excludes_nothing() -> None:
    low = {"psnr": 10.0, "converged": 1, "rounding_only": False}
    assert settled("undecided", 12.0, low) == "not identifiable"
    assert settled("undecided", 12.0, {**low, "model_may_change": True}) == "undecided"
    hidden = {"infinite": True, "converged": 1}
    assert settled("undecided", 12.0, {**hidden, "model_may_change": True}) == "undecided"
    assert "cannot all be recovered" in _sentence(hidden, 12.0)
    assert "not bound by this" in _sentence({**hidden, "model_may_change": True}, 12.0)
    assert "not bound by this" in _sentence({**low, "model_may_change": True}, 10.5)


# --- leakscope inspect


@pytest.fixture
def received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of weights as a client receives them, and a module that builds the model."""
    sent = RobbingTheFed(bins=32).prepare(ls.build_model("mlp", input_shape=(1, 8, 8), hidden=(8,)), (1, 8, 8))
    save_file(sent.state_dict(), tmp_path / "planted.safetensors")
    plain = ls.build_model("mlp", input_shape=(1, 8, 8), hidden=(8,), seed=1)
    save_file(plain.state_dict(), tmp_path / "plain.safetensors")
    (tmp_path / "received.py").write_text(
        "import leakscope as ls\n\n\ndef net():\n"
        "    model = ls.build_model('mlp', input_shape=(1, 8, 8), hidden=(8,))\n"
        "    return ls.attacks.RobbingTheFed(bins=32).prepare(model, (1, 8, 8))\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_inspect_says_what_it_found_and_ends_accordingly(received: Path) -> None:
    plain = typed("inspect", "convnet")
    assert plain.returncode == 0
    assert "nothing suspicious found" in plain.stdout
    assert "no proof" in plain.stdout
    planted = typed("inspect", "received:net", "--weights", "planted.safetensors")
    assert planted.returncode == 1
    assert "imprint.measure: imprint" in planted.stdout
    assert "32 of 32 units measure the same of their input" in planted.stdout
    assert "SUSPICIOUS" in planted.stdout


def test_inspect_reads_weights_without_any_code(received: Path) -> None:
    assert typed("inspect", "--weights", "plain.safetensors").returncode == 0
    found = typed("inspect", "--weights", received / "planted.safetensors", "--json")
    assert found.returncode == 1
    told = json.loads(found.stdout)
    assert told["suspicious"] is True
    assert told["weights"] == "planted.safetensors"
    assert [one["kind"] for one in told["suspicions"]] == ["imprint"]


@pytest.mark.parametrize(
    "words, message",
    [
        ((), "expected a model"),
        (("nonsense",), "unknown model 'nonsense'"),
        (("convnet", "--weights", "missing.safetensors"), "missing.safetensors"),
        (("convnet", "--weights", "planted.safetensors"), "do not fit the model"),
        (("convnet", "--input", "3xx"), "--input: expected sizes"),
        (("--weights", "plain.safetensors", "--classes", "3"), "expected with a model only"),
    ],
)
def test_inspect_tells_mistakes_in_one_line(received: Path, words: tuple[str, ...], message: str) -> None:
    told = typed("inspect", *words)
    assert told.returncode == 4
    assert message in told.stderr
    assert "Traceback" not in told.stderr
