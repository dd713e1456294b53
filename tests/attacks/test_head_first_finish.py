"""Whether an update determines its inputs, and what features may be those of silent units."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from leakscope.attacks.head_first import finish as head_first_finish
from leakscope.attacks.head_first.finish import MOST_MOVEMENT, SILENT_ERRORS, Finisher, inputs_movement
from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.observation import Observation
from leakscope.equations.embedding import recover_embedding
from leakscope.equations.gated_inverse import SILENT
from leakscope.federation import FedSGD
from leakscope.matching import GradientMap, Victim


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
    assert inputs_movement(mapping, flat, 1e-3) == pytest.approx(float(expected), rel=1e-3)


def finisher(seen: Observation) -> Finisher:
    embedding = recover_embedding(seen)
    assert embedding.labels is not None
    return Finisher(seen, embedding, Victim.of(seen), embedding.labels)


def test_only_an_update_that_determines_the_inputs_is_certified(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, x = observed(1.0)
    finish = finisher(seen)
    near = x + 1e-3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    solution = finish.gauss_newton(near)
    assert solution is not None
    assert solution.residual < EXPLAINED
    assert solution.free == (0,)
    assert float((solution.inputs - x).abs().max()) < 1e-5
    assert not finish.notes
    # As a badly conditioned network would have it: nothing is begun.
    monkeypatch.setattr(head_first_finish, "inputs_movement", lambda *_: 2 * MOST_MOVEMENT)
    assert finish.gauss_newton(near) is None
    assert "no Gauss-Newton steps" in finish.notes[-1]


def test_features_may_be_zero_as_far_as_their_error_tells() -> None:
    seen, _ = observed(1.0)
    exact = finisher(seen)
    assert exact.silence() == SILENT
    noisy = dataclasses.replace(exact, embedding=dataclasses.replace(exact.embedding, exact=False, error=1e-2))
    features = noisy.embedding.features
    share = 1e-2 * float(features.square().mean().sqrt() / features.abs().max())
    assert noisy.silence() == pytest.approx(SILENT_ERRORS * share)
