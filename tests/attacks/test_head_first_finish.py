"""Whether an update determines its inputs, and what features may be those of silent units."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from leakscope.attacks import HeadFirst
from leakscope.attacks.head_first import stages
from leakscope.attacks.head_first.case import Case
from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.observation import Observation
from leakscope.equations.embedding import SILENT, SILENT_ERRORS, recover_embedding
from leakscope.federation import FedSGD
from leakscope.matching import GradientMap
from leakscope.matching.determinacy import movement


def smooth_net(scale: float) -> nn.Module:
    """Tanh layers; the first sees half of the pixels ``scale`` times as strongly as the others."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 5)
        )
    with torch.no_grad():
        net[0].weight[:, :, :, 1:] *= scale
    return net.double()


def observed(scale: float) -> tuple[Observation, torch.Tensor]:
    x = torch.rand((1, 1, 6, 6), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return FedSGD().observe(smooth_net(scale), x, torch.tensor([2])), x


@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_the_movement_is_that_of_least_squares(scale: float) -> None:
    seen, x = observed(scale)
    mapping = GradientMap.of(seen, torch.tensor([2]))
    flat = mapping.flat(x)
    jacobian = torch.stack([mapping.linearise(flat).forward(row) for row in torch.eye(flat.numel()).double()], dim=1)
    noise = torch.randn(len(jacobian), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    noise = noise * (1e-3 / noise.norm())
    expected = torch.linalg.lstsq(jacobian, noise[:, None], driver="gelsd").solution.square().mean().sqrt()
    assert movement(mapping.linearise(flat), 1e-3, mapping.shape) == [pytest.approx(float(expected), rel=1e-3)]


def test_only_an_update_that_determines_the_inputs_is_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, x = observed(1.0)
    case = Case(HeadFirst(), seen, torch.Generator())
    case.hold(recover_embedding(seen))
    near = x + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    case.latest = case.candidate(near, "near")
    stage = stages.GaussNewtonSteps()
    assert stage.applies(case)
    (solution,) = stage.propose(case)
    assert solution.residual < EXPLAINED
    assert [proof.free_directions for proof in solution.certificates] == [0]
    assert float((solution.inputs - x).abs().max()) < 1e-5
    assert not case.notes
    # As a badly conditioned network would have it: nothing is begun.
    monkeypatch.setattr(stages, "movement", lambda *_: [2 * stages.MOST_MOVEMENT])
    assert not list(stage.propose(case))
    assert "no Gauss-Newton steps" in case.notes[-1]


def test_features_may_be_zero_as_far_as_their_error_tells() -> None:
    exact = recover_embedding(observed(1.0)[0])
    assert exact.silence == SILENT
    noisy = dataclasses.replace(exact, exact=False, error=1e-2)
    share = 1e-2 * float(noisy.features.square().mean().sqrt() / noisy.features.abs().max())
    assert noisy.silence == pytest.approx(SILENT_ERRORS * share)
