"""Inputs from the values of known ReLUs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.inputs import Box, ValueRange
from leakscope.equations.open_equations import OpenEquations
from leakscope.matching.known_values import ACTIVE, GAIN, KnownValues
from leakscope.matching.least_squares import LevenbergMarquardt, Preconditioner
from leakscope.network.gates import GatedNetwork, read_gated

SHAPE = (1, 6, 6)


def network(*front: nn.Module) -> tuple[nn.Module, GatedNetwork]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [*front, nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2)]
        net = nn.Sequential(*layers, nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
        net(torch.rand(32, *SHAPE))
    return net.eval(), read_gated(net, SHAPE, str(len(net) - 1))


def known_of(read: GatedNetwork, x: Tensor) -> KnownValues:
    """Return all ReLUs' values, as a peel would know them."""
    values = read.onwards(0, x.double()).values
    relus = {number: values[number] for number, step in enumerate(read.steps) if step.kind == "relu"}
    return KnownValues(read, relus, Box(shape=SHAPE, range=ValueRange()))


def image(seed: int) -> Tensor:
    return torch.randint(0, 256, (1, *SHAPE), generator=torch.Generator().manual_seed(seed)) / 255


def test_the_image_is_found_and_determined() -> None:
    _, read = network()
    x = image(1)
    known = known_of(read, x)
    found, left, _ = known.finish(known.descend(known.start(), 200), steps=20, tolerance=1e-9)
    assert left < 1e-6
    assert float((found - x.flatten()).abs().max()) < 1e-4
    assert known.free_directions(found, 200) == (0,)
    assert torch.allclose(known.whole_bytes(found, left).float(), x.flatten(), atol=1e-6)


def test_what_pooling_hides_is_free() -> None:
    _, read = network(nn.AvgPool2d(2))
    x = image(2)
    assert known_of(read, x).free_directions(x.double().flatten(), 200) == (36 - 9,)


def test_the_jacobian_is_that_of_the_products() -> None:
    _, read = network()
    known, x = known_of(read, image(1)), image(1).flatten()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    made = known.crude_jacobian(x, known.entries)
    assert torch.allclose(direction @ made, known.to(torch.float32).linearise(x).forward(direction), atol=1e-5)


@pytest.mark.parametrize("training", [False, True])
def test_a_preconditioner_counts_the_same_directions(training: bool) -> None:
    x = image(1)
    known = train_mode(x) if training else known_of(network()[1], x)
    helper = Preconditioner(known, x.double().flatten(), 0.0)
    counts = [known.free_directions(x.double().flatten(), 200, given) for given in (None, helper)]
    assert counts[0] == counts[1]


def test_known_values_stand_for_the_layers_above_them() -> None:
    """The second ReLU is not compared: it sees the first alone, which is known."""
    _, read = network()
    known = known_of(read, image(1))
    lowest = min(known.known)
    assert list(read.received(0, image(1).double(), known.known)) == [lowest]


@pytest.mark.parametrize(("level", "rounded"), [(1e-4, True), (0.3 / 255, True), (2 / 255, False)])
def test_bytes_are_kept_where_the_values_agree(level: float, rounded: bool) -> None:
    _, read = network()
    x = image(3).double().flatten()
    known = known_of(read, x.reshape(1, *SHAPE))
    near = x + level * torch.sign(torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=x.dtype))
    left = float((known(near) - known.wanted).norm() / known.wanted.norm())
    assert torch.allclose(known.whole_bytes(near, left), x, atol=1e-6) is rounded


@pytest.mark.parametrize(("share", "in_doubt"), [(0.9 * ACTIVE, True), (1.1 * ACTIVE, False)])
def test_small_known_values_of_units_that_are_shut_weigh_little(share: float, in_doubt: bool) -> None:
    """In front of the ReLU the right image may be far from a small value that is an error."""
    x = image(1)
    known = known_of(network()[1], x)
    lowest = min(known.known)
    value, received = known.known[lowest].clone(), known.network.run(x.double()).received[lowest]
    shut = received.flatten().argmin()
    value.view(-1)[shut] = share * value.max()
    left = dataclasses.replace(known, known={**known.known, lowest: value}).leaves(x.double().flatten())
    error = share * float(value.max() / value.norm())
    assert (left < 1.1 * error) is in_doubt


def test_least_squares_end_at_the_errors_of_the_values() -> None:
    known = known_of(network()[1], image(1))
    lowest = min(known.known)
    noise = torch.randn(known.known[lowest].shape, generator=torch.Generator().manual_seed(0)).double()
    noisy = dataclasses.replace(known, known={lowest: known.known[lowest] * (1 + 1e-3 * noise)})
    start, steps = known.descend(known.start(), 200), dict[float, int]()
    for gain in (0.0, GAIN):
        steps[gain] = LevenbergMarquardt(steps=30, gain=gain).run(noisy, noisy.wanted, start).steps
    assert steps[GAIN] < steps[0.0] / 2
    assert noisy.finish(start, steps=30, tolerance=1e-9)[1] < 2e-3


def train_mode(x: Tensor) -> KnownValues:
    net, _ = network()
    net[1].eps = 1e-12  # type: ignore[index, assignment]  # it has a scale of its own, which a dark image shows
    return known_of(read_gated(net, SHAPE, str(len(net) - 1), training=True), x)


def test_bytes_tell_the_scale_that_batchnorm_removes() -> None:
    x = image(1)
    known = train_mode(x)
    found = known.whole_bytes(0.7 * x.double().flatten(), left=1e-3)
    assert torch.allclose(found.float(), x.flatten(), atol=1e-6)
    assert known.free_directions(found, 200) == (0,)


@pytest.mark.parametrize("factor", [0.25, 0.9])
def test_several_scales_or_none_leave_the_scale_open(factor: float) -> None:
    """Four times as bright an image has whole bytes, too; with .9 there are none."""
    x = factor * (image(1) * 255 / 4).round() * 4 / 255
    known = train_mode(x)
    assert known.free_directions(x.double().flatten(), 200) == (1,)


def test_an_image_too_flat_for_bytes_keeps_its_scale_open() -> None:
    """At no scale below white do its bytes tell anything; all grey and all black it has no contrast at all."""
    pattern = image(1)
    for x in (0.5 + 0.01 * (pattern - 0.5), torch.full_like(pattern, 128 / 255), torch.zeros_like(pattern)):
        known, flat = train_mode(image(2)), ((255 * x).round() / 255).double().flatten()
        assert torch.allclose(known.whole_bytes(flat, 1.0), flat, atol=1e-9)
        assert known._byte_scales(flat) == []


@pytest.mark.parametrize("brightest", [-1.0, 1e-9])
def test_an_image_below_the_middle_of_the_range_has_few_scales(brightest: float) -> None:
    """Its darkest pixel, not its brightest, is the first to leave the bytes."""
    read = train_mode(image(2)).network
    x = -image(1) * 126 / 127.5
    x.view(-1)[0] = brightest
    known = dataclasses.replace(known_of(read, x), inputs=Box(shape=SHAPE, range=ValueRange(-1.0, 1.0)))
    assert len(known._byte_scales(known.inputs.to_unit(x.double()).flatten())) < 10


@pytest.mark.parametrize("inside", [False, True])
def test_equations_add_values_where_they_fit_those_above(inside: bool) -> None:
    """Inside of a block with a shortcut no known value follows from the solved ones alone."""
    known, values = block_of_a_batch(inside)
    truth = known.network.onwards(0, values).values
    step = known.equations.step  # type: ignore[union-attr]
    near = (values + 0.01 * torch.randn(values.shape, generator=torch.Generator().manual_seed(1))).flatten()
    found = known.solve_equations(near)
    assert found is not None
    assert found.equations is None
    assert torch.allclose(found.known[step], truth[step], atol=1e-4)
    assert found.parts[0].equations is None
    assert found.descend(near, 3).shape == near.shape
    assert known.descend(near, 3).shape == near.shape
    wrong = dataclasses.replace(known.equations, gradient=1.1 * known.equations.gradient)  # type: ignore[type-var, union-attr]
    assert (dataclasses.replace(known, equations=wrong).solve_equations(near) is None) is not inside


def block_of_a_batch(inside: bool) -> tuple[KnownValues, Tensor]:
    """Know what a residual block gave for two images, with equations for its input, or for what is inside of it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x + self.second(torch.relu(self.first(x))))

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), Block(), nn.Flatten(), nn.Linear(288, 4))
    read = read_gated(net.eval(), SHAPE, "4")
    x = torch.cat([image(1), image(2)])
    truth = read.onwards(0, x.double()).values
    relus = [number for number, step in enumerate(read.steps) if step.kind == "relu"]
    step = relus[1] if inside else relus[0]
    draws = torch.Generator().manual_seed(0)
    matrix = torch.randn((120, 72), generator=draws, dtype=torch.float64)
    gradient = matrix @ truth[step].permute(0, 2, 3, 1).flatten(0, 2)
    rows = OpenEquations(step=step, share=1.0, matrix=matrix, gradient=gradient, groups=torch.arange(120))
    known = {number: truth[number] for number in relus if number > step}
    space = Box(shape=SHAPE, range=ValueRange())
    return KnownValues(read, known, space, rows).to(torch.float32), x
