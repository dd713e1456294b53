"""Models that do not classify, or answer in other forms, each from a user's file through the command line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import numpy as np
import pytest
import yaml
from command_line import typed

from leakscope.audit import Audit
from leakscope.report import write_report
from leakscope.results import Row

MINE = '''
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import nn

import leakscope as ls


class Net(nn.Module):
    """Two linear layers; ``answer`` says in which form the outputs come."""

    def __init__(self, outputs, answer="tensor", positions=None):
        super().__init__()
        self.first, self.second = nn.Linear(16, 12), nn.Linear(12, outputs)
        self.answer, self.positions = answer, positions

    def forward(self, x):
        hidden = torch.tanh(self.first(x.flatten(1)))
        out = self.second(hidden)
        if self.positions:
            out = out.reshape(len(x), self.positions, -1)
        if self.answer == "tensor":
            return out
        if self.answer == "dict":
            return {"hidden": hidden, "logits": out}
        if self.answer == "logits":
            return SimpleNamespace(hidden=hidden, logits=out)
        return (out, hidden) if self.answer == "tuple" else "an answer"


def model(outputs=3, answer="tensor", positions=None, seed=0):
    torch.manual_seed(seed)
    return Net(outputs, answer, positions)


def data(kind="classes", count=3):
    draws = torch.Generator().manual_seed(1)
    x = torch.rand(count, 1, 4, 4, generator=draws)
    if kind == "classes":
        return x, torch.arange(count) % 3
    if kind == "numbers":
        return x, torch.randn(count, 2, generator=draws)
    if kind == "labels":
        return x, (torch.rand(count, 4, generator=draws) > 0.5).float()
    return x, torch.randint(0, 3, (count, 4), generator=draws)


def loss(outputs, targets):
    """The fourth power, which is no task of the table."""
    return (outputs - targets).pow(4).mean()


def weighted(outputs, targets):
    """Classes with a price each; the targets are class numbers, which no search finds."""
    return nn.functional.cross_entropy(outputs, targets, weight=torch.tensor([1.0, 2.0, 3.0]), reduction="none").mean()


@dataclass(frozen=True, kw_only=True)
class Cosine(ls.Task):
    """One minus the cosine with the target."""

    def each(self, outputs, targets):
        return 1 - torch.cosine_similarity(outputs, targets, dim=1)

    def problems_of(self, targets, examples, outputs):
        return [] if targets.shape == (examples, *outputs) else ["y: expected as many numbers as outputs"]

    def right(self, targets, guess):
        return (targets - guess).norm(dim=1)

    discrete = False
'''
ATTACKS: list[Any] = [
    {"inverting-gradients": {"iterations": 8, "restarts": 1}},
    "linear-layer",
    {"idlg": {"iterations": 3}},
]
FORMS: dict[str, dict[str, Any]] = {
    "regression": {"task": "regression", "model": {"outputs": 2}, "data": "numbers"},
    "absolute": {"task": {"regression": {"distance": "absolute"}}, "model": {"outputs": 2}, "data": "numbers"},
    "multi-label": {"task": "multi-label", "model": {"outputs": 4}, "data": "labels"},
    "logits": {"task": "classification", "model": {"answer": "logits"}, "data": "classes"},
    "dict": {"task": "classification", "model": {"answer": "dict"}, "data": "classes"},
    "tuple": {"task": "classification", "model": {"answer": "tuple"}, "data": "classes"},
    "per-position": {"task": "per-position", "model": {"outputs": 12, "positions": 4}, "data": "positions"},
    "own loss": {"task": "mine:loss", "model": {"outputs": 2}, "data": "numbers"},
    "own task": {"task": "mine:Cosine", "model": {"outputs": 2}, "data": "numbers"},
}
FAR = {"regression", "absolute", "own loss", "own task"}


@pytest.fixture
def mine(folder: Path) -> Path:
    (folder / "mine.py").write_text(MINE)
    return folder


def spec(form: str, **changes: Any) -> dict[str, Any]:
    said = FORMS[form]
    return {
        "model": {"name": "mine:model", "options": said["model"]},
        "data": {"name": "mine:data", "options": {"kind": said["data"]}},
        "task": said["task"],
        "examples": 2,
        "attacks": ATTACKS,
        "executor": "serial",
        **changes,
    }


def write(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "spec.yaml").write_text(yaml.safe_dump(content))
    return folder / "spec.yaml"


def attempts(done: Audit, attack: str) -> list[Row]:
    return [row for row in done.rows if row.job.attack_name == attack and row.counts]


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_ones_own_from_a_file_of_ones_own(form: str, mine: Path) -> None:
    ended = typed("audit", write(mine, spec(form)), "--out", "out")
    assert ended.returncode == 1, ended.stderr
    assert "Verdict: LEAKS" in ended.stdout
    done = Audit(mine / "out")
    assert not [row.error for row in done.rows if row.status == "failed"]
    for row in [*attempts(done, "inverting-gradients"), *attempts(done, "linear-layer")]:
        assert row.status == "done", row.error
        assert all(math.isfinite(example.value("psnr")) for example in row.examples)
    exact = attempts(done, "linear-layer")
    assert min(row.examples[0].value("psnr") for row in exact) > 60
    searched = [row.examples[0] for row in attempts(done, "inverting-gradients")]
    if form in FAR:
        assert all(math.isfinite(example.value("target_error")) for example in searched)
        assert all(math.isnan(example.value("label_correct")) for example in searched)
        # There are no classes to read off the last layer: the targets are searched too.
        ruled = [row.examples[0] for row in attempts(done, "idlg")]
        assert all(math.isfinite(example.value("target_error")) for example in ruled)
    else:
        assert all(0 <= example.value("label_correct") <= 1 for example in searched)
        assert all(math.isnan(example.value("target_error")) for example in searched)
    if FORMS[form]["task"] == "classification":
        assert [row.examples[0].value("label_correct") for row in attempts(done, "idlg")] == [1.0, 1.0]
    floor, embedding = done.findings
    assert embedding.status == "done", embedding.error
    assert (floor.status, floor.reason) == ("done", "")
    assert floor.content["unknowns"] == 16
    assert "linear-layer" in write_report(mine / "out").read_text(encoding="utf-8")


def test_float_targets_from_an_npz_file(mine: Path) -> None:
    draws = np.random.default_rng(0)
    x = draws.random((3, 4, 4), dtype=np.float32)
    np.savez(mine / "table.npz", x=x, y=draws.standard_normal((3, 2)).astype(np.float32))
    data = {"name": "npz", "path": str(mine / "table.npz")}
    model = {"name": "mine:model", "options": {"outputs": 2}}
    ended = typed("audit", write(mine, spec("regression", data=data, model=model)), "--out", "out")
    assert ended.returncode == 1, ended.stderr
    done = Audit(mine / "out")
    assert done.store.meta("data")["num_classes"] == 2
    errors = [row.examples[0].value("target_error") for row in attempts(done, "inverting-gradients")]
    assert len(errors) == 2
    assert all(math.isfinite(error) for error in errors)
    assert all(math.isfinite(row.examples[0].value("psnr")) for row in attempts(done, "linear-layer"))


@pytest.mark.slow
def test_an_own_loss_reaches_worker_processes(mine: Path) -> None:
    changes: dict[str, Any] = {"attacks": ["linear-layer"], "examples": 1, "findings": False, "controls": False}
    path = write(mine, spec("own loss", **changes, executor="processes", workers=1))
    ended = typed("audit", path, "--out", "spread")
    assert ended.returncode == 5, ended.stderr  # no control, and labels of an own loss cannot be read: no certificate
    typed("audit", write(mine, spec("own loss", **changes)), "--out", "here")
    spread, here = Audit(mine / "spread"), Audit(mine / "here")
    assert doubles.timeless(spread.rows) == doubles.timeless(here.rows)
    assert spread.store.meta("data")["task"] == "CustomLoss(name='mine:loss', targets='values')"


def test_targets_that_no_search_finds_are_given_or_the_attack_is_refused(mine: Path) -> None:
    task = {"mine:weighted": {"targets": "given"}}
    model = {"name": "mine:model", "options": {"outputs": 3}}
    data = {"name": "mine:data", "options": {"kind": "classes"}}
    common: dict[str, Any] = {"task": task, "model": model, "data": data}
    ended = typed("audit", write(mine, spec("own loss", **common)), "--out", "blind")
    assert ended.returncode == 1, ended.stderr  # the closed form needs no targets
    blind = Audit(mine / "blind")
    assert {row.status for row in attempts(blind, "inverting-gradients")} == {"refused"}
    assert {row.status for row in attempts(blind, "linear-layer")} == {"done"}
    assert not [row for row in blind.rows if row.status == "failed"]
    ended = typed("audit", write(mine, spec("own loss", **common, knowledge="full")), "--out", "told")
    assert ended.returncode == 1, ended.stderr
    assert {row.status for row in attempts(Audit(mine / "told"), "inverting-gradients")} == {"done"}


@pytest.mark.parametrize(
    "form, changes, words",
    [
        ("regression", {"task": "classification"}, "y: expected class numbers, or probabilities"),
        ("logits", {"task": "regression", "model": {"name": "mine:model"}}, "y: expected numbers of shape"),
        ("multi-label", {"task": "per-position"}, "model: expected outputs of shape (examples, positions, classes)"),
        ("regression", {"task": "multi-label"}, "y: expected numbers from 0 to 1"),
        ("regression", {"task": "regresion"}, "task: expected one of classification, binary, multi-label, regression"),
        ("regression", {"task": {"regression": {"distance": "cubic"}}}, "distance: expected 'squared', 'absolute' or"),
        ("regression", {"task": "mine:missing"}, "mine has no 'missing'"),
        ("dict", {"model": {"name": "mine:model", "options": {"answer": "text"}}}, "called logits, got str"),
    ],
)
def test_a_task_that_does_not_fit_is_one_clear_error(
    form: str, changes: dict[str, Any], words: str, mine: Path
) -> None:
    ended = typed("audit", write(mine, spec(form, **changes)), "--out", "out")
    assert ended.returncode == 4, ended.stderr
    assert words in ended.stderr
    assert ended.stderr.count("\n  - ") == 1
    assert "Traceback" not in ended.stderr
    assert not (mine / "out").exists()


def test_the_task_may_be_typed(mine: Path) -> None:
    path = write(mine, spec("regression", examples=1, findings=False))
    ended = typed("audit", path, "--task", "regression:distance=huber", "--out", "out")
    assert ended.returncode == 1, ended.stderr
    assert Audit(mine / "out").store.meta("data")["task"] == "Regression(distance='huber')"
