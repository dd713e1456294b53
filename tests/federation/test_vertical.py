"""Rounds of vertical learning against a loop of one's own, and what of them is shown."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.defense import Defense
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.defenses import GradientNoise, GradientPruning
from leakscope.federation import FedSGD, Vertical
from leakscope.models import build_model
from leakscope.models.split import VerticalModel


def net(**options: Any) -> nn.Module:
    options = {"workers": 2, "hidden": 6, "middle": 5, "activation": "tanh", **options}
    return build_model("vertical-mlp", input_shape=(8,), num_classes=3, **options).double()


def cnn(**options: Any) -> nn.Module:
    return build_model("cafe-cnn", input_shape=(1, 8, 8), num_classes=3, filters=(2, 3), hidden=4, middle=4, **options)


def data(count: int = 7, shape: tuple[int, ...] = (8,), dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.rand((count, *shape), generator=generator, dtype=dtype)
    return x, torch.randint(3, (count,), generator=generator)


def seeded(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def same_messages(one: Observation, two: Observation) -> bool:
    return len(one.messages) == len(two.messages) and all(
        a.indices == b.indices
        and set(a.update) == set(b.update)
        and all(torch.equal(a.update[name], b.update[name]) for name in a.update)
        for a, b in zip(one.messages, two.messages, strict=True)
    )


def test_each_message_is_the_gradient_of_the_announced_batch() -> None:
    model, (x, y) = net(), data()
    seen = Vertical(batch_size=3, rounds=5).observe(model, x, y)
    assert len(seen.messages) == 5
    assert all(message.kind == "gradient" and not message.partial for message in seen.messages)
    for message in seen.messages:
        rows = list(message.indices)
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        wanted = torch.autograd.grad(loss, list(model.parameters()))
        for (name, _), value in zip(model.named_parameters(), wanted, strict=True):
            assert torch.allclose(message.update[name], value, atol=1e-15)


@pytest.mark.parametrize("defense", [None, GradientPruning(fraction=0.5)], ids=repr)
def test_the_model_moves_by_the_learning_rate_times_what_was_sent(defense) -> None:
    """The oracle is a loop of torch's own SGD, which is given the announced batches and nothing else."""
    model, (x, y) = net(), data()
    seen = Vertical(batch_size=3, rounds=6, lr=0.3).observe(model, x, y, defense)
    twin = copy.deepcopy(model)
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.3)
    for message in seen.messages:
        optimiser.zero_grad()
        nn.functional.cross_entropy(twin(x[list(message.indices)]), y[list(message.indices)]).backward()
        for name, parameter in twin.named_parameters():
            if defense is not None:  # half of the entries, the smallest ones
                size = parameter.grad.abs().flatten().sort().values[parameter.numel() // 2]
                parameter.grad[parameter.grad.abs() < size] = 0
            assert torch.allclose(message.update[name], parameter.grad, atol=1e-14)
        optimiser.step()
    # The adversary is given the model of the first round.
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in seen.model.state_dict().items())


def test_a_static_model_sends_the_same_for_the_same_batch_and_a_moving_one_does_not() -> None:
    model, (x, y) = net(), data(4)
    static = Vertical(batch_size=4, rounds=2).observe(model, x, y).messages
    moving = Vertical(batch_size=4, rounds=2, lr=0.5).observe(model, x, y).messages
    assert torch.equal(static[0].update["head.fc.bias"], static[1].update["head.fc.bias"])
    assert not torch.allclose(moving[0].update["head.fc.bias"], moving[1].update["head.fc.bias"], atol=1e-4)


@dataclass(frozen=True, kw_only=True)
class Diary(Defense):
    calls: list = field(default_factory=list)

    def protect_batch(self, x, y, generator):
        self.calls.append(("batch", len(x)))
        return x, y

    def protect_example_gradients(self, gradients, generator):
        self.calls.append(("examples", len(next(iter(gradients.values())))))
        return gradients

    def protect_gradient(self, gradient, generator):
        self.calls.append("gradient")
        return gradient

    def protect_message(self, update, generator):
        self.calls.append("message")
        return update


def test_a_defence_acts_in_every_round_and_changes_nothing_by_itself() -> None:
    model, (x, y) = net(), data()
    diary, protocol = Diary(), Vertical(batch_size=3, rounds=4, lr=0.1)
    seen = protocol.observe(model, x, y, diary)
    assert diary.calls == [("batch", 3), ("examples", 3), "gradient", "message"] * 4
    for one, two in zip(seen.messages, protocol.observe(model, x, y).messages, strict=True):
        assert one.indices == two.indices
        assert all(torch.allclose(one.update[name], two.update[name], atol=1e-14) for name in one.update)


def test_noise_is_drawn_anew_in_each_round() -> None:
    model, (x, y) = net(), data()
    protocol = Vertical(batch_size=7, rounds=2)
    bare = protocol.observe(model, x, y).messages[0].update["head.fc.bias"]
    one, two = (m.update["head.fc.bias"] for m in protocol.observe(model, x, y, GradientNoise(sigma=0.1)).messages)
    assert not torch.equal(one - bare, two - bare)
    assert 0.01 < float((one - bare).abs().mean()) < 0.5


class AlwaysDrops(nn.Module):
    """A model that draws random numbers of its own, whatever its mode."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


def random_net() -> nn.Module:
    model = net()
    for worker in model.workers:
        worker.dense_activation2 = nn.Sequential(nn.Tanh(), AlwaysDrops())
    return model


@pytest.mark.parametrize("make", [net, random_net])
@pytest.mark.parametrize("defense", [None, GradientNoise(sigma=0.01)], ids=repr)
def test_training_plays_the_rounds_that_observing_shows(make, defense) -> None:
    model, (x, y) = make(), data()
    protocol = Vertical(batch_size=3, rounds=6, lr=0.2)
    told = []
    run = protocol.train(model, x, y, defense, seeded(), progress=lambda *facts: told.append(facts))
    weights = {name: value.detach().clone() for name, value in model.named_parameters()}
    for message in protocol.observe(model, x, y, defense, generator=seeded()).messages:
        weights = {name: value - 0.2 * message.update[name] for name, value in weights.items()}
    assert list(run.models) == [7]
    for name, value in run.last.named_parameters():
        assert torch.allclose(value, weights[name], atol=1e-14)
    assert len(run.losses) == 6
    assert told == [(number + 1, 6, loss) for number, loss in enumerate(run.losses)]


def test_training_tells_the_loss_of_each_batch_before_its_step() -> None:
    model, (x, y) = net(), data()
    protocol = Vertical(batch_size=3, rounds=4, lr=0.2)
    run = protocol.train(model, x, y, generator=seeded())
    weights = dict(model.named_parameters())
    for message, loss in zip(protocol.observe(model, x, y, generator=seeded()).messages, run.losses, strict=True):
        rows = list(message.indices)
        answer = torch.func.functional_call(model, weights, (x[rows],))
        assert nn.functional.cross_entropy(answer, y[rows]).item() == pytest.approx(loss, abs=1e-14)
        weights = {name: value - 0.2 * message.update[name] for name, value in weights.items()}


def test_training_brings_the_loss_down_in_every_step_of_all_samples() -> None:
    model, (x, y) = net(), data()
    losses = Vertical(batch_size=7, rounds=20, lr=0.1).train(model, x, y).losses
    assert all(after < before for before, after in pairwise(losses))


@pytest.mark.parametrize("mode, steps", [("eval", 0), ("train", 3)])
def test_batchnorm_counts_each_round_once(mode, steps) -> None:
    model, (x, y) = cnn(batchnorm=True), data(6, (1, 8, 8), torch.float32)
    run = Vertical(batch_size=3, rounds=3, batchnorm=mode).train(model, x, y)
    assert int(run.last.get_buffer("workers.0.norm1.num_batches_tracked")) == steps


def test_the_callers_model_and_data_and_the_global_generator_stay_as_they_were() -> None:
    model, (x, y) = cnn(batchnorm=True).train(), data(6, (1, 8, 8), torch.float32)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    samples, globe = x.clone(), torch.random.get_rng_state()
    protocol = Vertical(batch_size=3, rounds=2, lr=0.5, batchnorm="train")
    protocol.observe(model, x, y, knowledge=Knowledge.full)
    protocol.train(model, x, y)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert torch.equal(x, samples)
    assert torch.equal(globe, torch.random.get_rng_state())


def test_the_same_generator_gives_the_same_rounds() -> None:
    model, (x, y) = net(), data()
    protocol = Vertical(batch_size=3, rounds=4, lr=0.1)
    assert same_messages(protocol.observe(model, x, y), protocol.observe(model, x, y))
    one, two, other = (protocol.observe(model, x, y, generator=seeded(seed)) for seed in (1, 1, 2))
    assert same_messages(one, two)
    assert not same_messages(one, other)


def test_what_is_known_does_not_change_what_is_sent() -> None:
    model, (x, y) = cnn(batchnorm=True), data(6, (1, 8, 8), torch.float32)
    protocol = Vertical(batch_size=3, rounds=3, lr=0.1, batchnorm="train")
    blind = protocol.observe(model, x, y, knowledge=Knowledge())
    full = protocol.observe(model, x, y, knowledge=Knowledge.full)
    for one, two in zip(blind.messages, full.messages, strict=True):
        assert all(torch.equal(one.update[name], two.update[name]) for name in one.update)


def test_indices_and_recipe_are_shown_only_to_those_who_know_them() -> None:
    model, (x, y) = net(), data()
    protocol = Vertical(batch_size=3, rounds=4, lr=0.1)
    server = protocol.observe(model, x, y)
    assert server.knowledge == Knowledge.vertical_server
    assert all(len(message.indices) == 3 for message in server.messages)
    assert (server.num_examples, server.training.batch_size, server.training.learning_rate) == (7, 3, 0.1)
    assert (server.training.optimizer, server.labels, server.training.batch_order) == ("sgd", None, None)
    shuffled = protocol.observe(model, x, y, knowledge=Knowledge.honest_server)
    assert all(message.indices is None for message in shuffled.messages)
    stranger = protocol.observe(model, x, y, knowledge=Knowledge(num_examples=False))
    assert stranger.training == type(stranger.training)()
    assert stranger.num_examples is None
    assert torch.equal(protocol.observe(model, x, y, knowledge=Knowledge.full).labels, y)


def test_batchnorm_statistics_are_those_of_the_batch_at_the_weights_of_its_round() -> None:
    model, (x, y) = cnn(batchnorm=True), data(6, (1, 8, 8), torch.float32)
    protocol = Vertical(batch_size=3, rounds=3, lr=0.5)
    assert all(m.batchnorm_statistics is None for m in protocol.observe(model, x, y).messages)
    twin = copy.deepcopy(model).eval()
    for message in protocol.observe(model, x, y, knowledge=Knowledge.full).messages:
        part = twin.shares[0].take(x[list(message.indices)])
        z = twin.workers[0].conv1(part)
        statistics = message.batchnorm_statistics
        assert len(statistics) == 2 * 2 * 4
        assert torch.allclose(statistics["workers.0.norm1.mean"], z.mean((0, 2, 3)), atol=1e-6)
        assert torch.allclose(statistics["workers.0.norm1.var"], z.var((0, 2, 3), unbiased=False), atol=1e-6)
        with torch.no_grad():
            for name, parameter in twin.named_parameters():
                parameter -= 0.5 * message.update[name]


def test_of_later_rounds_only_biases_are_kept() -> None:
    model, (x, y) = net(), data()
    whole = Vertical(batch_size=3, rounds=5).observe(model, x, y)
    spare = Vertical(batch_size=3, rounds=5, whole_rounds=2).observe(model, x, y)
    assert [message.partial for message in spare.messages] == [False, False, True, True, True]
    biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
    for one, two in zip(whole.messages, spare.messages, strict=True):
        assert set(two.update) == (biases if two.partial else set(one.update))
        assert one.indices == two.indices
        assert all(torch.equal(one.update[name], two.update[name]) for name in two.update)
    assert same_messages(whole, Vertical(batch_size=3, rounds=5, whole_rounds=9).observe(model, x, y))


def test_frozen_parameters_are_not_sent_and_do_not_move() -> None:
    model, (x, y) = net(), data()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.endswith("bias"))
    protocol = Vertical(batch_size=3, rounds=3, whole_rounds=1)
    # There is no bias to keep, so nothing can be left out.
    assert all(not message.partial and len(message.update) == 7 for message in protocol.observe(model, x, y).messages)
    run = Vertical(batch_size=3, rounds=3, lr=0.5).train(model, x, y)
    assert torch.equal(run.last.get_parameter("head.fc.bias"), model.get_parameter("head.fc.bias"))
    assert not torch.equal(run.last.get_parameter("head.fc.weight"), model.get_parameter("head.fc.weight"))


def test_the_number_of_rounds() -> None:
    model, (x, y) = net(), data()
    assert Vertical(batch_size=3).count_rounds(7) == 12
    assert Vertical(batch_size=3, rounds=2).count_rounds(7) == 2
    assert len(Vertical(batch_size=3).observe(model, x, y).messages) == 12
    batches = [m.indices for m in Vertical(batch_size=3, rounds=4, sampling="epochs").observe(model, x, y).messages]
    assert not set(batches[0]) & set(batches[1])
    assert not set(batches[2]) & set(batches[3])


def test_one_round_of_all_samples_is_fedsgd() -> None:
    model, (x, y) = net(), data()
    one = Vertical(batch_size=7, rounds=1).observe(model, x, y).message
    two = FedSGD().observe(model, x, y).message
    assert all(torch.allclose(one.update[name], two.update[name], atol=1e-15) for name in two.update)


def test_settings_that_make_no_sense_are_told_at_once() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)batch_size: .*got 0.*rounds: .*got 1\.5.*lr: .*-1.*whole_rounds: .*True"
    ):
        Vertical(batch_size=0, rounds=1.5, whole_rounds=True, lr=-1)
    with pytest.raises(ValueError, match="sampling: expected 'uniform' or 'epochs', got 'random'"):
        Vertical(sampling="random")
    with pytest.raises(ValueError, match="whole_rounds: expected None where lr > 0"):
        Vertical(whole_rounds=3, lr=0.1)
    for lr in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="lr: expected a number of at least 0"):
            Vertical(lr=lr)
    with pytest.raises(ValueError, match="batchnorm"):
        Vertical(batchnorm="both")
    with pytest.raises(TypeError):
        Vertical(8)


@pytest.mark.parametrize("call", ["observe", "train"])
def test_models_and_samples_that_do_not_fit_say_why(call) -> None:
    model, (x, y) = net(), data()

    def play(protocol: Vertical, *facts: Any) -> None:
        getattr(protocol, call)(*facts)

    plain = build_model("mlp", input_shape=(8,), num_classes=3)
    with pytest.raises(ValueError, match=r"expected a VerticalModel, .* got \w+; build 'cafe-cnn' or 'vertical-mlp'"):
        play(Vertical(batch_size=2), plain, x.float(), y)
    with pytest.raises(ValueError, match="expected at most the 7 samples there are, got 8; lower it"):
        play(Vertical(batch_size=8), model, x, y)
    with pytest.raises(ValueError, match=r"samples of shape \(8,\) as in the model, got \(2, 4\)"):
        play(Vertical(batch_size=2), model, x.reshape(7, 2, 4), y)
    with pytest.raises(ValueError, match="expected tensors, got list"):
        play(Vertical(batch_size=2), model, x.tolist(), y)
    with pytest.raises(ValueError, match="at least one example"):
        play(Vertical(batch_size=2), model, x[:0], y[:0])
    with pytest.raises(ValueError, match="labels must lie"):
        play(Vertical(batch_size=2), model, x, y + 3)
    with pytest.raises(ValueError, match="convert one of them"):
        play(Vertical(batch_size=2), model, x.float(), y)
    steep = net(activation="identity")
    with torch.no_grad():
        for parameter in steep.parameters():
            parameter.mul_(10)
    with pytest.raises(ValueError, match="diverged"):
        play(Vertical(batch_size=2, rounds=40, lr=1e150), steep, x, y)


def test_settings_are_the_identity_of_the_protocol() -> None:
    protocol = Vertical(batch_size=3, rounds=7, lr=0.5, sampling="epochs")
    assert all(f"{setting.name}=" in repr(protocol) for setting in dataclasses.fields(protocol))
    assert eval(repr(protocol), {"Vertical": Vertical}) == protocol
    assert isinstance(net(), VerticalModel)
