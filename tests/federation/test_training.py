"""Training over rounds against the protocol's own update and calculations by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.defense import Defense
from leakscope.data import load_data, split_by_group
from leakscope.federation import FedAvg, FederatedTraining, FedSGD
from leakscope.federation.training import LOSS_CHUNK, round_generator
from leakscope.models import build_model

LOCAL = FedAvg(epochs=2, batch_size=3, lr=0.1)


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    net = nn.Linear(4, 3).to(dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return net


def clients(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(6)
    return [
        (torch.rand(n, 4, generator=generator).to(dtype), torch.randint(3, (n,), generator=generator)) for n in sizes
    ]


def weights(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in net.state_dict().items()}


def same(a: nn.Module, b: nn.Module) -> bool:
    ours, theirs = weights(a), weights(b)
    return set(ours) == set(theirs) and all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_the_mean_is_weighted_by_examples_as_by_hand() -> None:
    """One full-batch step each: w - lr * sum_c n_c/N * grad_c, which is the gradient over all examples together."""
    net, data = linear(torch.float64), clients(2, 5, 1, dtype=torch.float64)
    training = FederatedTraining(rounds=1, protocol=FedAvg(epochs=1, batch_size=99, lr=0.25))
    run = training.run(net, data)
    assert set(run.models) == {2}
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    probabilities = (x @ net.weight.T + net.bias).softmax(1)
    residual = (probabilities - nn.functional.one_hot(y, 3)) / len(y)
    assert torch.allclose(run.last.weight, net.weight - 0.25 * residual.T @ x, atol=1e-15)
    assert torch.allclose(run.last.bias, net.bias - 0.25 * residual.sum(0), atol=1e-15)
    assert run.losses == (pytest.approx(float(-probabilities.detach().log()[range(len(y)), y].mean()), abs=1e-14),)
    unweighted = torch.stack([(p - q).mean(0) for p, q in _residuals(net, data)]).mean(0)
    assert not torch.allclose(run.last.bias, net.bias - 0.25 * unweighted, atol=1e-3)


def _residuals(net: nn.Module, data: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(net(x).softmax(1), nn.functional.one_hot(y, 3)) for x, y in data]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "protocol",
    [LOCAL, FedAvg(epochs=3, batch_size=2, lr=0.05, momentum=0.9), FedAvg(optimizer="adam", shuffle=False)],
    ids=repr,
)
def test_one_client_and_one_round_is_its_update_subtracted(protocol: FedAvg, dtype: torch.dtype) -> None:
    net, data = linear(dtype), clients(7, dtype=dtype)
    run = FederatedTraining(rounds=1, protocol=protocol).run(net, data, seed=3)
    seen = protocol.observe(net, *data[0], generator=round_generator(3, 1, 0))
    for name, p in net.named_parameters():
        assert torch.equal(run.last.get_parameter(name), p - seen.message.update[name])


def test_rounds_are_chained_and_each_client_draws_its_own_order() -> None:
    net, data = linear(), clients(4, 6)
    run = FederatedTraining(rounds=2, protocol=LOCAL).run(net, data, seed=1, at=[1, 2, 3])
    assert same(run.models[1], net)
    for number in (1, 2):
        start = run.models[number]
        updates = [
            LOCAL.observe(start, x, y, generator=round_generator(1, number, client)).message.update
            for client, (x, y) in enumerate(data)
        ]
        for name, p in start.named_parameters():
            mean = 0.4 * updates[0][name].double() + 0.6 * updates[1][name].double()
            assert torch.allclose(run.models[number + 1].get_parameter(name), p - mean.float(), atol=1e-7)
    states = {tuple(round_generator(s, r, c).get_state().tolist()) for s in (0, 1) for r in (1, 2) for c in (0, 1)}
    assert len(states) == 8


def test_the_seed_decides_alone_and_nothing_of_the_caller_changes() -> None:
    net, data = linear().train(), clients(5, 3, 4, 6)
    net.weight.grad = torch.ones_like(net.weight)
    before, states = weights(net), [(x.clone(), y.clone()) for x, y in data]
    globe = torch.random.get_rng_state()
    training = FederatedTraining(rounds=3, clients_per_round=2, protocol=LOCAL)
    a, b, c = (training.run(net, data, seed=s) for s in (0, 0, 1))
    torch.rand(5)
    assert same(a.last, b.last)
    assert a.losses == b.losses
    assert not same(a.last, c.last)
    torch.random.set_rng_state(globe)
    training.run(net, data)
    assert torch.equal(globe, torch.random.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in weights(net).items())
    assert all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(data, states, strict=True))
    assert net.training
    assert a.last is not net
    assert all(p.grad is None for p in a.last.parameters())


def test_what_is_asked_for_does_not_change_the_training() -> None:
    net, data = linear(), clients(5, 3, 4, 6)
    training = FederatedTraining(rounds=5, clients_per_round=2, protocol=LOCAL)
    whole, some = training.run(net, data, at=range(1, 7)), training.run(net, data, at=[4, 2, 4])
    assert list(whole.models) == [1, 2, 3, 4, 5, 6]
    assert list(some.models) == [2, 4]
    assert all(same(some.models[r], whole.models[r]) for r in (2, 4))
    assert some.losses == whole.losses[:3]
    longer = FederatedTraining(rounds=50, clients_per_round=2, protocol=LOCAL).run(net, data, at=[6])
    assert same(longer.last, whole.last)


def test_the_server_draws_distinct_clients_anew_each_round() -> None:
    training = FederatedTraining(clients_per_round=4)
    drawn = [training.draw_clients(10, number, seed=2) for number in range(1, 201)]
    assert all(len(set(chosen)) == 4 and chosen == tuple(sorted(chosen)) for chosen in drawn)
    often = torch.bincount(torch.tensor(drawn).flatten(), minlength=10)
    assert bool(((often - 80).abs() < 35).all())  # five standard deviations of 200 draws with probability 0.4
    assert training.draw_clients(4, 1) == training.draw_clients(4, 9) == (0, 1, 2, 3)


def test_clients_that_are_not_drawn_have_no_say() -> None:
    net, data = linear(), clients(5, 3, 4, 6)
    training = FederatedTraining(rounds=1, clients_per_round=2, protocol=LOCAL)
    chosen = training.draw_clients(4, 1)
    other = [pair if number in chosen else (pair[0] * 0, pair[1]) for number, pair in enumerate(data)]
    assert same(training.run(net, data).last, training.run(net, other).last)


def test_progress_and_losses_over_several_chunks() -> None:
    net, data = linear(), clients(LOSS_CHUNK + 7, 3)
    told: list[tuple[int, int, float]] = []
    training = FederatedTraining(rounds=4, protocol=FedAvg(batch_size=200, lr=0.1))
    run = training.run(net, data, at=[2, 4], progress=lambda *event: told.append(event))
    assert told == [(1, 3, run.losses[0]), (2, 3, run.losses[1]), (3, 3, run.losses[2])]
    x, y = (torch.cat(parts) for parts in zip(*data, strict=True))
    for number, model in run.models.items():
        if number <= len(run.losses):
            assert run.losses[number - 1] == pytest.approx(
                float(nn.functional.cross_entropy(model(x), y).detach()), rel=1e-5
            )


@dataclass(frozen=True, kw_only=True)
class Silence(Defense):
    def protect_message(self, update: dict[str, Tensor], generator: torch.Generator) -> dict[str, Tensor]:
        return {name: torch.zeros_like(value) for name, value in update.items()}


def test_the_defence_is_at_work_in_the_training() -> None:
    net, data = linear(), clients(5, 3)
    run = FederatedTraining(rounds=3, protocol=LOCAL).run(net, data, defense=Silence())
    assert same(run.last, net)
    assert len(set(run.losses)) == 1


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_buffers_and_frozen_parameters_are_not_sent(mode: str) -> None:
    torch.random.default_generator.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    net[3].bias.requires_grad_(False)
    before = weights(net)
    run = FederatedTraining(rounds=2, protocol=FedAvg(batch_size=4, lr=0.1, batchnorm=mode)).run(net, clients(8, 4))
    moved = {name for name, value in weights(run.last).items() if not torch.equal(value, before[name])}
    assert moved == {"0.weight", "1.weight", "1.bias", "3.weight"} | (
        {"0.bias"} if mode == "eval" else moved & {"0.bias"}
    )
    assert not run.last[3].bias.requires_grad


def test_tied_weights_stay_tied() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    run = FederatedTraining(rounds=2, protocol=LOCAL).run(net, clients(6, 2))
    assert run.last[0].weight is run.last[1].weight
    assert not torch.equal(run.last[0].weight, net[0].weight)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(
        ValueError, match=r"rounds: .* got 0(.|\n)*clients_per_round: .* got 1.5(.|\n)*protocol: .*FedSGD"
    ):
        FederatedTraining(rounds=0, clients_per_round=1.5, protocol=FedSGD())  # type: ignore[arg-type]
    training = FederatedTraining(rounds=3)
    for wrong in ([], [0], [5], [1.0], [True]):
        with pytest.raises(ValueError, match="at: expected at least one round from 1, the initial model, to 4"):
            training.run(linear(), clients(3), at=wrong)  # type: ignore[arg-type]
    assert "protocol=FedAvg(" in repr(training)


def test_clients_that_cannot_be_are_told_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FedAvg, "_train", lambda *_: pytest.fail("trained"))
    training, good = FederatedTraining(), clients(3)[0]
    with pytest.raises(ValueError, match=r"seed: .* got -1(.|\n)*at least one pair"):
        training.run(linear(), [], seed=-1)
    x, y = good
    bad = [
        (x[:0], y[:0]),
        (x, y.float()),
        (x, y + 9),
        (x * float("nan"), y),
        (x.double(), y),
        (x[:, :2], y),
        (x, y[:2]),
        3,
    ]
    with pytest.raises(ValueError, match="federated training:") as caught:
        training.run(linear(), [good, *bad])  # type: ignore[list-item]
    told = str(caught.value)
    for number in range(1, 6):
        assert f"client {number}:" in told
    assert "client 0:" not in told
    assert "and 3 more" in told
    for wrong in bad[5:]:
        with pytest.raises(ValueError, match="client 1: "):
            training.run(linear(), [good, wrong])  # type: ignore[list-item]


def test_divergence_names_round_and_client() -> None:
    net, data = nn.Sequential(linear(), nn.Linear(3, 3), nn.Linear(3, 3)), clients(4, 4)
    training = FederatedTraining(rounds=3, protocol=FedAvg(lr=1e20, epochs=9, batch_size=2))
    with pytest.raises(ValueError, match=r"round \d, client \d: .*diverged"):
        training.run(net, data)


def test_real_writers_learn(real_data: Path) -> None:
    if not (real_data / "femnist.npz").is_file():
        pytest.skip("no femnist.npz")
    data = load_data("femnist", real_data).normalised(0.96424, 0.15768)
    rows = [part for part in split_by_group(data, limit=20) if len(part) == 20][:4]
    net = build_model("femnist-cnn", input_shape=(1, 28, 28), num_classes=62)
    training = FederatedTraining(rounds=5, protocol=FedAvg(epochs=2, batch_size=10, lr=0.1))
    run = training.run(net, [(data.x[part], data.y[part]) for part in rows], at=[5, 6])
    assert len(run.losses) == 5
    assert all(later < earlier for earlier, later in zip(run.losses, run.losses[1:], strict=False))
    assert run.losses[-1] < 0.95 * run.losses[0]
