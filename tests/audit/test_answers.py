"""What an audit says around its verdict: what ran, how large the noise is, and which command comes next."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from command_line import typed

PARTS = """
import dataclasses
import torch
from torch import nn
import leakscope as ls

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))

def data():
    return torch.rand(8, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4

@dataclasses.dataclass(frozen=True, kw_only=True)
class Misspelt(ls.Defense):
    def protect_mesage(self, update, generator):
        return {name: value * 0 for name, value in update.items()}

@dataclasses.dataclass(frozen=True, kw_only=True)
class Same(ls.Defense):
    def protect_message(self, update, generator):
        return dict(update)

@dataclasses.dataclass(frozen=True, kw_only=True)
class Zeros(ls.Defense):
    def protect_message(self, update, generator):
        return {name: value * 0 for name, value in update.items()}

@dataclasses.dataclass(frozen=True, kw_only=True)
class Breaks(ls.Attack):
    def run(self, observation, generator, progress=None):
        raise RuntimeError("no such thing")
"""
QUICK = ("--serial", "--no-progress", "--no-findings", "--examples", "1")
OWN = ("audit", "--model", "answer_parts:net", "--data", "answer_parts:data", *QUICK)


@pytest.fixture
def own(folder: Path) -> Path:
    (folder / "answer_parts.py").write_text(PARTS)
    return folder


def document(*words: str) -> dict[str, Any]:
    done = typed(*OWN, *words, "--json")
    assert done.returncode in (0, 1, 5), done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def lines(told: dict[str, Any], start: str) -> list[str]:
    return [line["text"] for line in told["audited"] if line["text"].startswith(start)]


def test_without_defences_only_what_the_user_has_is_audited(own: Path) -> None:
    told = document("--attack", "linear-layer")
    assert [setting["defense"] for setting in told["settings"]] == ["none"]


def test_the_command_that_a_leak_names_audits_defences_that_attacks_know(own: Path) -> None:
    told = document("--attack", "linear-layer", "--out", "first run")
    assert told["outcome"] == "leaks"
    words = shlex.split(told["advice"]["command"])
    page = re.sub(r"<[^>]*>", "", (own / "first run" / "report.html").read_text(encoding="utf-8"))
    assert "Run the same audit with --defense gradient-noise" in page
    assert words[:2] == ["leakscope", "audit"]
    assert words[-2:] == ["--out", "first run-2"], "another threat model is another audit"
    ended = typed(*words[1:])
    assert ended.returncode in (0, 1, 5), ended.stderr
    again = json.loads(ended.stdout)
    assert len(again["settings"]) == 3
    assert "none" not in [setting["defense"] for setting in again["settings"]]
    assert any("which defence was used" in line for line in again["threat_model"] if line.startswith("It knows"))
    printed = typed(*OWN, "--attack", "linear-layer", "--out", "first run").stdout
    shown = printed.partition("Next:")[2].partition("Report:")[0]
    assert shlex.split(shown.replace("\\\n", "")) == [*(w for w in words[:-1] if w != "--json"), "first run-3"]


def test_a_next_command_keeps_what_a_spec_in_a_file_asks_for(own: Path) -> None:
    spec = {"model": "answer_parts:net", "data": "answer_parts:data", "examples": 1, "findings": False}
    spec |= {"attacks": [{"inverting-gradients": {"iterations": 2}}], "defenses": [{"gradient-noise": {"sigma": 0.1}}]}
    (own / "spec.yaml").write_text(json.dumps({**spec, "budget": "1h"}))
    done = typed("audit", "spec.yaml", "--serial", "--no-progress", "--json", "--out", "run")
    command = json.loads(done.stdout)["advice"]["command"]
    assert command.startswith("leakscope audit spec.yaml")
    assert "--attack inverting-gradients:iterations=2" in command
    assert "--attack standard" in command
    assert command.endswith("--knowledge adaptive_server --out run-2")


def test_the_header_tells_what_ran_what_was_refused_and_what_comes_from_before(own: Path) -> None:
    first = document("--attack", "linear-layer", "--attack", "answer_parts:Breaks", "--out", "run")
    (ran,) = lines(first, "Attacks:")
    assert ran.startswith("Attacks: 1 ran: linear-layer;")
    assert lines(first, "Attacks that failed") == ["Attacks that failed: answer_parts:Breaks."]
    assert not lines(first, "From an earlier run")
    second = document("--attack", "inverting-gradients:iterations=2", "--out", "run")
    (ran,) = lines(second, "Attacks:")
    assert "linear-layer, inverting-gradients (iterations 2" in ran
    assert "linear-layer (1 job)" in lines(second, "From an earlier run")[0]
    assert "linear-layer" in lines(second, "Not asked for this time")[0]
    resumed = document("--attack", "linear-layer", "--attack", "inverting-gradients:iterations=2", "--out", "run")
    assert "linear-layer" not in "".join(lines(resumed, "Not asked for this time"))


def test_attacks_that_a_budget_left_out_did_not_run(own: Path) -> None:
    told = document("--attack", "linear-layer", "--attack", "dlg:iterations=3", "--budget", "0.001s", "--out", "run")
    (waiting,) = lines(told, "Attacks not run yet")
    assert "dlg" in waiting
    assert not any("dlg" in line for line in lines(told, "Attacks:"))


def test_the_norm_of_the_noise_stands_beside_that_of_the_update(own: Path) -> None:
    told = document(
        *("--attack", "linear-layer", "--defense", "gradient-noise:sigma=0.1"),
        *("--defense", "gradient-noise:sigma=100", "--defense", "answer_parts:Same"),
        *("--defense", "answer_parts:Zeros", "--defense", "gradient-clipping:norm=1000"),
    )
    scales = [setting["scale"] for setting in told["settings"]]
    weights = 16 * 8 + 8 + 8 * 4 + 4
    assert scales[0]["change"] == pytest.approx(0.1 * weights**0.5, rel=0.2)
    assert scales[0]["entries"] == weights
    assert len({scale["update"] for scale in scales}) == 1
    warned = {line["text"][:2] for line in told["audited"] if line["warning"] and line["text"].startswith("S")}
    assert warned == {"S2", "S3", "S4", "S5"}, "lost in noise, unchanged, zeros, and clipping that clips nothing"
    (noise,) = lines(told, "S1")
    assert f"{scales[0]['update']:.2g}" in noise
    assert f"{scales[0]['change']:.2g}" in noise


def test_a_defence_without_a_hook_is_an_error_that_lists_them(own: Path) -> None:
    done = typed(*OWN, "--attack", "linear-layer", "--defense", "answer_parts:Misspelt", "--out", "run")
    assert done.returncode == 4
    for text in ("protect_batch", "protect_gradient", "did you mean protect_message?"):
        assert text in done.stderr
    assert not (own / "run").exists()


def test_a_job_that_fails_in_two_runs_is_told_as_lasting(own: Path) -> None:
    words = ("--attack", "answer_parts:Breaks", "--attack", "linear-layer", "--waive", "head-first", "--out", "run")
    first = document(*words, "--defense", "gradient-noise:sigma=5")
    again = document(*words, "--defense", "gradient-noise:sigma=5")
    told = [
        [remedy["kind"] for reason in one["settings"][0]["reasons"] for remedy in reason["remedies"]]
        for one in (first, again)
    ]
    assert ["retry" in kinds for kinds in told] == [True, False]
