"""What a pass takes is counted, and what theory cannot do is refused before it is tried."""

from __future__ import annotations

import importlib
import math

import pytest
import torch
from torch import Tensor, nn

from leakscope.audit.findings import FINDINGS, Subject
from leakscope.contracts.channel import Channel
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.task import Classification
from leakscope.federation import FedAvg, FedSGD
from leakscope.limits import diagnose, effort, effort_of, jacobian, limits
from leakscope.matching import GradientMap
from leakscope.models import build_model

floor_module = importlib.import_module("leakscope.limits.cramer_rao")  # the room has a function of this name


class Functional(nn.Module):
    """Parameters of its own, and no module to hook."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.conv2d(x, weight=self.weight, padding=1).mean((2, 3))


@pytest.mark.parametrize(
    ("model", "shape", "operations"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(12, 5)), (3, 2, 2), 2 * 12 * 5),
        (nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 8, 8), 2 * 27 * 4 * 16),
        (nn.Conv2d(4, 4, 3, padding=1, groups=4), (4, 8, 8), 2 * 9 * 4 * 64),
        (nn.ConvTranspose2d(3, 4, 2, 2), (3, 8, 8), 2 * 3 * 4 * 4 * 64),
        (Functional(), (3, 8, 8), 2 * 27 * 4 * 64),
        (nn.LSTM(6, 5, batch_first=True), (7, 6), 2 * 7 * (20 * 6 + 20 * 5)),
    ],
)
def test_operations_are_those_of_the_layers(model: nn.Module, shape: tuple[int, ...], operations: int) -> None:
    assert effort_of(model, shape).operations == operations
    assert effort_of(model, shape, examples=6).operations == 6 * operations


@pytest.mark.parametrize(
    ("model", "steps"),
    [
        (nn.LSTM(6, 5, batch_first=True), 7),
        (nn.GRU(6, 5, num_layers=2, bidirectional=True, batch_first=True), 28),
        (nn.Conv1d(7, 5, 3), 0),
    ],
)
def test_steps_of_recurrent_layers_are_counted_once_for_all_examples(model: nn.Module, steps: int) -> None:
    found = effort_of(model, (7, 6), examples=6)
    assert found.steps == steps
    assert found.with_calls().operations == found.operations + steps * effort.STEP_OPERATIONS


def test_attention_counts() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    tokens, width = 9, 16
    least = 2 * tokens * (width * 3 * width + width * width + 2 * width * 32)
    assert least <= effort_of(layer, (tokens, width)).operations <= 2 * least


def test_a_model_that_cannot_be_run_takes_nothing_and_is_not_changed() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)).train()
    before = [value.clone() for value in model.state_dict().values()]
    assert effort_of(model, (5,)).operations == 0
    assert effort_of(model, (4,), examples=3).operations == 48
    assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    assert model.training


class Layers(nn.Module):
    """Counts how many of its layers were run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(8))
        self.head = nn.Linear(8, 3)
        self.runs: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            self.runs.append(number)
            x = layer(x)
        return self.head(x.mean((2, 3)))

    def __deepcopy__(self, memo: object) -> Layers:
        twin = Layers()
        twin.load_state_dict(self.state_dict())
        twin.runs = self.runs
        return twin.to(next(self.parameters()).dtype)


def test_the_pass_is_ended_once_it_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers()
    one = 2 * 8 * 8 * 9 * 64
    monkeypatch.setattr(effort, "MAX_OPERATIONS", 2.5 * one)
    found = effort_of(model, (8, 8, 8))
    assert (found.whole, model.runs) == (False, [0, 1, 2])
    assert found.refusal("the floor", 1, math.inf) is not None


def test_limits_refuses_a_model_that_is_too_large_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers()
    monkeypatch.setattr(effort, "MAX_OPERATIONS", 1e3)
    with pytest.raises(ValueError, match=r"too much for theory.*--exact"):
        limits(model, (8, 8, 8), 1)
    assert len(model.runs) == 1
    assert limits(model, (8, 4, 4), 1, exact=True).unknowns == 128


def subject(protocol: FedSGD | FedAvg, model: nn.Module, x: Tensor) -> Subject:
    y = torch.zeros(len(x), dtype=torch.int64)
    observation = protocol.observe(model, x, y, generator=torch.Generator().manual_seed(0))
    draws = torch.Generator
    return Subject(protocol, None, Classification(), observation, x, y, draws)


@pytest.mark.parametrize(("kind", "protocol"), [("floor", FedSGD()), ("trajectory", FedAvg(batch_size=1))])
@pytest.mark.parametrize("limit", ["operations", "numbers"])
def test_findings_refuse_before_any_derivative(kind, protocol, limit, monkeypatch: pytest.MonkeyPatch) -> None:
    if limit == "operations":
        monkeypatch.setattr(floor_module, "PRODUCTS_WORK", 1.0)
        monkeypatch.setattr(jacobian, "COLUMNS_WORK", 1.0)
        monkeypatch.setattr("leakscope.audit.trajectory.GRADIENTS_WORK", 1.0)
    else:
        monkeypatch.setattr(effort.Effort.refusal, "__defaults__", (10.0,))
    client = subject(protocol, build_model("convnet", input_shape=(3, 8, 8)), torch.rand(2, 3, 8, 8))
    if kind == "trajectory" and limit == "numbers":
        assert "shares" in FINDINGS[kind].tell(client), "gradients alone hold little"
        return
    for name in ("linearise", "jacobian", "update"):
        monkeypatch.setattr(GradientMap, name, None)
    found = FINDINGS[kind].tell(client)
    assert set(found) == {"reason"}
    assert "not computed" in found["reason"]
    assert "smaller" in found["reason"]


def test_a_large_update_leaves_no_useful_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floor_module, "affordable_steps", lambda mapping: 3)
    model = build_model("mlp", input_shape=(1, 40, 40), num_classes=4, hidden=(4,))
    found = FINDINGS["floor"].tell(subject(FedSGD(), model, torch.rand(1, 1, 40, 40)))
    assert "entries" in found["reason"]
    assert "smaller" in found["reason"]
    bound = limits(model, (1, 40, 40), 1, channel=Channel(noise=0.1))
    assert bound.floor is None
    assert "entries" in str(bound.floor_reason)


def test_diagnosis_refuses_by_the_cost_of_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leakscope.limits.diagnosis.QUICK_COLUMNS_WORK", 10.0)
    model = build_model("convnet", input_shape=(3, 8, 8))
    x = torch.rand(1, 3, 8, 8)
    observation = FedSGD().observe(model, x, torch.tensor([0]), generator=torch.Generator().manual_seed(0))
    result = Reconstruction(x, torch.tensor([0]), torch.zeros(1))
    found = diagnose(observation, result)
    assert found.outcome == "undecided"
    assert "passes" in found.reason
    assert diagnose(observation, result, thorough=True).residual is not None
