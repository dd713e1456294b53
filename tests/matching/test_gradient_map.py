"""The map from inputs to update: its value is the client's gradient, its derivatives are finite differences'."""

from __future__ import annotations

import pytest
import torch

from leakscope.contracts.inputs import ValueRange
from leakscope.federation import FedSGD
from leakscope.matching import GradientMap
from leakscope.models import build_model

SHAPE = (2, 6, 6)


@pytest.fixture(params=["dlg-lenet", "mlp"])
def case(request, generator):
    options = {"mlp": {"hidden": (7,), "activation": "tanh"}}.get(request.param, {})
    net = build_model(request.param, input_shape=SHAPE, num_classes=5, **options).double()
    x = torch.rand(2, *SHAPE, generator=generator, dtype=torch.float64) - 0.5
    y = torch.tensor([3, 1])
    seen = FedSGD().observe(net, x, y, value_range=ValueRange((-0.5,), (0.5,)))
    return GradientMap.of(seen, y), x, seen


def flattened(seen) -> torch.Tensor:
    return torch.cat([value.flatten() for value in seen.message.update.values()])


def test_its_value_at_the_truth_is_what_the_client_sent(case) -> None:
    mapping, x, seen = case
    flat = mapping.flat(x)
    assert flat.min() >= 0
    assert torch.equal(mapping.pictures(flat), mapping.pictures(mapping.flat(mapping.pictures(flat))))
    torch.testing.assert_close(mapping(flat), flattened(seen), rtol=1e-9, atol=1e-12)
    assert mapping.unknowns == x.numel()
    assert mapping.entries == len(flattened(seen))


def test_products_agree_with_finite_differences_and_with_each_other(case, generator) -> None:
    mapping, x, _ = case
    flat = mapping.flat(x)
    direction = torch.randn(flat.shape, generator=generator, dtype=torch.float64)
    weights = torch.randn(mapping.entries, generator=generator, dtype=torch.float64)
    near = mapping.linearise(flat)
    step = 1e-6
    slope = (mapping(flat + step * direction) - mapping(flat - step * direction)) / (2 * step)
    torch.testing.assert_close(near.forward(direction), slope, rtol=1e-5, atol=1e-7)
    left, right = float(weights @ near.forward(direction)), float(near.backward(weights) @ direction)
    assert left == pytest.approx(right, rel=1e-9)


def test_the_jacobian_in_tangent_coordinates_loses_nothing(generator) -> None:
    net = build_model("mlp", input_shape=(12,), num_classes=30, hidden=(40,), activation="tanh").double()
    x, y = torch.rand(2, 12, generator=generator, dtype=torch.float64), torch.tensor([4, 9])
    mapping = GradientMap.of(FedSGD().observe(net, x, y), y)
    flat = mapping.flat(x)
    whole, short = mapping.jacobian(flat, exact=True), mapping.jacobian(flat)
    assert whole.shape == (24, mapping.entries)
    assert short.shape[1] < whole.shape[1] / 4
    torch.testing.assert_close(short @ short.T, whole @ whole.T, rtol=1e-9, atol=1e-12)
    near = mapping.linearise(flat)
    torch.testing.assert_close(whole[5], near.forward(torch.eye(24, dtype=torch.float64)[5]))


@pytest.mark.parametrize("kind", ["zero", "twins"])
def test_degenerate_batches_lose_nothing_either(kind, generator) -> None:
    net = build_model("mlp", input_shape=(12,), num_classes=30, hidden=(40,), activation="tanh").double()
    x, y = torch.rand(2, 12, generator=generator, dtype=torch.float64), torch.tensor([4, 9])
    x[1] = 0 if kind == "zero" else x[0]
    mapping = GradientMap.of(FedSGD().observe(net, x, y), y)
    whole, short = mapping.jacobian(mapping.flat(x), exact=True), mapping.jacobian(mapping.flat(x))
    torch.testing.assert_close(short @ short.T, whole @ whole.T, rtol=1e-9, atol=1e-12)


def test_a_sketch_keeps_rank_and_sizes(generator) -> None:
    net = build_model("dlg-lenet", input_shape=(1, 6, 6), num_classes=4).double()
    x, y = torch.rand(1, 1, 6, 6, generator=generator, dtype=torch.float64), torch.tensor([2])
    mapping = GradientMap.of(FedSGD().observe(net, x, y), y)
    whole = torch.linalg.svdvals(mapping.jacobian(mapping.flat(x)))
    sketch = mapping.jacobian(mapping.flat(x), columns=8 * 36)
    assert sketch.shape == (36, 288)
    ratio = torch.linalg.svdvals(sketch) / whole
    assert float(ratio.min()) > 0.4
    assert float(ratio.max()) < 2


def test_the_narrow_map_is_the_same_in_float32(case) -> None:
    mapping, x, _ = case
    flat = mapping.flat(x)
    narrow = mapping.narrow()(flat.float())
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), mapping(flat), rtol=1e-3, atol=1e-5)


def test_a_held_output_gradient_gives_the_same_update_at_the_truth(generator) -> None:
    net = build_model("dlg-lenet", input_shape=(1, 8, 8), num_classes=4).double()
    x, y = torch.rand(1, 1, 8, 8, generator=generator, dtype=torch.float64), torch.tensor([2])
    seen = FedSGD().observe(net, x, y)
    held = GradientMap.of(seen, torch.tensor([0]), output_gradient=seen.message.update["fc.bias"])
    torch.testing.assert_close(held(held.flat(x)), flattened(seen), rtol=1e-10, atol=1e-13)
