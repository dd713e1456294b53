"""The client's side against an independent calculation, and that the caller's model stays as it was."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.defense import Defense
from leakscope.contracts.knowledge import Knowledge
from leakscope.federation import FedAvg, FedSGD


def bn_net() -> nn.Module:
    torch.random.default_generator.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.LazyLinear(3)
    )


@pytest.fixture
def scene() -> tuple[nn.Module, Tensor, Tensor]:
    net = bn_net()
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(6, 2, 6, 6, generator=generator)
    net(x)
    return net.train(), x, torch.tensor([0, 1, 2, 2, 1, 0])


def state(net: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in net.state_dict().items()}


PROTOCOLS = [
    FedSGD(),
    FedSGD(reduction="sum", batchnorm="train"),
    FedAvg(epochs=2, batch_size=4, lr=0.05),
    FedAvg(epochs=1, batch_size=3, lr=0.05, momentum=0.9, batchnorm="train"),
    FedAvg(epochs=2, batch_size=6, lr=0.01, optimizer="adam", shuffle=False),
]


@pytest.mark.parametrize("protocol", PROTOCOLS, ids=repr)
@pytest.mark.parametrize("knowledge", [Knowledge.honest_server, Knowledge.full], ids=["server", "full"])
def test_the_callers_model_is_bit_identical_afterwards(protocol, knowledge, scene) -> None:
    net, x, y = scene
    before, modes = state(net), [m.training for m in net.modules()]
    grads = [p.grad for p in net.parameters()]
    globe = torch.random.get_rng_state()
    protocol.observe(net, x, y, knowledge=knowledge)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert [m.training for m in net.modules()] == modes
    assert [p.grad for p in net.parameters()] == grads
    assert torch.equal(globe, torch.random.get_rng_state())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_fedsgd_is_the_gradient_that_autograd_gives(mode, scene) -> None:
    net, x, y = scene
    seen = FedSGD(batchnorm=mode).observe(net, x, y)
    net.eval()
    net[1].train(mode == "train")
    expected = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    for (name, _), value in zip(net.named_parameters(), expected, strict=True):
        assert torch.allclose(seen.message.update[name], value, atol=1e-7)


def test_batchnorm_mode_matters_and_sum_is_batch_times_mean(scene) -> None:
    net, x, y = scene
    mean = FedSGD().observe(net, x, y).message.update
    train = FedSGD(batchnorm="train").observe(net, x, y).message.update
    total = FedSGD(reduction="sum").observe(net, x, y).message.update
    assert not torch.allclose(mean["0.weight"], train["0.weight"], atol=1e-4)
    for name, value in mean.items():
        assert torch.allclose(total[name], 6 * value, atol=1e-5)


def test_one_full_batch_step_of_fedavg_is_lr_times_the_gradient(scene) -> None:
    net, x, y = scene
    gradient = FedSGD().observe(net, x, y).message.update
    delta = FedAvg(epochs=1, batch_size=6, lr=0.125).observe(net, x, y).message
    assert delta.kind == "weight_delta"
    for name, value in delta.update.items():
        assert torch.allclose(value, 0.125 * gradient[name], atol=1e-6)


def test_fedavg_follows_the_order_it_reports(scene) -> None:
    net, x, y = scene
    seen = FedAvg(epochs=2, batch_size=4, lr=0.1).observe(net, x, y, knowledge=Knowledge.full)
    twin = bn_net()
    twin(x)
    twin.load_state_dict(net.state_dict())
    twin.eval()
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    order = seen.training.batch_order
    assert sorted(i for step in order[:2] for i in step) == list(range(6))
    for rows in order:
        optimizer.zero_grad()
        nn.functional.cross_entropy(twin(x[list(rows)]), y[list(rows)]).backward()
        optimizer.step()
    before = dict(net.named_parameters())
    for name, p in twin.named_parameters():
        assert torch.allclose(seen.message.update[name], before[name] - p, atol=1e-6)


def test_same_generator_same_update(scene) -> None:
    net, x, y = scene
    protocol = FedAvg(epochs=1, batch_size=2, lr=0.1)
    a, b, c = (
        protocol.observe(net, x, y, generator=torch.Generator().manual_seed(s)).message.update["0.weight"]
        for s in (5, 5, 6)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_batchnorm_statistics_only_where_granted(scene) -> None:
    net, x, y = scene
    assert FedSGD().observe(net, x, y).message.batchnorm_statistics is None
    granted = FedSGD().observe(net, x, y, knowledge=Knowledge.full).message.batchnorm_statistics
    z = net[0](x)
    assert torch.allclose(granted["1.mean"], z.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(granted["1.var"], z.var((0, 2, 3), unbiased=False), atol=1e-6)


@dataclass(frozen=True, kw_only=True)
class Diary(Defense):
    calls: list = field(default_factory=list)

    def protect_batch(self, x, y, generator):
        self.calls.append("batch")
        return x, y

    def protect_example_gradients(self, gradients, generator):
        self.calls.append(("examples", next(iter(gradients.values())).shape[0]))
        return gradients

    def protect_gradient(self, gradient, generator):
        self.calls.append("gradient")
        return gradient

    def protect_message(self, update, generator):
        self.calls.append("message")
        return update


def test_hooks_are_called_at_the_right_moments_and_change_nothing_by_themselves(scene) -> None:
    net, x, y = scene
    diary = Diary()
    protected = FedSGD().observe(net, x, y, diary).message.update
    assert diary.calls == ["batch", ("examples", 6), "gradient", "message"]
    plain = FedSGD().observe(net, x, y).message.update
    assert all(torch.allclose(protected[k], v, atol=1e-6) for k, v in plain.items())
    diary = Diary()
    FedAvg(epochs=1, batch_size=4, lr=0.1).observe(net, x, y, diary)
    assert diary.calls == ["batch", ("examples", 4), "gradient", "batch", ("examples", 2), "gradient", "message"]


def test_frozen_parameters_are_not_sent(scene) -> None:
    net, x, y = scene
    net[0].requires_grad_(False)
    for protocol in (FedSGD(), FedAvg()):
        assert set(protocol.observe(net, x, y).message.update) == {"1.weight", "1.bias", "5.weight", "5.bias"}


def test_bad_batches_and_settings_are_refused(scene) -> None:
    net, x, y = scene
    cases = [
        (net, x, y.float(), "expected class numbers, or probabilities"),
        (net, x, y.int(), "int64"),
        (net, x[:0], y[:0], "at least one"),
        (net, x.long(), y, "floating"),
        (net, x * float("nan"), y, "NaN"),
        (net, x.double(), y, "float64"),
        (net, x, y + 5, "labels must lie"),
        (net, x[:, :1], y, "cannot read"),
    ]
    for model, inputs, labels, words in cases:
        with pytest.raises(ValueError, match=words):
            FedSGD().observe(model, inputs, labels)
    with pytest.raises(ValueError, match=r"nn\.Module"):
        FedSGD().observe("net", x, y)
    with pytest.raises(ValueError, match="diverged"):
        FedAvg(lr=1e30, epochs=5, batch_size=1).observe(net, x, y)
    with pytest.raises(ValueError, match=r"(?s)epochs.*batch_size.*lr"):
        FedAvg(epochs=0, batch_size=0, lr=-1)
    with pytest.raises(ValueError, match="momentum"):
        FedAvg(momentum=0.5, optimizer="adam")
    with pytest.raises(TypeError):
        FedSGD(nonsense=1)
    with pytest.raises(ValueError, match="batchnorm"):
        FedSGD(batchnorm="both")
