"""No weak attack makes a pass of a net that leaks: the worst thing that an audit can say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import InvertingGradients
from leakscope.audit import audit
from leakscope.audit.run import Audit
from leakscope.contracts.observation import Observation
from leakscope.results import judge


@dataclass(frozen=True, kw_only=True)
class WrongLabels(InvertingGradients):
    """Searches for the class after the right one."""

    def _readings(self, observation: Observation, generator: torch.Generator, shuffled: bool) -> Any:
        from dataclasses import replace

        readings, _, notes = super()._readings(observation, generator, shuffled)
        wrong = [replace(r, labels=(r.labels + 1) % observation.num_classes) for r in readings]
        return wrong, (), notes


def inverting(**settings: Any) -> dict[str, Any]:
    return {"inverting-gradients": {"iterations": 40, **settings}}


WEAK: dict[str, Any] = {
    "a tiny learning rate": inverting(lr=1e-9),
    "a small learning rate": inverting(lr=1e-4),
    "a huge learning rate": inverting(lr=1e6),
    "a large learning rate": inverting(lr=20.0, schedule="constant"),
    "a large learning rate on signs": inverting(lr=20.0, gradient="sign"),
    **{f"{steps} steps": inverting(iterations=steps) for steps in (1, 2, 3, 4, 5)},
    "a heavy prior": inverting(tv=100.0),
    "nothing but the prior": inverting(tv=1e6),
    "wrong labels": WrongLabels(iterations=60),
    "labels searched along, briefly": inverting(labels="joint", iterations=5),
    "a distance that saturates": inverting(distance="gaussian-kernel", lr=1e-3),
    "absolute entries": inverting(distance="l1", lr=1e-3, iterations=20),
    "kernels, tiny steps": {"sapag": {"iterations": 20, "lr": 1e-6}},
    "L-BFGS, two evaluations": {"dlg": {"iterations": 2}},
    "L-BFGS far outside": {"dlg": {"iterations": 20, "start": "normal", "line_search": "none"}},
    "second order, one step": {"gauss-newton": {"steps": 1, "restarts": 1, "damping": 1e12, "smooth_only": False}},
}
assert len(WEAK) == 20


def smooth_pictures(count: int, size: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(4)
    coarse = torch.rand(count, 1, 4, 4, generator=draws)
    pictures = nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1)
    return pictures, torch.arange(count) % 4


def leaky_net(activation: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            *(nn.Conv2d(1, 8, 5, padding=2), activation(), nn.Conv2d(8, 8, 5, stride=2, padding=2), activation()),
            *(nn.Flatten(), nn.Linear(8 * 16, 4)),
        )


SETTINGS: dict[str, dict[str, Any]] = {
    "one example": {"examples": 1},
    "a batch, no theory": {"batch": 2, "examples": 2, "findings": False},
    "weight updates": {
        "protocols": [{"fedavg": {"epochs": 2, "batch_size": 1, "lr": 0.05}}],
        "batch": 1,
        "examples": 1,
    },
    "a defence in name only": {
        "defenses": [{"gradient-noise": {"sigma": 1e-7}}],
        "knowledge": "adaptive_server",
        "examples": 1,
    },
}


def audited(activation: type[nn.Module], attacks: list[Any], **settings: Any) -> Audit:
    data = smooth_pictures(12, 8)
    # Blind controls only make passes harder; without them the test is stricter, and quicker.
    controls = ["prior-mean", "undefended", "planted"]
    return audit(model=leaky_net(activation), data=data, attacks=attacks, controls=controls, **settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("activation", "setting"),
    [
        (nn.ReLU, "one example"),
        (nn.Sigmoid, "a batch, no theory"),
        (nn.ReLU, "weight updates"),
        (nn.Sigmoid, "a defence in name only"),
    ],
)
def test_no_weak_attack_passes_a_net_that_leaks(activation: type[nn.Module], setting: str) -> None:
    strong = audited(activation, [inverting(iterations=300, tv=0.001)], **SETTINGS[setting])
    assert strong.verdict.outcome == "leaks", "the net is one that leaks"
    done = audited(activation, list(WEAK.values()), **SETTINGS[setting])
    attacks = {row.job.attack for row in done.rows if row.counts}
    assert len(attacks) == len(WEAK)
    plan = done.store.meta("plan")
    for attack in attacks:  # as an audit with this attack alone would judge it
        rows = [row for row in done.rows if row.job.attack in (attack, "none")]
        # Without the rule of the standard set, which would pass none of them, however strong.
        share = {**plan, "standard": None, "total": 0, "settings": [{**entry, "jobs": 0} for entry in plan["settings"]]}
        verdict = judge(rows, None, share, done.findings)
        for found in verdict.settings:
            assert found.outcome in ("inconclusive", "leaks"), f"{attack}: {found}"
