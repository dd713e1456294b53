"""Parts of the user's own, all in one file of the current folder: named in a spec, typed, and in worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from audit_doubles import STANDARD, timeless
from command_line import typed

from leakscope.audit import EXECUTORS, Audit, SpecError, run_spec
from leakscope.contracts.registry import Entry
from leakscope.report import write_report

MINE = '''
"""Everything that somebody may bring along."""
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import leakscope as ls
from leakscope.audit import Executor
from leakscope.audit.attempts import Bench
from leakscope.audit.executors.base import throttled
from leakscope.contracts.observation import LocalTraining


def model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 3))


def data():
    x = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    return x, torch.arange(3)


@dataclass(frozen=True, kw_only=True)
class MyAttack(ls.Attack):
    """The quotient of the gradients of weight and bias, averaged over some units."""

    reads_channel: ClassVar[bool] = True

    steps: int = ls.setting(1, "Units to look at.", ge=1, le=3)

    def run(self, observation, generator, progress=None):
        update = observation.message.update
        bias = update["1.bias"]
        units = bias.abs().topk(self.steps).indices
        x = (update["1.weight"][units] / bias[units, None]).mean(0).reshape(1, *observation.input_shape)
        info = {"knew": None if observation.channel is None else observation.channel.describe()}
        return ls.Reconstruction(x, bias.argmin()[None], torch.zeros(1), info=info)


@dataclass(frozen=True, kw_only=True)
class Secret(ls.Defense):
    """Scales the message; what that means for an adversary nobody has worked out."""

    factor: float = ls.setting(0.5, "What the message is multiplied with.", gt=0)

    def protect_message(self, update, generator):
        return {name: self.factor * value for name, value in update.items()}


@dataclass(frozen=True, kw_only=True)
class Known(Secret):
    """The same, and an adversary may know."""

    def channel(self, *, examples=1, reduction="mean"):
        return Halved(dropout=0.0)


class Halved(ls.Channel):
    def stand_in(self, update, survivors):
        return {name: 0.5 * value for name, value in update.items()}

    def describe(self):
        return "halved"


@dataclass(frozen=True, kw_only=True)
class MyProtocol(ls.Protocol):
    """The sign of the gradient would be too little; this one sends the gradient twice as large."""

    kind: ClassVar[str] = "gradient"

    times: float = ls.setting(2.0, "How much larger.", gt=0)

    def _exchange(self, client, knowledge):
        loss = client.task.loss(client.model(client.x), client.y)
        found = torch.autograd.grad(self.times * loss, list(client.trained.values()))
        update = client.defense.protect_message(dict(zip(client.trained, found)), client.generator)
        return (ls.Message(update=update),), LocalTraining(epochs=1)


class Backwards(Executor):
    """The last client first."""

    def run(self, setup, groups, *, emit, record):
        bench = Bench(setup)
        for group in reversed(groups):
            for job in group:
                emit({"event": "started", "job": job})
                record(job, bench.run(job, throttled(job, emit)))


class NoAttack:
    pass
'''
SPEC: dict[str, Any] = {
    "model": "mine:model",
    "data": "mine:data",
    "examples": 2,
    "protocols": ["fedsgd", {"mine:MyProtocol": {"times": 3}}],
    "defenses": ["none", "mine:Secret", {"mine:Known": {"factor": 0.5}}],
    "attacks": [{"mine:MyAttack": {"steps": 2}}, "linear-layer"],
    "knowledge": "adaptive_server",
    "findings": False,
}


@pytest.fixture
def mine(folder: Path) -> Path:
    (folder / "mine.py").write_text(MINE)
    return folder


def audited(folder: Path, out: str, **changes: Any) -> Audit:
    path = folder / f"{out}.yaml"
    path.write_text(yaml.safe_dump({**SPEC, **changes}))
    return run_spec(path, folder / out)


def test_everything_of_ones_own_in_one_file(mine: Path) -> None:
    done = audited(mine, "out", findings=True)
    assert {row.status for row in done.rows} == {"done"}
    assert sum(row.counts for row in done.rows) == 2 * 3 * 2 * 2
    assert {row.job.attack for row in done.rows if row.counts} == {
        "MyAttack(ignore_defense=False, steps=2)",
        "LinearLayer(ignore_defense=False, tolerance=1e-05)",
    }
    assert {row.job.attack_name for row in done.rows if row.counts} == {"mine:MyAttack", "linear-layer"}
    assert [row.kind for row in done.findings] == ["floor"] * 3 + ["embedding"] * 3, "MyProtocol names none"
    assert done.worst is not None
    assert done.worst.psnr > 60
    knew = {(row.job.defense, row.result.info["knew"]) for row in done.rows if row.result and "knew" in row.result.info}
    assert knew == {
        ("none", "the gradient as it is"),
        ("Secret(factor=0.5)", None),
        ("Known(factor=0.5)", "halved"),
    }
    assert done.store.meta("spec")["attacks"][0] == {
        "name": "mine:MyAttack",
        "options": {"ignore_defense": False, "steps": 2},
    }
    page = write_report(mine / "out").read_text(encoding="utf-8")
    for name in (
        "mine:MyAttack",
        "MyAttack(ignore_defense=False, steps=2)",
        "Secret(factor=0.5)",
        "Known(factor=0.5)",
        "MyProtocol(",
    ):
        assert name in page, name


def test_a_defence_that_nobody_can_know_is_no_pass(mine: Path) -> None:
    never = {"max_psnr": 500.0, "max_identification": 1.0, "waive": STANDARD}
    done = audited(mine, "out", policy=never, protocols=["fedsgd"])
    outcomes = {setting.defense: (setting.outcome, setting.reasons) for setting in done.verdict.settings}
    assert outcomes["none"] == ("within policy", [])
    assert outcomes["Known(factor=0.5)"] == ("within policy", [])
    outcome, (*_, reason) = outcomes["Secret(factor=0.5)"]
    assert outcome == "inconclusive"
    assert reason.code == "defence-unread"
    blind = audited(mine, "blind", policy=never, protocols=["fedsgd"], knowledge="honest_server")
    told = {setting.defense: setting.reasons for setting in blind.verdict.settings}
    for defense in ("Secret(factor=0.5)", "Known(factor=0.5)"):
        assert told[defense][-1].remedy.kind == "know-defence"


@pytest.mark.slow
def test_worker_processes_find_the_file_too(mine: Path) -> None:
    changes: dict[str, Any] = {"protocols": ["mine:MyProtocol"], "defenses": ["mine:Known"], "examples": 1}
    spread = audited(mine, "spread", **changes, executor="processes", workers=1)
    assert timeless(spread.rows) == timeless(audited(mine, "here", **changes).rows)
    assert {row.status for row in spread.rows} == {"done"}


@pytest.mark.slow
def test_a_third_executor_is_one_file(mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serial = audited(mine, "serial", findings=True)
    named = audited(mine, "named", findings=True, executor="mine:Backwards")
    assert named.store.meta("spec")["executor"] == "mine:Backwards"
    assert [row.position for row in named.rows] == list(range(len(serial.rows)))
    assert timeless(named.rows) == timeless(serial.rows)
    assert timeless(named.findings) == timeless(serial.findings)
    import mine as module  # type: ignore[import-not-found]

    monkeypatch.setattr(EXECUTORS, "_entries", dict(EXECUTORS._entries))
    EXECUTORS.register(Entry("backwards", module.Backwards, "the last client first"))
    registered = audited(mine, "registered", executor="backwards")
    assert timeless(registered.rows) == timeless(serial.rows)
    with pytest.raises(SpecError, match=r"executor: .*inherits leakscope.Executor"):
        audited(mine, "wrong", executor="mine:NoAttack")


def test_typed_on_the_command_line(mine: Path) -> None:
    options = ["--model", "mine:model", "--data", "mine:data", "--examples", 1, "--no-findings", "--serial"]
    options += ["-v", "--attack", "mine:MyAttack:steps=2", "--defense", "mine:Secret:factor=0.25"]
    done = typed("audit", *options, "--protocol", "mine:MyProtocol:times=1.5", "--knowledge", "adaptive_server")
    assert done.returncode == 1, done.stderr
    assert "mine:MyAttack, Secret(factor=0.25)" in done.stderr
    assert "mine:MyAttack" in (mine / "leakscope-audit" / "report.html").read_text(encoding="utf-8")
    assert Audit(mine / "leakscope-audit").rows[0].job.protocol.endswith("times=1.5)")
    listed = typed("list", "attacks", "mine:MyAttack")
    assert "steps" in listed.stdout
    assert "Units to look at." in listed.stdout


@pytest.mark.parametrize(
    "change, words",
    [
        ({"attacks": ["mine:NoAttack"]}, "attacks[0]: attack 'mine:NoAttack': expected a class that inherits"),
        ({"attacks": ["mine:Missing"]}, "mine has no 'Missing'. Callables in it: "),
        ({"attacks": ["yours:MyAttack"]}, "no module named 'yours'"),
        ({"attacks": [{"mine:MyAttack": {"steps": 4}}]}, "mine:MyAttack: steps: expected a whole number of at least 1"),
        (
            {"attacks": [{"mine:MyAttack": {"step": 1}}]},
            "unknown setting 'step': expected one of ignore_defense, steps",
        ),
        ({"defenses": ["mine:MyAttack"]}, "defenses[0]: defence 'mine:MyAttack': expected a class that inherits"),
        ({"protocols": ["mine:Known"]}, "protocols[0]: protocol 'mine:Known': expected a class that inherits"),
        ({"data": "mine:model"}, "data 'mine:model': expected Examples, a pair (x, y) of tensors or"),
        ({"model": "mine:data"}, "expected it to return a torch.nn.Module"),
    ],
    ids=str,
)
def test_what_is_wrong_with_them_is_told_at_once(change: dict[str, Any], words: str, mine: Path) -> None:
    with pytest.raises(SpecError) as caught:
        audited(mine, "out", **change)
    assert words in str(caught.value)
    assert len(caught.value.problems) == 1
    assert not (mine / "out").exists()
