"""Guesses of images from feature maps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.inputs import Box, InputSpace, ValueRange
from leakscope.matching.decoder import decode, natural_images
from leakscope.network.gates import GatedNetwork, read_gated

SHAPE = (3, 16, 16)


def network(*, training: bool = False) -> GatedNetwork:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        first, second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 48, 3, 2, 1)
        layers = [first, nn.BatchNorm2d(16), nn.ReLU(), second, nn.BatchNorm2d(48), nn.ReLU()]
        net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(48 * 64, 4))
        net(torch.rand(32, *SHAPE))
    return read_gated(net.eval(), SHAPE, "7", training=training)


def space(low: float = 0.0, high: float = 1.0) -> InputSpace:
    return Box(shape=SHAPE, range=ValueRange(low, high))


def last_relu(read: GatedNetwork) -> int:
    return max(number for number, step in enumerate(read.steps) if step.kind == "relu")


def smooth(seed: int, count: int = 1) -> Tensor:
    small = torch.rand((count, 3, 5, 5), generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(small, SHAPE[1:], mode="bicubic").clamp(0, 1)


@pytest.mark.parametrize("inputs", [space(), space(-1.0, 3.0)])
def test_a_guess_is_far_nearer_than_grey(inputs: InputSpace) -> None:
    read, x = network(), smooth(1, 2)
    step = last_relu(read)
    values = read.onwards(0, inputs.from_unit(x).double()).values[step].float()
    guess = decode(read.to(torch.float32), step, values, inputs)
    assert guess is not None
    assert guess.shape == (2, 768)
    error, grey = (float((one - x.flatten(1)).square().mean()) for one in (guess, torch.full((2, 768), 0.5)))
    assert error < grey / 5


def test_the_guess_is_the_same_each_time_and_follows_statistics_of_the_batch() -> None:
    read, x = network(training=True), smooth(2, 3)
    step = last_relu(read)
    values = read.onwards(0, x.double()).values[step].float()
    guess = decode(read.to(torch.float32), step, values, space())
    again = decode(read.to(torch.float32), step, values, space())
    assert guess is not None
    assert again is not None
    assert torch.equal(guess, again)
    # Statistics of the batch hide its brightness and contrast.
    apart = [torch.corrcoef(torch.stack([one, true]))[0, 1] for one, true in zip(guess, x.flatten(1), strict=True)]
    assert min(apart) > 0.6


def test_what_is_no_map_of_an_image_is_not_guessed() -> None:
    read = network()
    assert decode(read, last_relu(read), torch.zeros(1, 48, 5, 5), space()) is None
    assert decode(read, last_relu(read), torch.zeros(1, 48), space()) is None


def test_random_images_are_smooth_and_differ() -> None:
    images = natural_images(20, (3, 32, 32), torch.Generator().manual_seed(0))
    assert float(images.min()) >= 0
    assert float(images.max()) <= 1
    steps = images.diff(dim=3).square().mean((1, 2, 3)) / images.var((1, 2, 3))
    assert float(steps.max()) < 0.5  # of white noise: 2
    assert float(images.mean((1, 2, 3)).std()) > 0.05
