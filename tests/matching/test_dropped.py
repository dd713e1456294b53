"""Dropped units of the client's network: read where layers are dense, searched below a cut where they are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import HeadFirst
from leakscope.contracts.channel import Channel
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.defenses import NetworkDropout
from leakscope.equations.embedding import recover_embedding
from leakscope.federation import FedAvg, FedSGD
from leakscope.matching.held import MASKS, PACE, DroppedMatching, searched_layers
from leakscope.metrics import psnr
from leakscope.metrics.assignment import assign


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(*layers: nn.Module) -> nn.Sequential:
    """The layers with weights of one seed."""
    net, draws = nn.Sequential(*layers), seeded(1)
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.randn(value.shape, generator=draws) / max(value[0].numel(), 1) ** 0.5)
    return net


def dense(activation: nn.Module) -> nn.Sequential:
    return made(nn.Flatten(), nn.Linear(36, 50), activation, nn.Linear(50, 40), activation, nn.Linear(40, 6))


def convolutions() -> nn.Sequential:
    return made(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(576, 6),
    )


def pictures(count: int) -> Tensor:
    x = torch.rand((count, 1, 6, 6), generator=seeded())
    return (x + x.roll(1, 2) + x.roll(1, 3)) / 3


def dropped(net: nn.Module, x: Tensor, probability: float = 0.5, seed: int = 0) -> Observation:
    y = torch.arange(len(x))
    return FedSGD().observe(net, x, y, NetworkDropout(probability=probability), Knowledge.adaptive_server, seeded(seed))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()], ids=["relu", "tanh"])
@pytest.mark.parametrize("count", [1, 3])
def test_masks_of_dense_layers_are_read_and_the_input_follows(activation: nn.Module, count: int) -> None:
    x = pictures(count)
    seen = dropped(dense(activation), x)
    result = HeadFirst()(seen, seed=0)
    guess = result.inputs[assign(x.flatten(1), result.inputs.flatten(1))]
    assert float(psnr(x, guess).min()) > 60
    assert result.info["method"] == "algebra"
    assert "defence approximated" not in result.flags


def test_a_defence_that_was_not_there_is_not_undone() -> None:
    """Told of masks that no client drew, the layers below do not fit, and nothing is certified."""
    x = pictures(1)
    plain = FedSGD().observe(dense(nn.Tanh()), x, torch.tensor([0]), None, Knowledge.adaptive_server)
    told = Observation(
        model=plain.model,
        messages=plain.messages,
        inputs=plain.inputs,
        num_classes=6,
        num_examples=1,
        knowledge=plain.knowledge,
        training=plain.training,
        channel=Channel(inexact=True, units_dropped=0.5, dropped_layers=("3", "5")),
    )
    found = recover_embedding(told)
    assert not found.reaches_input
    assert any("was not solved" in note for note in found.notes)
    result = HeadFirst(iterations=3)(told, seed=0)
    assert "defence approximated" in result.flags


def test_features_that_were_dropped_are_not_seen_and_the_others_are_those_of_the_whole_network() -> None:
    x, net = pictures(1), convolutions()
    found = recover_embedding(dropped(net, x, 0.5))
    assert found.seen is not None
    assert 0.1 < float(found.seen.mean()) < 0.6
    assert found.layer == "5"
    assert bool((found.adjoints[found.seen == 0] == 0).all())


def test_the_search_of_masks_begins_at_their_mean_and_keeps_them_between_zero_and_one() -> None:
    x, net = pictures(1), convolutions()
    seen = dropped(net, x)
    found = recover_embedding(seen)
    below = searched_layers(net, "5", ("2", "5"), x)
    assert below == ["2"]
    matching = DroppedMatching(
        model=net,
        layer=net[5],
        features=found.features.float(),
        adjoints=found.adjoints.float(),
        gradients={name: seen.message.update[name] for name in ("0.weight", "2.weight")},
        inputs=seen.inputs,
        first=frozenset({"0.weight"}),
        dropped=below,
        probability=0.5,
    )
    start = matching.start(seeded())
    assert start.shape == (1, 36 + 8 * 36)
    assert bool((start[0, 36:] * PACE == 0.5).all())
    # Masks of one, divided by one minus the probability, are the network itself twice as strong.
    ones = torch.cat([start[:, :36], torch.full((1, 288), 0.5 / PACE)], 1)
    plain = net[:5](matching.to_model(matching.pictures(ones)))
    assert torch.allclose(matching.at_cut(ones), plain, atol=1e-6)
    rows = matching.project(start + 100)
    assert float(rows[0, 36:].max()) * PACE == pytest.approx(1.0)
    before, after = (matching.run(start, MASKS, steps).curves[-1] for steps in (1, 40))
    assert float(after[0]) < float(before[0])


def test_searching_the_masks_of_convolutions_beats_the_mean_of_the_network() -> None:
    x = pictures(1)
    seen = dropped(convolutions(), x, 0.5)
    knowing, ignoring = (
        float(psnr(x, HeadFirst(iterations=200, ignore_defense=ignore)(seen, seed=0).inputs))
        for ignore in (False, True)
    )
    assert knowing > ignoring + 1
    assert "defence approximated" in HeadFirst(iterations=5)(seen, seed=0).flags


def test_one_local_step_has_one_set_of_masks_and_several_have_several() -> None:
    rule = NetworkDropout(probability=0.3, layers=("2",))
    one, many = FedAvg(epochs=1, batch_size=4).channel(rule, 4), FedAvg(epochs=2, batch_size=4).channel(rule, 4)
    assert one is not None
    assert one.dropped_layers == ("2",)
    assert many == Channel(inexact=True)
    assert NetworkDropout(probability=0.0).channel() == Channel()
