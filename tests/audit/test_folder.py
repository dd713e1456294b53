"""What was audited is said, with warnings where a verdict may not be what it seems."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from leakscope.audit.folder import describe_audited
from leakscope.audit.run import run_spec
from leakscope.audit.setup import build_setup
from leakscope.audit.spec import AuditSpec
from leakscope.models import build_model
from leakscope.report.audited import audited_lines


def told(**changes: Any) -> dict[str, tuple[str, bool]]:
    """Text and warning by the first word."""
    spec = {"model": "mlp", "data": "tiles", "attacks": "linear-layer", "examples": 2, **changes}
    setup = build_setup(AuditSpec.parse(spec))
    statements = describe_audited(setup)
    return {line["text"].split(":")[0]: (line["text"], line["warning"]) for line in statements}


def small(*between: nn.Module, classes: int = 9) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=4), *between, nn.Flatten(), nn.Linear(4 * 8 * 8, classes))


def test_random_weights_are_a_warning_and_others_are_named(tmp_path: Path) -> None:
    text, warning = told()["Weights"]
    assert warning
    assert "random, seed 0" in text
    assert "--weights" in text
    model = build_model("mlp", input_shape=(3, 32, 32), num_classes=9, seed=3)
    save_file(model.state_dict(), tmp_path / "mine.safetensors")
    loaded, warning = told(model={"name": "mlp", "weights": tmp_path / "mine.safetensors"})["Weights"]
    assert not warning
    assert "mine.safetensors" in loaded
    assert str(tmp_path) not in loaded
    given = told(model=model)["Weights"]
    assert given[0].startswith("Weights: those of the model given")
    assert loaded.split("fingerprint ")[1][:12] == given[0].split("fingerprint ")[1][:12], "the same weights"
    training = {"rounds": 2, "clients": 2}
    assert "trained here, round 2" in told(training=training)["Weights"][0]


@pytest.mark.parametrize(
    ("mode", "own", "warns"), [("eval", True, True), ("train", True, False), ("eval", False, False)]
)
def test_batchnorm_mode_against_the_models_own(mode: str, own: bool, warns: bool) -> None:
    model = small(nn.BatchNorm2d(4), nn.ReLU()).train(own)
    text, warning = told(model=model, protocols=[{"fedsgd": {"batchnorm": mode}}])["BatchNorm"]
    assert warning == warns
    assert f"{mode} mode in the client" in text
    assert not warns or "batchnorm=train" in text


def test_dropout_and_outputs_that_no_class_uses() -> None:
    assert "Dropout" not in told()
    assert told(model=small(nn.Dropout(0.5)))["Dropout"][1]
    assert "Outputs" not in told(model=small())
    text, warning = told(model=small(classes=1000))["Outputs"]
    assert warning
    assert "1000 for" in text


def test_one_output_without_an_axis_of_its_own() -> None:
    x = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 1), nn.Flatten(0))
    assert "Outputs" not in told(model=model, data=(x, torch.tensor([0, 1, 0, 1])))


def test_epsilon_is_that_of_the_steps_really_taken() -> None:
    five = [{"fedavg": {"epochs": 5, "batch_size": 1}}]
    text, warning = told(protocols=five, defenses=[{"dp-sgd": {"epsilon": 1.0}}])["Privacy"]
    assert warning
    assert "spends epsilon 2.42" in text
    assert "Set steps: 5" in text
    text, warning = told(protocols=five, defenses=[{"dp-sgd": {"epsilon": 1.0, "steps": 5}}])["Privacy"]
    assert not warning
    assert "spends epsilon 1 in" in text
    assert "Privacy" not in told(defenses=[{"gradient-noise": {"sigma": 1.0}}]), "noise without clipping has no epsilon"


def test_draws_are_said_to_be_simulated() -> None:
    assert "reproducible by seed" in told()["Draws"][0]


def test_the_store_has_it(tmp_path: Path) -> None:
    spec = {"model": "mlp", "data": "tiles", "attacks": "linear-layer", "examples": 1, "findings": False}
    done = run_spec(spec, tmp_path / "out")
    statements = done.store.meta("audited")
    assert [set(entry) for entry in statements] == [{"text", "warning"}] * len(statements)
    assert statements[0]["text"].startswith("Weights: random")


def test_an_attack_that_is_also_run_without_knowing_the_defence_is_told_apart(tmp_path: Path) -> None:
    idlg = [{"idlg": {"iterations": 2}}, {"idlg": {"iterations": 2, "ignore_defense": True}}]
    spec = {"model": "mlp", "data": "tiles", "attacks": idlg, "examples": 1, "findings": False, "controls": False}
    done = run_spec(
        {**spec, "defenses": [{"gradient-noise": {"sigma": 1.0}}], "knowledge": "adaptive_server"}, tmp_path
    )
    texts = [line["text"] for line in audited_lines(done.store, done.rows, done.verdict)]
    (ran,) = [text for text in texts if text.startswith("Attacks: 2 ran")]
    assert ran.count("without knowing the defence") == 1
