"""Attacks with their default settings on real pictures: far above what a broken attack would reach.

The full measurement, ten pictures each, is ``benchmarks/quality.py``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from leakscope.attacks import DLG, InvertingGradients
from leakscope.contracts.attack import Attack
from leakscope.data import load_data
from leakscope.federation import FedAvg, FedSGD
from leakscope.metrics import evaluate
from leakscope.models import build_model

pytestmark = pytest.mark.slow

CASES = [
    pytest.param(InvertingGradients(), "convnet", "cifar10", "cifar-10-batches-bin", 1, 40.0, id="ig-one"),
    pytest.param(InvertingGradients(), "convnet", "cifar10", "cifar-10-batches-bin", 4, 22.0, id="ig-four"),
    pytest.param(DLG(iterations=900), "dlg-lenet", "cifar100", "cifar-100-binary", 1, 28.0, id="dlg"),
]


@pytest.mark.slow
@pytest.mark.parametrize("attack, model, name, folder, batch, least", CASES)
def test_default_settings_recover_real_pictures(
    attack: Attack, model: str, name: str, folder: str, batch: int, least: float, real_data: Path
) -> None:
    data = load_data(name, path=real_data / folder, split="test", limit=40).batch(3, batch)
    net = build_model(model, input_shape=data.shape, num_classes=data.num_classes)
    result = attack(FedSGD().observe(net, data.x, data.y))
    found = evaluate(data.x, data.y, result.inputs, result.labels)
    assert sum(row["psnr"] for row in found.rows) / batch >= least
    assert sorted(result.labels.tolist()) == sorted(data.y.tolist())


@pytest.mark.slow
def test_signals_are_recovered_too(real_data: Path) -> None:
    data = load_data("ecg", path=real_data / "ecg_mitbih.npz").batch(0, 1)
    net = build_model("signal-cnn", input_shape=data.shape, num_classes=data.num_classes, activation="tanh")
    seen = FedSGD().observe(net, data.x, data.y, value_range=data.value_range)
    found = InvertingGradients(tv=0.0)(seen)
    unit = data.value_range.to_unit
    (row,) = evaluate(unit(data.x), data.y, unit(found.inputs), found.labels).rows
    (blind,) = evaluate(unit(data.x), data.y, torch.full_like(data.x, 0.5), found.labels).rows
    assert row["psnr"] > blind["psnr"] + 10


@pytest.mark.slow
def test_an_unrolled_update_of_two_handwritten_digits_is_recovered(real_data: Path) -> None:
    data = load_data("mnist", path=real_data / "MNIST" / "raw", split="test", limit=10).subset([0, 1])
    net = build_model("femnist-cnn", input_shape=data.shape, num_classes=data.num_classes)
    protocol = FedAvg(epochs=2, batch_size=2, lr=0.05)
    result = InvertingGradients()(protocol.observe(net, data.x, data.y))
    found = evaluate(data.x, data.y, result.inputs, result.labels)
    assert min(row["psnr"] for row in found.rows) > 25
