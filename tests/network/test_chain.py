"""Reading a model as a chain of stages: what is read, and what is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from leakscope.contracts.errors import NotApplicable
from leakscope.network.activations import INVERTIBLE, Activation
from leakscope.network.chain import ResidualStage, read_chain


class Written(nn.Module):
    """A chain in plain forward code, with functions where Sequential has layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 4, 3, stride=2)
        self.unused = nn.ReLU()
        self.head = nn.Linear(4 * 2 * 2, 5)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.leaky_relu(self.first(x), 0.3)
        x = functional.avg_pool2d(torch.tanh(self.second(x)), 2, ceil_mode=True)
        x = self.drop(x)
        x = x.view(x.size(0), -1)
        return self.head(functional.dropout(x, training=False))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x + self.body(x)))


class Joined(nn.Module):
    """Layers ``first`` .. of one's choice, joined by a function of one's choice."""

    def __init__(self, join: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.join = join
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.join(self, x))


def body(activation: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), activation or nn.Tanh(), nn.Linear(4, 4))


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x) if x.sum() > 0 else self.head(-x)


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)


def test_plain_forward_code_is_read_like_layers_in_a_row() -> None:
    model = Written()
    before = copy.deepcopy(model.state_dict())
    chain = read_chain(model, (2, 9, 9))
    assert [(s.name, s.activation) for s in chain.stages] == [
        ("first", Activation("leaky-relu", 0.3)),
        ("second", Activation("tanh")),
        ("avg_pool2d + head", Activation("identity")),
    ]
    assert [s.input_shape for s in chain.stages] == [(2, 9, 9), (3, 9, 9), (4, 4, 4)]
    assert [s.convolutional for s in chain.stages] == [True, True, False]
    x = torch.rand(3, 2, 9, 9, dtype=torch.float64)
    expected = copy.deepcopy(model).double().eval()(x)
    assert torch.allclose(chain.run(x), expected)
    hidden = chain.stages[0](x)
    assert torch.allclose(chain.run(hidden.flatten(1), start=1), expected)
    assert list(chain.parameters(1)) == ["second.weight", "second.bias", "head.weight", "head.bias"]
    # The model itself stays as it was: precision, mode, weights.
    assert model.training
    assert model.head.weight.dtype == torch.float32
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_frozen_weights_are_no_parameters() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    assert list(read_chain(model, (4,)).parameters()) == ["2.weight", "2.bias"]


def test_identity_joins_two_layers_into_one_stage() -> None:
    chain = read_chain(nn.Sequential(nn.Linear(4, 3), nn.Identity(), nn.Linear(3, 2), nn.Sigmoid()), (4,))
    assert [(s.name, s.activation.name) for s in chain.stages] == [("0 + 2", "sigmoid")]


SHARED = nn.Linear(4, 4)


@pytest.mark.parametrize(
    "model, words",
    [
        (nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), ["'1' (ReLU)", "inverted", "leaky-relu"]),
        (nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)), ["'1' (Softmax)"]),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)), ["'1' (BatchNorm1d)"]),
        (nn.Sequential(nn.Linear(4, 3), nn.LeakyReLU(0.0)), ["LeakyReLU of slope 0.0"]),
        (nn.Sequential(nn.Tanh(), nn.Linear(4, 2)), ["'0' (Tanh)", "follows no linear layer"]),
        (nn.Sequential(nn.Unflatten(1, (1, 4)), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(2, 2)), ["Unflatten"]),
        (nn.Sequential(SHARED, nn.Tanh(), SHARED), ["0.weight", "used twice"]),
        (Residual(), ["'add' (add)", "residual"]),
        (Branching(), ["cannot be traced"]),
        (Weighted(), ["'scale'", "outside of a layer"]),
        (nn.Sequential(nn.Flatten()), ["no layer with weights"]),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))), ["ParametrizedLinear"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_what_is_no_chain_is_refused_by_name(model: nn.Module, words: list[str]) -> None:
    with pytest.raises(NotApplicable) as caught:
        read_chain(model, (4,))
    for word in words:
        assert word in str(caught.value)


def in_place(m: nn.Module, x: Tensor) -> Tensor:
    y = m.body(x)
    y += x
    return y


@pytest.mark.parametrize(
    "join",
    [
        lambda m, x: x + m.body(x),
        lambda m, x: m.body(x) + x,
        lambda m, x: torch.add(x, m.body(x)),
        lambda m, x: x.add(m.body(x)),
        lambda m, x: m.body(x).add_(x),
        in_place,
    ],
)
def test_every_way_to_add_is_read_as_a_block(join: Callable[..., Tensor]) -> None:
    model = Joined(join, body=body())
    with pytest.raises(NotApplicable, match=r"'add_?' \(i?add_?\) joins two paths \(a residual connection\)"):
        read_chain(model, (4,))
    block, head = read_chain(model, (4,), residual=True).stages
    assert isinstance(block, ResidualStage)
    assert (block.name, block.inner.name, block.outer.name, block.shortcut) == ("body", "body.0", "body.2", None)
    assert head.name == "head"


def test_blocks_in_a_row_with_all_their_parts() -> None:
    def blocks(m: nn.Module, x: Tensor) -> Tensor:
        x = m.stem(x)
        x = torch.tanh((m.one(x) + m.short(x)).flatten(1))
        return x + m.two(x)

    model = Joined(blocks, stem=nn.Linear(3, 5), one=nn.Sequential(nn.Linear(5, 6), nn.Sigmoid(), nn.Linear(6, 4)))
    model.short, model.two = nn.Linear(5, 4, bias=False), body(nn.LeakyReLU(0.1))
    chain = read_chain(model, (3,), residual=True)
    assert [(s.name, s.activation.name, s.unknowns) for s in chain.stages] == [
        ("stem", "identity", 3),
        ("one.0 + one.2 + short", "tanh", 5),
        ("two", "identity", 4),
        ("head", "identity", 4),
    ]
    one = chain.stages[1]
    assert isinstance(one, ResidualStage)
    assert one.shortcut is not None
    assert (one.inner.activation.name, one.shortcut.name, one.output_shape) == ("sigmoid", "short", (4,))
    assert list(chain.parameters(2)) == [*(f"two.{n}.{p}" for n in (0, 2) for p in ("weight", "bias")), *HEAD]
    assert set(chain.parameters()) == {name for name, _ in model.named_parameters()}


HEAD = ["head.weight", "head.bias"]
FORMS = {
    "relu inside": (lambda m, x: x + m.a(x), {"a": body(nn.ReLU())}, ["'a.1' (ReLU)", "inverted"]),
    "three in a row": (
        lambda m, x: x + m.a(x) + m.b(x),
        {"a": body(), "b": body()},
        ["'add_1' (add)", "more than two paths", "'add' (add)"],
    ),
    "three in brackets": (
        lambda m, x: x + (m.a(x) + m.b(x)),
        {"a": body(), "b": body()},
        ["'add_1' (add)", "more than two paths"],
    ),
    "block in a block": (
        lambda m, x: x + m.b(torch.tanh(x + m.a(x))),
        {"a": body(), "b": nn.Linear(4, 4)},
        ["'add_1' (add)", "'add' (add) is on one"],
    ),
    "active shortcut": (
        lambda m, x: m.a(x) + m.s(x),
        {"a": body(), "s": nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())},
        ["'add' (add)", "both paths", "'a.1' (Tanh)", "'s.1' (Sigmoid)"],
    ),
    "bare activation as shortcut": (lambda m, x: m.a(x) + torch.tanh(x), {"a": body()}, ["'tanh' (tanh)"]),
    "one layer": (lambda m, x: x + m.a(x), {"a": nn.Linear(4, 4)}, ["'add' (add)", "one activation", "'a' (Linear)"]),
    "activation last": (
        lambda m, x: x + torch.tanh(m.a(x)),
        {"a": nn.Linear(4, 4)},
        ["'add' (add)", "one activation", "'tanh' (tanh)"],
    ),
    "two activations": (
        lambda m, x: x + m.a(x),
        {"a": nn.Sequential(*body(), nn.Sigmoid(), nn.Linear(4, 4))},
        ["'add' (add)", "one activation", "'a.3' (Sigmoid)"],
    ),
    "activation first": (
        lambda m, x: x + m.a(x),
        {"a": nn.Sequential(nn.Tanh(), nn.Linear(4, 4))},
        ["'a.0' (Tanh)", "follows no linear layer"],
    ),
    "two activations behind": (lambda m, x: torch.sigmoid(torch.tanh(x + m.a(x))), {"a": body()}, ["'sigmoid'"]),
    "weighted": (lambda m, x: torch.add(x, m.a(x), alpha=2), {"a": body()}, ["'add' (add)", "no plain sum"]),
    "broadcast": (
        lambda m, x: x + m.a(x),
        {"a": nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))},
        ["'add' (add)", "no plain sum"],
    ),
    "itself": (lambda m, x: x + x, {}, ["'add' (add)"]),
    "product": (lambda m, x: x * m.a(x), {"a": body()}, ["'mul' (mul)", "does not read the layer before it alone"]),
    "unused": (lambda m, x: (m.a(x), m.b(x))[1], {"a": body(), "b": body()}, ["'a.0' (Linear)", "not on the way"]),
    "shared": (lambda m, x: m.a[2](torch.tanh(m.a[0](x))) + m.a[0](x), {"a": body()}, ["a.0.weight", "used twice"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_blocks_without_equations_are_refused_by_name(name: str) -> None:
    join, layers, words = FORMS[name]
    with pytest.raises(NotApplicable) as caught:
        read_chain(Joined(join, **layers), (4,), residual=True)
    for word in words:
        assert word in str(caught.value)


def test_batch_norm_is_affine_with_running_statistics_only() -> None:
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3, affine=False), nn.Tanh())
    model.append(nn.Flatten()).append(nn.Linear(12, 2))
    with pytest.raises(NotApplicable, match=r"'0' \(BatchNorm2d\).*running statistics"):
        read_chain(model, (2, 4, 4))
    chain = read_chain(model, (2, 4, 4), batch_norm=True)
    assert [(s.name, s.convolutional) for s in chain.stages] == [("0 + 1 + 2", True), ("5", False)]
    assert list(chain.parameters()) == [name for name, _ in model.named_parameters()]
    without = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    with pytest.raises(NotApplicable, match=r"'1' \(BatchNorm1d\).*running statistics"):
        read_chain(without, (4,), batch_norm=True)


def test_hooks_that_change_the_result_are_noticed() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    with pytest.raises(NotApplicable):
        read_chain(model, (4,))


def test_a_wrong_shape_is_a_plain_error() -> None:
    with pytest.raises(ValueError, match=r"does not run on inputs of shape \(5,\)"):
        read_chain(nn.Sequential(nn.Linear(4, 3)), (5,))


@pytest.mark.parametrize("name", INVERTIBLE)
def test_inverse_and_derivative(name: str) -> None:
    activation = Activation(name, 0.7)
    z = torch.linspace(-4, 4, 81, dtype=torch.float64, requires_grad=True)
    y = activation(z)
    assert torch.allclose(activation.inverse(y), z, atol=1e-10)
    (slope,) = torch.autograd.grad(y.sum(), z)
    away = z.detach().abs() > 1e-9  # the LeakyReLU has no derivative at zero
    assert torch.allclose(activation.derivative(z)[away], slope[away], atol=1e-15)
    assert activation.derivative(z).dtype == torch.float64


@pytest.mark.parametrize("name", INVERTIBLE)
def test_outputs_that_cannot_be_become_finite(name: str) -> None:
    y = torch.tensor([-1e300, -1.0, 0.0, 1.0, 1e300], dtype=torch.float64)
    assert torch.isfinite(Activation(name, 0.5).inverse(y, clip=0.9999)).all()
    assert float(Activation("tanh").inverse(y, clip=0.9999).max()) == pytest.approx(4.9517, abs=1e-3)


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of identity"):
        Activation("relu")
    with pytest.raises(ValueError, match="positive"):
        Activation("leaky-relu", -1.0)
