"""One step from inputs with a known error towards the right ones, and the error that is expected to be left."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from leakscope.federation import FedSGD
from leakscope.matching import GradientMap
from leakscope.matching.refinement import SMALLEST, noise_levels, refine


def test_refined_inputs_are_as_near_as_expected() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 4))
    x, y = torch.rand(1, 3, 2, 2), torch.tensor([1])
    wide = FedSGD().observe(net, x, y).to(dtype=torch.float64)
    update = dict(wide.message.update)
    mapping = dataclasses.replace(GradientMap.of(wide, y), scales=noise_levels(update))
    truth = mapping.flat(x.double())
    start = truth + 1e-4 * torch.randn(12, dtype=torch.float64)
    found = refine(mapping, mapping.joined(update), start, lambda c: 1e-4 * c, 12, 12)
    error = float((found.x - truth).square().mean().sqrt())
    assert error < 1e-5
    assert error < 3 * found.error
    wrong = refine(mapping, mapping.joined(update), start + 0.1, lambda c: 1e-4 * c, 12, 12)
    assert wrong.error > 10 * found.error  # what is left is more than rehearsed


@pytest.mark.parametrize(("share", "counts"), [(2 * SMALLEST, True), (SMALLEST / 2, False)])
def test_tensors_that_are_too_small_are_not_counted_on(share: float, counts: bool) -> None:
    levels = noise_levels({"large": torch.ones(3), "small": torch.full((3,), share)})
    assert (levels["small"] < torch.inf) == counts
