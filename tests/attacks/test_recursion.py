"""The certificate of a solved chain: given where every layer is determined, and withheld everywhere else."""

from __future__ import annotations

import dataclasses

import torch
from torch import nn

from leakscope.attacks import RGAP
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.federation import FedSGD
from leakscope.limits import diagnose
from leakscope.models import build_model


def solved(model: nn.Module, shape: tuple[int, ...], examples: int = 1) -> Reconstruction:
    draws = torch.Generator().manual_seed(4)
    x = torch.rand(examples, *shape, generator=draws, dtype=torch.float64)
    y = torch.arange(examples) + 1
    seen = FedSGD().observe(model.double(), x, y)
    found = RGAP()(seen)
    return dataclasses.replace(found, diagnosis=diagnose(seen, found))


def certified(found: Reconstruction) -> bool:
    return found.diagnosis is not None and "full rank" in found.diagnosis.reason


def test_full_rank_is_a_certificate() -> None:
    found = solved(build_model("cnn3-c3", input_shape=(3, 10, 10)), (3, 10, 10))
    assert certified(found)
    assert found.diagnosis is not None
    assert found.diagnosis.outcome == "recovered"
    assert found.flags == ()


def test_open_directions_mixtures_and_contradictions_have_none() -> None:
    assert not certified(solved(build_model("cnn2-c2", input_shape=(3, 14, 14)), (3, 14, 14)))
    net = build_model("cnn3-c3", input_shape=(3, 10, 10))
    mixed = solved(net, (3, 10, 10), examples=3)
    assert mixed.diagnosis is not None
    assert mixed.diagnosis.outcome == "optimiser failed", "one layer determines the batch"
    draws = torch.Generator().manual_seed(4)
    seen = FedSGD().observe(net.double(), torch.rand(1, 3, 10, 10, generator=draws).double(), torch.tensor([1]))
    noisy = {n: v + 0.1 * v.norm() * torch.randn(v.shape, generator=draws) for n, v in seen.message.update.items()}
    found = RGAP()(seen.with_update(noisy))
    assert not certified(found)
    assert "ill-conditioned" in found.flags
    nothing = {name: torch.zeros_like(value) for name, value in seen.message.update.items()}
    assert "ill-conditioned" in RGAP()(seen.with_update(nothing)).flags
