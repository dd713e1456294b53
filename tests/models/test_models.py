"""Reference victims: exact shapes and counts, any size the architecture allows, determinism."""

from __future__ import annotations

import tracemalloc

import pytest
import torch
from torch import nn

from leakscope.models import ACTIVATIONS, MODELS, build_model, parameter_count


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def conv(inputs: int, outputs: int, kernel: int) -> int:
    return inputs * outputs * kernel * kernel + outputs


def residual(inputs: int, outputs: int, *, shortcut: bool) -> int:
    """Two 3x3 convolutions without bias, two BatchNorms; a 1x1 with its BatchNorm where the size changes."""
    count = 9 * inputs * outputs + 9 * outputs * outputs + 4 * outputs
    return count + (inputs * outputs + 2 * outputs if shortcut else 0)


def transformer_layer(dim: int, ratio: int, *, first: bool) -> int:
    attention = 3 * dim * dim + linear(dim, dim)
    norms = 2 * dim if first else 4 * dim
    return attention + norms + linear(dim, ratio * dim) + linear(ratio * dim, dim)


COUNTS = {
    "cafe-cnn": 4 * (conv(3, 64, 5) + conv(64, 128, 5) + linear(2048, 256) + linear(256, 64) + linear(64, 10))
    + linear(40, 10),
    "vertical-mlp": 4 * (linear(4, 64) + linear(64, 32) + linear(32, 2)) + linear(8, 2),
    "convnet": conv(3, 32, 3) + conv(32, 64, 3) + conv(64, 128, 3) + linear(2048, 10),
    "dlg-lenet": conv(3, 12, 5) + 2 * conv(12, 12, 5) + linear(768, 100),
    "lenet-tanh": conv(1, 6, 5) + conv(6, 16, 5) + linear(400, 120) + linear(120, 84) + linear(84, 62),
    "one-layer-cnn": conv(3, 12, 5) + linear(12 * 16 * 16, 100),
    "femnist-cnn": conv(1, 32, 3) + conv(32, 64, 3) + linear(3136, 100) + linear(100, 62),
    "cifar-cnn": conv(3, 64, 3) + conv(64, 128, 3) + linear(8192, 200) + linear(200, 100),
    "resnet8": 9 * 32
    + 64
    + residual(32, 32, shortcut=False)
    + residual(32, 64, shortcut=True)
    + residual(64, 128, shortcut=True)
    + linear(2048, 1000)
    + linear(1000, 62),
    "resnet18": 11_173_962,
    "vit": conv(3, 96, 4) + 66 * 96 + 4 * (transformer_layer(96, 4, first=False) + 3 * 96) + 2 * 96 + linear(96, 10),
    "s3-vit": linear(784, 384)
    + 3 * 384
    + transformer_layer(384, 2, first=True)
    + 3 * transformer_layer(384, 2, first=False)
    + 2 * 384
    + linear(384, 768)
    + linear(768, 62),
    "mlp": linear(3072, 256) + linear(256, 10),
    "s3-mlp": linear(784, 1000) + linear(1000, 1000) + linear(1000, 62),
    "logistic": linear(3072, 10),
    "cnn2-c1": 6 * 3 * 9 + linear(5400, 10),
    "cnn2-c2": 6 * 3 * 16 + linear(1350, 10),
    "cnn3-c1": 6 * 3 * 9 + 3 * 6 * 16 + linear(588, 10),
    "cnn3-c2": 6 * 3 * 16 + 3 * 6 * 9 + linear(147, 10),
    "cnn3-c3": 6 * 3 * 9 + 9 * 6 * 9 + linear(7056, 10),
    "cnn3-c4": 3 * 9 + 6 * 9 + linear(4704, 10),
    "cnn4-c1": 6 * 3 * 9 + 5 * 6 * 16 + 3 * 5 * 16 + linear(363, 10),
    "cnn4-c2": 16 * 3 * 25 + 6 * 16 * 25 + 32 * 6 * 25 + linear(4608, 10),
    "cnn4-c3": 6 * 3 * 25 + 16 * 6 * 25 + 16 * 16 * 25 + linear(2304, 10),
    "cnn6": 12 * 3 * 16 + 9 * (36 * 12 + 2 * 36 * 36 + 64 * 36 + 128 * 64) + linear(3200, 10),
    "cnn6-d": 12 * 3 * 16 + 9 * (20 * 12 + 36 * 20 + 36 * 36 + 64 * 36 + 128 * 64) + linear(3200, 10),
    "fcn3": 784 * 1000 + 1000 * 100 + 100 * 10,
    "signal-cnn": (7 * 16 + 16) + (5 * 16 * 32 + 32) + (5 * 32 * 64 + 64) + linear(64 * 32, 5),
}


def test_every_model_has_a_count() -> None:
    assert set(COUNTS) == set(MODELS)


@pytest.mark.parametrize("name", list(MODELS))
def test_count_and_output(name: str) -> None:
    entry = MODELS[name]
    model = build_model(name)
    assert parameter_count(model) == COUNTS[name]
    assert model(torch.rand(2, *entry.input_shape)).shape == (2, entry.num_classes)
    assert entry.name == name
    assert entry.summary


IMAGES = [(1, 28, 28), (3, 32, 32), (4, 31, 29), (2, 17, 40)]


@pytest.mark.parametrize("shape", IMAGES, ids=str)
@pytest.mark.parametrize("name", [n for n in MODELS if n != "signal-cnn"])
def test_any_image_size_and_channels(name: str, shape: tuple[int, ...]) -> None:
    model = build_model(name, input_shape=shape, num_classes=7)
    assert model(torch.rand(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize("name", ["mlp", "s3-mlp", "logistic", "fcn3"])
@pytest.mark.parametrize("shape", [(5,), (2, 9), (1, 4, 4)], ids=str)
def test_fully_connected_read_anything(name: str, shape: tuple[int, ...]) -> None:
    assert build_model(name, input_shape=shape, num_classes=3)(torch.rand(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("shape", [(1, 256), (12, 101), (2, 1)], ids=str)
def test_signals(shape: tuple[int, ...]) -> None:
    assert build_model("signal-cnn", input_shape=shape, num_classes=3)(torch.rand(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize("name", list(MODELS))
def test_differentiable_twice(name: str) -> None:
    """Gradient matching differentiates the gradient with respect to the input."""
    entry = MODELS[name]
    model = build_model(name).eval()
    x = torch.rand(1, *entry.input_shape, requires_grad=True)
    loss = nn.functional.cross_entropy(model(x), torch.tensor([1]))
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    total = sum((g**2).sum() for g in gradients)
    (second,) = torch.autograd.grad(total, x)  # type: ignore[arg-type]
    assert torch.isfinite(second).all()
    assert second.abs().max() > 0


@pytest.mark.parametrize("name", list(MODELS))
def test_seed_decides_the_weights_and_nothing_else_moves(name: str) -> None:
    before = torch.get_rng_state()
    first, again, other = (build_model(name, seed=seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_global_state_does_not_matter() -> None:
    first = build_model("convnet").state_dict()
    torch.rand(5)
    second = build_model("convnet").state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_dlg_lenet_is_uniform() -> None:
    model = build_model("dlg-lenet")
    values = torch.cat([p.detach().flatten() for p in model.parameters()])
    assert values.min() >= -0.5
    assert values.max() <= 0.5
    assert values.min() < -0.499
    assert values.max() > 0.499
    assert abs(values.mean()) < 0.005
    assert abs(values.std() - 1 / 12**0.5) < 0.005
    default = build_model("dlg-lenet", init="default").get_submodule("fc").weight
    assert default.abs().max() < 0.05


def test_dlg_lenet_on_mnist_has_588_features() -> None:
    model = build_model("dlg-lenet", input_shape=(1, 28, 28), num_classes=10)
    assert tuple(model.get_submodule("fc").weight.shape) == (10, 588)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_activations(activation: str) -> None:
    model = build_model("dlg-lenet", activation=activation)
    assert type(model.get_submodule("activation2")) is type(ACTIVATIONS[activation]())


def test_lenet_tanh_returns_probabilities() -> None:
    x = torch.rand(2, 1, 28, 28)
    assert torch.allclose(build_model("lenet-tanh")(x).sum(1), torch.ones(2))
    logits = build_model("lenet-tanh", softmax=False)
    assert torch.allclose(torch.softmax(logits(x), 1), build_model("lenet-tanh")(x))


def test_s3_mlp_rectifies_its_logits() -> None:
    output = build_model("s3-mlp")(torch.rand(4, 1, 28, 28))
    assert output.min() == 0
    assert output.max() > 0


def test_s3_vit_first_layer_is_plain() -> None:
    model = build_model("s3-vit")
    names = dict(model.named_parameters())
    assert "layers.layer1.norm1.weight" not in names
    assert all(f"layers.layer{i}.norm1.weight" in names for i in (2, 3, 4))
    # Without residual and norm, an attention that returns 0 makes the first layer forget its input.
    layer = model.get_submodule("layers.layer1")
    nn.init.zeros_(layer.get_submodule("attention.projection").weight)
    one, two = layer(torch.rand(1, 2, 384)), layer(torch.rand(1, 2, 384))
    assert torch.equal(one, two)


def test_s3_vit_patches_hold_neighbouring_pixels() -> None:
    model = build_model("s3-vit", input_shape=(2, 4, 6), patch_size=2)
    x = torch.arange(48.0).reshape(1, 2, 4, 6)
    patches = model.patches(x)  # type: ignore[operator]
    assert patches.shape == (1, 6, 8)
    expected = x[0, :, 0:2, 2:4].permute(1, 2, 0).flatten()  # the second patch of the first row
    assert torch.equal(patches[0, 1], expected)


def test_vit_positions_are_learned_or_fixed_and_tokens_are_pooled() -> None:
    assert build_model("vit").position.shape == (1, 65, 96)
    fixed = build_model("vit", learned_positions=False, pool="mean")
    assert "position" not in dict(fixed.named_parameters())
    assert fixed.position.shape == (1, 64, 96)
    assert fixed.class_token is None
    x = torch.rand(1, 3, 32, 32)
    assert not torch.equal(fixed(x), fixed(x.flip(3)))


def test_resnet18_is_narrow_or_has_one_more_dense_layer_where_asked() -> None:
    wide = build_model("resnet18", width=16, hidden=64)
    assert [type(layer).__name__ for layer in wide.head] == ["Linear", "ReLU", "Linear"]
    assert (wide.head.fc1.in_features, wide.head.fc1.out_features, wide.head.fc2.in_features) == (128, 64, 64)
    assert list(build_model("resnet18").head._modules) == ["fc1"]
    with pytest.raises(ValueError, match="resnet18: hidden"):
        build_model("resnet18", hidden=-1)


def test_resnet18_keeps_the_resolution_of_small_images() -> None:
    model = build_model("resnet18")
    stem = model.get_submodule("conv")
    assert (stem.kernel_size, stem.stride, stem.padding) == ((3, 3), (1, 1), (1, 1))
    assert sum(isinstance(m, nn.MaxPool2d) for m in model.modules()) == 0
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 20


def test_convnet_pools_to_four_whatever_the_size() -> None:
    for shape in IMAGES:
        model = build_model("convnet", input_shape=shape)
        body = nn.Sequential(*list(model.children())[:-2])
        assert body(torch.rand(1, *shape)).shape == (1, 128, 4, 4)


def test_options_reach_the_model() -> None:
    assert build_model("mlp", hidden=[5, 6]).get_submodule("fc2").weight.shape == (6, 5)
    assert build_model("mlp", hidden=7).get_submodule("fc1").weight.shape == (7, 3072)
    assert build_model("mlp", hidden=[]).get_submodule("fc1").weight.shape == (10, 3072)
    assert build_model("one-layer-cnn", filters=1).get_submodule("fc").weight.shape == (100, 256)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"spec": "convent"}, ["convent", "did you mean convnet", "resnet18", "package.module:Name"]),
        ({"spec": "zzzz"}, ["unknown model 'zzzz'", "convnet"]),
        ({"spec": "convnet", "depth": 3}, ["no option depth", "activation, filters"]),
        ({"spec": "s3-mlp", "depth": 3}, ["no option depth", "none"]),
        ({"spec": "convnet", "activation": "swish"}, ["sigmoid, tanh, relu", "'swish'"]),
        ({"spec": "convnet", "input_shape": (10,)}, ["image shape", "(10,)", "mlp"]),
        ({"spec": "convnet", "input_shape": (3, 0, 4)}, ["at least 1", "got 0"]),
        ({"spec": "convnet", "input_shape": ()}, ["input_shape", "(3, 32, 32)"]),
        ({"spec": "convnet", "input_shape": 5}, ["input_shape", "got 5"]),
        ({"spec": "convnet", "input_shape": "3x32x32"}, ["input_shape", "3x32x32"]),
        ({"spec": "convnet", "num_classes": 0}, ["num_classes", "got 0"]),
        ({"spec": "convnet", "num_classes": 2.5}, ["num_classes", "got 2.5"]),
        ({"spec": "convnet", "seed": "x"}, ["seed", "'x'"]),
        ({"spec": "convnet", "filters": 0}, ["filters", "got 0"]),
        ({"spec": "signal-cnn", "input_shape": (3, 8, 8)}, ["signal shape", "convnet"]),
        ({"spec": "lenet-tanh", "input_shape": (1, 8, 8)}, ["too small", "(1, 8, 8)"]),
        ({"spec": "femnist-cnn", "input_shape": (1, 3, 9)}, ["too small", "4 pixels"]),
        ({"spec": "s3-vit", "patch_size": 5}, ["patch_size=5", "28x28"]),
        ({"spec": "s3-vit", "heads": 5}, ["multiple of heads"]),
        ({"spec": "vit", "heads": 5}, ["vit: dim must be a multiple of heads"]),
        ({"spec": "vit", "pool": "max"}, ["vit: pool", "'max'"]),
        ({"spec": "mlp", "hidden": "12"}, ["hidden", "'12'"]),
        ({"spec": "mlp", "hidden": 1.5}, ["hidden", "1.5"]),
        ({"spec": "mlp", "hidden": [3, -1]}, ["hidden", "-1"]),
        ({"spec": "dlg-lenet", "init": "zero"}, ["init", "'zero'"]),
    ],
    ids=str,
)
def test_errors_say_what_was_expected(arguments: dict, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        build_model(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_name_must_be_text() -> None:
    with pytest.raises(ValueError, match="name of a model"):
        build_model(nn.Linear(1, 1))  # type: ignore[arg-type]


def test_table_is_read_only() -> None:
    with pytest.raises(TypeError):
        MODELS["x"] = MODELS["mlp"]  # type: ignore[index]


@pytest.mark.parametrize(
    "name, facts, words",
    [
        ("mlp", {"hidden": 10**9}, "at most 200,000,000 parameters"),
        ("mlp", {"hidden": [60_000, 60_000]}, "LEAKSCOPE_MAX_PARAMETERS=3"),
        ("mlp", {"hidden": [1] * 5000}, "mlp: hidden: expected at most 1,000"),
        ("convnet", {"filters": 100_000}, "Choose smaller options"),
        ("logistic", {"num_classes": 10**8}, "expected at most 200,000,000 parameters"),
        ("logistic", {"num_classes": 10**300}, "expected at most 200,000,000 parameters, got far more"),
        ("vit", {"depth": 10**7, "dim": 1, "heads": 1}, "vit: depth: expected at most 1,000"),
        ("s3-vit", {"layers": 10**7, "dim": 1, "heads": 1}, "s3-vit: layers: expected at most 1,000"),
        ("vertical-mlp", {"input_shape": (10**6,), "workers": 10**6}, "workers: expected at most 1,000"),
        ("mlp", {"input_shape": (10**6, 10**6)}, "one example: expected at most 1,073,741,824 bytes"),
        ("mlp", {"input_shape": (1,) * 100}, "up to 16 sizes"),
        ("mlp", {"seed": 1 << 80}, "seed: expected an integer of at most 63 bits"),
    ],
    ids=str,
)
def test_models_that_no_memory_holds_are_refused_before_they_are_made(name: str, facts: dict, words: str) -> None:
    tracemalloc.start()
    with pytest.raises(ValueError, match=words):
        build_model(name, **facts)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000_000


def test_a_user_may_raise_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAKSCOPE_MAX_PARAMETERS", "100")
    with pytest.raises(ValueError, match=r"expected at most 100 parameters, got 110\. .*LEAKSCOPE_MAX_PARAMETERS=110"):
        build_model("logistic", input_shape=(10,), num_classes=10)
    monkeypatch.setenv("LEAKSCOPE_MAX_PARAMETERS", "110")
    build_model("logistic", input_shape=(10,), num_classes=10)
    monkeypatch.setenv("LEAKSCOPE_MAX_PARAMETERS", "many")
    with pytest.raises(ValueError, match="LEAKSCOPE_MAX_PARAMETERS: expected a whole number of parameters, got 'many'"):
        build_model("logistic", input_shape=(10,), num_classes=10)
