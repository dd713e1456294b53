"""Captured weights and updates: every problem at once, orders and wrappers understood, BatchNorm buffers read."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from leakscope import capture
from leakscope.capture.state import order_of
from leakscope.contracts.errors import UserError
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.made import Made
from leakscope.contracts.observation import Observation
from leakscope.federation.client import batchnorm_statistics

SHAPE, CLASSES = (3, 8, 8), 10
FACTS = {"input_shape": SHAPE, "num_classes": CLASSES}


def relu_net(seed: int = 0) -> nn.Module:
    return _seeded(seed, lambda: [nn.Flatten(), nn.Linear(192, 16), nn.ReLU(), nn.Linear(16, CLASSES)])


def batchnorm_net(momentum: float | None = 0.1) -> nn.Module:
    head = [nn.ReLU(), nn.Flatten(), nn.Linear(6 * 36, CLASSES)]
    return _seeded(0, lambda: [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=momentum), *head])


def _seeded(seed: int, layers) -> nn.Module:  # type: ignore[no-untyped-def]
    with torch.random.fork_rng():
        torch.random.default_generator.manual_seed(seed)
        return nn.Sequential(*layers())


def examples(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.rand((count, *SHAPE), generator=draws), torch.randperm(CLASSES, generator=draws)[:count]


def trained(net: nn.Module, x: Tensor, y: Tensor, steps: int = 1, lr: float = 0.1, mode: bool = True) -> nn.Module:
    client = copy.deepcopy(net).train(mode)
    rule = torch.optim.SGD(client.parameters(), lr=lr)
    for _ in range(steps):
        rule.zero_grad()
        nn.functional.cross_entropy(client(x), y).backward()
        rule.step()
    return client


def test_weights_before_and_after_are_the_update_before_minus_after() -> None:
    net, (x, y) = relu_net(), examples(2)
    after = trained(net, x, y, lr=0.5)
    seen = capture.from_state_dicts(
        net.state_dict(), after.state_dict(), model=relu_net(9), num_examples=2, learning_rate=0.5, **FACTS
    )
    gradient = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), list(net.parameters()))
    for (name, _), value in zip(net.named_parameters(), gradient, strict=True):
        assert torch.allclose(seen.message.update[name], 0.5 * value, atol=1e-6)
        assert torch.equal(dict(seen.model.named_parameters())[name], dict(net.named_parameters())[name])
    assert seen.message.kind == "weight_delta"
    assert seen.made is not None
    assert (seen.made.sign, seen.made.by) == ("right", "leakscope.capture.from_state_dicts")
    assert seen.knowledge == Knowledge(learning_rate=True)


def test_all_problems_are_told_at_once() -> None:
    net = batchnorm_net()
    before = dict(net.state_dict())
    after = {name: value.clone() for name, value in before.items()}
    del before["0.bias"]
    before["nonsense"] = torch.zeros(2)
    after["0.weight"] = after["0.weight"].flatten()
    after["4.weight"][0, 0] = float("nan")
    after["4.bias"] = after["4.bias"].long()
    after["1.weight"] = "text"
    with pytest.raises(ValueError, match="not fit the model") as error:
        capture.from_state_dicts(before, after, model=net, num_examples=2, **FACTS)
    told = str(error.value)
    for words in (
        "before: missing: 0.bias (6,)",
        "before: extra: nonsense",
        "after: 0.weight: expected shape (6, 3, 3, 3), got (162,)",
        "after: 4.weight: 1 of 2160 entries are NaN or infinite",
        "after: 4.bias: expected floats",
        "after: 1.weight: expected numbers",
    ):
        assert words in told


@pytest.mark.parametrize("prefix", ["module.", "_module.", "_orig_mod.module."])
def test_names_of_wrappers_are_understood_and_told(prefix: str) -> None:
    net, (x, y) = relu_net(), examples(1)
    after = {prefix + name: value for name, value in trained(net, x, y).state_dict().items()}
    seen = capture.from_state_dicts(net.state_dict(), after, model=net, num_examples=1, **FACTS)
    assert list(seen.message.update) == [name for name, _ in net.named_parameters()]
    assert seen.made is not None
    assert prefix[:6] in " ".join(seen.made.notes)


@pytest.mark.parametrize("layout", ["state", "no counters", "parameters"])
def test_arrays_in_every_order_that_systems_send(layout: str) -> None:
    net, (x, y) = batchnorm_net(), examples(3)

    def arrays(model: nn.Module) -> list[np.ndarray]:  # type: ignore[type-arg]
        named = dict(model.named_parameters()) if layout == "parameters" else model.state_dict()
        names = [name for name in named if layout == "state" or not name.endswith("tracked")]
        return [named[name].detach().numpy().copy() for name in names]

    after = trained(net, x, y)
    seen = capture.from_arrays(arrays(after), before=arrays(net), model=net, num_examples=3, **FACTS)
    for name, value in after.named_parameters():
        expected = dict(net.named_parameters())[name] - value
        assert torch.allclose(seen.message.update[name], expected, atol=1e-7)
    assert seen.batchnorm == "train"  # without buffers too, for that is how clients train
    assert (seen.message.batchnorm_statistics is not None) == (layout == "state")


def test_arrays_that_fit_no_order_name_every_misfit() -> None:
    net = batchnorm_net()
    arrays = [value.numpy() for value in net.state_dict().values()]
    with pytest.raises(ValueError, match=r"expected .*9 \(the state dict in its order.* got 3 arrays"):
        capture.from_arrays(arrays[:3], model=net, **FACTS)
    arrays[0], arrays[7] = arrays[0].T, arrays[7].T
    with pytest.raises(ValueError, match=r"array 0 \(0.weight\)[\s\S]*array 7 \(4.weight\)"):
        capture.from_arrays(arrays, model=net, **FACTS)
    assert order_of([(1,), (1,)], nn.BatchNorm1d(1))[1] == "2 arrays are the parameters in their order"


def test_one_step_of_buffers_gives_the_statistics_of_the_private_batch() -> None:
    net, (x, y) = batchnorm_net(), examples(3)
    after = trained(net, x, y)
    seen = capture.from_state_dicts(net.state_dict(), after.state_dict(), model=net, num_examples=3, **FACTS)
    truth = batchnorm_statistics(copy.deepcopy(net).train(), x)
    assert truth is not None
    assert seen.message.batchnorm_statistics is not None
    for name, value in truth.items():
        assert torch.allclose(seen.message.batchnorm_statistics[name], value, rtol=1e-4, atol=1e-5), name
    assert seen.knowledge.batchnorm_statistics
    assert (seen.batchnorm, seen.training.epochs, seen.training.batch_size) == ("train", 1, 3)


def test_a_plain_average_of_batches_is_read_too() -> None:
    net, (x, y) = batchnorm_net(momentum=None), examples(3)
    net = trained(net, *examples(4, seed=5), steps=2)
    seen = capture.from_state_dicts(
        net.state_dict(), trained(net, x, y).state_dict(), model=net, num_examples=3, **FACTS
    )
    truth = batchnorm_statistics(copy.deepcopy(net).train(), x)
    assert truth is not None
    assert seen.message.batchnorm_statistics is not None
    assert torch.allclose(seen.message.batchnorm_statistics["1.var"], truth["1.var"], rtol=1e-3)


def test_several_steps_leave_a_blend_of_which_nothing_is_claimed() -> None:
    net, (x, y) = batchnorm_net(), examples(3)
    states = net.state_dict(), trained(net, x, y, steps=3).state_dict()
    seen = capture.from_state_dicts(*states, model=net, num_examples=3, **FACTS)
    assert seen.message.batchnorm_statistics is None
    assert not seen.knowledge.batchnorm_statistics
    assert seen.batchnorm == "train"
    assert seen.training.epochs is None
    assert seen.made is not None
    assert "a blend of 3 steps" in " ".join(seen.made.notes)


@pytest.mark.parametrize("count", [1.5, 0.25])
def test_counters_of_a_mean_of_clients_are_no_single_step(count: float) -> None:
    net, (x, y) = batchnorm_net(), examples(3)
    after = trained(net, x, y).state_dict() | {"1.num_batches_tracked": np.array(count)}
    seen = capture.from_state_dicts(net.state_dict(), after, model=net, num_examples=3, **FACTS)
    assert seen.message.batchnorm_statistics is None
    assert (seen.batchnorm, seen.training.epochs) == ("train", None)


def test_buffers_that_did_not_move_mean_eval_mode() -> None:
    net, (x, y) = batchnorm_net(), examples(3)
    states = net.state_dict(), trained(net, x, y, mode=False).state_dict()
    seen = capture.from_state_dicts(*states, model=net, num_examples=3, **FACTS)
    assert seen.batchnorm == "eval"
    assert seen.message.batchnorm_statistics is None


def test_a_mistaken_momentum_is_noticed_where_a_variance_would_be_negative() -> None:
    net, (x, y) = batchnorm_net(momentum=0.9), examples(3)
    after = trained(net, 0.01 * x, y).state_dict()
    net[1].momentum = 0.1
    seen = capture.from_state_dicts(net.state_dict(), after, model=net, num_examples=3, **FACTS)
    assert seen.message.batchnorm_statistics is None


def test_an_empty_update_and_a_recipe_of_a_gradient_are_refused() -> None:
    net = relu_net()
    with pytest.raises(ValueError, match="captured twice"):
        capture.from_state_dicts(net.state_dict(), net.state_dict(), model=net, **FACTS)
    gradient = {name: torch.ones_like(value) for name, value in net.named_parameters()}
    with pytest.raises(ValueError, match="a gradient has no local training"):
        capture.from_arrays(gradient, kind="gradient", model=net, epochs=2, **FACTS)
    with pytest.raises(ValueError, match="kind: expected one of weights"):
        capture.from_arrays(gradient, kind="delta", model=net, **FACTS)
    with pytest.raises(ValueError, match="sign: expected"):
        capture.from_arrays(gradient, kind="gradient", model=net, sign="maybe", **FACTS)


def test_knowledge_that_is_given_withholds_what_the_buffers_would_tell() -> None:
    net, (x, y) = batchnorm_net(), examples(3)
    states = net.state_dict(), trained(net, x, y).state_dict()
    facts = {"knowledge": Knowledge.eavesdropper, "num_examples": 3, **FACTS}
    seen = capture.from_state_dicts(*states, model=net, **facts)
    assert seen.message.batchnorm_statistics is None
    assert seen.training.epochs is None


def test_a_file_says_how_it_was_made_and_older_files_are_read(tmp_path: Path) -> None:
    net, (x, y) = relu_net(), examples(1)
    states = net.state_dict(), trained(net, x, y).state_dict()
    sources = ("somebody/home/before.pt", "C:\\users\\after.pt")
    seen = capture.from_state_dicts(*states, model=net, num_examples=1, sources=sources, **FACTS)
    seen.save(tmp_path / "a")
    facts = json.loads((tmp_path / "a.json").read_text())
    assert facts["format"] == 3
    assert facts["made"]["sources"] == ["before.pt", "after.pt"]
    assert "home" not in (tmp_path / "a.json").read_text()
    assert Observation.load(tmp_path / "a", net).made == seen.made
    del facts["made"]
    (tmp_path / "a.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="made: Field required"):
        Observation.load(tmp_path / "a", net)
    (tmp_path / "a.json").write_text(json.dumps({**facts, "format": 2}))
    assert Observation.load(tmp_path / "a", net).made is None


@pytest.mark.parametrize("made", [[], {"version": "1"}, {"by": 3}, {"by": "x", "evil": 1}, {"by": "x", "notes": [1]}])
def test_hostile_facts_of_how_it_was_made_are_refused(made: object, tmp_path: Path) -> None:
    net, (x, y) = relu_net(), examples(1)
    states = net.state_dict(), trained(net, x, y).state_dict()
    capture.from_state_dicts(*states, model=net, num_examples=1, **FACTS).save(tmp_path / "a")
    facts = json.loads((tmp_path / "a.json").read_text())
    (tmp_path / "a.json").write_text(json.dumps({**facts, "made": made}))
    with pytest.raises(ValueError, match="made"):
        Observation.load(tmp_path / "a", net)


def test_an_observation_of_a_protocol_says_who_wrote_it() -> None:
    assert Made(by="x").facts()["version"]


def test_a_running_system_is_not_stopped_by_what_a_file_is_refused_for() -> None:
    net = relu_net()
    state = dict(net.state_dict())
    facts = {"num_examples": 1, **FACTS}
    for after in (state, {name: value * float("nan") for name, value in state.items()}):
        with pytest.raises(UserError):
            capture.from_state_dicts(state, after, model=net, **facts)
        seen = capture.from_state_dicts(state, after, model=net, running=True, **facts)
        assert seen.made is not None
        assert seen.made.sign == "cannot be told"


def test_the_older_names_work_and_warn() -> None:
    net, (x, y) = relu_net(), examples(1)
    after = trained(net, x, y).state_dict()
    with pytest.warns(DeprecationWarning, match=r"capture\.from_state_dicts"):
        old = Observation.from_state_dicts(net.state_dict(), after, model=net, num_examples=1, **FACTS)
    new = capture.from_state_dicts(net.state_dict(), after, model=net, num_examples=1, **FACTS)
    assert all(torch.equal(value, new.message.update[name]) for name, value in old.message.update.items())
