"""The limits of vertical models whose answer is known, against the gradients that the protocol really sends."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from leakscope.contracts.task import Classification
from leakscope.data import load_data
from leakscope.equations.index_matrix import identify
from leakscope.federation import Vertical
from leakscope.limits import layer_signals, vertical_limits
from leakscope.models import build_model
from leakscope.models.split import VerticalModel, make_shares
from leakscope.network.layers import first_dense
from leakscope.network.recorder import inputs_of
from leakscope.report.limits import vertical_tables


def net(features: int = 16, classes: int = 3, activation: str = "tanh", **options: Any) -> VerticalModel:
    options = {"hidden": 12, "middle": 8, **options}
    model = build_model("vertical-mlp", input_shape=(features,), num_classes=classes, activation=activation, **options)
    assert isinstance(model, VerticalModel)
    return model


def samples_of(model: VerticalModel, count: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.rand((count, *model.input_shape), generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (count,), generator=generator)


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize("kind", ["mlp", "cnn"])
def test_signals_and_inputs_make_up_the_gradient_of_any_batch(kind: str, classes: int) -> None:
    if kind == "mlp":
        model = net(classes=classes)
    else:
        found = build_model(
            "cafe-cnn", input_shape=(3, 8, 8), num_classes=classes, filters=(3, 4), hidden=6, middle=5, batchnorm=True
        )
        assert isinstance(found, VerticalModel)
        model = found
    x, y = samples_of(model, 9, 2)
    layers = layer_signals(model, x, y, batch=4)
    exact = copy.deepcopy(model).double().eval()
    rows = [1, 2, 5, 8]
    loss = Classification().loss(exact(x[rows]), y[rows])
    for dense, (signals, inputs) in zip(first_dense(model), layers, strict=True):
        layer = dense.module(exact)
        assert layer.bias is not None
        weight, bias = torch.autograd.grad(loss, [layer.weight, layer.bias], retain_graph=True)
        assert torch.allclose(signals[rows].sum(0), bias, atol=1e-14)
        assert torch.allclose(signals[rows].T @ inputs[rows], weight, atol=1e-14)
        reads = inputs_of(layer, exact.workers[dense.worker], dense.share.take(x))
        assert torch.allclose(inputs, reads, atol=1e-14)


def test_the_model_is_left_as_it_was() -> None:
    model = net().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    vertical_limits(model, samples=6, batch=2)
    assert model.training
    assert all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_enough_rounds_make_everything_follow_though_theorem_2_as_printed_is_not_met() -> None:
    found = vertical_limits(net(), samples=20, batch=4)
    assert found.rounds == 35
    assert found.identifiable
    assert found.index.identifiable
    assert found.conclusion.startswith("Identifiable: 35 rounds have 20 independent batches")
    for worker in found.workers:
        assert (worker.features, worker.inputs, worker.units, worker.bias) == (4, 4, 12, True)
        assert worker.enough_inputs
        assert worker.invisible == ()
        assert worker.determined == 20
        assert worker.separable is None
        assert worker.theorem.printed is False
        assert worker.theorem.corrected is True
        assert worker.input_rank == 4
        assert 0 < worker.signal_rank <= 12
        assert math.isinf(worker.bounds[0].inputs_phi1)
        assert math.isfinite(worker.bounds[2].inputs_phi1)


def test_what_the_protocol_sends_gives_what_the_limits_promise() -> None:
    model = net().double()
    x, y = samples_of(model, 12)
    protocol = Vertical(batch_size=3)
    seen = protocol.observe(model, x, y)
    indices = [message.indices for message in seen.messages]
    assert all(batch is not None for batch in indices)
    found = vertical_limits(model, 12, 3, inputs=x, labels=y, indices=indices)  # type: ignore[arg-type]
    assert found.given
    assert found.identifiable == identify(indices, 12).identifiable is True  # type: ignore[arg-type]
    rows = torch.tensor([[float(n in batch) for n in range(12)] for batch in indices], dtype=torch.float64)  # type: ignore[operator]
    for dense in first_dense(model):
        bias = torch.stack([message.update[f"{dense.name}.bias"] for message in seen.messages])
        weight = torch.stack([message.update[f"{dense.name}.weight"] for message in seen.messages])
        isolate = torch.linalg.pinv(rows)
        signals = isolate @ bias
        each = torch.einsum("nt,tji->nji", isolate, weight)
        reads = torch.einsum("nji,nj->ni", each, signals) / signals.square().sum(1, keepdim=True)
        assert float((reads - dense.share.take(x)).abs().max()) < 1e-9


def test_dead_units_hide_samples_from_one_worker_only() -> None:
    model = net(activation="relu").double()
    layer = first_dense(model)[1].module(model)
    with torch.no_grad():  # the unit is on only for the samples whose first feature is above 1/2
        layer.weight.zero_()
        layer.weight[:, 0] = 1.0
        assert layer.bias is not None
        layer.bias.fill_(-0.5)
        for parameter in model.workers[1].fc2.parameters():  # type: ignore[union-attr, operator]
            parameter.fill_(0.1)
        for parameter in model.workers[1].fc3.parameters():  # type: ignore[union-attr, operator]
            parameter.fill_(0.1)
    x, y = samples_of(model, 10)
    dark = tuple(torch.nonzero(first_dense(model)[1].share.take(x)[:, 0] <= 0.5).flatten().tolist())
    assert 0 < len(dark) < 10
    found = vertical_limits(model, 10, 2, rounds=20, inputs=x, labels=y)
    assert found.point == "the samples that were given"
    worker = found.workers[1]
    assert worker.invisible == dark
    assert worker.determined == 10 - len(dark)
    assert worker.theorem.corrected is False
    assert not found.identifiable
    assert found.conclusion.startswith("Partly identifiable")


def test_batches_of_all_samples_determine_nothing() -> None:
    found = vertical_limits(net(), samples=5, batch=5, rounds=30)
    assert found.index.rank == 1
    assert [worker.determined for worker in found.workers] == [0] * 4
    assert found.needed.least is None
    assert found.theorem.corrected is False
    assert found.together == 5
    assert found.conclusion.startswith("Not identifiable by steps I and II: every round has the same samples")


def test_fewer_rounds_than_samples_are_told_to_be_no_safety_where_inputs_suffice() -> None:
    wide = vertical_limits(net(features=120), samples=20, batch=4, rounds=18)
    assert not wide.identifiable
    together = 20 - wide.together
    assert [worker.separable for worker in wide.workers] == [together] * 4
    assert together > 15
    assert "no safety" in wide.conclusion
    narrow = vertical_limits(net(features=16), samples=20, batch=4, rounds=18)  # 5 inputs with the bias's for 20
    assert [worker.separable for worker in narrow.workers] == [0] * 4
    assert "by steps I and II" in narrow.conclusion


def test_shuffled_epochs_need_more_rounds_than_samples() -> None:
    found = vertical_limits(net(), samples=12, batch=6, sampling="epochs", rounds=20)
    assert found.needed.least == 21
    assert found.index.rank < 12
    assert vertical_limits(net(), samples=12, batch=6, sampling="epochs", rounds=30).index.rank == 12


def test_workers_without_bias_or_with_too_few_inputs_are_named() -> None:
    shares = make_shares((8,), {"bank": ["0-5"], "shop": ["6-7"]})
    workers = [
        nn.Sequential(nn.Unflatten(1, (1, 6)), nn.AvgPool1d(2), nn.Flatten(), nn.Linear(3, 4, bias=False), nn.Tanh()),
        nn.Sequential(nn.Linear(2, 4), nn.Tanh()),
    ]
    model = VerticalModel(workers=workers, head=nn.Linear(8, 2), shares=shares, input_shape=(8,))
    found = vertical_limits(model, samples=6, batch=2)
    bank, shop = found.workers
    assert (bank.bias, bank.inputs, bank.features, bank.enough_inputs) == (False, 3, 6, False)
    assert (shop.bias, shop.inputs, shop.features, shop.enough_inputs) == (True, 2, 2, True)
    notes = " ".join(table.note or "" for table in vertical_tables(found))
    assert "Fewer inputs than features: bank;" in notes
    assert "No bias: bank;" in notes


def test_tables_and_json_hold_everything() -> None:
    found = vertical_limits(net(), samples=20, batch=20, rounds=3)
    for table in vertical_tables(found):
        assert table.rows
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert all(isinstance(cell, str) for row in table.rows for cell in row)
    assert "Cramér-Rao" in (vertical_tables(found)[-1].note or "")
    facts = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert facts["samples"] == facts["batch"] == 20
    assert facts["index"]["condition"] is None
    assert facts["index"]["rank"] == 1
    assert facts["needed"]["least"] is None
    assert facts["workers"][3]["bounds"][0]["name"] == "as printed"
    assert facts["identifiable"] is False
    assert facts["conclusion"] == found.conclusion


def test_the_seed_decides_and_progress_is_told() -> None:
    told: list[tuple[str, int, int]] = []
    first = vertical_limits(net(), 130, 8, 140, seed=3, progress=lambda *event: told.append(event))
    assert ("samples", 100, 130) in told
    assert ("samples", 130, 130) in told
    assert told[-1] == ("workers", 4, 4)
    assert vertical_limits(net(), 130, 8, 140, seed=3).as_dict() == first.as_dict()
    assert vertical_limits(net(), 130, 8, 140, seed=4).index.condition != first.index.condition


def test_real_pictures_in_the_network_of_the_paper(real_data) -> None:
    model = build_model("cafe-cnn", input_shape=(3, 32, 32), num_classes=10)
    assert isinstance(model, VerticalModel)
    data = load_data("cifar10", real_data / "cifar-10-batches-bin", split="test", limit=60)
    found = vertical_limits(model, 60, 8, rounds=50, inputs=data.x, labels=data.y)
    assert not found.identifiable
    assert [worker.input_rank for worker in found.workers] == [60] * 4
    assert min(worker.separable or 0 for worker in found.workers) >= 50


def test_all_mistakes_are_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)samples: .*batch: .*rounds: .*sampling: .*both or neither") as error:
        vertical_limits(net(), 0, True, -1, sampling="now and then", inputs=torch.zeros(1, 3))  # type: ignore[arg-type]
    assert "inputs: expected shape (0, 16), got (1, 3)" in str(error.value)
    with pytest.raises(ValueError, match="at most the 3 samples, got 4"):
        vertical_limits(net(), 3, 4)
    with pytest.raises(ValueError, match="expected 2, as there are indices"):
        vertical_limits(net(), 3, 2, 5, indices=[[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="round 0"):
        vertical_limits(net(), 3, 2, indices=[[0, 3]])
    with pytest.raises(ValueError, match="classes below the model's 3, got up to 7"):
        vertical_limits(net(), 2, 1, inputs=torch.zeros(2, 16), labels=torch.tensor([0, 7]))
    with pytest.raises(ValueError, match="2 class numbers"):
        vertical_limits(net(), 2, 1, inputs=torch.zeros(2, 16), labels=torch.zeros(2))
    with pytest.raises(ValueError, match="VerticalModel, got Linear"):
        vertical_limits(nn.Linear(2, 2), 2, 1)  # type: ignore[arg-type]


def test_a_first_dense_layer_that_reads_samples_in_pieces_is_refused() -> None:
    shares = make_shares((6,), {"one": ["0-5"]})
    worker = nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Linear(3, 4), nn.Flatten())
    model = VerticalModel(workers=[worker], head=nn.Linear(8, 2), shares=shares, input_shape=(6,))
    with pytest.raises(ValueError, match=r"read each sample once, got one with outputs \(2, 2, 4\)"):
        vertical_limits(model, 2, 1)
