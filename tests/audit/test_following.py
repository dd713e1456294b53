"""Whoever follows the command of each verdict ends, after three more audits at most, in an answer."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import typed

from leakscope.attacks import ATTACKS
from leakscope.results import advice

NETS = """
import dataclasses
import torch
from torch import nn
import leakscope as ls

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

def conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(12, 4))

def pooled():
    torch.manual_seed(0)
    return nn.Sequential(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 4))

def data():
    x = torch.rand(24, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(24) % 4

@dataclasses.dataclass(frozen=True, kw_only=True)
class Shy(ls.Defense):
    "A defence of which nobody has worked out what an attack can compute with."
    def protect_message(self, update, generator):
        return {name: value + 0.3 * torch.randn(value.shape, generator=generator) for name, value in update.items()}

@dataclasses.dataclass(frozen=True, kw_only=True)
class Breaks(ls.Attack):
    def run(self, observation, generator, progress=None):
        raise RuntimeError("no such thing")
"""
#: A short search, so that the first answer is one of doubt (iterations, steps).
SHORT = "inverting-gradients:iterations=3"
SCENARIOS = {
    "one weak attack": ["--model", "following_nets:conv", "--attack", SHORT],
    "standard attacks left out": ["--model", "following_nets:net", "--attack", "idlg:iterations=3"],
    "noise that nobody knows": ["--model", "following_nets:net", "--defense", "gradient-noise:sigma=0.3"],
    "strong noise": ["--model", "following_nets:net", "--defense", "gradient-noise:sigma=5"],
    "local steps, shuffled": [
        *("--model", "following_nets:net", "--protocol", "fedavg:epochs=1,batch_size=2,lr=0.1", "--batch", "4"),
        *("--examples", "4", "--attack", SHORT),
    ],
    "recipe withheld": [
        *("--model", "following_nets:net", "--protocol", "fedavg:epochs=2,batch_size=1,lr=0.1", "--batch", "2"),
        *("--knowledge", "eavesdropper", "--attack", "head-first:iterations=3"),
    ],
    "a mixture": ["--model", "following_nets:net", "--batch", "4", "--examples", "4", "--attack", "linear-layer"],
    "a defence without a channel": [
        *(
            "--model",
            "following_nets:net",
            "--defense",
            "following_nets:Shy",
            "--knowledge",
            "adaptive_server",
            "--attack",
            SHORT,
        ),
    ],
    "an attack that breaks": ["--model", "following_nets:net", "--attack", "following_nets:Breaks"],
    "no controls, a budget": [
        *("--no-findings", "--model", "following_nets:pooled", "--attack", SHORT, "--no-controls"),
        *("--budget", "0.01s"),
    ],
}
KINDS = ("gradient", "weight_delta")
ENDS = ("leaks", "within policy")
#: Further audits until an answer (count).
ROUNDS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("following")
    (folder / "following_nets.py").write_text(NETS)
    return folder


def audited(words: list[str]) -> dict[str, Any]:
    done = typed(*words, "--json")
    assert done.returncode in (0, 1, 5), done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer standard attacks and shorter searches: what is tried next does not depend on how long it takes."""
    slow = ("idlg", "inverting-gradients", "cocktail-party")
    entries = {name: dataclasses.replace(ATTACKS[name], standard_for=()) for name in slow}
    monkeypatch.setattr(ATTACKS, "_entries", {**ATTACKS._entries, **entries})
    monkeypatch.setitem(advice._TABLE, "search", {kind: {"head-first": {"iterations": 310}} for kind in KINDS})
    monkeypatch.setitem(advice._TABLE, "restarts", {"inverting-gradients": {"restarts": 2}})


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_remedies_end_in_an_answer(folder: Path, name: str, quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    words = ["audit", "--data", "following_nets:data", "--serial", "--no-progress", *SCENARIOS[name]]
    words += [] if "--examples" in words else ["--examples", "2"]
    words += ["--out", name.replace(" ", "-").replace(",", "")]
    told = []
    for _ in range(ROUNDS + 1):
        document = audited(words)
        ahead = document["advice"]
        told.append((document["outcome"], ahead["text"] or ahead["command"]))
        if document["outcome"] in ENDS or ahead["kind"] == "undecidable":
            break
        assert ahead["command"], told
        words = shlex.split(ahead["command"])[1:]
        words.remove("--json")
    else:
        pytest.fail(f"no answer after {ROUNDS} more audits: {told}")
    if os.environ.get("TOLD"):
        print(name, *told, sep="\n   ")
