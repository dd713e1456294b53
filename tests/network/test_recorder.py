"""Layers are recorded as they run, and no hook is left behind on the caller's model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from leakscope.network.layers import find_head, structure
from leakscope.network.recorder import cut_at, inputs_of, is_layer, probe, record_layers, tap


class Odd(nn.Module):
    """Runs its layers in another order than they were registered, one of them twice, and owns a token."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2)
        self.token = nn.Parameter(torch.ones(4))
        self.unused = nn.Linear(4, 4)
        self.body = nn.ModuleDict({"twice": nn.Linear(4, 4)})
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        twice = self.body["twice"]
        out: Tensor = self.head(self.norm(twice(torch.tanh(twice(x)))) + self.token)
        return out


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_layers_come_in_the_order_in_which_they_run_and_as_often() -> None:
    net, x = Odd(), draw(3, 4)
    record = record_layers(net, x)
    assert [call.name for call in record.calls] == ["body.twice", "body.twice", "norm", "head"]
    assert all(call.module is net.get_submodule(call.name) for call in record.calls)
    assert torch.equal(record.outputs, net(x))
    first, second = record.of("body.twice")
    assert torch.equal(first.inputs, x)
    assert torch.equal(second.inputs, torch.tanh(first.output))
    assert torch.equal(record.of("norm")[0].inputs, second.output)
    assert record.of("unused") == ()


def test_the_callers_model_keeps_hooks_mode_statistics_and_gradients() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(3, 2)).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    x = draw(5, 4)
    record_layers(net, x)
    probe(net, x)
    inputs_of(net[3], net.eval(), x)
    net.train()
    with cut_at([net[0]]):
        assert hooks(net) == 1
    assert hooks(net) == 0
    assert all(module.training for module in net.modules())
    assert all(p.grad is None for p in net.parameters())
    other = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).train()
    before = {name: value.clone() for name, value in other.state_dict().items()}
    record_layers(other, x)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_the_input_of_the_caller_is_not_changed_by_a_model_that_works_in_place() -> None:
    x = draw(2, 4)
    kept = x.clone()
    record_layers(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 2)), x)
    assert torch.equal(x, kept)


def test_any_layers_can_be_chosen() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), nn.ReLU())
    found = record_layers(net, draw(1, 4), lambda _, module: isinstance(module, nn.ReLU))
    assert [call.name for call in found.calls] == ["1", "3"]
    assert record_layers(net, draw(1, 4), lambda name, _: name == "0").calls[0].module is net[0]
    assert [name for name, module in Odd().named_modules() if is_layer(name, module)] == [
        *("head", "unused", "body.twice", "norm"),
    ]


def test_models_that_return_more_than_a_tensor_are_recorded() -> None:
    class Dict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"hidden": x, "logits": self.fc(x)}

    net, x = Dict(), draw(2, 4)
    assert torch.equal(record_layers(net, x).outputs, net(x)["logits"])
    assert find_head(net, (4,), 3).tail == "none"


def test_a_shape_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match=r"cannot read an input of shape \(5,\).*without the batch"):
        probe(nn.Linear(4, 2), draw(1, 5))


def test_a_tap_holds_what_layers_received_in_the_last_pass_with_its_derivatives() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    tape = tap(net, ["2"])
    assert tape == {}
    x = draw(2, 4).requires_grad_(True)
    net(x)
    assert torch.equal(tape["2"], net[:2](x))
    (slope,) = torch.autograd.grad(tape["2"].sum(), x)
    assert float(slope.abs().min()) > 0
    net(2 * x)
    assert torch.equal(tape["2"], net[:2](2 * x))
    with pytest.raises(AttributeError):
        tap(net, ["absent"])


def test_nothing_behind_the_layer_is_run() -> None:
    class Refuses(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("reached")

    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2), Refuses())
    x = draw(2, 4).requires_grad_(True)
    found = inputs_of(net[2], net, x)
    assert torch.equal(found, net[:2](x))
    assert found.requires_grad
    with pytest.raises(AssertionError, match="reached"):
        inputs_of(nn.Linear(2, 2), net, x)
    with pytest.raises(ValueError, match="expected a layer that the model runs"):
        inputs_of(nn.Linear(2, 2), net[:3], x)
    assert hooks(net) == 0


def test_a_cut_gives_the_output_gradient_of_a_layer_and_stops_there() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    x = draw(5, 4)
    with cut_at([net[0]]) as cuts:
        loss = net(x).square().sum()
    inputs, output = cuts[net[0]]
    assert torch.equal(inputs, x)
    (gradient,) = torch.autograd.grad(loss, output, retain_graph=True)
    weight, bias = torch.autograd.grad(net(x).square().sum(), [net[0].weight, net[0].bias])
    assert torch.allclose(gradient.T @ x, weight, atol=1e-6)
    assert torch.allclose(gradient.sum(0), bias, atol=1e-6)
    assert torch.autograd.grad(loss, net[0].weight, allow_unused=True) == (None,)


@pytest.mark.parametrize("net, words", [(nn.Linear(4, 4), "used twice"), (nn.Linear(2, 2), r"outputs \(3, 2, 2\)")])
def test_layers_that_do_not_read_each_sample_once_are_not_cut(net: nn.Linear, words: str) -> None:
    with pytest.raises(ValueError, match=words), cut_at([net]):
        net(net(draw(3, 4))) if words == "used twice" else net(draw(3, 2, 2))
    assert hooks(net) == 0


def test_a_parametrised_layer_is_recorded_under_its_own_name() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), parametrizations.weight_norm(nn.Linear(3, 2)))
    assert parametrize.is_parametrized(net[2])
    x = draw(2, 4)
    record = record_layers(net, x)
    names = [call.name for call in record.calls]
    assert names[0] == "0"
    assert names[-1] == "2", "the layer itself ends after its parametrisation"
    assert torch.equal(record.of("2")[0].inputs, net[:2](x))
    with pytest.raises(ValueError, match="computed from other parameters"):
        find_head(net, (4,), 2)
    assert structure(net, (4,)).layers[0].name == "0"


@pytest.mark.parametrize(
    "behind, tail",
    [
        ((), "none"),
        ((nn.Identity(),), "none"),
        ((nn.Dropout(0.5),), "none"),
        ((nn.LogSoftmax(1),), "log_softmax"),
        ((nn.Softmax(1),), "softmax"),
        ((nn.LogSoftmax(1), nn.Softmax(1)), "softmax"),
        ((nn.Softmax(1), nn.Softmax(1)), "other"),
        ((nn.Softmin(1),), "other"),
        ((nn.ReLU(),), "other"),
        ((nn.Sigmoid(),), "other"),
    ],
)
def test_what_is_behind_the_head_is_told_by_its_outputs(behind: tuple[nn.Module, ...], tail: str) -> None:
    for seed in range(20):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3), *behind)
        head = find_head(net, (4,), 3)
        assert (head.module_name, head.tail) == ("2", tail)
