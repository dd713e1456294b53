"""CAFE where the answer is known: exact steps I and II, exact features, and what it says where nothing follows."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.attacks import ATTACKS, CAFE, MissingKnowledge, NotApplicable, Reconstruction
from leakscope.attacks.back_signals import solve_inputs, solve_signals
from leakscope.defenses import GradientNoise
from leakscope.federation import FedAvg, FedSGD, Vertical
from leakscope.limits import identify, layer_signals
from leakscope.limits.index_alignment import index_matrix
from leakscope.models import build_model
from leakscope.observation import Knowledge, Message, Observation
from leakscope.vertical import VerticalModel, first_dense

WITHOUT_RATE = Knowledge(batch_indices=True, normalisation=True)


def mlp(features: int = 8, classes: int = 3, **options: Any) -> VerticalModel:
    options = {"workers": 2, "hidden": 16, "middle": 10, "activation": "tanh", **options}
    model = build_model("vertical-mlp", input_shape=(features,), num_classes=classes, **options)
    assert isinstance(model, VerticalModel)
    return model.double()


def cnn(**options: Any) -> VerticalModel:
    options = {"filters": (4, 6), "hidden": 8, "middle": 6, **options}
    model = build_model("cafe-cnn", input_shape=(1, 8, 8), num_classes=3, **options)
    assert isinstance(model, VerticalModel)
    return model


def data(count: int, shape: tuple[int, ...] = (8,), classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.rand((count, *shape), generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (count,), generator=generator)


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
        input_shape=tuple(x.shape[1:]),
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
def test_back_signals_and_layer_inputs_are_exact_on_a_static_model(name) -> None:
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
        first = solve_signals(matrix, bias)
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
    assert any("every round has the same samples" in note for note in found.notes)
    assert any("5 for 'strip 1', 5 for 'strip 2'" in note for note in found.notes)
    assert found.diagnosis.outcome == "not identifiable"
    assert "every round has the same samples" in found.diagnosis.reason
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
    assert "1 of them in no round" in found.notes[0]
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
    with pytest.raises(MissingKnowledge, match="needs to know batch_indices"):
        CAFE()(shuffled)
    some = Vertical(batch_size=2, rounds=9).observe(model, x, y)
    lost = dataclasses.replace(
        some, messages=(*some.messages[:-1], dataclasses.replace(some.messages[-1], indices=None))
    )
    with pytest.raises(MissingKnowledge, match="batch_indices, which messages of this observation lack"):
        CAFE()(lost)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "cafe"])
@pytest.mark.parametrize("knowledge", [Knowledge.vertical_server, Knowledge.full], ids=["server", "full"])
def test_attacks_on_one_update_refuse_rounds_and_name_the_one_that_reads_them(name, knowledge) -> None:
    model, (x, y) = mlp(), data(6)
    seen = Vertical(batch_size=2, rounds=3).observe(model, x, y, knowledge=knowledge)
    with pytest.raises(NotApplicable, match=r"got 3 messages on batches of them\. Use cafe"):
        ATTACKS[name].cls()(seen)
    one = Vertical(batch_size=2, rounds=1).observe(model, x, y, knowledge=knowledge)
    with pytest.raises(NotApplicable, match="Use cafe"):
        ATTACKS[name].cls()(one)


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
    facts: dict[str, Any] = {"input_shape": (8,), "num_classes": 3, "num_examples": 6}
    facts["knowledge"] = Knowledge.vertical_server
    with pytest.raises(NotApplicable, match="rounds of a VerticalModel, got"):
        CAFE()(Observation(model=plain, messages=(message,), **facts))
    delta = dataclasses.replace(FedAvg().observe(model, x, y).message, indices=tuple(range(6)))
    with pytest.raises(NotApplicable, match="gradients, got weight updates"):
        CAFE()(Observation(model=model, messages=(delta,), **facts))
    bare = mlp()
    bare.workers[1].fc1 = nn.Linear(4, 16, bias=False).double()
    with pytest.raises(NotApplicable, match="bias gradient of the first dense layer; none in strip 2"):
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
    with pytest.raises(NotApplicable, match="worker 'top left': expected a dense layer"):
        CAFE()(protocol.observe(flat, pictures.float(), labels))


def test_labels_that_cannot_be_read_are_none_and_the_inputs_still_follow() -> None:
    model, (x, y) = mlp(), data(6)
    model.head.requires_grad_(False)
    found = CAFE()(Vertical(batch_size=2, rounds=20).observe(model, x, y))
    assert found.labels is None
    assert found.flags == ("labels uncertain",)
    assert worst(found, x) < 1e-8


# --- loops -----------------------------------------------------------------------------------------------------------


def small(lr: float = 0.0, **how: Any) -> tuple[Observation, Tensor, Tensor]:
    model, (x, y) = mlp(features=6), data(6, (6,))
    return Vertical(batch_size=2, rounds=20, lr=lr).observe(model, x, y, **how), x, y


def test_the_nested_loop_settles_where_the_direct_solution_is() -> None:
    seen, x, y = small()
    # Full rank and nothing unexplained: there is one such pair of tables, and the direct one is another name for it.
    found = CAFE(method="nested", first_iterations=600, iterations=100, gradient=0.0)(seen)
    assert found.info["unexplained"] < 1e-12
    assert found.flags == ()
    assert float(decibels(found, x).min()) > 25
    assert torch.equal(found.labels, y)


def test_the_published_steps_explain_more_the_longer_they_run() -> None:
    seen, _, _ = small()
    left = [
        CAFE(method="nested", steps="descent", first_iterations=steps, iterations=1)(seen).info["unexplained"]
        for steps in (20, 200, 1000)
    ]
    assert left[2] < 0.3 * left[1] < 0.3 * left[0]


def test_the_single_loop_recovers_a_static_model() -> None:
    seen, x, y = small()
    found = CAFE(method="single-loop", iterations=150)(seen)
    assert float(decibels(found, x).min()) > 27
    assert found.info["unexplained"] < 1e-3
    assert found.flags == ()
    assert torch.equal(found.labels, y)
    (curve,) = found.history["objective"]
    assert sum(curve[-20:]) < 0.1 * sum(curve[:20])


def test_a_loop_that_ran_too_short_says_so_and_does_not_blame_the_rounds() -> None:
    seen, _, _ = small()
    found = CAFE(method="single-loop", iterations=3)(seen)
    assert found.info["unexplained"] > 0.4
    assert found.flags == ("did not converge",)


def test_a_model_that_moves_a_little_is_still_read() -> None:
    seen, x, y = small(lr=1e-3)
    direct = CAFE()(seen)
    assert float(decibels(direct, x).min()) > 40
    loop = CAFE(method="single-loop", iterations=150)(seen)
    assert float(decibels(loop, x).min()) > 27
    for found in (direct, loop):
        assert 1e-5 < found.info["unexplained"] < 0.1
        assert found.flags == ()
        assert torch.equal(found.labels, y)


def test_a_model_that_moves_far_is_noticed() -> None:
    seen, x, _ = small(lr=2.0)
    for attack in (CAFE(), CAFE(method="single-loop", iterations=60)):
        found = attack(seen)
        assert found.info["unexplained"] > 0.6
        assert "rounds disagree" in found.flags
        assert found.diagnosis.outcome == "undecided"
        assert any("are not explained by one row a sample" in note for note in found.notes)
        assert float(decibels(found, x).mean()) < 20


def test_plain_matching_follows_a_moving_model_where_it_knows_the_learning_rate() -> None:
    """The weights of every round are known, so movement costs it nothing."""
    seen, x, _ = small(lr=1.0)
    found = CAFE(method="gradients", iterations=150)(seen)
    assert float(decibels(found, x).min()) > 18
    assert "steps not simulated" not in found.flags
    blind, _, _ = small(lr=1.0, knowledge=WITHOUT_RATE)
    lost = CAFE(method="gradients", iterations=150)(blind)
    assert "steps not simulated" in lost.flags
    assert float(decibels(lost, x).mean()) < float(decibels(found, x).mean()) - 5


# --- variants and presets --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def normalised() -> tuple[Observation, Tensor]:
    model = cnn(batchnorm=True, activation="tanh", pool="average", slices="strips", workers=2)
    x, y = data(4, (1, 8, 8))
    knowledge = dataclasses.replace(Knowledge.vertical_server, batchnorm_statistics=True)
    return Vertical(batch_size=2, rounds=6).observe(model, x.float(), y, knowledge=knowledge), x.float()


@pytest.mark.parametrize("name", ["dlg", "cosine", "sapag", "batchnorm", "group-consistency"])
def test_the_variants_run_on_the_same_rounds_and_bring_their_objective_down(name, normalised) -> None:
    seen, x = normalised
    attack = CAFE.preset(name, iterations=30)
    assert attack.method == "gradients"
    found = attack(seen)
    (curve,) = found.history["objective"]
    assert sum(curve[-6:]) < 0.7 * sum(curve[:6])
    assert found.inputs.shape == x.shape
    assert torch.isfinite(found.inputs).all()
    assert found.scores.shape == (4,)
    assert torch.isfinite(found.scores).all()
    assert found.flags == ()


def test_each_variant_is_a_different_search(normalised) -> None:
    seen, _ = normalised
    names = ("dlg", "cosine", "sapag", "batchnorm", "group-consistency")
    found = [CAFE.preset(name, iterations=2)(seen).inputs for name in names]
    assert all(not torch.equal(found[i], found[j]) for i in range(5) for j in range(i))


@pytest.mark.parametrize(
    "name, rates, threshold",
    [
        ("cifar10", (5e-3, 8e-3, 2e-2), 90),
        ("mnist", (1e-2, 1e-2, 1e-2), 25),
        ("linnaeus", (5e-3, 5e-3, 1e-2), 110),
        ("yale", (1e-2, 1e-2, 1e-2), 32),
    ],
)
def test_the_published_settings_are_those_of_table_9(name, rates, threshold) -> None:
    attack = CAFE.preset(name)
    assert (attack.signal_lr, attack.input_lr, attack.lr) == rates
    assert (attack.gradient, attack.tv, attack.representation, attack.threshold) == (1e-2, 1e-4, 1e-3, threshold)
    assert (attack.method, attack.steps, attack.iterations, attack.relative) == (
        "single-loop",
        "descent",
        20_000,
        False,
    )
    assert (attack.labels, attack.start, attack.schedule, attack.fade) == ("joint", "uniform", "constant", 1.0)


def test_the_published_settings_run_and_search_labels_along(normalised) -> None:
    seen, _ = normalised
    one, more = (CAFE.preset("mnist", iterations=steps)(seen) for steps in (6, 24))
    assert one.info["labels"] == "joint"
    assert one.labels.shape == (4,)
    assert more.info["unexplained"] < one.info["unexplained"]
    assert float(more.scores.mean()) < float(one.scores.mean())


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
        ({"method": "fast"}, "expected 'direct', 'nested', 'single-loop' or 'gradients', got 'fast'"),
        ({"steps": "jumps"}, "'projection' or 'descent', .* got 'jumps'"),
        ({"labels": "guess"}, "'recover' or 'joint', got .* 'guess'"),
        ({"first_iterations": 0}, "at least 1 and positive numbers, got 0"),
        ({"signal_lr": 0.0}, "positive numbers"),
        ({"iterations": 0, "lr": 0, "tv": -1, "distance": "far"}, "(?s)iterations.*lr and fade.*tv:.*distance:.*'far'"),
        ({"fade": 0}, "0 < fade <= 1"),
        ({"group": 0}, "iterations and group: expected at least 1"),
        ({"schedule": "sometimes"}, "schedule: expected"),
        ({"start": "black"}, "start: expected"),
        ({"threshold": float("nan")}, "threshold: expected a number >= 0"),
    ],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(settings, words) -> None:
    with pytest.raises(ValueError, match=words):
        CAFE(**settings)
