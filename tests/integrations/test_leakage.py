"""Certified examples are counted in what travels, without the truth and without a label."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from leakscope.audit.assess import Assessment
from leakscope.capture.recordings import Origin
from leakscope.contracts.attack import Attack
from leakscope.contracts.certificate import Certificate
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.federation import FedSGD
from leakscope.integrations.flower_mod import worst_of_clients
from leakscope.integrations.flower_strategy import summary_of
from leakscope.integrations.leakage import measure, unassessed
from leakscope.integrations.opacus import DPReport
from leakscope.models import build_model

SHAPE = (1, 4, 4)


@dataclass(frozen=True, kw_only=True)
class Prover(Attack):
    """Grey inputs with certificates; ``free`` of each example, fewer than 0: none."""

    free: tuple[int, ...] = (0, 0)

    def run(self, observation: Observation, generator: torch.Generator, progress: Any = None) -> Reconstruction:
        count = len(self.free)
        proofs = tuple(
            None if free < 0 else Certificate(residual=0.4, tolerance=1.0, free_directions=free, method="quotient")
            for free in self.free
        )
        labels = torch.zeros(count, dtype=torch.long)
        return Reconstruction(torch.full((count, *SHAPE), 0.5), labels, torch.zeros(count), certificates=proofs)


def found(*free: int, place: Any = "server") -> Assessment:
    x, y = torch.rand(len(free), *SHAPE), torch.zeros(len(free), dtype=torch.long)
    seen = FedSGD().observe(build_model("logistic", input_shape=SHAPE, num_classes=3), x, y)
    origin = Origin(place=place, client="1", number=1, run="1", library="none")
    return measure(seen, origin, Prover(free=free), controls=False)


@pytest.mark.parametrize("free, certified", [((0, 0), 2), ((0, 7), 1), ((0, -1), 1), ((-1, -1), 0)])
def test_certified_examples_are_counted(free: tuple[int, ...], certified: int) -> None:
    one = found(*free)
    assert one.certified == certified
    assert one.metrics()["leakscope.server.certified"] == certified
    assert found(*free, place="raw").metrics()["leakscope.raw.certified"] == certified
    assert (f"{certified} of 2 examples: recovered, certified" in one.describe()) == (certified > 0)
    assert ("7 directions" in one.describe()) == (7 in free)


def test_what_was_not_attacked_is_not_certified() -> None:
    whole = found(0)
    assert whole.origin is not None
    one = unassessed(whole.observation, whole.origin, whole.attack, "not its turn")
    assert one.certified == 0
    assert math.isnan(one.metrics()["leakscope.server.certified"])
    assert summary_of([one, found(0)])["leakscope.server.certified"] == 1


def test_a_round_counts_them_over_its_clients() -> None:
    clients = [found(0, 0), found(0, 7), found(-1, -1)]
    told = summary_of(clients)
    assert (told["leakscope.server.audited"], told["leakscope.server.certified"]) == (3, 3)
    assert summary_of([])["leakscope.server.certified"] == 0
    records = [SimpleNamespace(metric_records={"m": found(*free, place="raw").metrics()}) for free in ((0, 0), (0, 7))]
    assert worst_of_clients(records)["leakscope.raw.certified.worst_client"] == 2


def test_steps_of_dp_sgd_count_them() -> None:
    facts: dict[str, Any] = {"steps": 2, "epsilon": 1.0, "delta": 1e-5, "noise_multiplier": 1.0, "clip": 1.0}
    report = DPReport(leakage=(found(0, 0), found(0, 7)), problems=(), skipped={}, **facts)
    assert report.certified == 3
    assert "3 examples certified" in report.describe()
