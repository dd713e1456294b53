"""The split models: the published sizes, inputs of any kind, and workers that see their own features only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from leakscope.models import MODELS, build_model
from leakscope.models.split import VerticalModel
from leakscope.network.layers import first_dense


def build(name: str, shape: tuple[int, ...], classes: int = 3, **options: Any) -> VerticalModel:
    model = build_model(name, input_shape=shape, num_classes=classes, **options)
    assert isinstance(model, VerticalModel)
    return model


@pytest.mark.parametrize("shape, features", [((1, 28, 28), 2048), ((3, 32, 32), 2048)], ids=["mnist", "cifar10"])
def test_the_workers_are_the_published_ones(shape, features) -> None:
    model = build("cafe-cnn", shape, 10)
    assert len(model.workers) == 4
    for worker in model.workers:
        kinds = [type(layer).__name__ for layer in worker]
        assert kinds == ["Conv2d", "ReLU", "MaxPool2d"] * 2 + ["Flatten"] + ["Linear", "ReLU"] * 3
        convolutions = [layer for layer in worker if isinstance(layer, nn.Conv2d)]
        assert [(c.in_channels, c.out_channels, c.kernel_size, c.padding) for c in convolutions] == [
            (shape[0], 64, (5, 5), (2, 2)),
            (64, 128, (5, 5), (2, 2)),
        ]
        dense = [layer for layer in worker if isinstance(layer, nn.Linear)]
        assert [(layer.in_features, layer.out_features) for layer in dense] == [(features, 256), (256, 64), (64, 10)]
    (head,) = model.head
    assert (head.in_features, head.out_features) == (40, 10)
    assert [(layer.inputs, layer.units, layer.bias) for layer in first_dense(model)] == [(features, 256, True)] * 4


def test_the_second_softmax_is_that_of_the_published_code() -> None:
    x = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    plain = build("cafe-cnn", (1, 8, 8), filters=(2, 3), hidden=4, middle=4)
    double = build("cafe-cnn", (1, 8, 8), filters=(2, 3), hidden=4, middle=4, double_softmax=True)
    assert torch.equal(double(x), plain(x).softmax(1))


SHAPES: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("cafe-cnn", (1, 8, 8), {}),
    ("cafe-cnn", (3, 15, 11), {"batchnorm": True, "activation": "tanh"}),
    ("cafe-cnn", (1, 4, 4), {"pool": "average"}),
    ("cafe-cnn", (2, 64), {"slices": "strips"}),
    ("cafe-cnn", (2, 21), {"slices": "strips", "workers": 3, "pool": "average", "batchnorm": True}),
    ("cafe-cnn", (3, 12, 8), {"slices": "strips", "workers": 2}),
    ("cafe-cnn", (1, 8, 8), {"slices": {"left": "0-2", "right": "3-7"}}),
    ("vertical-mlp", (16,), {}),
    ("vertical-mlp", (7,), {"workers": 3, "activation": "sigmoid"}),
    ("vertical-mlp", (9,), {"slices": {"bank": ["0-3", 8], "shop": ["4-7"]}}),
    ("vertical-mlp", (2, 10), {"workers": 2}),
    ("vertical-mlp", (3, 6, 6), {"slices": "quadrants"}),
]


@pytest.mark.parametrize("name, shape, options", SHAPES, ids=str)
@pytest.mark.parametrize("classes", [1, 3])
def test_every_kind_of_input_gives_logits(name, shape, options, classes) -> None:
    small = {"hidden": 6, "middle": 5} | ({"filters": (2, 3)} if name == "cafe-cnn" else {})
    model = build(name, shape, classes, **small, **options).eval()
    x = torch.rand(4, *shape, generator=torch.Generator().manual_seed(1))
    assert model(x).shape == (4, classes)
    layers = first_dense(model)
    assert len(layers) == len(model.shares) == len(model.workers)
    assert {layer.units for layer in layers} == {6}
    if name == "vertical-mlp":
        assert [layer.inputs for layer in layers] == [len(share.places) for share in model.shares]
    for worker, share in zip(model.workers, model.shares, strict=True):
        assert worker(share.take(x)).shape == (4, classes)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    assert len(norms) == (2 * len(layers) if options.get("batchnorm") else 0)


def test_a_worker_reads_its_own_features_only_and_has_its_own_weights() -> None:
    model = build("vertical-mlp", (8,), workers=2, activation="tanh")
    x = torch.rand(1, 8, generator=torch.Generator().manual_seed(1))
    other = x.clone()
    other[:, 5] += 1
    one, two = ([w(s.take(v)) for w, s in zip(model.workers, model.shares, strict=True)] for v in (x, other))
    assert torch.equal(one[0], two[0])
    assert not torch.equal(one[1], two[1])
    assert not torch.equal(model.get_parameter("workers.0.fc1.weight"), model.get_parameter("workers.1.fc1.weight"))


def test_the_same_seed_gives_the_same_model() -> None:
    states = [build("vertical-mlp", (8,), seed=seed).state_dict() for seed in (3, 3, 4)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not all(torch.equal(states[0][key], states[2][key]) for key in states[0])


def test_both_are_in_the_table_with_their_options() -> None:
    assert {"slices", "workers", "filters", "pool", "batchnorm", "double_softmax"} <= set(MODELS["cafe-cnn"].options())
    assert {"slices", "workers", "hidden", "middle", "activation"} <= set(MODELS["vertical-mlp"].options())
    assert build_model("vertical-mlp")(torch.zeros(1, 16)).shape == (1, 2)


@pytest.mark.parametrize(
    "name, shape, options, words",
    [
        ("cafe-cnn", (16,), {}, r"images or signals, got shape \(16,\); use 'vertical-mlp'"),
        ("cafe-cnn", (1, 8, 8), {"pool": "min"}, "expected 'max' or 'average', got 'min'"),
        ("cafe-cnn", (1, 8, 8), {"filters": (2,)}, r"filters: expected two numbers, one a convolution, got \(2,\)"),
        ("cafe-cnn", (1, 8, 8), {"filters": 64}, "filters: expected two numbers"),
        (
            "cafe-cnn",
            (1, 8, 8),
            {"filters": (2, 0)},
            "filters, hidden, middle: expected an integer of at least 1, got 0",
        ),
        ("cafe-cnn", (1, 8, 8), {"workers": 3}, "expected 4 for quadrants, got 3"),
        ("cafe-cnn", (1, 3, 8), {}, "too small: worker 'bottom left' needs 2 pixels a side"),
        ("cafe-cnn", (2, 16), {}, "quadrants need images"),
        ("vertical-mlp", (8,), {"hidden": 0}, "hidden, middle: expected an integer of at least 1, got 0"),
        ("vertical-mlp", (8,), {"activation": "step"}, "activation: expected one of .* got 'step'"),
        ("vertical-mlp", (3,), {}, "expected 1 to 3 strips"),
        ("vertical-mlp", (8,), {"slices": {"a": "0-4", "b": "4-7"}}, r"exactly one worker; not so: 4 \(2 times\)"),
        ("vertical-mlp", (8,), {"filters": (2, 2)}, "has no option filters"),
    ],
    ids=str,
)
def test_what_cannot_be_built_says_why(name, shape, options, words) -> None:
    with pytest.raises(ValueError, match=words):
        build(name, shape, **options)
