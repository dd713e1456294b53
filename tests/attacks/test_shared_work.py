"""Equal work is done once, and what is handed out again is what a search of its own would have found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import HeadFirst, InvertingGradients, shared_work
from leakscope.attacks.shared_work import SharedWork
from leakscope.contracts.attack import Attack
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.defenses import GradientPruning
from leakscope.federation import FedSGD
from leakscope.matching import Matcher

SHAPE = (1, 6, 6)
QUICK = InvertingGradients(iterations=4)


def net(seed: int = 0) -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draws) / 5)
    return model


def picture(seed: int = 0) -> Tensor:
    return torch.rand((1, *SHAPE), generator=torch.Generator().manual_seed(seed))


def look(model: nn.Module | None = None, x: Tensor | None = None, **how: Any) -> Observation:
    return FedSGD().observe(model or net(), picture() if x is None else x, torch.tensor([1]), **how)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Matcher]:
    """The searches that were really run."""
    done: list[Matcher] = []
    original = Matcher.run

    def run(self: Matcher, *args: Any, **rest: Any) -> Any:
        done.append(self)
        return original(self, *args, **rest)

    monkeypatch.setattr(Matcher, "run", run)
    return done


def same(one: Reconstruction, other: Reconstruction) -> bool:
    facts = [{name: value for name, value in r.info.items() if name != "seconds"} for r in (one, other)]
    return (
        torch.equal(one.inputs, other.inputs)
        and torch.equal(one.scores, other.scores)
        and one.history == other.history
        and (one.flags, one.notes) == (other.flags, other.notes)
        and facts[0] == facts[1]
    )


def test_an_equal_search_is_run_once_and_handed_out_to_the_last_bit(runs: list[Matcher]) -> None:
    alone = QUICK(look(), seed=3)
    shared = SharedWork()
    first, second = (QUICK(look().with_facts(shared=shared), seed=3) for _ in range(2))
    assert len(runs) == 2, "one alone, and one for both"
    assert same(alone, first)
    assert same(alone, second)
    assert shared.recalled_seconds > 0


def test_observations_without_the_store_share_nothing(runs: list[Matcher]) -> None:
    QUICK(look().with_facts(shared=SharedWork()))
    QUICK(look())
    QUICK(look())
    assert len(runs) == 3


def test_head_first_and_inverting_gradients_share_the_match_of_the_whole_update(runs: list[Matcher]) -> None:
    pruned = look(defense=GradientPruning(fraction=0.9)).with_facts(shared=SharedWork())
    ours = HeadFirst(iterations=4)(pruned, seed=1)
    before = len(runs)
    theirs = QUICK(pruned, seed=1)
    assert ours.info["method"] == "whole update"
    assert len(runs) == before, "the second ran no search of its own"
    assert torch.equal(ours.inputs, theirs.inputs)
    assert same(theirs, QUICK(pruned.with_facts(shared=None), seed=1))


def test_labels_that_are_known_are_as_good_as_the_same_ones_read(runs: list[Matcher]) -> None:
    knowing = dataclasses.replace(Knowledge.honest_server, labels="yes")
    shared = SharedWork()
    read, known = (QUICK(one.with_facts(shared=shared)) for one in (look(), look(knowledge=knowing)))
    assert torch.equal(read.inputs, known.inputs)
    assert len(runs) == 1
    assert read.info["labels"] != known.info["labels"] == "known", "how labels were come by is told of each"


def test_labels_are_read_once_and_by_whoever_knows_more_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Observation] = []
    original = shared_work.label_candidates

    def counted(observation: Observation, generator: torch.Generator) -> Any:
        read.append(observation)
        return original(observation, generator)

    monkeypatch.setattr(shared_work, "label_candidates", counted)
    noise = look().with_update({name: torch.rand_like(value) for name, value in look().message.update.items()})
    counting = dataclasses.replace(
        noise,
        knowledge=dataclasses.replace(Knowledge.honest_server, labels="counts"),
        label_counts=torch.tensor([0, 1, 0]),
    )
    other = dataclasses.replace(QUICK, tv=0.5)
    store = SharedWork()
    both = [seen.with_facts(shared=store) for seen in (noise, counting)]
    shared = [attack(seen, seed=2) for attack in (QUICK, other) for seen in both]
    assert len(read) == 2, "once for each observation, whatever the attack"
    alone = [attack(seen, seed=2) for attack in (QUICK, other) for seen in (noise, counting)]
    assert len(read) == 6
    assert all(same(one, two) for one, two in zip(shared, alone, strict=True))
    assert any("readings of the labels were tried" in note for note in alone[0].notes)


def _other_buffer() -> nn.Module:
    model = net()
    model.register_buffer("scale", torch.ones(1))
    return model


@pytest.mark.parametrize(
    "attack, observation, seed",
    [
        (QUICK, look(), 1),
        (dataclasses.replace(QUICK, tv=0.5), look(), 0),
        (dataclasses.replace(QUICK, iterations=5), look(), 0),
        (QUICK, look(net(seed=1)), 0),
        (QUICK, look(x=picture(seed=1)), 0),
        (QUICK, look(_other_buffer()), 0),
        (QUICK, look().to(dtype=torch.float64), 0),
    ],
    ids=["seed", "settings", "steps", "weights", "update", "buffers", "precision"],
)
def test_whatever_the_result_depends_on_makes_another_search(
    attack: Attack, observation: Observation, seed: int, runs: list[Matcher]
) -> None:
    shared = SharedWork()
    QUICK(look().with_facts(shared=shared), seed=0)
    found = attack(observation.with_facts(shared=shared), seed=seed)
    assert len(runs) == 2
    assert same(found, attack(observation, seed=seed))


def test_what_was_handed_out_may_be_changed(runs: list[Matcher]) -> None:
    seen = look().with_facts(shared=SharedWork())
    first = QUICK(seen)
    truth = first.inputs.clone()
    first.inputs.zero_()
    second = QUICK(seen)
    second.inputs.zero_()
    third = QUICK(seen)
    assert torch.equal(third.inputs, truth)
    assert len(runs) == 1


def test_a_search_that_is_stopped_leaves_nothing(runs: list[Matcher]) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    seen = look().with_facts(shared=SharedWork())
    with pytest.raises(KeyboardInterrupt):
        QUICK(seen, progress=stop)
    found = QUICK(seen)
    assert len(runs) == 2
    assert same(found, QUICK(look()))


def test_the_oldest_results_make_room(runs: list[Matcher], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_work, "MOST_NUMBERS", 2 * 36 + 8)  # and a few labels
    seen = look().with_facts(shared=SharedWork())
    for seed in (0, 1, 2, 2, 1, 0):
        QUICK(seen, seed=seed)
    assert len(runs) == 4, "the first of three was gone"


def test_what_cannot_be_compared_is_not_shared(runs: list[Matcher]) -> None:
    @dataclasses.dataclass(frozen=True)
    class Listed(type(QUICK.matcher(look()).distance)):  # type: ignore[misc]
        names: list[str] = dataclasses.field(default_factory=list)

    class Own(InvertingGradients):
        def matcher(self, observation: Observation) -> Matcher:
            return dataclasses.replace(super().matcher(observation), distance=Listed())

    seen = look().with_facts(shared=SharedWork())
    one, two = Own(iterations=4)(seen), Own(iterations=4)(seen)
    assert len(runs) == 2
    assert same(one, two)
