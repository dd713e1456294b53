"""Piecewise-linear networks as affine steps and gates: the model's own numbers, derivatives and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.models import build_model
from leakscope.network.gates import GatedNetwork, read_gated
from leakscope.network.recorder import inputs_of

IMAGE, SIGNAL = (2, 12, 12), (2, 20)


def chain(*layers: nn.Module, shape: tuple[int, ...] = IMAGE) -> tuple[nn.Module, tuple[int, ...], str]:
    """These layers, a flattening and a head that fits; the input's shape, and the head's name."""
    body = nn.Sequential(*layers, nn.Flatten())
    with torch.no_grad():
        features = body.eval()(torch.zeros((1, *shape))).shape[1]
    return nn.Sequential(*body, nn.Linear(features, 5)), shape, str(len(body))


class Functions(nn.Module):
    """Everything called as a function, or as a method of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3)
        self.conv3 = nn.Conv2d(6, 4, 1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.leaky_relu(self.conv1(x), 0.2), 2)
        x = F.avg_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.relu(self.conv3(F.adaptive_avg_pool2d(x, 2))).contiguous()
        answer: Tensor = self.head(x.mean((2, 3)).view(x.size(0), -1))
        return answer


class Residual(nn.Module):
    """One block whose shortcut is the input of its first convolution itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4 * 36, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        x = F.relu(self.norm(self.two(F.relu(self.one(x)))) + x)
        answer: Tensor = self.head(torch.flatten(F.max_pool2d(x, kernel_size=2), 1))
        return answer


class Pooled(nn.Module):
    """A pooling between a convolution and its ReLU, and torch.mean."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.head = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 3, 3), nn.Linear(3, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.conv1(x), 2))
        answer: Tensor = self.head(torch.mean(F.relu(self.conv2(x)), dim=(2, 3)))
        return answer


NETS = {
    "strides and padding": lambda: chain(nn.Conv2d(2, 4, 3, 2, 1), nn.ReLU(), nn.Conv2d(4, 6, 3, (1, 2), 2), nn.ReLU()),
    "5x5 without bias": lambda: chain(nn.Conv2d(2, 4, 5, bias=False), nn.ReLU(), nn.Conv2d(4, 3, 5, 1, 2), nn.ReLU()),
    "dilation": lambda: chain(nn.Conv2d(2, 4, 3, dilation=2), nn.ReLU(), nn.Conv2d(4, 4, (3, 1), dilation=(1, 2))),
    "same padding": lambda: chain(
        *(nn.Conv2d(2, 4, 3, padding="same"), nn.ReLU(), nn.Conv2d(4, 4, (4, 2), padding="same"), nn.ReLU())
    ),
    "valid padding": lambda: chain(nn.Conv2d(2, 4, 3, padding="valid"), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.ReLU()),
    "max pool behind ReLU": lambda: chain(
        *(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
    ),
    "max pool before ReLU": lambda: chain(
        *(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.MaxPool2d(2, 1), nn.ReLU())
    ),
    "average pool": lambda: chain(
        *(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(4, 6, 3), nn.LeakyReLU(0.1)),
        nn.AdaptiveAvgPool2d(2),
    ),
    "dense": lambda: chain(nn.Flatten(), nn.Linear(288, 9), nn.ReLU(), nn.Dropout(), nn.Linear(9, 7), nn.LeakyReLU()),
    "reshaped": lambda: chain(
        *(nn.Flatten(), nn.Linear(288, 36), nn.ReLU(), nn.Unflatten(1, (1, 6, 6)), nn.Conv2d(1, 2, 3), nn.ReLU())
    ),
    "Conv1d": lambda: chain(
        *(nn.Conv1d(2, 4, 5, 2, 1), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(4, 6, 3, padding="same"), nn.LeakyReLU()),
        *(nn.AvgPool1d(2), nn.BatchNorm1d(6)),
        shape=SIGNAL,
    ),
    "in place": lambda: chain(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True)),
    "functions": lambda: (Functions(), IMAGE, "head"),
    "residual": lambda: (Residual(), IMAGE, "head"),
    "pooled": lambda: (Pooled(), IMAGE, "head"),
    "resnet8": lambda: (build_model("resnet8", input_shape=(3, 8, 8), num_classes=5), (3, 8, 8), "head.fc2"),
    "lenet": lambda: (build_model("femnist-cnn", input_shape=(1, 12, 12), num_classes=5), (1, 12, 12), "fc2"),
}


class Case:
    """A net in float64 with BatchNorm statistics that are not those of its beginning, two inputs, and an adjoint."""

    def __init__(self, name: str) -> None:
        draws = torch.Generator().manual_seed(5)
        model, shape, self.cut = NETS[name]()
        self.model = model.double().eval()
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.running_mean.copy_(torch.randn(module.num_features, generator=draws) / 10)
                module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=draws))
        self.network = read_gated(self.model, shape, self.cut)
        self.x = torch.rand((2, *shape), generator=draws, dtype=torch.float64)
        self.other = torch.rand((2, *shape), generator=draws, dtype=torch.float64)
        self.features = inputs_of(self.model.get_submodule(self.cut), self.model, self.x).flatten(1)
        self.adjoint = torch.randn(self.features.shape, generator=draws, dtype=torch.float64)


@pytest.fixture(params=NETS, scope="module")
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(3)
    return Case(request.param)


def test_a_run_is_the_model_up_to_the_cut(case: Case) -> None:
    assert torch.allclose(case.network.run(case.x).features.flatten(1), case.features, rtol=1e-12, atol=1e-12)


def test_with_its_own_gates_held_it_is_the_same_run(case: Case) -> None:
    now = case.network.run(case.x)
    inputs, features = case.network.held(case.x, now.gates, bias=True)
    assert torch.allclose(features, now.features, rtol=1e-12, atol=1e-12)
    assert all(torch.allclose(inputs[step], value, rtol=1e-12, atol=1e-12) for step, value in now.inputs.items())


def test_with_gates_held_it_is_linear_without_bias_and_affine_with_it(case: Case) -> None:
    gates = case.network.run(case.x).gates

    def held(x: Tensor, bias: bool = False) -> Tensor:
        return case.network.held(x, gates, bias=bias)[1]

    mixed = held(2.5 * case.x - 0.3 * case.other)
    assert torch.allclose(mixed, 2.5 * held(case.x) - 0.3 * held(case.other), rtol=1e-10, atol=1e-12)
    difference = held(case.x, bias=True) - held(case.other, bias=True)
    assert torch.allclose(difference, held(case.x - case.other), rtol=1e-10, atol=1e-12)


def test_signals_and_weight_gradients_are_those_of_autograd(case: Case) -> None:
    features = inputs_of(case.model.get_submodule(case.cut), case.model, case.x).flatten(1)
    parameters = dict(case.model.named_parameters())
    names = [n for layer in case.network.layers for n in (layer.weight_name, layer.bias_name) if n is not None]
    total = (features * case.adjoint).sum()
    truth = dict(zip(names, torch.autograd.grad(total, [parameters[name] for name in names]), strict=True))
    now = case.network.run(case.x)
    for layer in case.network.layers:
        signal = case.network.signal(layer, now.gates, case.adjoint)
        gradient = layer.weight_gradient(now.inputs[layer.step], signal)
        assert torch.allclose(gradient, truth[layer.weight_name].flatten(1), rtol=1e-9, atol=1e-11)
        if layer.bias_name is not None:
            assert torch.allclose(signal.sum((0, 2)), truth[layer.bias_name], rtol=1e-9, atol=1e-11)


def test_a_gate_thrown_open_is_taken_out_of_the_signal(case: Case) -> None:
    now = case.network.run(case.x)
    for layer in case.network.layers:
        full = case.network.signal(layer, now.gates, case.adjoint, open_gate=True)
        signal = case.network.signal(layer, now.gates, case.adjoint)
        if layer.gate is None:
            assert torch.equal(full, signal)
        else:
            assert torch.allclose(full * now.gates[layer.gate].reshape(full.shape), signal, atol=1e-12)


def test_a_copy_in_another_precision_leaves_the_first_as_it_is(case: Case) -> None:
    narrow = case.network.to(torch.float32)
    assert narrow.run(case.x.float()).features.dtype == torch.float32
    assert case.network.run(case.x).features.dtype == torch.float64
    assert narrow.work == case.network.work > 0


def read(*layers: nn.Module, shape: tuple[int, ...] = IMAGE) -> GatedNetwork:
    torch.manual_seed(3)
    return read_gated(*chain(*layers, shape=shape))


def test_slack_is_added_behind_a_gate() -> None:
    network = read(nn.Conv2d(2, 3, 3), nn.ReLU())
    x = torch.rand((1, *IMAGE), dtype=torch.float64)
    gates = network.run(x).gates
    slack = {2: torch.full((1, 3, 10, 10), 0.25, dtype=torch.float64)}
    with_slack, without = (network.held(x, gates, bias=True, slack=s)[1] for s in (slack, None))
    assert torch.allclose(with_slack - without, torch.full_like(without, 0.25))


def test_layers_know_their_gate_and_whether_they_read_the_input() -> None:
    layers = read(
        *(nn.AvgPool2d(2), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU()),
        *(nn.Conv2d(3, 3, 1), nn.AvgPool2d(2), nn.ReLU(), nn.Conv2d(3, 3, 1)),
    ).layers
    assert [layer.gate for layer in layers] == [4, None, None]
    assert [layer.first for layer in layers] == [True, False, False]
    assert [layer.weight_name for layer in layers] == ["1.weight", "4.weight", "7.weight"]
    behind_maxima = read(nn.MaxPool2d(2), nn.Conv2d(2, 3, 3), nn.ReLU())
    assert not behind_maxima.layers[0].first, "a max pooling is a gate before it"


def test_sums_share_the_gate_behind_them() -> None:
    network = read_gated(Residual(), IMAGE, "head")
    by_name = {layer.weight_name: layer for layer in network.layers}
    assert by_name["two.weight"].gate is not None
    assert by_name["two.weight"].gate > by_name["one.weight"].gate
    assert [name for name, layer in by_name.items() if layer.first] == ["stem.weight"]


def test_silent_features_shut_the_units_that_they_average() -> None:
    network = read(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.AvgPool2d(5))
    silent = torch.zeros(2, 12, dtype=torch.bool)
    silent[1, 5] = True  # channel 1, first row, second column of 2 x 2
    ((number, (never, single)),) = network.shut_gates(silent).items()
    assert network.steps[number].kind == "relu"
    assert not single
    assert never.nonzero().tolist() == [[1, 1, row, column] for row in range(5) for column in range(5, 10)]


def test_without_a_pooling_each_feature_tells_its_unit() -> None:
    network = read(nn.Conv2d(2, 3, 3), nn.ReLU())
    x = torch.rand((2, *IMAGE), dtype=torch.float64)
    now = network.run(x)
    ((number, (never, single)),) = network.shut_gates(now.features == 0).items()
    assert single
    assert torch.equal(never, now.gates[number] == 0)


def test_a_maximum_of_zero_shuts_its_whole_window() -> None:
    network = read(nn.Conv2d(2, 3, 3), nn.ReLU(), nn.MaxPool2d(2))
    x = torch.rand((2, *IMAGE), dtype=torch.float64)
    now = network.run(x)
    ((number, (never, single)),) = network.shut_gates(now.features == 0).items()
    assert not single
    assert bool((now.gates[number][never] == 0).all())
    assert never.sum() == 4 * (now.features == 0).sum()


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param((nn.Conv2d(2, 3, 3), nn.LeakyReLU(0.1)), id="a LeakyReLU is never silent"),
        pytest.param((nn.Conv2d(2, 3, 3), nn.ReLU(), nn.Conv2d(3, 3, 1)), id="weights are between"),
        pytest.param((nn.Conv2d(2, 3, 3), nn.ReLU(), nn.BatchNorm2d(3)), id="a shift is between"),
    ],
)
def test_elsewhere_silence_tells_nothing(layers: tuple[nn.Module, ...]) -> None:
    network = read(*layers)
    assert network.shut_gates(torch.ones(1, 300, dtype=torch.bool)) == {}


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 2, 3, padding=1), nn.Linear(288, 5)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(F.relu(self.conv(F.relu(self.conv(x)))).flatten(1))
        return answer


class Attached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 2, 3), nn.Linear(200, 5)
        self.register_buffer("mean", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(F.relu(self.conv(x - self.mean)).flatten(1))
        return answer


class Narrow(Attached):
    """Its code insists on float32."""

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(F.relu(self.conv(x.float())).flatten(1))
        return answer


class Branching(Attached):
    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.head(F.relu(self.conv(x if x.sum() > 0 else -x)).flatten(1))
        return answer


def weighted_norm() -> tuple[nn.Module, tuple[int, ...], str]:
    return chain(nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 3, 3)), nn.ReLU())


REFUSED = {
    r"'1' \(GELU\) is neither an affine layer nor a ReLU": lambda: chain(nn.Conv2d(2, 3, 3), nn.GELU()),
    r"'1' \(PReLU\)": lambda: chain(nn.Conv2d(2, 3, 3), nn.PReLU()),
    r"'1' \(ReLU6\)": lambda: chain(nn.Conv2d(2, 3, 3), nn.ReLU6()),
    r"'1' \(LayerNorm\)": lambda: chain(nn.Conv2d(2, 3, 3), nn.LayerNorm([3, 10, 10])),
    r"'0' \(Conv2d\) has groups": lambda: chain(nn.Conv2d(2, 4, 3, groups=2), nn.ReLU()),
    r"pads with something else than zeros": lambda: chain(nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect")),
    r"max pooling with dilation": lambda: chain(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2, dilation=2)),
    r"'0' \(Linear\) is applied to each place": lambda: chain(nn.Linear(12, 4), nn.ReLU()),
    r"used twice": lambda: (Twice(), IMAGE, "head"),
    r"'mean' outside of a layer": lambda: (Attached(), IMAGE, "head"),
    r"cannot be traced": lambda: (Branching(), IMAGE, "head"),
    r"float64": lambda: (Narrow(), IMAGE, "head"),
    r"computed from other parameters": weighted_norm,
    r"no layer with weights": lambda: chain(nn.ReLU()),
    r"does not call the layer 'nowhere'": lambda: (chain(nn.Conv2d(2, 3, 3))[0], IMAGE, "nowhere"),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_such_network_is_refused_by_name(words: str) -> None:
    with pytest.raises(NotApplicable, match=words):
        read_gated(*REFUSED[words]())


def test_a_hook_that_changes_numbers_is_noticed() -> None:
    model, shape, cut = chain(nn.Conv2d(2, 3, 3), nn.ReLU())
    model[0].register_forward_hook(lambda _module, _inputs, output: 2 * output + 1)
    with pytest.raises(NotApplicable, match="something else than its layers say"):
        read_gated(model, shape, cut)


def test_the_model_is_left_as_it_is() -> None:
    model, shape, cut = chain(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU())
    model.train()
    read_gated(model, shape, cut)
    assert model.training
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert float(model[1].num_batches_tracked) == 0
