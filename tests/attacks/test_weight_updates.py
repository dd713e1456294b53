"""Attacks on updates of many local steps: SME and DLFA where they must work, where they cannot, and with bad input."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import DLFA, SME, InvertingGradients
from leakscope.attacks.dlfa import average_aligned
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import LocalTraining, Observation
from leakscope.federation import FedAvg, FedSGD
from leakscope.matching import Victim
from leakscope.metrics import assign, psnr
from leakscope.models import MODELS, build_model

pytestmark = pytest.mark.slow

LABELS = dataclasses.replace(Knowledge.honest_server, labels="yes")


def smooth(examples: int, side: int = 12) -> Tensor:
    x = torch.rand(examples, 1, side, side, generator=torch.Generator().manual_seed(3))
    for axis in (2, 3):
        x = (x + x.roll(1, axis) + x.roll(-1, axis)) / 3
    return (x - x.amin((1, 2, 3), keepdim=True)) / (x.amax((1, 2, 3), keepdim=True) - x.amin((1, 2, 3), keepdim=True))


def small_net() -> nn.Module:
    """The FEMNIST net, half as wide: replayed steps take a fraction of the time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = [
            ("conv1", nn.Conv2d(1, 16, 3, padding=1)), ("act1", nn.ReLU()), ("pool1", nn.AvgPool2d(2)),
            ("conv2", nn.Conv2d(16, 32, 3, padding=1)), ("act2", nn.ReLU()), ("pool2", nn.AvgPool2d(2)),
            ("flatten", nn.Flatten()), ("fc1", nn.Linear(288, 60)), ("act3", nn.ReLU()), ("fc2", nn.Linear(60, 6)),
        ]  # fmt: skip
        return nn.Sequential(OrderedDict(layers))


def look(
    protocol: FedAvg, examples: int = 3, knowledge: Knowledge = LABELS, net: nn.Module | None = None
) -> tuple[Observation, Tensor]:
    net = small_net() if net is None else net
    x, y = smooth(examples), torch.arange(examples) % 6
    return protocol.observe(net, x, y, None, knowledge, torch.Generator().manual_seed(0)), x


def score(x: Tensor, found: Tensor) -> float:
    return float(psnr(x, found[assign(x, found)].clamp(0, 1)).mean())


def test_sme_beats_one_gradient_at_the_start_and_the_replay_beats_both() -> None:
    seen, x = look(FedAvg(epochs=8, batch_size=3, lr=0.12))
    options = {"iterations": 80, "compile": "never"}
    single = SME(beta=0.0, beta_lr=0.0, **options)(seen)
    searched = SME(**options)(seen)
    replayed = DLFA(**options)(seen)
    assert score(x, single.inputs) + 1 < score(x, searched.inputs) < score(x, replayed.inputs)
    assert 0.2 < searched.info["beta"] < 0.8
    assert "beta" not in single.info
    assert float(searched.scores[0]) < float(single.scores[0])


def test_with_beta_fixed_at_zero_sme_is_inverting_gradients() -> None:
    seen, _ = look(FedAvg(epochs=5, batch_size=3, lr=0.05))
    seen = seen.to(dtype=torch.float64)
    # Half the sum of both directions' variation is their mean.
    ig = InvertingGradients(update="gradient", distance="cosine", tv=0.01, lr=0.2, iterations=20)(seen, seed=4)
    sme = SME(beta=0.0, beta_lr=0.0, distance="cosine", tv=0.02, lr=0.2, iterations=20)(seen, seed=4)
    assert torch.allclose(ig.inputs, sme.inputs, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_sme_takes_every_reference_model(name) -> None:
    entry = MODELS[name]
    net = build_model(name)
    x = torch.rand(2, *entry.input_shape, generator=torch.Generator().manual_seed(0))
    seen = FedAvg(epochs=2, batch_size=1, lr=0.01).observe(net, x, torch.tensor([0, 1]), None, LABELS)
    found = SME(iterations=2, compile="never")(seen)
    assert found.inputs.shape == x.shape
    assert torch.isfinite(found.inputs).all()
    assert 0 <= found.info["beta"] <= 1


CLIENTS = pytest.mark.parametrize(
    "client", [{"momentum": 0.9}, {"optimizer": "adam", "lr": 0.001}, {}], ids=["momentum", "adam", "plain"]
)


@CLIENTS
def test_sme_needs_no_recipe_and_a_replay_without_one_is_flagged(client) -> None:
    protocol = FedAvg(**{"epochs": 4, "batch_size": 2, "lr": 0.02, **client})
    knowledge = dataclasses.replace(LABELS, learning_rate=False) if client else Knowledge.eavesdropper
    net = build_model("femnist-cnn", input_shape=(1, 12, 12), num_classes=6)
    seen, x = look(protocol, 2, dataclasses.replace(knowledge, labels="yes"), net)
    options = {"iterations": 120, "lr": 0.2, "compile": "never"}
    searched = SME(**options)(seen)
    assert "steps not simulated" not in searched.flags
    blind = dataclasses.replace(Knowledge.eavesdropper, labels="yes")
    guess = SME(**options)(look(FedAvg(epochs=1, batch_size=2, lr=1e-9), 2, blind, net)[0].with_update(
        {k: torch.randn(v.shape, generator=torch.Generator().manual_seed(1)) for k, v in seen.message.update.items()}
    ))  # fmt: skip
    assert score(x, searched.inputs) > score(x, guess.inputs) + 3
    for attack in (DLFA(iterations=3, compile="never"), InvertingGradients(iterations=3, compile="never")):
        assert "steps not simulated" in attack(seen).flags
    plain, _ = look(FedAvg(epochs=2, batch_size=2, lr=0.02), 2)
    assert "steps not simulated" not in DLFA(iterations=2, compile="never")(plain).flags


@pytest.mark.parametrize(
    ("variant", "preset"),
    [(name, None) for name in ("copies", "shared", "epoch", "single")]
    + [("copies", "paper-femnist"), ("copies", "paper-cifar")],
)
def test_every_variant_of_the_replay_runs_and_lowers_its_objective(variant, preset) -> None:
    seen, x = look(FedAvg(epochs=3, batch_size=2, lr=0.05), 4)
    options = {"variant": variant, "iterations": 12, "compile": "never"}
    attack = DLFA(**options) if preset is None else DLFA.preset(preset, **options)
    found = attack(seen)
    assert found.inputs.shape == x.shape
    curve = found.history["objective"][0]
    assert min(curve) < curve[0]
    assert attack.copies(seen) == (3 if variant == "copies" else 1)


def test_one_batch_an_epoch_needs_one_copy() -> None:
    seen, _ = look(FedAvg(epochs=5, batch_size=8, lr=0.05), 3)
    assert DLFA().copies(seen) == 1
    assert DLFA().copies(look(FedAvg(epochs=5, batch_size=2, lr=0.05), 3)[0]) == 5


def test_per_epoch_copies_recover_shuffled_epochs() -> None:
    seen, x = look(FedAvg(epochs=3, batch_size=2, lr=0.05), 4)
    found = DLFA(iterations=80, compile="never")(seen)
    assert score(x, found.inputs) > 20


def test_a_known_order_is_used() -> None:
    net = small_net()
    x, y = smooth(4), torch.arange(4)
    seen = FedAvg(epochs=3, batch_size=2, lr=0.05).observe(net, x, y, None, Knowledge.full)
    attack = DLFA(iterations=1, compile="never")
    assert attack.copies(seen) == 1
    assert attack.matcher(seen).simulation.order == seen.training.batch_order


def test_random_filters_go_with_restarts() -> None:
    seen, x = look(FedAvg(epochs=2, batch_size=2, lr=0.05), 4)
    found = DLFA.preset("paper-cifar", iterations=2, restarts=2, compile="never")(seen)
    assert found.inputs.shape == x.shape


@pytest.mark.parametrize("variant", ["epoch", "single"])
def test_lengths_agree_for_added_losses_too(variant) -> None:
    """One step of a client whose loss is a sum: a replay of the truth is the observed update, whatever the variant."""
    net = small_net()
    x, y = smooth(3), torch.arange(3)
    gradient = FedSGD(reduction="sum").observe(net, x, y).message.update
    seen = Observation.from_update(
        net, {name: 1e-3 * value for name, value in gradient.items()}, kind="weight_delta", reduction="sum",
        input_shape=(1, 12, 12), num_classes=6, num_examples=3, knowledge=LABELS, labels=y,
        training=LocalTraining(epochs=1, batch_size=3, learning_rate=1e-3, optimizer="sgd"),
    )  # fmt: skip
    attack = DLFA(variant=variant, distance="relative-squared-l2", tv=0.0)
    matcher = attack.matcher(seen)
    victim = Victim.of(seen)
    found, _ = matcher.simulation(victim, victim.tensors, x, y, {})
    assert float(matcher.distance(attack._observed(seen, matcher), found)) < 1e-6  # single precision


def test_one_local_step_hides_nothing_and_is_not_flagged() -> None:
    seen, _ = look(FedAvg(epochs=1, batch_size=4, lr=0.05, momentum=0.9), 4)
    assert "steps not simulated" not in InvertingGradients(iterations=1, compile="never")(seen).flags
    several, _ = look(FedAvg(epochs=2, batch_size=4, lr=0.05, momentum=0.9), 4)
    strange = dataclasses.replace(several, training=dataclasses.replace(several.training, optimizer="rmsprop"))
    with pytest.raises(NotApplicable, match=r"replays SGD and Adam.*rmsprop"):
        InvertingGradients(update="unroll")(strange)
    assert "steps not simulated" in DLFA(iterations=1, compile="never")(strange).flags


@CLIENTS
def test_a_replay_takes_the_clients_own_optimiser(client) -> None:
    seen, x = look(FedAvg(**{"epochs": 3, "batch_size": 2, "lr": 0.02, **client}), 2)
    for attack in (DLFA(iterations=120, compile="never"), InvertingGradients(iterations=1, update="unroll")):
        simulation = attack.matcher(seen).simulation
        victim = Victim.of(seen)
        replayed, _ = simulation(victim, victim.tensors, x, seen.labels, {})
        for name, value in seen.message.update.items():
            assert torch.allclose(replayed[name], value, atol=1e-5)
    found = DLFA(iterations=80, compile="never")(seen)
    assert "steps not simulated" not in found.flags
    if client.get("optimizer") != "adam":
        assert score(x, found.inputs) > score(x, SME(iterations=80, compile="never")(seen).inputs)


def test_one_local_step_is_compiled_where_the_run_is_long_and_nowhere_else() -> None:
    seen, _ = look(FedAvg(epochs=3, batch_size=2, lr=0.02), 2)
    for settings, compiled in (
        ({"iterations": 10}, False),
        ({"iterations": 10**6}, True),
        ({"iterations": 10**6, "compile": "never"}, False),
        ({"iterations": 10**6, "checkpoint": False}, False),
    ):
        assert DLFA(**settings).matcher(seen).simulation.compiled == compiled


def test_an_update_is_kept_in_the_models_order_whatever_it_came_in(tmp_path) -> None:
    """Files and mappings give tensors in any order; distances that weigh by depth must not care."""
    seen, _ = look(FedAvg(epochs=2, batch_size=2, lr=0.05), 4)
    names = list(seen.message.update)
    shuffled = seen.with_update(dict(reversed(seen.message.update.items())))
    assert list(shuffled.message.update) == names
    seen.save(tmp_path / "seen.safetensors")
    loaded = Observation.load(tmp_path / "seen.safetensors", seen.model)
    assert list(loaded.message.update) == names == [name for name, _ in seen.model.named_parameters()]
    attack = DLFA.preset("paper-femnist", iterations=2, compile="never")
    assert torch.equal(attack(seen).inputs, attack(loaded).inputs)


def test_aligned_copies_average_to_the_truth_whatever_their_orders() -> None:
    truth = smooth(3)
    for order in permutations(range(3)):
        assert torch.allclose(average_aligned(torch.stack([truth, truth[list(order)]])), truth)


def test_label_counts_suffice_and_labels_are_not_given_in_their_order() -> None:
    knowledge = dataclasses.replace(Knowledge.honest_server, labels="counts")
    net = small_net()
    x, y = smooth(4), torch.tensor([5, 0, 5, 2])
    seen = FedAvg(epochs=3, batch_size=4, lr=0.05).observe(net, x, y, None, knowledge)
    assert seen.labels is None
    for attack in (SME(iterations=2, compile="never"), DLFA(iterations=2, compile="never")):
        found = attack(seen)
        assert sorted(found.labels.tolist()) == [0, 2, 5, 5]
        assert "labels uncertain" not in found.flags
    orders = {tuple(DLFA(iterations=1, compile="never")(seen, seed=s).labels.tolist()) for s in range(6)}
    assert len(orders) > 1  # drawn, not sorted: batches of one class would mislead the replay


def test_gradients_are_matched_too() -> None:
    net = build_model("femnist-cnn", input_shape=(1, 12, 12), num_classes=6)
    x = smooth(1)
    seen = FedSGD().observe(net, x, torch.tensor([2]))
    for attack in (SME(iterations=150, compile="never"), DLFA(iterations=150, compile="never")):
        found = attack(seen)
        assert score(x, found.inputs) > 25
        assert "beta" not in found.info


def test_a_bad_update_is_one_clear_error() -> None:
    seen, _ = look(FedAvg(epochs=2, batch_size=2, lr=0.05))
    update = {name: value.clone() for name, value in seen.message.update.items()}
    broken = {**update, "conv2.weight": update["conv2.weight"] * float("nan")}
    missing = {name: value for name, value in update.items() if name != "conv2.weight"}
    facts = {"input_shape": (1, 12, 12), "num_classes": 6, "kind": "weight_delta"}
    for attack in (SME(), DLFA()):
        with pytest.raises(ValueError, match=r"NaN or infinite entries in conv2.weight"):
            attack(seen.with_update(broken))
    with pytest.raises(ValueError, match=r"conv2.weight"):
        Observation.from_update(seen.model, missing, num_examples=3, **facts)
    with pytest.raises(ValueError, match=r"num_examples.*got 0"):
        Observation.from_update(seen.model, update, num_examples=0, **facts)


def test_settings_are_checked() -> None:
    for make in (
        lambda: SME(beta=2.0),
        lambda: SME(beta_every=0),
        lambda: SME(tv=-1.0),
        lambda: SME(tv_variant="nonsense"),
        lambda: DLFA(tv_variant="nonsense"),
        lambda: SME(distance="nonsense"),
        lambda: DLFA(variant="other"),
        lambda: DLFA(factor=(0.0, 1.0)),
        lambda: DLFA(agreement=-1.0),
        lambda: DLFA(distance="nonsense"),
        lambda: DLFA(soft_range=-1.0),
        lambda: DLFA(compile="always"),
    ):
        with pytest.raises(ValueError, match="expected"):
            make()


@pytest.mark.parametrize("attack", [InvertingGradients(iterations=60), DLFA(iterations=60)])
def test_the_visiting_order_is_searched_where_there_are_few(attack: InvertingGradients | DLFA) -> None:
    protocol = FedAvg(epochs=2, batch_size=1, lr=0.05)
    seen, x = look(protocol, examples=2)
    order = look(protocol, 2, dataclasses.replace(LABELS, batch_order=True))[0].training.batch_order
    assert order is not None
    assert order != ((0,), (1,)) * 2, "or the test would show nothing"
    told: list[tuple[int, int]] = []
    found = attack(seen, seed=0, progress=lambda done, total, _: told.append((done, total)))
    assert found.info["batch_order"] == order
    assert any("4 visiting orders exist; 4" in note for note in found.notes)
    assert score(x, found.inputs) > 20
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert {total for _, total in told} == {told[-1][0]}
    again = attack(seen, seed=0)
    assert torch.equal(again.inputs, found.inputs)


def test_many_visiting_orders_are_drawn() -> None:
    seen, _ = look(FedAvg(epochs=3, batch_size=1, lr=0.05), examples=3)
    for attack in (InvertingGradients(iterations=4), DLFA(iterations=4)):
        found = attack(seen)
        assert any("216 visiting orders or more exist; 8" in note for note in found.notes), found.notes
        assert ("batch_order" in found.info) == isinstance(attack, InvertingGradients)
    known = look(FedAvg(epochs=3, batch_size=1, lr=0.05), 3, dataclasses.replace(LABELS, batch_order=True))[0]
    assert not any("visiting orders" in note for note in InvertingGradients(iterations=4)(known).notes)
    whole = look(FedAvg(epochs=3, batch_size=3, lr=0.05), 3)[0]
    assert not any("visiting orders" in note for note in InvertingGradients(iterations=4)(whole).notes)
