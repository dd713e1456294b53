"""Planted layers are found, in whatever net and form; ordinary nets, of all kinds and trained or not, raise nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import leakscope as ls
from leakscope.attacks import RobbingTheFed
from leakscope.models import build_model
from leakscope.network.inspection import inspect_model, inspect_weights

SHAPE = (3, 16, 16)
SIZE = 768


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def house(name: str, seed: int = 0, shape: tuple[int, ...] = SHAPE, **options: object) -> nn.Module:
    return build_model(name, input_shape=shape, num_classes=10, seed=seed, **options)


def dense(*sizes: int, seed: int = 0) -> nn.Sequential:
    """Linear layers with ReLU between them, torch's initial weights."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(sizes)]
        return nn.Sequential(nn.Flatten(), *layers)


def own(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return build()


# --- planted

FITTED = torch.rand(64, *SHAPE, generator=draws()) * 4 - 2
SETTINGS = [
    ("convnet", RobbingTheFed()),
    ("convnet", RobbingTheFed(bins=8)),
    ("convnet", RobbingTheFed(bins=512, gain=1.0)),
    ("convnet", RobbingTheFed(bins=100, gain=1e-6, connection="replace")),
    ("dlg-lenet", RobbingTheFed(bins=16)),
    ("dlg-lenet", RobbingTheFed(measurement="dct", placement="laplace", bins=64)),
    ("femnist-cnn", RobbingTheFed(measurement="random", placement="normal", bins=64)),
    ("femnist-cnn", RobbingTheFed(variant="sparse", bins=32)),
    ("resnet8", RobbingTheFed.fitted_to(FITTED, bins=48)),
    ("resnet8", RobbingTheFed.fitted_to(FITTED, measurement="random", bins=48, seed=3)),
    ("mlp", RobbingTheFed.fitted_to(FITTED, measurement="dct", frequency=5, bins=24)),
    ("mlp", RobbingTheFed(variant="sparse", bins=128, gain=10.0)),
    ("logistic", RobbingTheFed(bins=20)),
]


@pytest.mark.parametrize("name, attack", SETTINGS, ids=repr)
def test_finds_the_imprint_of_the_attack(name: str, attack: RobbingTheFed) -> None:
    sent = attack.prepare(house(name), SHAPE)
    for found in (inspect_model(sent), inspect_weights(sent.state_dict())):
        assert [(one.layer, one.kind) for one in found.suspicions] == [("imprint.measure", "imprint")]
        assert found.suspicions[0].units == attack.bins
        assert ("an interval of its own" in found.suspicions[0].reason) == (attack.variant == "sparse")


def ladder(units: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of one measurement and their biases."""
    row = torch.randn(size, generator=draws(seed)) / size**0.5
    return row.repeat(units, 1), -torch.linspace(-2, 2, units)


def published_block(sparse: bool) -> nn.Module:
    """Both layers trained, the second as wide as the input."""
    net = dense(SIZE, 64, SIZE, 10)
    rows, bias = ladder(64, SIZE)
    scale = torch.linspace(1, 4, 64)[:, None] if sparse else torch.ones(64, 1)
    net[1][0].weight.data, net[1][0].bias.data = rows * scale, bias * scale[:, 0]
    nn.init.ones_(net[2][0].weight)
    return net


def inside_a_convnet() -> nn.Module:
    features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    block = nn.Linear(8 * 8 * 8, 96)
    block.weight.data, block.bias.data = ladder(96, 512)
    return nn.Sequential(features, block, nn.ReLU(), nn.Linear(96, 10))


def hidden_among_others() -> nn.Module:
    net = dense(SIZE, 256, 10)
    rows, bias = ladder(40, SIZE)
    places = torch.randperm(256, generator=draws(1))[:40]
    net[1][0].weight.data[places], net[1][0].bias.data[places] = rows, bias
    return net


def disguised_by_noise() -> nn.Module:
    net = dense(SIZE, 64, 10)
    rows, bias = ladder(64, SIZE)
    noise = torch.randn(rows.shape, generator=draws(2)) * rows.std() * 0.01
    net[1][0].weight.data, net[1][0].bias.data = rows + noise, bias
    return net


def shuffled_scaled_and_negated() -> nn.Module:
    net = dense(SIZE, 64, 10)
    rows, bias = ladder(64, SIZE)
    scale = torch.rand(64, generator=draws(3)) + 0.5
    scale[::3] *= -1
    order = torch.randperm(64, generator=draws(4))
    net[1][0].weight.data, net[1][0].bias.data = (rows * scale[:, None])[order], (bias * scale)[order]
    return net


def convolution_over_all() -> nn.Module:
    conv = nn.Conv2d(3, 32, 16)
    rows, bias = ladder(32, SIZE)
    conv.weight.data, conv.bias.data = rows.reshape(32, *SHAPE), bias
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(32, 10))


class ThresholdsInABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rows, bias = ladder(64, SIZE)
        self.rows = nn.Parameter(rows)
        self.register_buffer("edges", bias)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.flatten(1) @ self.rows.T + self.edges).relu())


PLANTED = [
    (partial(published_block, False), "imprint"),
    (partial(published_block, True), "imprint"),
    (inside_a_convnet, "imprint"),
    (hidden_among_others, "imprint"),
    (disguised_by_noise, "imprint"),
    (shuffled_scaled_and_negated, "imprint"),
    (convolution_over_all, "imprint"),
    (ThresholdsInABuffer, "imprint"),
]


def malicious_initialisation() -> nn.Module:
    """Half of the units standard normal, their outgoing weights k / v to every class."""
    net = dense(512, 128, 10)
    net[1][0].weight.data[64:] = torch.randn(64, 512, generator=draws(5))
    net[2][0].weight.data[:, 64:] = torch.arange(1, 65) / 64
    return net


def malicious_initialisation_of_all() -> nn.Module:
    net = dense(512, 256, 10)
    net[1][0].weight.data = torch.randn(256, 512, generator=draws(5))
    net[2][0].weight.data[:] = torch.arange(1, 257) / 256
    return net


def trap_weights() -> nn.Module:
    net = dense(SIZE, 64, 10)
    rows = torch.empty(64, SIZE)
    for row in rows:
        negative = torch.randn(SIZE // 2, generator=draws(6)).abs() * 0.05
        mixed = torch.cat([-negative, 0.97 * negative])
        row[:] = mixed[torch.randperm(SIZE, generator=draws(7))]
    net[1][0].weight.data = rows * (1 + torch.arange(64.0)[:, None] / 64)
    net[1][0].weight.data = torch.stack([row[torch.randperm(SIZE, generator=draws(i))] for i, row in enumerate(rows)])
    return net


def one_outsized_unit() -> nn.Module:
    net = dense(SIZE, 64, 10)
    net[1][0].weight.data[5] *= 1e4
    return net


def rank_one_without_thresholds() -> nn.Module:
    net = dense(SIZE, 64, 10)
    net[1][0].weight.data = torch.rand(64, 1, generator=draws(8)) * torch.randn(1, SIZE, generator=draws(9))
    net[1][0].bias.data.zero_()
    return net


PLANTED += [
    (malicious_initialisation, "constant outgoing weights"),
    (malicious_initialisation_of_all, "constant outgoing weights"),
    (trap_weights, "mirrored weights"),
    (one_outsized_unit, "outsized units"),
    (rank_one_without_thresholds, "rank one"),
]


@pytest.mark.parametrize("plant, kind", PLANTED, ids=lambda value: getattr(value, "__name__", str(value))[:40])
def test_finds_planted_layers_of_other_makes(plant: Callable[[], nn.Module], kind: str) -> None:
    model = own(plant)
    assert kind in {one.kind for one in inspect_model(model).suspicions}
    if plant is not ThresholdsInABuffer:
        assert kind in {one.kind for one in inspect_weights(model.state_dict()).suspicions}


# --- ordinary


def trained(name: str, steps: int, rate: float = 0.05, **options: object) -> nn.Module:
    """A few steps of plain training on the embedded pictures."""
    tiles = ls.load_data("tiles", limit=64)
    net = house(name, shape=tiles.shape, **options).train()
    optimiser = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
    order = draws(10)
    for _ in range(steps):
        rows = torch.randint(len(tiles.x), (16,), generator=order)
        optimiser.zero_grad()
        nn.functional.cross_entropy(net(tiles.x[rows]), tiles.y[rows]).backward()
        optimiser.step()
    return net


def initialised(scheme: Callable[[Tensor], object]) -> nn.Module:
    net = dense(SIZE, 128, 64, 10)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            scheme(parameter)
        else:
            nn.init.zeros_(parameter)
    return net


def zero_head_after_one_example() -> nn.Module:
    """Its gradient has rank one, and so have its weights; units that learned the same differ in nothing else."""
    net = dense(64, 32, 20)
    nn.init.zeros_(net[2][0].weight)
    nn.init.zeros_(net[2][0].bias)
    loss = nn.functional.cross_entropy(net(torch.rand(1, 64, generator=draws(11))), torch.tensor([1]))
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
    return net


def pruned(rows: bool) -> nn.Module:
    net = dense(SIZE, 256, 10)
    weight = net[1][0].weight.data
    if rows:
        weight[torch.randperm(256, generator=draws(12))[:230]] = 0
    else:
        weight[weight.abs() < weight.abs().quantile(0.9)] = 0
    return net


def dead_units() -> nn.Module:
    net = dense(SIZE, 256, 10)
    net[1][0].weight.data[torch.randperm(256, generator=draws(13))[:180]] *= 1e-9
    return net


def tied() -> nn.Module:
    table, head = nn.Embedding(100, 32), nn.Linear(32, 100, bias=False)
    head.weight = table.weight
    return nn.Sequential(table, head)


def widened_by_copies() -> nn.Module:
    """Net2Net: units copied with their biases."""
    net = dense(SIZE, 64, 10)
    layer = net[1][0]
    layer.weight.data, layer.bias.data = layer.weight.data[:8].repeat(8, 1), layer.bias.data[:8].repeat(8)
    return net


def subpixel_upsampling() -> nn.Module:
    """ICNR: groups of nine equal kernels, biases of their own."""
    conv = nn.Conv2d(16, 36 * 9, 3)
    conv.weight.data = conv.weight.data[:36].repeat_interleave(9, 0)
    return nn.Sequential(conv, nn.PixelShuffle(3))


def blur_and_depthwise() -> nn.Module:
    blur = nn.Conv2d(32, 32, 3, groups=32)
    blur.weight.data = (torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]) / 16).repeat(32, 1, 1, 1)
    return nn.Sequential(nn.Conv2d(3, 32, 1), blur, nn.Conv2d(32, 32, 3, groups=32), nn.Conv2d(32, 10, 1))


def random_features() -> nn.Module:
    first = nn.Linear(64, 512)
    first.weight.data = torch.randn(512, 64, generator=draws(14))
    return nn.Sequential(first, nn.Tanh(), nn.Linear(512, 10))


def equal_outputs() -> nn.Module:
    net = dense(SIZE, 64, 4)
    net[2][0].weight.data[:] = net[2][0].weight.data[:1].clone()
    return net


class StateSpace(nn.Module):
    """Tables of equal rows, as state-space models and splines begin with, beside a vector that fits."""

    def __init__(self) -> None:
        super().__init__()
        self.log_rates = nn.Parameter(torch.arange(1, 17).log().repeat(64, 1))
        self.skip = nn.Parameter(torch.rand(64))
        self.register_buffer("grid", torch.linspace(-1, 1, 12).repeat(64, 1))
        self.register_buffer("mask", torch.full((80, 80), -torch.inf).triu(1))
        self.positions = nn.Parameter(torch.randn(1, 80, 64))
        self.norm = nn.LayerNorm((8, 16, 16))
        self.project = nn.Linear(64, 64)


def normalised_mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(SIZE, 128), nn.LayerNorm(128), nn.GELU()),
        *(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 1)),
    )


def fourier_coordinates() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 256), nn.ReLU(), nn.Linear(256, 1), nn.Linear(1, 64), nn.ReLU(), nn.Linear(64, 1))


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    **{f"initial {name}": partial(house, name) for name in ("convnet", "dlg-lenet", "femnist-cnn", "mlp", "resnet8")},
    "initial vit": partial(house, "s3-vit", shape=(1, 28, 28)),
    "initial resnet18": partial(house, "resnet18", shape=(3, 32, 32)),
    "trained convnet": partial(trained, "convnet", 30, filters=16),
    "trained lenet": partial(trained, "dlg-lenet", 60),
    "trained resnet8": partial(trained, "resnet8", 15),
    "trained mlp": partial(trained, "mlp", 60, 0.01),
    "overtrained logistic": partial(trained, "logistic", 200, 1.0),
    "orthogonal": partial(initialised, nn.init.orthogonal_),
    "xavier": partial(initialised, nn.init.xavier_uniform_),
    "he": partial(initialised, nn.init.kaiming_normal_),
    "small normal": partial(initialised, partial(nn.init.normal_, std=0.02)),
    "all standard normal": partial(initialised, nn.init.normal_),
    "all zero": partial(initialised, nn.init.zeros_),
    "all equal": partial(initialised, partial(nn.init.constant_, val=0.01)),
    "identity": partial(initialised, nn.init.eye_),
    "zero head after one example": zero_head_after_one_example,
    "pruned": partial(pruned, False),
    "pruned units": partial(pruned, True),
    "dead units": dead_units,
    "tied weights": tied,
    "copied units": widened_by_copies,
    "subpixel upsampling": subpixel_upsampling,
    "blur and depthwise": blur_and_depthwise,
    "random features": random_features,
    "normalisation layers": normalised_mlp,
    "tables of equal rows": StateSpace,
    "equal outputs": equal_outputs,
    "coordinates": fourier_coordinates,
    "transformer": lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True),
    "recurrent": lambda: nn.Sequential(nn.LSTM(32, 64), nn.Linear(64, 10)),
    "transposed": lambda: nn.Sequential(nn.ConvTranspose2d(32, 16, 4), nn.ConvTranspose2d(16, 3, 4)),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(64, 32)), nn.Linear(32, 10)),
    "half precision": lambda: dense(SIZE, 64, 10).half(),
    "one unit": lambda: nn.Linear(SIZE, 1),
    "nothing to train": nn.Identity,
}


@pytest.mark.parametrize("name", ORDINARY)
def test_raises_nothing_on_ordinary_nets(name: str) -> None:
    model = own(ORDINARY[name])
    assert inspect_model(model).suspicions == ()
    assert inspect_weights(model.state_dict()).suspicions == ()


def test_the_model_is_left_as_it_was_and_is_not_run() -> None:
    class Trap(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(SIZE, 64)

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the model was run")

    model = Trap()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    globe = torch.random.get_rng_state()
    assert inspect_model(model).layers == 1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(globe, torch.random.get_rng_state())


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected a torch\.nn\.Module, got dict"):
        ls.inspect_model({})  # type: ignore[arg-type]


def test_tells_it_as_json_values() -> None:
    told = inspect_model(RobbingTheFed(bins=16).prepare(house("mlp"), SHAPE)).as_dict()
    assert told["suspicious"] is True
    assert told["suspicions"][0]["layer"] == "imprint.measure"
    assert "Robbing the Fed" in told["suspicions"][0]["consequence"]
