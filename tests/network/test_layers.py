"""The head is found by what is executed, and the caller's model is never touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from leakscope.network.layers import Head, find_head


class HeadFirst(nn.Module):
    """The head is registered first, a spare layer last, and a class token sits on the outer module."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 4, bias=False)
        self.token = nn.Parameter(torch.zeros(6))
        self.body = nn.Linear(8, 6)
        self.spare = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x.flatten(1)).relu() + self.token)
        return out


def test_the_executed_layer_counts_not_the_order_of_parameters() -> None:
    assert find_head(HeadFirst(), (2, 4), 4) == Head("head.weight", None, "head")


def test_the_model_keeps_mode_statistics_hooks_and_gradients() -> None:
    layers = (nn.Conv1d(2, 3, 3), nn.BatchNorm1d(3), nn.Flatten(), nn.Dropout(), nn.Linear(18, 5))
    net = nn.Sequential(*layers).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    assert find_head(net, (2, 8), 5).weight_name == "4.weight"
    assert all(module.training for module in net.modules())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in net.modules())


def test_batchnorm_without_running_statistics_is_given_two_examples() -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False), nn.Linear(3, 2))
    assert find_head(net, (4,), 2).module_name == "2"


def test_tied_weights_are_named_as_in_named_parameters() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    assert find_head(net, (4,), 4) == Head("0.weight", "2.bias", "2")


def test_double_precision_models_work() -> None:
    assert find_head(nn.Sequential(nn.Linear(4, 2)).double(), (4,), 2).bias_name == "0.bias"


@pytest.mark.parametrize(
    "net, shape, reason",
    [
        (
            nn.Sequential(nn.Linear(8, 3), nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 3, 1), nn.Flatten()),
            (8,),
            "Conv1d",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(8, 5)), (8,), "has 5 outputs"),
        (nn.Flatten(), (3,), "no layer with parameters"),
        (nn.Linear(8, 3), (7,), "cannot read an input"),
    ],
)
def test_models_without_a_linear_head_are_refused_with_the_reason(
    net: nn.Module, shape: tuple[int, ...], reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        find_head(net, shape, 3)


def test_parametrised_weights_are_refused() -> None:
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)))
    with pytest.raises(ValueError, match="parametrisation"):
        find_head(net, (4,), 2)
