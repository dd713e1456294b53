"""An audit in which an attack learns: from others' examples only, and counting as one that knows the defence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import torch

from leakscope.attacks import LearningToInvert
from leakscope.audit import audit
from leakscope.contracts.attack import Attack
from leakscope.contracts.defense import Defense, Gradient
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction

#: Small, and linear: the residuals of logistic regression make it no exact case.
QUICK = LearningToInvert(clients=100, hidden=0)


@dataclass(frozen=True, kw_only=True)
class Signs(Defense):
    """No channel describes it."""

    def protect_message(self, update: Gradient, generator: torch.Generator) -> Gradient:
        return {name: value.sign() for name, value in update.items()}


@dataclass(frozen=True, kw_only=True)
class Snoop(Attack):
    """Looks for the client's examples among those it was given; the update of one example tells it which they are."""

    requires = ("num_examples", "auxiliary_data")

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        assert observation.auxiliary is not None
        update = observation.message.update
        row = int(update["1.bias"].abs().argmax())
        x = (update["1.weight"][row] / update["1.bias"][row]).reshape(1, -1)
        distances = torch.cdist(x, observation.auxiliary[0].flatten(1))[0]
        found = observation.auxiliary[0][distances.argmin()][None]
        return Reconstruction(found, None, torch.zeros(1), info={"nearest": float(distances.min())})


def run(out: Path, count: int = 120, **changes: Any) -> Any:
    x, y = doubles.examples(count)
    x[60] = x[1]  # somebody else's copy of an attacked example
    spec = {"model": doubles.net(), "data": (x, y), "examples": 2, "knowledge": "informed_server", "findings": False}
    return audit(**{**spec, "out": out, **changes})


def test_an_attack_that_learned_the_defence_is_one_that_knows_it(tmp_path: Path) -> None:
    never = {"max_psnr": 500.0, "max_identification": 1.0}
    done = run(tmp_path / "out", attacks=[QUICK, doubles.Quotient()], defenses=[Signs()], policy=never)
    for row in done.rows:
        if row.counts:
            assert row.result.adaptive == row.job.attack.startswith("LearningToInvert")
    (setting,) = done.verdict.settings
    # It knows the defence, but with a hundred examples it is too weak: that is no pass either.
    (reason,) = [reason for reason in setting.reasons if reason.knowing]
    assert reason.code.startswith("weak-")
    assert setting.outcome == "inconclusive"
    blind = run(tmp_path / "blind", attacks=[doubles.Quotient()], defenses=[Signs()], policy=never)
    (reason,) = [r for r in blind.verdict.settings[0].reasons if r.code == "defence-unread"]
    assert "learn-defence" in {remedy.kind for remedy in reason.remedy.alternatives}


def test_no_attacked_example_is_among_those_that_an_attack_is_given(tmp_path: Path) -> None:
    done = run(tmp_path / "out", attacks=[Snoop()], defenses=["none"])
    counting = [row for row in done.rows if row.counts]
    assert len(counting) == 2
    assert all(row.result.info["nearest"] > 0.1 for row in counting)
    assert all(row.result.best_psnr < 20 for row in counting)


def test_where_there_are_too_few_examples_the_attack_says_so(tmp_path: Path) -> None:
    done = run(tmp_path / "out", count=62, examples=40, attacks=[QUICK], defenses=["none"])
    attempts = [row for row in done.rows if row.counts or row.status == "refused"]
    assert {row.status for row in attempts} == {"refused"}
    assert "expected at least 32 examples of the adversary's own to learn from, got 21" in (attempts[0].error or "")
    assert done.verdict.outcome != "within policy"
