"""Ranks of published nets, and the security metric of Chen and Campbell, equation 12."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.inputs import ValueRange
from leakscope.limits.security import LayerSystem, layer_systems, security_metric
from leakscope.models import build_model

pytestmark = pytest.mark.slow

# c(M) and the deficiency of each convolution, at 3 x 32 x 32.
PREDICTED = {
    "cnn2-c1": (0, [0]),
    "cnn2-c2": (-1470, [-1470]),
    "cnn3-c1": (-2266.5, [0, -4533]),
    "cnn3-c2": (-1995, [-1470, -1050]),
    "cnn3-c3": (0, [0, 0]),
    "cnn3-c4": (-2146, [-2146, 0]),
    "cnn4-c1": (-2772, [0, -3965, -386]),
    "cnn4-c2": (-18632 / 3, [0, -9316, 0]),
    "cnn4-c3": (-512 / 3, [0, -256, 0]),
}


@pytest.mark.parametrize("name", PREDICTED)
def test_published_nets_by_the_formula(name: str) -> None:
    layers = layer_systems(build_model(name), (3, 32, 32), max_unknowns=0)
    metric, deficiencies = PREDICTED[name]
    assert [layer.deficiency for layer in layers if layer.convolutional] == deficiencies
    assert security_metric(layers) == pytest.approx(metric, abs=1e-9)
    assert all(layer.rank is None and "computed up to 0" in str(layer.reason) for layer in layers[:-1])
    assert layers[-1].deficiency == 0  # the linear layer


@pytest.mark.parametrize("name", ["cnn2-c2", "cnn3-c2", "cnn3-c1"])
def test_published_nets_by_computed_ranks(name: str) -> None:
    layers = layer_systems(build_model(name), (3, 32, 32))
    assert [layer.rank for layer in layers] == [layer.predicted_rank for layer in layers]
    assert security_metric(layers) == PREDICTED[name][0]
    assert all(layer.smallest and layer.condition and layer.condition < 1e4 for layer in layers)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn2-c1", "cnn3-c3", "cnn3-c4", "cnn4-c1", "cnn4-c2"])
def test_larger_published_nets_by_computed_ranks(name: str) -> None:
    layers = layer_systems(build_model(name), (3, 32, 32))
    assert [layer.rank for layer in layers] == [layer.predicted_rank for layer in layers]
    assert security_metric(layers) == pytest.approx(PREDICTED[name][0], abs=1e-9)


def test_the_formula_does_not_know_of_pixels_that_a_stride_leaves_out() -> None:
    """The second convolution reads 12 x 12 maps with windows of 5 in steps of 2: the last row and column are lost."""
    first, second, *_ = layer_systems(build_model("cnn4-c3", input_shape=(3, 16, 16)), (3, 16, 16))
    assert first.unseen == 0
    assert second.unseen == 6 * (12 + 12 - 1)
    assert second.predicted_rank == second.unknowns
    assert second.rank == second.unknowns - second.unseen


@pytest.mark.parametrize("name", [name for name in PREDICTED if name != "cnn4-c2"])  # small, it has fewer outputs
@pytest.mark.parametrize("seed", [0, 1])
def test_small_versions_neither_depend_on_data_nor_on_the_box(name: str, seed: int) -> None:
    box = ValueRange((-0.5,), (0.5,)) if seed else None
    # Sizes at which every window of a stride ends at the border.
    shape = (3, 17, 17) if name == "cnn4-c3" else (3, 16, 16)
    model = build_model(name, input_shape=shape, seed=seed)
    layers = layer_systems(model, shape, num_classes=10, seed=seed, value_range=box)
    assert all(layer.unseen == 0 for layer in layers)
    assert [layer.rank for layer in layers] == [layer.predicted_rank for layer in layers]


def test_training_does_not_change_it() -> None:
    model = build_model("cnn3-c2", input_shape=(3, 12, 12))
    before = layer_systems(model, (3, 12, 12))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.rand(20, 3, 12, 12), torch.arange(20) % 10
    for _ in range(30):
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimiser.step()
    after = layer_systems(model, (3, 12, 12))
    assert [layer.rank for layer in before] == [layer.rank for layer in after]
    assert before != after


def test_one_output_has_the_same_ranks() -> None:
    several = layer_systems(build_model("cnn3-c3", input_shape=(3, 8, 8)), (3, 8, 8))
    one = layer_systems(build_model("cnn3-c3", input_shape=(3, 8, 8), num_classes=1, head_bias=False), (3, 8, 8))
    assert [layer.rank for layer in several] == [layer.rank for layer in one]


def test_a_frozen_layer_has_no_gradient_equations() -> None:
    model = build_model("cnn3-c1", input_shape=(3, 8, 8))
    whole = layer_systems(model, (3, 8, 8))
    model.get_submodule("conv1").requires_grad_(False)
    frozen = layer_systems(model, (3, 8, 8))
    assert whole[0].rows - frozen[0].rows == 6 * 3 * 9
    assert frozen[1] == whole[1]


def test_weights_fall_from_the_input_on() -> None:
    def layer(deficiency: int | None, convolutional: bool = True) -> LayerSystem:
        rank = None if deficiency is None else 100 + deficiency
        return LayerSystem(
            name="x", convolutional=convolutional, rows=9, unknowns=100, unseen=0, rank=rank, predicted_rank=None
        )

    assert security_metric([layer(-3), layer(-6), layer(-9)]) == pytest.approx(-3 - 4 - 3)
    assert security_metric([layer(-3), layer(-50, convolutional=False)]) == -3
    assert math.isnan(security_metric([layer(-3), layer(None)]))
    assert security_metric([]) == 0


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(NotApplicable, match="ReLU"):
        layer_systems(build_model("convnet"), (3, 32, 32))
    with pytest.raises(ValueError, match="the model's 10 outputs, got 3"):
        layer_systems(build_model("cnn2-c1", input_shape=(3, 8, 8)), (3, 8, 8), num_classes=3)
