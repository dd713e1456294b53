"""What an adversary sees, and above all what it does not."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.defense import Defense
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.knowledge import KNOWLEDGE_PRESETS, Knowledge
from leakscope.contracts.observation import Message, Observation
from leakscope.contracts.task import CustomLoss, MultiLabel, PerPosition, Regression, Task
from leakscope.defenses import GradientNoise
from leakscope.federation import FedAvg, FedSGD, Vertical
from leakscope.models import build_model


def small_net() -> nn.Module:
    return build_model("mlp", input_shape=(1, 4, 4), num_classes=3, hidden=[6])


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(5, 1, 4, 4, generator=generator), torch.tensor([0, 2, 1, 2, 0])


def tensors_within(thing: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that can be reached from ``thing`` by fields, items, or module state."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, str | int | float | bool | type(None) | torch.dtype):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    children: list[Any] = []
    if isinstance(thing, Mapping):
        children = [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        children = list(thing)
    children += list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    for child in children:
        yield from tensors_within(child, seen)


@pytest.mark.parametrize("preset", KNOWLEDGE_PRESETS)
@pytest.mark.parametrize("protocol", [FedSGD(), FedAvg(epochs=2, batch_size=2, lr=0.1)], ids=repr)
def test_private_inputs_cannot_be_reached_from_an_observation(protocol, preset, batch) -> None:
    x, y = batch
    seen = protocol.observe(small_net(), x, y, knowledge=Knowledge.preset(preset))
    found = list(tensors_within(seen))
    assert len(found) > 4
    private = x.untyped_storage().data_ptr()
    for tensor in found:
        assert tensor.untyped_storage().data_ptr() != private
        assert not (tensor.numel() == x.numel() and torch.allclose(tensor.flatten().float(), x.flatten()))
        for example in x:
            assert not (tensor.numel() == example.numel() and torch.allclose(tensor.flatten(), example.flatten()))
    if preset != "full":
        assert not any(t.shape == y.shape and torch.equal(t.double(), y.double()) for t in found)


def test_the_walk_would_notice(batch) -> None:
    x, y = batch
    seen = FedSGD().observe(small_net(), x, y)
    seen.model.register_buffer("smuggled", x[0])
    assert any(t.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for t in tensors_within(seen))


def test_knowledge_decides_each_fact(batch) -> None:
    x, y = batch
    protocol = FedAvg(epochs=2, batch_size=2, lr=0.1)
    net = small_net()
    nothing = protocol.observe(net, x, y, knowledge=Knowledge(num_examples=False))
    assert nothing.training == type(nothing.training)()
    assert nothing.num_examples is None
    assert nothing.value_range is None
    assert nothing.labels is None
    assert nothing.label_counts is None
    server = protocol.observe(net, x, y)
    assert (server.training.epochs, server.training.batch_size, server.training.learning_rate) == (2, 2, 0.1)
    assert server.training.batch_order is None
    assert server.labels is None
    counts = protocol.observe(net, x, y, knowledge=dataclasses.replace(Knowledge.honest_server, labels="counts"))
    assert counts.label_counts.tolist() == [2, 1, 2]
    assert counts.labels is None
    full = protocol.observe(net, x, y, knowledge=Knowledge.full)
    assert torch.equal(full.labels, y)
    assert len(full.training.batch_order) == 6


def test_observation_is_immutable_and_its_own_copy(batch) -> None:
    x, y = batch
    net = small_net()
    seen = FedSGD().observe(net, x, y)
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen.num_examples = 7
    with pytest.raises(TypeError):
        seen.message.update["new"] = x
    before = {k: v.clone() for k, v in seen.model.state_dict().items()}
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    assert all(torch.equal(before[k], v) for k, v in seen.model.state_dict().items())


def test_the_model_is_copied_once_and_other_facts_are_checked_again(batch, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = FedSGD().observe(small_net(), *batch)
    copies: list[Any] = []
    original = copy.deepcopy
    monkeypatch.setattr(copy, "deepcopy", lambda *given: copies.append(given[0]) or original(*given))
    for same in (seen.without_channel(), seen.with_update(seen.message.update), seen.with_facts(model_name="mine")):
        assert same.model is seen.model
    assert not [one for one in copies if isinstance(one, nn.Module)]
    assert seen.to(dtype=torch.float64).model is not dataclasses.replace(seen).model is not seen.model
    assert [one for one in copies if one is seen.model] == [seen.model] * 2
    with pytest.raises(ValueError, match="labels"):
        seen.with_facts(labels=torch.tensor([0]))


@pytest.mark.parametrize("preset", KNOWLEDGE_PRESETS)
def test_round_trip_through_files(preset, batch, tmp_path: Path) -> None:
    x, y = batch
    net = small_net()
    seen = FedAvg(epochs=1, batch_size=2, lr=0.1).observe(net, x, y, knowledge=Knowledge.preset(preset))
    seen.save(tmp_path / "update")
    again = Observation.load(tmp_path / "update.safetensors", small_net())
    for name in ("knowledge", "training", "value_range", "input_shape", "num_classes", "num_examples", "reduction"):
        assert getattr(again, name) == getattr(seen, name)
    assert again.message.kind == "weight_delta"
    assert all(torch.equal(again.message.update[k], v) for k, v in seen.message.update.items())
    assert all(torch.equal(again.model.state_dict()[k], v) for k, v in seen.model.state_dict().items())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["update.json", "update.safetensors"]


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: (p / "update.safetensors").write_bytes(b"\x00" * 20),
        lambda p: (p / "update.safetensors").unlink(),
        lambda p: (p / "update.json").write_text("{}"),
        lambda p: (p / "update.json").write_text("not json"),
        lambda p: (p / "update.json").write_text("[]"),
        lambda p: (p / "update.json").write_text((p / "update.json").read_text().replace('"format": 3', '"format": 9')),
        lambda p: (p / "update.safetensors").write_bytes((p / "update.safetensors").read_bytes()[:-50]),
    ],
)
def test_damaged_files_give_one_clear_error(harm, batch, tmp_path: Path) -> None:
    FedSGD().observe(small_net(), *batch).save(tmp_path / "update")
    harm(tmp_path)
    with pytest.raises(ValueError, match="update"):
        Observation.load(tmp_path / "update.safetensors", small_net())


def test_another_model_is_refused(batch, tmp_path: Path) -> None:
    FedSGD().observe(small_net(), *batch).save(tmp_path / "update")
    with pytest.raises(ValueError, match="do not fit the model") as error:
        Observation.load(tmp_path / "update", build_model("logistic", input_shape=(1, 4, 4), num_classes=3))
    assert "\n" not in str(error.value), "one line, whatever torch says of every tensor"


def test_all_problems_of_an_update_are_told_at_once() -> None:
    net = small_net()
    update = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    first, *_ = update
    update[first] = torch.zeros(1, 1)
    update["stranger"] = torch.zeros(2)
    last = list(update)[-2]
    del update[last]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is looked at below
        Observation.from_update(net, update, input_shape=(1, 4, 4), num_classes=3, num_examples=0)
    for word in (first, "stranger", last, "num_examples"):
        assert word in str(caught.value)
    with pytest.raises(ValueError, match="mapping"):
        Message(update=[torch.zeros(1)])


def test_moves_between_precisions(batch) -> None:
    seen = FedSGD().observe(small_net(), *batch, knowledge=Knowledge.full)
    double = seen.to(dtype=torch.float64)
    assert double.dtype == torch.float64
    assert next(double.model.parameters()).dtype == torch.float64
    assert double.labels.dtype == torch.int64
    assert seen.dtype == torch.float32


def test_value_range_of_channels() -> None:
    box = ValueRange.normalised(mean=(0.5, 0.25), std=(0.5, 0.25))
    x = torch.rand(3, 2, 4, 4)
    assert torch.allclose(box.to_unit(box.from_unit(x)), x, atol=1e-6)
    with pytest.raises(ValueError, match="channels"):
        box.to_unit(torch.rand(3, 5, 4, 4))
    with pytest.raises(ValueError, match="below"):
        ValueRange(low=(1.0,), high=(0.0,))


def test_names_with_dots_stay_apart(batch, tmp_path: Path) -> None:
    for name in ("round.1", "round.2"):
        FedSGD().observe(small_net(), *batch).save(tmp_path / name)
    assert len(list(tmp_path.iterdir())) == 4
    Observation.load(tmp_path / "round.1", small_net())


def test_another_precision_than_the_models_is_refused(batch) -> None:
    net = small_net()
    update = {name: torch.zeros_like(p).half() for name, p in net.named_parameters()}
    with pytest.raises(ValueError, match="float32 as in the model"):
        Observation.from_update(net, update, input_shape=(1, 4, 4), num_classes=3, num_examples=1)


# --- several rounds --------------------------------------------------------------------------------------------------


def split_net() -> nn.Module:
    return build_model("vertical-mlp", input_shape=(1, 4, 4), num_classes=3, workers=2, hidden=6, middle=4)


@pytest.mark.parametrize("preset", KNOWLEDGE_PRESETS)
def test_private_inputs_cannot_be_reached_from_rounds(preset, batch) -> None:
    x, y = batch
    seen = Vertical(batch_size=2, rounds=3).observe(split_net(), x, y, knowledge=Knowledge.preset(preset))
    pieces = [*x.flatten(1), *x.flatten(2).reshape(10, -1)]
    found = list(tensors_within(seen))
    assert len(found) > 40
    for tensor in found:
        assert tensor.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()
        assert not any(tensor.numel() == piece.numel() and torch.allclose(tensor.flatten(), piece) for piece in pieces)
    granted = Knowledge.preset(preset).batch_indices
    assert granted == (preset in ("vertical_server", "full"))
    assert all((message.indices is not None) == granted for message in seen.messages)


def test_a_vertical_server_is_an_honest_one_that_announces_the_batches() -> None:
    server = dataclasses.replace(Knowledge.honest_server, batch_indices=True)
    assert server == Knowledge.vertical_server == Knowledge.preset("vertical_server")
    known, unknown = (
        next(line for line in Knowledge.vertical_server.describe() if line.startswith(start))
        for start in ("It knows", "It does not know the order")
    )
    assert "which examples are in each batch" in known
    assert "which examples" not in unknown


def test_indices_that_are_denied_or_impossible_are_refused(batch) -> None:
    seen = Vertical(batch_size=2, rounds=3).observe(split_net(), *batch)
    with pytest.raises(ValueError, match="batch indices are given although the knowledge denies it"):
        dataclasses.replace(seen, knowledge=Knowledge.honest_server)
    for wrong in ((0, 5), (-1, 2)):
        messages = (*seen.messages[:2], dataclasses.replace(seen.messages[2], indices=wrong))
        with pytest.raises(ValueError, match=r"batch indices: expected sample numbers in 0\.\.4, got others"):
            dataclasses.replace(seen, messages=messages)


def test_there_is_no_such_thing_as_the_message_of_several_rounds(batch) -> None:
    seen = Vertical(batch_size=2, rounds=3).observe(split_net(), *batch)
    with pytest.raises(ValueError, match="one message, got 3"):
        _ = seen.message
    assert [m.dtype for m in (seen, seen.to(dtype=torch.float64))] == [torch.float32, torch.float64]
    assert [m.indices for m in seen.to(dtype=torch.float64).messages] == [m.indices for m in seen.messages]


@pytest.mark.parametrize("preset", ["honest_server", "vertical_server", "full"])
def test_rounds_and_partial_messages_go_through_files(preset, batch, tmp_path: Path) -> None:
    protocol = Vertical(batch_size=2, rounds=4, whole_rounds=2)
    seen = protocol.observe(split_net(), *batch, knowledge=Knowledge.preset(preset))
    seen.save(tmp_path / "rounds")
    again = Observation.load(tmp_path / "rounds", split_net())
    assert (again.knowledge, again.training, again.num_examples) == (seen.knowledge, seen.training, seen.num_examples)
    assert [message.partial for message in again.messages] == [False, False, True, True]
    for one, two in zip(seen.messages, again.messages, strict=True):
        assert (one.kind, one.indices, one.partial) == (two.kind, two.indices, two.partial)
        assert list(one.update) == list(two.update)
        assert all(torch.equal(one.update[name], two.update[name]) for name in one.update)


def test_files_from_before_there_were_partial_messages_are_still_read(batch, tmp_path: Path) -> None:
    FedSGD().observe(small_net(), *batch).save(tmp_path / "old")
    text = (tmp_path / "old.json").read_text()
    assert '"partial"' in text
    (tmp_path / "old.json").write_text(
        text.replace('"indices": null,', '"indices": null').replace('"partial": false', "")
    )
    assert not Observation.load(tmp_path / "old", small_net()).message.partial


def test_only_a_partial_message_may_lack_tensors(batch) -> None:
    seen = Vertical(batch_size=2, rounds=2).observe(split_net(), *batch)
    first, second = seen.messages
    less = dict(second.update)
    del less["head.fc.weight"]
    with pytest.raises(ValueError, match=r"update lacks head\.fc\.weight"):
        dataclasses.replace(seen, messages=(first, dataclasses.replace(second, update=less)))
    spare = dataclasses.replace(seen, messages=(first, dataclasses.replace(second, update=less, partial=True)))
    assert "head.fc.weight" not in spare.messages[1].update
    for update, words in (({}, "at least one tensor, got none"), ({"stranger": torch.zeros(1)}, "stranger")):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(seen, messages=(first, Message(update=update, partial=True, indices=(0, 1))))


# --- facts that the knowledge denies ---------------------------------------------------------------------------------


def full_observation(batch: tuple[Tensor, Tensor]) -> Observation:
    """Everything that can be known of a weight update, the BatchNorm statistics and the defence too."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
    protocol = FedAvg(epochs=2, batch_size=2, lr=0.1)
    others = torch.rand(7, 1, 4, 4, generator=torch.Generator().manual_seed(3)), torch.arange(7) % 3
    return protocol.observe(net, *batch, GradientNoise(sigma=0.1), Knowledge.full, auxiliary=others)


@pytest.mark.parametrize(
    "field_, words",
    [
        ("labels", "labels are given"),
        ("num_examples", "num_examples is given"),
        ("local_epochs", r"training\.epochs is given"),
        ("batch_size", r"training\.batch_size is given"),
        ("learning_rate", r"(?s)training\.learning_rate is.*training\.optimizer is.*training\.momentum is"),
        ("batch_order", r"training\.batch_order is given"),
        ("batchnorm_statistics", "BatchNorm statistics of the batch are given"),
        ("normalisation", "the value range of inputs is given"),
        ("defense", r"(?s)the defence's channel is given.*the defence is given"),
        ("auxiliary_data", "auxiliary examples are given"),
    ],
)
def test_a_fact_that_is_denied_is_refused(field_: str, words: str, batch) -> None:
    seen = full_observation(batch)
    less = dataclasses.replace(seen.knowledge, **{field_: "no" if field_ == "labels" else False})
    with pytest.raises(ValueError, match=words) as caught:
        dataclasses.replace(seen, knowledge=less)
    assert "although the knowledge denies it" in str(caught.value)


def test_counts_of_labels_may_stay_where_labels_are_denied(batch) -> None:
    seen = full_observation(batch)
    counts = dataclasses.replace(seen.knowledge, labels="counts")
    assert dataclasses.replace(seen, knowledge=counts, labels=None).label_counts.tolist() == [2, 1, 2]
    with pytest.raises(ValueError, match="labels are given"):
        dataclasses.replace(seen, knowledge=counts)
    with pytest.raises(ValueError, match="label counts are given"):
        dataclasses.replace(seen, knowledge=dataclasses.replace(seen.knowledge, labels="no"), labels=None)


def test_a_captured_update_may_not_carry_what_its_adversary_does_not_know(batch) -> None:
    net = small_net()
    update = {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    with pytest.raises(ValueError, match="the value range of inputs is given although"):
        Observation.from_update(
            net,
            update,
            input_shape=(1, 4, 4),
            num_classes=3,
            num_examples=1,
            knowledge=Knowledge.eavesdropper,
            value_range=ValueRange(),
        )


def test_somebody_who_does_not_know_the_defence_sees_the_rest(batch) -> None:
    seen = full_observation(batch)
    assert seen.channel == Channel(noise=0.1)
    blind = seen.without_channel()
    assert (blind.channel, blind.defense) == (None, None)
    assert not blind.knowledge.defense
    assert blind.knowledge == dataclasses.replace(Knowledge.full, defense=False)
    assert all(torch.equal(blind.message.update[name], value) for name, value in seen.message.update.items())
    assert FedSGD().observe(small_net(), *batch, defense=GradientNoise(sigma=0.1)).channel is None


@pytest.mark.parametrize(
    "pair, words",
    [
        ([1, 2], "expected a pair of tensors"),
        ((torch.rand(3, 1, 4, 4), None), "expected a pair of tensors"),
        (
            (torch.rand(3, 1, 4, 5), torch.zeros(3).long()),
            r"auxiliary: expected inputs of shape",
        ),
        ((torch.zeros(3, 1, 4, 4).long(), torch.zeros(3).long()), "floating point"),
        ((torch.rand(0, 1, 4, 4), torch.zeros(0).long()), "expected inputs"),
        ((torch.full((3, 1, 4, 4), float("nan")), torch.zeros(3).long()), "NaN or infinite"),
        ((torch.rand(3, 1, 4, 4), torch.zeros(2).long()), "auxiliary: y: expected int64 class numbers"),
        ((torch.rand(3, 1, 4, 4), torch.full((3,), 9)), "auxiliary: y:"),
    ],
)
def test_auxiliary_examples_must_be_of_the_same_kind(pair: Any, words: str, batch) -> None:
    with pytest.raises(ValueError, match=words):
        FedSGD().observe(small_net(), *batch, knowledge=Knowledge.informed_server, auxiliary=pair)


def test_auxiliary_examples_and_the_defence_are_for_those_who_know_them(batch) -> None:
    others = torch.rand(7, 1, 4, 4, generator=torch.Generator().manual_seed(3)), torch.arange(7) % 3
    for knowledge, has_defense, has_others in (
        (Knowledge.honest_server, False, False),
        (Knowledge.adaptive_server, True, False),
        (Knowledge.informed_server, True, True),
    ):
        seen = FedSGD().observe(small_net(), *batch, GradientNoise(sigma=0.1), knowledge, auxiliary=others)
        assert seen.defense == (GradientNoise(sigma=0.1) if has_defense else None)
        assert (seen.auxiliary is not None) == has_others
    assert "auxiliary=" not in repr(seen)
    wide = seen.to(dtype=torch.float64).auxiliary
    assert wide is not None
    assert (wide[0].dtype, wide[1].dtype) == (torch.float64, torch.int64)
    # None says that the defence is not known; somebody who knows that there is none is told so.
    assert FedSGD().observe(small_net(), *batch, knowledge=Knowledge.adaptive_server).defense == Defense()


# --- files of tasks, channels and older versions ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "channel",
    [
        None,
        Channel(),
        Channel(clip=2.0, clip_per="example", noise=0.1),
        Channel(prune=0.5, prune_scope="global", dropout=0.1),
        Channel(noise={"fc1.weight": 0.1, "fc1.bias": 0.0, "fc2.weight": 0.3, "fc2.bias": 0.4}),
    ],
)
def test_channels_go_through_files(channel: Channel | None, batch, tmp_path: Path) -> None:
    seen = FedSGD().observe(small_net(), *batch, knowledge=Knowledge.adaptive_server)
    dataclasses.replace(seen, channel=channel).save(tmp_path / "update")
    assert Observation.load(tmp_path / "update", small_net()).channel == channel


@pytest.mark.parametrize(
    "task, outputs, targets",
    [
        (Regression(distance="huber"), (3,), torch.rand(5, 3)),
        (MultiLabel(), (3,), torch.ones(5, 3)),
        (PerPosition(), (2, 3), torch.ones(5, 2).long()),
    ],
)
def test_tasks_go_through_files(task: Task, outputs: tuple[int, ...], targets: Tensor, batch, tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, math.prod(outputs)), nn.Unflatten(1, outputs))
    seen = FedSGD().observe(net, batch[0], targets, knowledge=Knowledge.full, task=task)
    seen.save(tmp_path / "update")
    again = Observation.load(tmp_path / "update", net)
    assert again.task == task
    assert (again.output_shape, again.num_classes) == (outputs, math.prod(outputs))
    assert torch.equal(again.labels, targets)
    assert again.label_counts is None


def test_code_is_never_written_to_a_file_nor_read_from_one(batch, tmp_path: Path) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class OwnChannel(Channel):
        pass

    own = CustomLoss(name="own", function=loss)
    with pytest.raises(ValueError, match="the loss 'own' is code"):
        FedSGD().observe(small_net(), batch[0], torch.zeros(5, 3), task=own).save(tmp_path / "a")
    seen = FedSGD().observe(small_net(), *batch, knowledge=Knowledge.adaptive_server)
    with pytest.raises(ValueError, match="a OwnChannel cannot be written"):
        dataclasses.replace(seen, channel=OwnChannel()).save(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []
    seen.save(tmp_path / "c")
    facts = json.loads((tmp_path / "c.json").read_text())
    facts["task"]["name"] = "os:system"
    (tmp_path / "c.json").write_text(json.dumps(facts))
    with pytest.raises(ValueError, match="unknown task 'os:system'"):
        Observation.load(tmp_path / "c", small_net())


@pytest.mark.parametrize("preset", ["eavesdropper", "honest_server", "full"])
def test_files_of_the_first_format_are_still_read(preset: str, batch, tmp_path: Path) -> None:
    knowledge = Knowledge.preset(preset)
    seen = FedAvg(epochs=1, batch_size=2, lr=0.1).observe(small_net(), *batch, knowledge=knowledge).without_channel()
    seen.save(tmp_path / "old")
    facts = json.loads((tmp_path / "old.json").read_text())
    for name in ("task", "output_shape", "channel", "made"):
        del facts[name]
    del facts["knowledge"]["defense"]
    space = facts.pop("inputs")
    facts |= {"format": 1, "input_shape": space["shape"], "value_range": space["range"]}
    (tmp_path / "old.json").write_text(json.dumps(facts))
    again = Observation.load(tmp_path / "old", small_net())
    for name in ("inputs", "task", "output_shape", "knowledge", "training", "channel", "num_examples", "num_classes"):
        assert getattr(again, name) == getattr(seen, name)
    assert all(torch.equal(again.message.update[name], value) for name, value in seen.message.update.items())
