"""Several plain local steps on one batch: the images of each step, its weights, and the order of the steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.equations import peel_start
from leakscope.equations.convolution_factor import ConvolutionFactors, factor_convolution
from leakscope.equations.local_networks import rounding
from leakscope.equations.peel_start import BLURRED
from leakscope.equations.peel_state import PeelState
from leakscope.equations.peeling import Peel, peel
from leakscope.models.resnet import resnet18
from leakscope.network.gates import GatedNetwork, WeightedLayer, read_gated

SHAPE = (3, 16, 16)
RATE = 0.5


class Client:
    """A small ResNet18 whose client takes plain steps on one batch; ``truth`` holds the values of each step."""

    def __init__(self, images: int, steps: int, *, training: bool = False, decay: float = 0.0) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = resnet18(input_shape=SHAPE, num_classes=10, width=32)
            net(torch.rand(64, *SHAPE))
            self.net: nn.Module = net.train(training)
            self.x, self.y = torch.rand(images, *SHAPE), torch.randint(0, 10, (images,))
        self.images, self.steps = images, steps
        self.network: GatedNetwork = read_gated(net, SHAPE, "head.fc1", training=training)
        self.nets, twin = list[nn.Module](), copy.deepcopy(net)
        rule = torch.optim.SGD(twin.parameters(), RATE, weight_decay=decay)
        for _ in range(steps):
            self.nets.append(copy.deepcopy(twin))
            rule.zero_grad()
            F.cross_entropy(twin(self.x), self.y).backward()
            rule.step()
        after = dict(twin.named_parameters())
        self.update = {name: (value - after[name]).detach() for name, value in net.named_parameters()}
        self.noise = {name: rounding(value, steps) for name, value in net.named_parameters()}

    def peel(self) -> Peel:
        return peel(self.network, self.update, self.images, steps=self.steps, noise=self.noise)

    def errors(self, found: Peel) -> list[float]:
        """Return the relative error of the values of each step, images in the order that fits best."""
        errors = []
        networks = [read_gated(net, SHAPE, "head.fc1") for net in self.nets[: len(found.network)]]
        truths = [network.onwards(0, self.x.double()).values for network in networks]
        for step, value in found.values.items():
            for part, truth in zip(found.network.split(value), truths, strict=True):
                rows = [F.normalize(one.flatten(1), dim=1) for one in (part, truth[step])]
                order = (rows[0] @ rows[1].T).argmax(0)
                errors.append(float((part[order] - truth[step]).norm() / truth[step].norm()))
        return errors


@pytest.mark.parametrize(("images", "steps"), [(1, 3), (2, 2)])
def test_features_of_each_step_are_exact(images: int, steps: int) -> None:
    client = Client(images, steps)
    found = client.peel()
    errors = client.errors(found)
    assert len(errors) >= 5 * steps
    assert max(errors) < 1e-4
    # Far below the layer that was factored: its weights and gains at each step are known.
    assert found.cuts[-1].step < found.pinned.pop() - 5


def test_weights_of_each_step_are_known_where_the_peel_was() -> None:
    client = Client(1, 3)
    found = client.peel()
    network = found.network
    reader = next(layer for layer in network.layers if network.steps[layer.step].sources[0] == found.cuts[-1].step)
    norm = found.readers[reader.step][0]
    for number in (reader.step, norm):
        name = network.steps[number].name
        for one, net in zip(network.each, client.nets, strict=True):
            truth = net.get_submodule(name).weight.detach().double()
            moved = (truth - client.nets[0].get_submodule(name).weight.detach()).norm().clamp_min(1e-3)
            weight = dict(one.steps[number].module.named_parameters())["weight"].detach()  # type: ignore[union-attr]
            assert float((weight - truth).norm() / moved) < 1e-3


def test_what_is_kept_is_that_of_the_first_step() -> None:
    client = Client(2, 2)
    found = client.peel()
    found.keep_first_step()
    assert all(len(value) == 2 for value in found.values.values())
    assert len(found.cuts[-1].signals) == 2
    assert max(client.errors(found)) < 1e-4


def test_the_wrong_order_of_the_steps_does_not_lead_down(monkeypatch: pytest.MonkeyPatch) -> None:
    client, tell_order = Client(1, 2), peel_start._order_steps

    def backwards(state: PeelState, layer: WeightedLayer) -> None:
        tell_order(state, layer)
        source = state.network.steps[layer.step].sources[0]
        state.signals[layer.step] = state.signals[layer.step].flip(0)
        state.values[source] = state.values[source].flip(0)
        state.settle(layer, state.values[source], derived=True)

    right = client.peel().cuts[-1].step
    monkeypatch.setattr(peel_start, "_order_steps", backwards)
    try:
        assert client.peel().cuts[-1].step > right
    except NotApplicable as error:
        assert "scale" in str(error)  # noqa: PT017


@pytest.mark.parametrize("level", [1e-2, 1e-3])
def test_noise_ends_it(level: float) -> None:
    client, draws = Client(1, 2), torch.Generator().manual_seed(3)
    for name, value in client.update.items():
        noise = torch.randn(value.shape, generator=draws)
        client.update[name] = value + level * value.norm() / value.numel() ** 0.5 * noise
    with pytest.raises(NotApplicable):
        client.peel()


def test_weight_decay_is_refused() -> None:
    with pytest.raises(NotApplicable):
        Client(1, 2, decay=0.01).peel()


def test_statistics_of_each_step_are_refused() -> None:
    with pytest.raises(NotApplicable, match="statistics"):
        Client(2, 2, training=True).peel()


def test_too_many_orders_are_refused() -> None:
    with pytest.raises(NotApplicable, match="orders"):
        next(peel_start._orders(torch.arange(8).reshape(1, 8)))
    assert len(list(peel_start._orders(torch.arange(4).reshape(2, 2)))) == 4


def test_rounding_of_weights_is_the_noise_of_their_difference() -> None:
    draws = torch.Generator().manual_seed(0)
    before, change = torch.randn(20000, generator=draws), 1e-3 * torch.randn(20000, generator=draws).double()
    found = before - (before.double() - change).float()
    assert float((found - change).std()) == pytest.approx(rounding(before, 1), rel=0.1)


def test_refined_factors_are_nearer_to_the_truth() -> None:
    draws = torch.Generator().manual_seed(0)
    x = torch.randn((2, 64, 4, 4), generator=draws, dtype=torch.float64).relu()
    signal = torch.randn((2, 80, 4, 4), generator=draws, dtype=torch.float64)
    gradient = torch.nn.grad.conv2d_weight(x, (80, 64, 3, 3), signal, padding=1)
    noise = 1e-4 * float(gradient.square().mean().sqrt())
    gradient = gradient + noise * torch.randn(gradient.shape, generator=draws, dtype=torch.float64)
    net = nn.Sequential(nn.ReLU(), nn.Conv2d(64, 80, 3, padding=1), nn.Flatten(), nn.Linear(1280, 2))
    layer = read_gated(net, (64, 4, 4), "3").layers[0]
    rough = factor_convolution(gradient, (4, 4), images=2, noise=noise)
    assert rough.holds
    assert rough.blur > BLURRED

    def apart(found: ConvolutionFactors) -> float:
        rows = [F.normalize(one.flatten(1), dim=1) for one in (found.inputs, x)]
        order = (rows[0] @ rows[1].T).argmax(0)
        return float((rows[0][order] - rows[1]).norm())

    assert apart(peel_start.refine(layer, gradient, rough)) < 0.7 * apart(rough)
