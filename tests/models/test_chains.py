"""Nets of the closed-form attacks: the published tables, sizes that follow from the input, one output."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from leakscope.models import MODELS, build_model
from leakscope.models.classic import HYBRID_LAYERS, RGAP_LAYERS

# Name -> (in -> out, kernel, stride, padding of each convolution, inputs of the linear layer) at 3 x 32 x 32.
PUBLISHED = {
    "cnn2-c1": (["3>6,3,1,0"], 5400),
    "cnn2-c2": (["3>6,4,2,0"], 1350),
    "cnn3-c1": (["3>6,3,1,0", "6>3,4,2,0"], 588),
    "cnn3-c2": (["3>6,4,2,0", "6>3,3,2,0"], 147),
    "cnn3-c3": (["3>6,3,1,0", "6>9,3,1,0"], 7056),
    "cnn3-c4": (["3>1,3,1,0", "1>6,3,1,0"], 4704),
    "cnn4-c1": (["3>6,3,1,0", "6>5,4,2,0", "5>3,4,1,0"], 363),
    "cnn4-c2": (["3>16,5,1,0", "16>6,5,2,0", "6>32,5,1,2"], 4608),
    "cnn4-c3": (["3>6,5,1,0", "6>16,5,2,0", "16>16,5,1,2"], 2304),
    "cnn6": (["3>12,4,2,2", "12>36,3,2,1", "36>36,3,1,1", "36>36,3,1,1", "36>64,3,2,1", "64>128,3,1,1"], 3200),
    "cnn6-d": (["3>12,4,2,2", "12>20,3,2,1", "20>36,3,1,1", "36>36,3,1,1", "36>64,3,2,1", "64>128,3,1,1"], 3200),
}


def described(layer: nn.Conv2d) -> str:
    assert layer.kernel_size[0] == layer.kernel_size[1]
    return f"{layer.in_channels}>{layer.out_channels},{layer.kernel_size[0]},{layer.stride[0]},{layer.padding[0]}"


def test_every_net_is_in_the_table() -> None:
    assert set(PUBLISHED) == set(HYBRID_LAYERS) | set(RGAP_LAYERS)
    assert set(PUBLISHED) <= set(MODELS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_layers_are_the_published_ones(name: str) -> None:
    model = build_model(name)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    rows, features = PUBLISHED[name]
    assert [described(layer) for layer in convolutions] == rows
    assert all(layer.bias is None for layer in convolutions)
    head = model.get_submodule("fc")
    assert isinstance(head, nn.Linear)
    assert (head.in_features, head.out_features, head.bias is not None) == (features, 10, True)
    usual = nn.LeakyReLU if name.startswith("cnn6") else nn.Tanh
    activations = [m for m in model.modules() if isinstance(m, nn.LeakyReLU | nn.Tanh)]
    assert [type(m) for m in activations] == [usual] * len(rows)
    assert all(m.negative_slope == 0.2 for m in activations if isinstance(m, nn.LeakyReLU))


@pytest.mark.parametrize("name", [*PUBLISHED, "fcn3"])
def test_one_output_without_bias(name: str) -> None:
    model = build_model(name, num_classes=1, head_bias=False)
    assert model(torch.rand(2, *MODELS[name].input_shape)).shape == (2, 1)
    assert not [key for key, _ in model.named_parameters() if key.endswith("bias")]


def test_fcn3_has_an_activation_on_its_output_as_published() -> None:
    model = build_model("fcn3", num_classes=1)
    assert [m.out_features for m in model.modules() if isinstance(m, nn.Linear)] == [1000, 100, 1]
    assert isinstance(list(model.children())[-1], nn.LeakyReLU)
    plain = build_model("fcn3", num_classes=1, head_activation=False)
    x = torch.rand(3, 1, 28, 28)
    assert torch.equal(model(x), nn.functional.leaky_relu(plain(x), 0.2))


def test_options_and_errors() -> None:
    assert MODELS["cnn3-c1"].options() == ("activation", "head_bias")
    model = build_model("cnn3-c1", activation="identity")
    assert isinstance(model.get_submodule("activation1"), nn.Identity)
    with pytest.raises(ValueError, match="nothing is left after conv2"):
        build_model("cnn3-c1", input_shape=(3, 5, 9))
