"""The finding "embedding": the features that follow from the update, compared with the true ones."""

from __future__ import annotations

import json
from typing import Any

import audit_doubles as doubles
import pytest
import torch

from leakscope.audit.findings import Subject, describe_embedding
from leakscope.contracts.defense import Defense
from leakscope.contracts.task import Classification
from leakscope.defenses import GradientPruning
from leakscope.federation import FedAvg, FedSGD
from leakscope.models import build_model


def told(protocol: Any, model: Any, x: torch.Tensor, y: torch.Tensor, defense: Defense | None = None) -> dict[str, Any]:
    def draws() -> torch.Generator:
        return torch.Generator().manual_seed(0)

    observation = protocol.observe(model, x, y, defense, generator=draws())
    content = describe_embedding(Subject(protocol, defense, Classification(), observation, x, y, draws))
    json.dumps(content, allow_nan=False)
    return content


@pytest.mark.parametrize("count", [1, 4])
def test_features_in_front_of_a_convolutional_nets_head(count: int) -> None:
    model = build_model("convnet", input_shape=(3, 16, 16), num_classes=10, filters=4)
    x, y = torch.rand((count, 3, 16, 16), generator=torch.Generator().manual_seed(0)), torch.arange(count).flip(0)
    content = told(FedSGD(), model, x, y)
    assert (content["layer"], content["peeled"], content["reaches_input"]) == ("fc", [], False)
    assert (content["examples"], content["numbers"], content["labels_right"]) == (count, 256, 1.0)
    assert content["exact"]
    assert content["error"] < 1e-5
    assert content["residual"] < 1e-6
    assert len(content["errors"]) == len(content["losses"]) == count


def test_logistic_regression_gives_the_examples_themselves() -> None:
    content = told(FedSGD(), doubles.net(), *doubles.examples(2))
    assert content["reaches_input"]
    assert content["error"] < 1e-4


def test_a_refusal_is_a_reason() -> None:
    x, y = doubles.examples(4)
    assert "at most 2 examples" in told(FedSGD(), doubles.net(), x, y)["reason"]
    assert set(told(FedAvg(epochs=5, batch_size=1, lr=1.0), doubles.net(), x[:2], y[:2])) == {"reason"}
    assert set(told(FedSGD(), doubles.net(), x[:2], y[:2], GradientPruning(fraction=0.9))) == {"reason"}


def test_where_single_features_do_not_follow_their_span_may() -> None:
    model = build_model("mlp", input_shape=(3, 8, 8), num_classes=4, hidden=256)
    draws = torch.Generator().manual_seed(0)
    x, y = torch.rand((6, 3, 8, 8), generator=draws), torch.arange(6) % 4
    content = told(FedSGD(), model, x, y)
    assert content["reason"]
    assert (content["layer"], content["examples"], content["numbers"]) == ("fc1", 6, 192)
    assert content["span_error"] < 1e-4
    assert content["span_baseline"] == pytest.approx((1 - 6 / 192) ** 0.5)
