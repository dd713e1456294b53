"""CAFE where the answer is known: exact steps I and II, exact features, and what it says where nothing follows."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import ATTACKS, CAFE
from leakscope.attacks.cafe.rounds import solve_inputs, solve_output_gradients
from leakscope.contracts.errors import MissingKnowledge, NotApplicable
from leakscope.contracts.inputs import Box
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Message, Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.defenses import GradientNoise
from leakscope.equations.index_matrix import identify, index_matrix
from leakscope.federation import FedAvg, FedSGD, Vertical
from leakscope.limits import layer_signals
from leakscope.models import build_model
from leakscope.models.split import VerticalModel
from leakscope.network.layers import first_dense
from vertical_rounds import cnn, data, mlp


def play(model: nn.Module, x: Tensor, y: Tensor, batches: list[tuple[int, ...]]) -> Observation:
    """Rounds on chosen batches, by autograd alone."""
    messages = []
    for batch in batches:
        loss = nn.functional.cross_entropy(model(x[list(batch)]), y[list(batch)])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        names = [name for name, _ in model.named_parameters()]
        messages.append(Message(update=dict(zip(names, gradients, strict=True)), indices=batch))
    return Observation(
        model=model,
        messages=tuple(messages),
        inputs=Box(tuple(x.shape[1:])),
        num_classes=3,
        num_examples=len(x),
        knowledge=Knowledge.vertical_server,
    )


def decibels(found: Reconstruction, x: Tensor) -> Tensor:
    """PSNR of each sample, in the box."""
    return -10 * (found.inputs.clamp(0, 1) - x).square().flatten(1).mean(1).clamp_min(1e-30).log10()


def worst(found: Reconstruction, x: Tensor) -> float:
    return float((found.inputs - x).abs().max())


# --- steps I and II --------------------------------------------------------------------------------------------------

NETS = {
    "few samples": (lambda: mlp(hidden=32), 10, 3),
    "more samples than units": (lambda: mlp(hidden=5), 20, 4),
    "convolutions": (lambda: cnn(activation="tanh", batchnorm=True).double(), 9, 2),
    "published kind": (lambda: cnn().double(), 12, 4),
}


@pytest.mark.parametrize("name", NETS)
def test_output_gradients_and_layer_inputs_are_exact_on_a_static_model(name) -> None:
    """E5."""
    make, count, batch = NETS[name]
    model = make()
    x, y = data(count, model.input_shape)
    seen = Vertical(batch_size=batch, rounds=3 * count).observe(model, x, y)
    batches = [message.indices for message in seen.messages]
    assert identify(batches, count).identifiable
    matrix, told = index_matrix(batches, count), 0
    for layer, (signals, reads) in zip(first_dense(model), layer_signals(model, x, y, batch), strict=True):
        bias = torch.stack([message.update[f"{layer.name}.bias"] for message in seen.messages])
        first = solve_output_gradients(matrix, bias)
        assert float((first.rows - signals).abs().max()) < 1e-10
        second = solve_inputs(seen.messages, f"{layer.name}.weight", first.rows)
        visible = signals.abs().amax(1) > 0
        told += int(visible.sum())
        assert bool(((second.rows - reads)[visible].abs() < 1e-10).all())
    assert told >= 2 * count


CUTS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((8,), {}),
    ((13,), {"workers": 3}),
    ((9,), {"slices": {"bank": [8, "0-3"], "shop": "4-7"}}),
    ((2, 10), {"slices": "strips", "workers": 3}),
    ((3, 5, 7), {"slices": "quadrants", "workers": 4}),
    ((1, 6, 4), {"slices": {"left": "0-2", "right": 3}}),
    ((8,), {"hidden": 4}),
    ((8,), {"activation": "sigmoid", "workers": 1}),
]


@pytest.mark.parametrize("shape, options", CUTS, ids=str)
@pytest.mark.parametrize("sampling", ["uniform", "epochs"])
def test_features_behind_a_dense_layer_are_read_off_exactly_and_labels_too(shape, options, sampling) -> None:
    options = {"workers": 2, "hidden": 16, "middle": 10, "activation": "tanh", **options}
    model = build_model("vertical-mlp", input_shape=shape, num_classes=3, **options).double()
    x, y = data(12, shape)
    seen = Vertical(batch_size=3, rounds=32, sampling=sampling).observe(model, 2 * x - 1, y)
    assert seen.labels is None
    found = CAFE()(seen)
    assert worst(found, 2 * x - 1) < 1e-8
    assert torch.equal(found.labels, y)
    assert found.info["labels"] == "step I on the last layer"
    assert found.flags == ()
    assert found.info["unexplained"] < 1e-12
    assert found.scores.shape == (12,)


def test_in_single_precision_the_error_is_that_of_the_gradients() -> None:
    model, (x, y) = mlp().float(), data(12)
    found = CAFE()(Vertical(batch_size=3, rounds=40).observe(model, x.float(), y))
    assert 1e-9 < worst(found, x) < 1e-3
    assert torch.equal(found.labels, y)
    assert found.flags == ()


@pytest.mark.parametrize("options", [{"classes": 1}, {"classes": 5}])
def test_labels_of_any_number_of_classes(options) -> None:
    model, (x, y) = mlp(**options), data(12, classes=max(2, options["classes"]))
    found = CAFE()(Vertical(batch_size=4, rounds=30).observe(model, x, y))
    assert torch.equal(found.labels, y)
    assert worst(found, x) < 1e-8


def test_known_labels_are_taken_as_they_are() -> None:
    model, (x, y) = mlp(), data(8)
    knowledge = dataclasses.replace(Knowledge.vertical_server, labels="yes")
    found = CAFE()(Vertical(batch_size=3, rounds=20).observe(model, x, y, knowledge=knowledge))
    assert torch.equal(found.labels, y)
    assert found.info["labels"] == "known"


def test_the_second_softmax_of_the_published_code_hides_no_label() -> None:
    model, (x, y) = cnn(double_softmax=True, activation="tanh").double(), data(8, (1, 8, 8))
    found = CAFE(iterations=2)(Vertical(batch_size=3, rounds=20).observe(model, x, y))
    assert torch.equal(found.labels, y)


# --- what does not follow --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["direct", "nested", "single-loop"])
def test_batches_of_everybody_are_not_identifiable(method) -> None:
    model, (x, y) = mlp(), data(5)
    seen = Vertical(batch_size=5, rounds=8).observe(model, x, y)
    found = CAFE(method=method, iterations=10, first_iterations=20)(seen)
    assert {"not identifiable", "labels uncertain"} <= set(found.flags)
    assert "rounds disagree" not in found.flags
    assert any("same samples" in note for note in found.notes)
    assert any("5 for 'strip 1', 5 for 'strip 2'" in note for note in found.notes)
    assert found.diagnosis.outcome == "not identifiable"
    assert "same samples" in found.diagnosis.reason
    assert float(decibels(found, x).max()) < 20
    assert torch.isfinite(found.inputs).all()


def test_with_fewer_rounds_than_samples_those_that_follow_are_exact_and_the_others_are_told() -> None:
    """Samples 0 to 3 follow from rounds of their own; 4 to 7 share rounds with them and do not follow."""
    model, (x, y) = mlp(), data(8)
    batches = [(0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3), (0, 4, 5), (1, 4, 6), (2, 5, 7)]
    assert identify(batches, 8).determined.tolist() == [True] * 4 + [False] * 4
    found = CAFE()(play(model, x, y, batches))
    assert float((found.inputs - x)[:4].abs().max()) < 1e-8
    assert torch.equal(found.labels[:4], y[:4])
    assert {"not identifiable", "labels uncertain"} == set(found.flags)
    assert found.notes[0] == "7 rounds have 7 independent batches, but there are 8 samples"
    assert "4 for 'strip 1', 4 for 'strip 2'" in found.notes[1]
    assert found.diagnosis.outcome == "not identifiable"
    assert torch.isfinite(found.inputs).all()
    assert float(found.inputs.abs().max()) < 10


def test_a_sample_that_was_in_no_round_is_told_and_the_others_are_exact() -> None:
    model, (x, y) = mlp(), data(6)
    seen = play(model, x, y, [(0, 1), (1, 2), (0, 2), (0, 3), (1, 4), (2, 4)])
    found = CAFE()(seen)
    assert float((found.inputs - x)[:5].abs().max()) < 1e-8
    assert float(found.inputs[5].abs().max()) < 10
    assert "1 of them" in found.notes[0]
    assert "not identifiable" in found.flags
    for method in ("nested", "single-loop", "gradients"):
        again = CAFE(method=method, iterations=8, first_iterations=8, group=2)(seen)
        assert torch.isfinite(again.inputs).all()


def half_dead() -> tuple[VerticalModel, Tensor, Tensor, Tensor]:
    """The first worker's last ReLU is dead for samples whose first feature is below 1/2: they send nothing back."""
    model = mlp(activation="relu")
    worker = model.workers[0]
    with torch.no_grad():
        for layer in (worker.fc1, worker.fc2, worker.fc3):
            layer.weight.zero_()
            layer.bias.zero_()
        worker.fc1.weight[:, 0] = torch.linspace(0.5, 1, 16)
        worker.fc2.weight[:, 0] = 1.0
        worker.fc3.weight[:, 0] = 2.0
        worker.fc3.bias.fill_(-0.5)
        model.workers[1].fc3.bias.fill_(1.0)
    x, y = data(10)
    return model, x, y, x[:, 0] <= 0.5


@pytest.mark.parametrize("dtype, error", [(torch.float64, 1e-8), (torch.float32, 1e-3)])
def test_samples_that_are_invisible_to_a_worker_are_told_and_spoil_nothing(dtype, error) -> None:
    model, x, y, dark = half_dead()
    assert 0 < int(dark.sum()) < 10
    assert torch.equal(layer_signals(model, x, y, 3)[0][0].abs().amax(1) == 0, dark)
    seen = Vertical(batch_size=3, rounds=30).observe(model.to(dtype), x.to(dtype), y)
    found = CAFE()(seen)
    assert found.flags == ("not identifiable",)
    assert f"{int(dark.sum())} for 'strip 1'" in found.notes[0]
    assert "strip 2" not in found.notes[0]
    assert found.diagnosis.outcome == "not identifiable"
    assert torch.equal(found.labels, y)
    wrong = (found.inputs - x).abs()
    assert float(wrong[~dark].max()) < error
    assert float(wrong[:, 4:].max()) < error
    assert float(wrong[dark][:, :4].max()) > 0.05
    assert bool(((found.inputs >= -error) & (found.inputs <= 1 + error)).all())


def test_an_invisible_sample_changes_nothing_for_the_others_in_a_search() -> None:
    """Step III is one search for each sample, so the others come out the same to the last digit."""
    model = cnn(activation="relu")
    x, y = data(8, (1, 8, 8))
    x = x.float()
    worker, share = model.workers[0], model.shares[0]
    with torch.no_grad():
        largest = worker.fc3(worker[:-2](share.take(x))).amax(1)
        worker.fc3.bias.sub_(largest.sort().values[3:5].mean())
    dark = torch.nonzero(layer_signals(model, x, y, 3)[0][0].abs().amax(1) == 0).flatten()
    bright = [n for n in range(8) if n not in dark.tolist()]
    assert len(dark) == 4
    seen = Vertical(batch_size=3, rounds=30).observe(model, x, y)
    found = CAFE(iterations=30)(seen)
    assert "4 for 'top left'" in " ".join(found.notes)
    assert found.info["expected_error"] < 1e-3
    reads = layer_signals(model, x, y, 3)[0][1]
    with torch.no_grad():
        made = worker[:7](share.take(found.inputs)).double()
    misfit = (made - reads).square().sum(1) / reads.square().sum(1)
    assert float(misfit[bright].max()) < 0.1 * float(misfit[dark].min())


def test_too_few_whole_messages_for_a_narrow_layer_are_noticed() -> None:
    """Every sample is in a whole round, but two rounds of 4 units are 8 equations for 20 samples."""
    model, (x, y) = mlp(hidden=4), data(20)
    drawn = Vertical(batch_size=10, rounds=50).observe(model, x, y)
    later = [message.indices for message in drawn.messages]
    seen = play(model, x, y, [tuple(range(10)), tuple(range(10, 20)), *later])

    def spare(whole: int) -> Observation:
        messages = list(seen.messages)
        for number in range(whole, len(messages)):
            biases = {name: value for name, value in messages[number].update.items() if value.dim() == 1}
            messages[number] = dataclasses.replace(messages[number], update=biases, partial=True)
        return dataclasses.replace(seen, messages=tuple(messages))

    found = CAFE()(spare(2))
    assert "not identifiable" in found.flags
    assert worst(found, x) > 0.01
    enough = CAFE()(spare(20))
    assert enough.flags == ()
    assert worst(enough, x) < 1e-8


# --- the observation -------------------------------------------------------------------------------------------------


def test_without_indices_there_is_no_attack() -> None:
    model, (x, y) = mlp(), data(6)
    shuffled = Vertical(batch_size=2, rounds=9).observe(model, x, y, knowledge=Knowledge.honest_server)
    with pytest.raises(MissingKnowledge, match="batch_indices"):
        CAFE()(shuffled)
    some = Vertical(batch_size=2, rounds=9).observe(model, x, y)
    lost = dataclasses.replace(
        some, messages=(*some.messages[:-1], dataclasses.replace(some.messages[-1], indices=None))
    )
    with pytest.raises(MissingKnowledge, match="batch_indices"):
        CAFE()(lost)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "cafe"])
@pytest.mark.parametrize(
    "knowledge",
    [dataclasses.replace(Knowledge.full, labels="no"), Knowledge.full],
    ids=["server", "full"],
)
def test_attacks_on_one_update_refuse_rounds_and_name_the_one_that_reads_them(name, knowledge) -> None:
    model, (x, y) = mlp(), data(6)
    seen = Vertical(batch_size=2, rounds=3).observe(model, x, y, knowledge=knowledge)
    with pytest.raises(NotApplicable, match="3 messages"):
        ATTACKS[name].target()(seen)
    one = Vertical(batch_size=2, rounds=1).observe(model, x, y, knowledge=knowledge)
    with pytest.raises(NotApplicable, match="reads rounds"):
        ATTACKS[name].target()(one)


def test_partial_messages_give_the_same_result_also_from_a_file(tmp_path: Path) -> None:
    model, (x, y) = mlp(), data(10)
    protocol = Vertical(batch_size=3, rounds=30)
    whole = CAFE()(protocol.observe(model, x, y))
    spare = dataclasses.replace(protocol, whole_rounds=20).observe(model, x, y)
    assert sum(message.partial for message in spare.messages) == 10
    spare.save(tmp_path / "rounds")
    again = CAFE()(Observation.load(tmp_path / "rounds", mlp()))
    for found in (CAFE()(spare), again):
        assert torch.allclose(found.inputs, whole.inputs, atol=1e-9)
        assert torch.equal(found.labels, whole.labels)
        assert found.flags == whole.flags == ()
    nested = CAFE(method="nested", iterations=2, first_iterations=900)(spare)
    assert nested.info["unexplained"] < 1e-6
    with pytest.raises(NotApplicable, match="whole messages"):
        CAFE()(dataclasses.replace(spare, messages=spare.messages[20:]))


def test_models_and_messages_that_it_cannot_read() -> None:
    model, (x, y) = mlp(), data(6)
    protocol = Vertical(batch_size=2, rounds=4)
    plain = build_model("mlp", input_shape=(8,), num_classes=3).double()
    message = dataclasses.replace(FedSGD().observe(plain, x, y).message, indices=tuple(range(6)))
    facts: dict[str, Any] = {"inputs": Box((8,)), "num_classes": 3, "num_examples": 6}
    facts["knowledge"] = Knowledge.vertical_server
    with pytest.raises(NotApplicable, match="VerticalModel"):
        CAFE()(Observation(model=plain, messages=(message,), **facts))
    delta = dataclasses.replace(FedAvg().observe(model, x, y).message, indices=tuple(range(6)))
    with pytest.raises(NotApplicable, match="weight updates"):
        CAFE()(Observation(model=model, messages=(delta,), **facts))
    bare = mlp()
    bare.workers[1].fc1 = nn.Linear(4, 16, bias=False).double()
    with pytest.raises(NotApplicable, match=r"bias.*strip 2"):
        CAFE()(protocol.observe(bare, x, y))
    for part in ("weight", "bias"):
        frozen = mlp()
        frozen.get_parameter(f"workers.1.fc1.{part}").requires_grad_(False)
        with pytest.raises(NotApplicable, match=rf"workers\.1\.fc1\.{part}"):
            CAFE()(protocol.observe(frozen, x, y))
    shared = VerticalModel(
        workers=[model.workers[0]] * 2, head=model.head, shares=model.shares, input_shape=model.input_shape
    )
    with pytest.raises(NotApplicable, match=r"workers\.1\.fc1\.bias"):
        CAFE()(protocol.observe(shared, x, y))
    flat = build_model("cafe-cnn", input_shape=(1, 8, 8), num_classes=3, filters=(2, 2), hidden=4, middle=4)
    flat.workers[0] = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten())
    pictures, labels = data(6, (1, 8, 8))
    with pytest.raises(NotApplicable, match=r"'top left'.*dense"):
        CAFE()(protocol.observe(flat, pictures.float(), labels))


def test_labels_that_cannot_be_read_are_none_and_the_inputs_still_follow() -> None:
    model, (x, y) = mlp(), data(6)
    model.head.requires_grad_(False)
    found = CAFE()(Vertical(batch_size=2, rounds=20).observe(model, x, y))
    assert found.labels is None
    assert found.flags == ("labels uncertain",)
    assert worst(found, x) < 1e-8


# --- controls --------------------------------------------------------------------------------------------------------


def with_noise(seen: Observation, seed: int = 3) -> Observation:
    """Noise of the same length in place of every tensor of every message."""
    generator = torch.Generator().manual_seed(seed)
    messages = []
    for message in seen.messages:
        noise = {k: torch.randn(v.shape, generator=generator).to(v) for k, v in message.update.items()}
        update = {k: noise[k] * v.norm() / noise[k].norm() for k, v in message.update.items()}
        messages.append(dataclasses.replace(message, update=update))
    return dataclasses.replace(seen, messages=tuple(messages))


def with_other_indices(seen: Observation) -> Observation:
    """Every round with the indices of the next one."""
    indices = [message.indices for message in seen.messages]
    messages = zip(seen.messages, [*indices[1:], indices[0]], strict=True)
    return dataclasses.replace(seen, messages=tuple(dataclasses.replace(m, indices=i) for m, i in messages))


@pytest.mark.parametrize("harm", [with_noise, with_other_indices])
def test_without_information_nothing_is_recovered(harm) -> None:
    model, (x, y) = mlp(), data(12)
    seen = Vertical(batch_size=3, rounds=40).observe(model, x, y)
    assert float(decibels(CAFE()(seen), x).min()) > 150
    found = CAFE()(harm(seen))
    assert float(decibels(found, x).max()) < 15
    assert "rounds disagree" in found.flags
    assert torch.isfinite(found.inputs).all()


def test_another_numbering_of_the_samples_gives_them_in_another_order() -> None:
    model, (x, y) = mlp(), data(8)
    seen = Vertical(batch_size=3, rounds=24).observe(model, x, y)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    messages = [dataclasses.replace(m, indices=tuple(order[list(m.indices)].tolist())) for m in seen.messages]
    found = CAFE()(dataclasses.replace(seen, messages=tuple(messages)))
    assert float((found.inputs[order] - x).abs().max()) < 1e-8
    assert torch.equal(found.labels[order], y)


def test_noise_on_every_message_costs_accuracy_and_much_noise_everything() -> None:
    model, (x, y) = mlp(), data(10)
    protocol = Vertical(batch_size=3, rounds=40)
    bare, little, much = (
        CAFE()(protocol.observe(model, x, y, defense))
        for defense in (None, GradientNoise(sigma=1e-5), GradientNoise(sigma=1.0))
    )
    assert float(decibels(bare, x).min()) > float(decibels(little, x).max()) + 50
    assert float(decibels(little, x).mean()) > 30
    assert little.flags == ()
    assert "rounds disagree" in much.flags
    assert float(decibels(much, x).mean()) < 15


# --- manners ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["direct", "nested", "single-loop", "gradients"])
def test_the_observation_stays_as_it_was_also_in_training_mode(method) -> None:
    model = cnn(batchnorm=True).train()
    x, y = data(4, (1, 8, 8))
    model(x.float())  # running statistics that are those of some data
    seen = Vertical(batch_size=2, rounds=8).observe(model, x.float(), y)
    before = {key: value.clone() for key, value in seen.model.state_dict().items()}
    globe = torch.random.get_rng_state()
    attack = CAFE(method=method, iterations=4, first_iterations=4)
    first = attack(seen)
    assert all(torch.equal(value, before[key]) for key, value in seen.model.state_dict().items())
    assert all(parameter.requires_grad for parameter in seen.model.parameters())
    assert all(module.training for module in seen.model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in seen.model.modules())
    assert torch.equal(globe, torch.random.get_rng_state())
    assert torch.equal(first.inputs, attack(seen).inputs)
    # The clients ran in evaluation mode, whatever mode the model was handed over in.
    twin = dataclasses.replace(seen, model=copy.deepcopy(seen.model).eval())
    assert torch.equal(first.inputs, attack(twin).inputs)


def test_statistics_in_front_of_a_first_dense_layer_stay_as_they_were() -> None:
    """The worker begins with BatchNorm, so that the dense layer has as many inputs as there are features."""
    model, (x, y) = mlp(), data(6)
    model.workers[0] = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    model.train()
    seen = Vertical(batch_size=2, rounds=18).observe(model, x, y)
    before = {key: value.clone() for key, value in seen.model.state_dict().items()}
    found = CAFE(iterations=200, tv=0.0)(seen)
    assert all(torch.equal(value, before[key]) for key, value in seen.model.state_dict().items())
    assert float((found.inputs - x)[:, 4:].abs().max()) < 1e-8
    assert float((found.inputs - x)[:, :4].abs().max()) < 0.01


@pytest.mark.parametrize("method, steps", [("direct", 5 * 40), ("nested", 5), ("single-loop", 5), ("gradients", 5)])
def test_progress_rises_to_its_end(method, steps) -> None:
    model = cnn(slices="strips", workers=2)
    x, y = data(40, (1, 8, 8))
    told: list[tuple[int, int, float]] = []
    seen = Vertical(batch_size=20, rounds=3).observe(model, x.float(), y)
    CAFE(method=method, iterations=5, first_iterations=3)(seen, progress=lambda *facts: told.append(facts))
    done = [now for now, _, _ in told]
    assert done == sorted(set(done))
    assert {total for _, total, _ in told} == {steps}
    assert done[-1] == steps


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"method": "fast"}, "method: expected 'direct', 'nested', 'single-loop' or 'gradients', got 'fast'"),
        ({"steps": "jumps"}, "steps: expected 'projection' or 'descent', got 'jumps'"),
        ({"labels": "guess"}, "labels: expected 'recover' or 'joint', got 'guess'"),
        ({"first_iterations": 0}, "first_iterations: expected a whole number of at least 1, got 0"),
        ({"signal_lr": 0.0}, "signal_lr: expected a number above 0, got 0.0"),
        ({"iterations": 0, "lr": 0, "tv": -1, "distance": "far"}, "(?s)iterations:.*lr:.*distance:.*'far'.*tv:"),
        ({"fade": 0}, "fade: expected a number above 0 and of at most 1, got 0"),
        ({"group": 0}, "group: expected a whole number of at least 1, got 0"),
        ({"schedule": "sometimes"}, "schedule: expected"),
        ({"start": "black"}, "start: expected"),
        ({"threshold": float("nan")}, "threshold: expected a number of at least 0, got nan"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings, words) -> None:
    with pytest.raises(ValueError, match=words):
        CAFE(**settings)
