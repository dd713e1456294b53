"""Which way an update points: right, wrong, or honestly unknown; never the opposite of the truth."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from leakscope import capture
from leakscope.capture.sign import check_sign, logit_layer

SHAPE, CLASSES = (3, 8, 8), 10


def net_of(activation: nn.Module, *, bias: bool = True, batchnorm: bool = False, seed: int = 0) -> nn.Module:
    norm = [nn.BatchNorm2d(8)] if batchnorm else []
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(seed)
        head = nn.Linear(8 * 36, CLASSES, bias=bias)
        return nn.Sequential(nn.Conv2d(3, 8, 3), *norm, activation, nn.Flatten(), head)


def local_update(
    net: nn.Module,
    count: int,
    *,
    steps: int = 1,
    rule: str = "sgd",
    decay: float = 0.0,
    seed: int = 0,
    labels: int = 10,
) -> dict[str, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    x = torch.rand((count, *SHAPE), generator=draws)
    y = torch.randint(labels, (count,), generator=draws)
    client = copy.deepcopy(net).train()
    rules = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=decay),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=decay),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    }
    optimiser = rules[rule](client.parameters())
    for _ in range(steps):
        optimiser.zero_grad()
        nn.functional.cross_entropy(client(x), y).backward()
        optimiser.step()
    after = dict(client.named_parameters())
    return {name: (value - after[name]).detach() for name, value in net.named_parameters()}


def answers(net: nn.Module, update: dict[str, Tensor], count: int | None) -> tuple[str, str]:
    layer = logit_layer(net, SHAPE, CLASSES)
    turned = {name: -value for name, value in update.items()}
    return check_sign(update, layer, count, {}).answer, check_sign(turned, layer, count, {}).answer


NETS = {
    "relu": lambda: net_of(nn.ReLU()),
    "relu without bias": lambda: net_of(nn.ReLU(), bias=False),
    "tanh": lambda: net_of(nn.Tanh()),
    "gelu": lambda: net_of(nn.GELU()),
    "batchnorm": lambda: net_of(nn.ReLU(), batchnorm=True),
}


@pytest.mark.parametrize("name", list(NETS))
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 10])
def test_few_examples_of_many_classes_show_the_sign(name: str, count: int, steps: int) -> None:
    net = NETS[name]()
    for seed in range(3):
        update = local_update(net, count, steps=steps, rule="sgd" if steps == 1 else "momentum", decay=5e-4, seed=seed)
        assert answers(net, update, count) == ("right", "wrong")


@pytest.mark.parametrize("name", ["relu", "tanh", "batchnorm"])
@pytest.mark.parametrize("rule", ["sgd", "adam"])
@pytest.mark.parametrize("count", [1, 4, 8, 40])
def test_it_never_says_the_opposite(name: str, rule: str, count: int) -> None:
    net = NETS[name]()
    for seed in range(3):
        pair = answers(net, local_update(net, count, steps=4, rule=rule, seed=seed), count)
        assert pair in {("right", "wrong"), ("cannot be told", "cannot be told")}


def test_what_cannot_be_told_is_not_told() -> None:
    net = net_of(nn.ReLU())
    batch = local_update(net, 40)
    assert answers(net, batch, 40)[0] == "cannot be told"
    assert answers(net, local_update(net, 1), None)[0] == "cannot be told"
    noise = {n: torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) for n, v in net.named_parameters()}
    assert answers(net, noise, 1) == ("cannot be told", "cannot be told")
    signed = net_of(nn.Tanh(), bias=False)
    assert answers(signed, local_update(signed, 1), 1)[0] == "cannot be told"
    soft = nn.Sequential(*net_of(nn.ReLU()), nn.Softmax(1))
    assert logit_layer(soft, SHAPE, CLASSES) is None


def test_noise_is_told_from_an_update_and_hides_it_where_it_is_large() -> None:
    net, draws = net_of(nn.ReLU()), torch.Generator().manual_seed(0)
    told = []
    for level in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        update = local_update(net, 1)
        size = float(torch.cat([value.flatten() for value in update.values()]).norm())
        noisy = {n: v + level * size * torch.randn(v.shape, generator=draws) for n, v in update.items()}
        pair = answers(net, noisy, 1)
        assert pair in {("right", "wrong"), ("cannot be told", "cannot be told")}
        told.append(pair[0])
    assert told[:3] == ["right"] * 3
    assert told[-1] == "cannot be told"


def test_pure_noise_never_has_a_sign() -> None:
    net, draws = net_of(nn.ReLU()), torch.Generator().manual_seed(3)
    layer = logit_layer(net, SHAPE, CLASSES)
    for count in (1, 3):
        for _ in range(150):
            noise = {n: torch.randn(v.shape, generator=draws) for n, v in list(net.named_parameters())[-2:]}
            assert check_sign(noise, layer, count, {}).answer == "cannot be told"


def test_counters_of_batchnorm_layers_decide() -> None:
    assert check_sign({}, None, None, {"1.num_batches_tracked": 5.0}).answer == "right"
    assert check_sign({}, None, None, {"1.num_batches_tracked": -1.0}).answer == "wrong"
    assert check_sign({}, None, None, {"a": 1.0, "b": -1.0}).answer == "cannot be told"
    assert "linear layer" in str(check_sign({}, None, 1, {"a": 0.0}))


@pytest.mark.parametrize("kind", ["gradient", "weight_delta"])
def test_a_wrong_sign_is_refused_turned_or_kept(kind: str) -> None:
    net = net_of(nn.ReLU())
    update = local_update(net, 1)
    turned = {name: -value for name, value in update.items()}
    facts = {"model": net, "input_shape": SHAPE, "num_classes": CLASSES, "num_examples": 1, "kind": kind}
    with pytest.raises(ValueError, match=r"points the wrong way.*sign='flip'"):
        capture.from_arrays(turned, **facts)
    flipped = capture.from_arrays(turned, sign="flip", **facts)
    assert all(torch.equal(flipped.message.update[name], value) for name, value in update.items())
    kept = capture.from_arrays(turned, sign="trust", **facts)
    assert kept.made is not None
    assert kept.made.sign == "wrong"
    with pytest.raises(ValueError, match="leave sign='flip'"):
        capture.from_arrays(update, sign="flip", **facts)


def test_swapped_weights_are_noticed_and_swapped_on_request() -> None:
    net = net_of(nn.ReLU())
    update = local_update(net, 2)
    before = {name: value.detach().clone() for name, value in net.named_parameters()}
    after = {name: value - update[name] for name, value in before.items()}
    facts = {"model": net, "input_shape": SHAPE, "num_classes": CLASSES, "num_examples": 2}
    with pytest.raises(ValueError, match="swap before and after"):
        capture.from_state_dicts(after, before, **facts)
    seen = capture.from_state_dicts(after, before, sign="flip", **facts)
    for name, value in seen.model.named_parameters():
        assert torch.equal(value, before[name])
        assert torch.equal(seen.message.update[name], before[name] - after[name])
