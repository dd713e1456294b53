"""Residual networks peeled from one convolution downwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.convolution_equations import LEAST_EQUATIONS
from leakscope.equations.open_equations import OpenEquations
from leakscope.equations.peel_state import active
from leakscope.equations.peeling import AGREES, Peel, peel
from leakscope.equations.robust_solve import SET_ASIDE, robust_solve
from leakscope.models.resnet import resnet18
from leakscope.network.gates import GatedNetwork, read_gated

SHAPE = (3, 16, 16)


class Subject:
    """A small ResNet18 with BatchNorm statistics of random images, and the gradient of a batch."""

    def __init__(self, images: int, seed: int = 0, *, calibrated: bool = True) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = resnet18(input_shape=SHAPE, num_classes=10, width=16)
            if calibrated:
                net(torch.rand(64, *SHAPE))
            self.net: nn.Module = net.eval()
            self.x, self.y = torch.rand(images, *SHAPE), torch.randint(0, 10, (images,))
        self.network: GatedNetwork = read_gated(self.net, SHAPE, "head.fc1")
        self.gradients = self.update(self.x)

    def update(self, x: Tensor) -> dict[str, Tensor]:
        names, weights = zip(*self.net.named_parameters(), strict=True)
        return dict(zip(names, torch.autograd.grad(F.cross_entropy(self.net(x), self.y), weights), strict=True))

    def errors(self, found: Peel) -> list[float]:
        """Return the relative error of each cut, images in the order that fits best."""
        truth = self.network.onwards(0, self.x.double()).values
        errors = []
        for cut in found.cuts:
            rows = [F.normalize(one.flatten(1), dim=1) for one in (cut.values, truth[cut.step])]
            order = (rows[0] @ rows[1].T).argmax(0)
            errors.append(float((cut.values[order] - truth[cut.step]).norm() / truth[cut.step].norm()))
        return errors


@pytest.mark.parametrize("images", [1, 2, 4])
def test_features_are_exact_below_the_factored_layer(images: int) -> None:
    subject = Subject(images)
    found = peel(subject.network, subject.gradients, images)
    assert found.cuts
    assert max(subject.errors(found)) < 1e-4
    lowest = found.cuts[-1].step
    start = next(number for number, step in enumerate(subject.network.steps) if step.name == found.started)
    assert lowest < start


def test_the_scale_of_a_fresh_network_is_left_to_its_biases() -> None:
    """Without statistics and biases it is homogeneous, so that the forward pass says nothing of the scale."""
    subject = Subject(1, calibrated=False)
    assert max(subject.errors(peel(subject.network, subject.gradients, 1))) < 1e-4


def test_equations_of_what_was_solved_are_not_open() -> None:
    """Masks that were corrected may solve a layer whose equations had been left open before."""
    subject = Subject(1)
    found = peel(subject.network, subject.gradients, 1)
    some, step = torch.zeros(1, 1, dtype=torch.float64), max(found.values)
    found.open = OpenEquations(step=step, share=1.0, matrix=some, gradient=some, groups=torch.zeros(1).long())
    found.run()
    assert found.open is None or found.open.step not in found.values


def test_derivatives_at_the_cut_are_those_of_the_loss() -> None:
    subject = Subject(1)
    cut = peel(subject.network, subject.gradients, 1).cuts[-1]
    start = subject.network.onwards(0, subject.x.double()).values[cut.step].requires_grad_()
    features = subject.network.onwards(cut.step, start).values[len(subject.network.steps) - 1].flatten(1)
    logits = subject.net.get_submodule("head.fc1").double()(features)
    (wanted,) = torch.autograd.grad(F.cross_entropy(logits, subject.y), start)
    assert float((cut.signals - wanted).norm() / wanted.norm()) < 1e-3


@pytest.mark.parametrize("level", [1e-2, 1e-3])
def test_noise_ends_it(level: float) -> None:
    subject, draws = Subject(1), torch.Generator().manual_seed(3)
    noisy = {
        name: value + level * value.norm() / value.numel() ** 0.5 * torch.randn(value.shape, generator=draws)
        for name, value in subject.gradients.items()
    }
    with pytest.raises(NotApplicable):
        peel(subject.network, noisy, 1)


def test_layers_of_two_batches_do_not_fit_together() -> None:
    """The factored layers say one image, the layers in front another."""
    subject = Subject(1)
    other = subject.update(torch.rand(1, *SHAPE, generator=torch.Generator().manual_seed(9)))
    mixed = {name: other[name] if "conv1" in name else value for name, value in subject.gradients.items()}
    with pytest.raises(NotApplicable):
        peel(subject.network, mixed, 1)


def test_it_says_how_many_equations_were_missing() -> None:
    subject = Subject(4)
    ended = peel(subject.network, subject.gradients, 4).ended
    assert "equations" in ended
    assert LEAST_EQUATIONS > 1
    assert AGREES < 0.01


@pytest.mark.parametrize(("share", "found"), [(0.1, True), (0.7, False)])
def test_odd_groups_are_set_aside_while_they_are_few(share: float, found: bool) -> None:
    draws = torch.Generator().manual_seed(0)
    matrix = torch.randn((200, 20), generator=draws, dtype=torch.float64)
    x = torch.randn((20, 3), generator=draws, dtype=torch.float64)
    wanted = matrix @ x + 1e-9 * torch.randn((200, 3), generator=draws, dtype=torch.float64)
    odd = round(share * 40)
    wanted[: 5 * odd] += torch.randn((5 * odd, 3), generator=draws, dtype=torch.float64)
    solution, weights, _ = robust_solve(matrix, wanted, torch.arange(40).repeat_interleave(5))
    assert bool(torch.allclose(solution, x, atol=1e-6)) is found
    if found:
        assert bool((weights[:odd] < SET_ASIDE).all())
        assert bool((weights[odd:] >= SET_ASIDE).all())


def test_active_units_lie_above_the_widest_gap() -> None:
    values = torch.tensor([2.0, 0.5, 1e-3, 3e-8, -2e-8, 1e-8])
    assert active(values).tolist() == [1, 1, 1, 0, 0, 0]
    assert active(-values.abs()).tolist() == [0] * 6


def equations_of_a_batch(spare: float, seed: int = 0) -> tuple[OpenEquations, Tensor]:
    """Return equations of a layer for the values of two images, ``spare`` times as many as unknowns, and the values."""
    draws = torch.Generator().manual_seed(seed)
    values = torch.randn((2, 6, 5, 5), generator=draws, dtype=torch.float64).relu()
    rows = round(spare * 50)
    matrix = torch.randn((rows, 50), generator=draws, dtype=torch.float64)
    gradient = matrix @ values.permute(0, 2, 3, 1).flatten(0, 2)
    return OpenEquations(step=3, share=spare, matrix=matrix, gradient=gradient, groups=torch.arange(rows)), values


@pytest.mark.parametrize(("share", "error", "solved"), [(0.9, 0.03, True), (0.4, 0.03, False)])
def test_equations_that_are_too_few_are_solved_from_near(share: float, error: float, solved: bool) -> None:
    """Half of the values are zero, and which is nearly known: fewer equations than half of the unknowns are too few."""
    system, values = equations_of_a_batch(share)
    noise = torch.randn(values.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, left = system.solve((values + error * noise * (values > 0)).float())
    assert (float((found - values).norm() / values.norm()) < 1e-6) is solved
    assert not solved or left < 1e-6


def test_equations_follow_the_order_of_the_images() -> None:
    system, values = equations_of_a_batch(2.0)
    swapped = system.reordered(torch.tensor([1, 0]))
    rows = values[[1, 0]].permute(0, 2, 3, 1).flatten(0, 2)
    assert torch.allclose(swapped.matrix @ rows, swapped.gradient)


def test_dead_channels_do_not_count_among_balanced_equations() -> None:
    system, values = equations_of_a_batch(2.0)
    system.matrix[0] *= 1e-12
    system.gradient[0] *= 1e-12
    matrix, gradient = system.balanced()
    assert torch.equal(matrix[0], torch.zeros(50, dtype=torch.float64))
    assert torch.allclose(matrix[1:].norm(dim=1), torch.ones(99, dtype=torch.float64))
    assert torch.allclose(matrix @ values.permute(0, 2, 3, 1).flatten(0, 2), gradient)
