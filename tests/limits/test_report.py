"""Limits of small models whose answer is known."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from torch import nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.inputs import ValueRange
from leakscope.equations import decomposition as decomposition_module
from leakscope.limits import Limits, cramer_rao, gradient_map_at, jacobian_rank, layer_systems, limits, security_metric
from leakscope.limits import jacobian as jacobian_module
from leakscope.limits import report as report_module
from leakscope.limits.cramer_rao import Floor
from leakscope.models import build_model
from leakscope.report.limits import limits_tables


def net(hidden: int = 6, features: int = 8, classes: int = 3, activation: str = "sigmoid") -> nn.Module:
    return build_model("mlp", input_shape=(features,), num_classes=classes, hidden=hidden, activation=activation)


def test_one_example_behind_a_linear_layer_is_closed_form_and_full_rank() -> None:
    found = limits(net(), (8,), 1)
    assert found.closed_form
    assert found.identifiable
    assert found.jacobian.rank == 8
    assert [p.applies for p in found.propositions] == [True, True, False]
    assert [p.met for p in found.propositions] == [True, True, None]
    assert "does not apply because" in found.propositions[2].statement


def test_the_span_statement_is_true_of_real_gradients(generator: torch.Generator) -> None:
    model = net(hidden=6).double()
    found = limits(model, (8,), 4)
    assert found.span_readable
    x = torch.rand(4, 8, dtype=torch.float64, generator=generator)
    loss = nn.functional.cross_entropy(model(x), torch.tensor([0, 1, 2, 0]))
    (weight,) = torch.autograd.grad(loss, [model.fc1.weight])  # type: ignore[union-attr,list-item]
    assert int(torch.linalg.matrix_rank(weight)) == 4
    basis = torch.linalg.svd(weight, full_matrices=False)[2][:4]
    assert float((x - x @ basis.T @ basis).norm() / x.norm()) <= 1e-10
    assert not limits(net(hidden=3), (8,), 4).span_readable


def test_enough_units_give_full_rank_and_one_fewer_than_the_batch_does_not() -> None:
    enough = limits(net(hidden=5, features=64, classes=10), (64,), 4)
    assert enough.propositions[1].met
    assert enough.jacobian.full
    few = limits(net(hidden=3, features=64, classes=10), (64,), 4)
    assert few.propositions[1].met is False
    assert few.jacobian.full is False


def test_a_net_too_small_for_its_batch_is_not_identifiable() -> None:
    found = limits(net(hidden=1, features=32), (32,), 3)
    assert found.gradient_entries < found.unknowns
    assert not found.count_met
    assert found.identifiable is False
    assert found.jacobian.rank is not None
    assert found.jacobian.rank < found.unknowns
    assert found.jacobian.smallest == 0.0
    assert found.conclusion.startswith("Not identifiable")


@pytest.mark.parametrize("features", [4, 20])
def test_one_relu_unit_cannot_tell_two_examples_apart(features: int) -> None:
    model = net(hidden=1, features=features, activation="relu")
    with torch.no_grad():
        model.fc1.bias.fill_(10.0)  # type: ignore[union-attr,operator]
    found = limits(model, (features,), 2)
    assert found.jacobian.full is False
    assert found.jacobian.rank  # the unit is alive
    assert found.identifiable is False


def test_a_dead_relu_layer_shows_nothing_even_of_one_example() -> None:
    model = net(hidden=2, activation="relu")
    with torch.no_grad():
        model.fc1.bias.fill_(-100.0)  # type: ignore[union-attr,operator]
    found = limits(model, (8,), 1)
    assert found.jacobian.rank == 0
    assert found.identifiable is False


def test_dlg_lenet_shows_every_pixel() -> None:
    found = limits(build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=10), (1, 8, 8), 1, 10)
    assert found.jacobian.rank == found.unknowns == 64
    assert found.identifiable
    assert found.first_layer_kind == "Conv2d"
    assert not any(p.applies for p in found.propositions)


def test_one_convolution_is_proposition_three() -> None:
    model = build_model("one-layer-cnn", input_shape=(3, 8, 8), num_classes=10, filters=12)
    three = limits(model, (3, 8, 8), 1).propositions[2]
    assert three.applies
    assert three.met
    assert three.numbers["needed"] == 12


def test_the_jacobian_agrees_with_finite_differences() -> None:
    model = net(hidden=3, features=4).double()
    generator = torch.Generator().manual_seed(5)
    x = torch.rand(2, 4, dtype=torch.float64, generator=generator)
    labels = torch.tensor([0, 1])

    def gradient(inputs: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])

    step, rows = 1e-6, []
    for unit in torch.eye(8, dtype=torch.float64):
        change = step * unit.reshape(2, 4)
        rows.append((gradient(x + change) - gradient(x - change)) / (2 * step))
    values = torch.linalg.svdvals(torch.stack(rows))
    found = jacobian_rank(model, (4,), 2, 3, seed=5)
    assert found.largest == pytest.approx(float(values[0]), rel=1e-6)
    assert found.smallest == pytest.approx(float(values[-1]), rel=1e-4)
    assert found.condition == pytest.approx(float(values[0] / values[-1]), rel=1e-4)


def test_frozen_first_layer_gives_no_closed_form() -> None:
    model = net()
    model.fc1.requires_grad_(False)  # type: ignore[union-attr,operator]
    found = limits(model, (8,), 1)
    assert not found.closed_form
    assert "frozen" in found.first_linear
    assert found.gradient_entries == 6 * 3 + 3


def test_large_problems_say_why_there_is_no_rank() -> None:
    found = limits(build_model("mlp", input_shape=(3, 32, 32), num_classes=10, hidden=1), (3, 32, 32), 2)
    assert found.jacobian.rank is None
    assert "--exact" in (found.jacobian.reason or "")
    assert found.identifiable is False  # by the count
    wide = limits(build_model("mlp", input_shape=(3, 32, 32), num_classes=10, hidden=64), (3, 32, 32), 2, exact=True)
    assert "5000" in (wide.jacobian.reason or "")
    assert wide.identifiable is None
    assert wide.conclusion.startswith("Not excluded")


def test_exact_raises_the_limit_and_the_gram_matrix_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobian_module, "QUICK_UNKNOWNS", 8)
    assert limits(net(), (8,), 2).jacobian.rank is None
    direct = limits(net(), (8,), 2, exact=True).jacobian
    assert (direct.rank, direct.method) == (16, "singular values")
    monkeypatch.setattr(decomposition_module, "MAX_SINGULAR_VALUES", 8)
    squared = limits(net(), (8,), 2, exact=True).jacobian
    assert (squared.rank, squared.method) == (16, "Gram matrix")
    assert squared.smallest == pytest.approx(direct.smallest, rel=1e-6)
    assert squared.largest == pytest.approx(direct.largest, rel=1e-9)
    assert squared.tolerance is not None
    assert direct.tolerance is not None
    assert squared.tolerance > 1e3 * direct.tolerance
    monkeypatch.setattr(jacobian_module, "MAX_ENTRIES", 100)
    assert "made up to 100" in (limits(net(), (8,), 2, exact=True).jacobian.reason or "")


def every_cell(found: Limits) -> dict[str, str]:
    """First cell of each row -> the second."""
    return {row[0]: row[1] for table in limits_tables(found) for row in table.rows}


def test_tables_and_dict_are_for_people_and_files() -> None:
    found = limits(net(hidden=1), (8,), 3, value_range=ValueRange((-1.0,), (2.0,)))
    for table in limits_tables(found):
        assert table.title
        assert table.rows or table.note
        assert all(len(row) == len(table.columns) and all(isinstance(c, str) for c in row) for row in table.rows)
    assert {"first layer", "rank of the Jacobian", "Proposition 2", "conclusion"} <= every_cell(found).keys()
    facts = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert facts["jacobian"]["condition"] is None
    assert facts["identifiable"] is False
    assert facts["propositions"][1]["numbers"]["hidden"] == 1
    assert facts["floor"] is None
    assert "--noise" in facts["floor_reason"]


def test_the_floor_is_that_of_the_channel_at_the_same_batch() -> None:
    channel = Channel(noise=0.01, prune=0.2)
    found = limits(net(), (8,), 2, channel=channel)
    mapping, flat = gradient_map_at(net(), (8,), 2, 3)
    assert found.floor == cramer_rao(mapping, flat, channel)
    cells = every_cell(found)
    assert cells["least RMSE"] == f"{found.floor.rmse:.3g}"  # type: ignore[union-attr]
    assert cells["surviving"].endswith("%")
    facts = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert facts["floor"]["psnr"] == pytest.approx(found.floor.psnr)  # type: ignore[union-attr]
    assert facts["floor"]["infinite"] is False
    assert facts["channel"]["prune"] == 0.2


def test_a_surviving_share_that_rounding_lifts_above_one_still_has_an_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def rounded(*args: Any, **options: Any) -> Floor:
        return dataclasses.replace(cramer_rao(*args, **options), surviving=1 + 2**-52)

    monkeypatch.setattr(report_module, "cramer_rao", rounded)
    found = limits(net(), (8,), 2, channel=Channel(noise=0.01, prune=0.2))
    (pruning,) = (order for order in found.orders if order.defense == "pruning")
    assert pruning.lower is not None
    assert math.isfinite(pruning.lower)


def test_an_infinite_floor_is_told_apart_in_json() -> None:
    found = limits(net(hidden=1), (8,), 3, channel=Channel(noise=0.1))
    facts = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert facts["floor"]["rmse"] is None
    assert facts["floor"]["infinite"] is True
    assert every_cell(found)["least RMSE"] == "infinite"


def test_above_the_quick_limit_the_floor_is_estimated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jacobian_module, "QUICK_UNKNOWNS", 8)
    spoken: list[tuple[str, int, int]] = []
    found = limits(net(), (8,), 2, channel=Channel(noise=0.01), probes=4, progress=lambda *told: spoken.append(told))
    exact = limits(net(), (8,), 2, channel=Channel(noise=0.01), exact=True)
    assert found.floor is not None
    assert exact.floor is not None
    assert (found.floor.method, exact.floor.method) == ("estimate", "exact")
    assert found.floor.rmse == pytest.approx(exact.floor.rmse, rel=0.5)
    assert " to " in every_cell(found)["least RMSE"]
    assert {name for name, _, _ in spoken} == {"floor"}
    assert all(0 < done <= total for _, done, total in spoken)


def test_given_examples_take_the_place_of_random_ones() -> None:
    _, flat = gradient_map_at(net(), (8,), 2, 3, seed=4)
    inputs, labels = flat.reshape(2, 8).float(), torch.tensor([0, 1])
    given = limits(net(), (8,), 2, inputs=inputs, labels=labels, channel=Channel(noise=0.01))
    random = limits(net(), (8,), 2, seed=4, channel=Channel(noise=0.01))
    assert given.jacobian.smallest == pytest.approx(random.jacobian.smallest, rel=1e-5)
    assert (given.point, random.point) == ("the batch that was given", "a random batch in the box")
    with pytest.raises(ValueError, match="both or neither"):
        limits(net(), (8,), 2, inputs=inputs)
    with pytest.raises(ValueError, match="expected shape") as caught:
        limits(net(), (8,), 2, inputs=inputs[:1], labels=torch.tensor([0, 7]))
    assert "below the model's 3" in str(caught.value)


def test_layers_and_the_security_metric_are_in_the_report() -> None:
    model = build_model("cnn3-c1", input_shape=(3, 12, 12), num_classes=10)
    found = limits(model, (3, 12, 12), 1)
    assert found.layers == layer_systems(model, (3, 12, 12))
    assert found.security == security_metric(found.layers)
    table = next(table for table in limits_tables(found) if "Layer by layer" in table.title)
    shares = [float(row[-1]) for row in table.rows]
    assert sum(shares) == pytest.approx(found.security)
    assert found.security is not None
    assert found.security < 0
    assert f"c(M) = {found.security:g}" in (table.note or "")
    facts = found.as_dict()
    assert facts["security"] == found.security
    assert [entry["deficiency"] for entry in facts["layers"]] == [layer.deficiency for layer in found.layers]


def test_a_model_that_is_no_chain_says_so() -> None:
    found = limits(build_model("mlp", input_shape=(8,), num_classes=3, hidden=4, activation="relu"), (8,), 1)
    assert found.layers == ()
    assert found.security is None
    assert found.layers_reason


def test_published_orders_need_one_hidden_layer() -> None:
    found = limits(net(hidden=20), (8,), 2, channel=Channel(noise=0.1, clip=0.01, prune=0.3))
    orders = {order.defense: order for order in found.orders}
    assert orders["none"].upper == pytest.approx(2 * math.sqrt(8 / 20))
    assert found.floor is not None
    factor = found.floor.gradient_norm / 0.01
    assert orders["clipping"].lower == pytest.approx(0.1 * factor * math.sqrt(8 / 20))
    assert orders["pruning"].lower == pytest.approx(0.1 * math.sqrt(8 / (found.floor.surviving * 20)))
    assert orders["dropout"].upper is None
    assert "order" in next(table.title for table in limits_tables(found) if "Published orders" in table.title)
    bare = limits(net(hidden=20), (8,), 2)
    assert [order.lower for order in bare.orders] == [None] * 7
    deep = limits(build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=10), (1, 8, 8), 1)
    assert deep.orders == ()
    assert "Conv2d, not Linear" in (deep.orders_reason or "")


def test_one_output_is_two_classes() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    assert limits(model, (6,), 2).jacobian.rank == 12


def test_the_callers_model_is_untouched_and_the_answer_repeats() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 3)
    ).train()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    first, second = limits(model, (1, 6, 6), 2), limits(model, (1, 6, 6), 2)
    assert first == second
    assert model.training
    assert all(m.training for m in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert torch.equal(state, torch.get_rng_state())


def test_signals_and_models_without_a_children_layer_work() -> None:
    assert limits(build_model("signal-cnn", input_shape=(1, 64), num_classes=3), (1, 64), 1).jacobian.full
    plain = limits(nn.Linear(5, 4), (5,), 1)
    assert plain.first_layer == "model"
    assert plain.closed_form


@pytest.mark.parametrize(
    "arguments, words",
    [
        (((8,), 0), "batch"),
        (((), 1), "input_shape"),
        (((8, -1), 1), "input_shape"),
        (((9,), 1), "cannot read an input of shape"),
        (((8,), 1, 4), "the model has 3 outputs"),
    ],
)
def test_wrong_arguments_are_named(arguments: tuple[object, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        limits(net(), *arguments)  # type: ignore[arg-type]


def test_models_that_cannot_be_observed_are_refused() -> None:
    with pytest.raises(ValueError, match="expected a torch"):
        limits("convnet", (8,), 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no trainable parameters"):
        limits(nn.Flatten(), (8,), 1)
    with pytest.raises(ValueError, match="logits"):
        limits(nn.Conv2d(1, 2, 3), (1, 8, 8), 1)
