"""The networks of ``exact_inversion.py``: victims of ``strength_models.py``, one trained by others, two for photos."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.data import Examples, load_data
from leakscope.models import build_model
from leakscope.models.resnet import ResidualBlock
from strength_models import UNTRAINED, VICTIMS, Victim, untrained, victim

#: The state of weights that others trained.
TRAINED = "trained"
#: How the inputs of ``resnet20`` were normalised by those who trained it.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class PaddedBlock(nn.Module):
    """A basic block whose shortcut takes every second place and pads channels with zeros (He et al., option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.stride, self.added = stride, outputs - inputs

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        if self.added:
            before = self.added // 2
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, before, self.added - before))
        return F.relu(inner + x)


class ResNet20(nn.Module):
    """ResNet-20 for CIFAR-10, with the names of the weights that others trained."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        stages, inputs = [], 16
        for outputs, stride in ((16, 1), (32, 2), (64, 2)):
            row = [PaddedBlock(inputs, outputs, stride), *(PaddedBlock(outputs, outputs, 1) for _ in range(2))]
            stages.append(nn.Sequential(*row))
            inputs = outputs
        self.layer1, self.layer2, self.layer3 = stages
        self.linear = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x))))))
        return self.linear(x.mean((2, 3)))


def imagenet_resnet18(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-18 with a 7x7 convolution of stride 2 and a 3x3 max pooling of stride 2 in front."""
    stem = [nn.Conv2d(shape[0], 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks, inputs = list[nn.Module](), 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        blocks += [ResidualBlock(inputs, outputs, stride), ResidualBlock(outputs, outputs, 1)]
        inputs = outputs
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def vit_s16(shape: tuple[int, ...], classes: int) -> nn.Module:
    size = {"patch": 16, "dim": 384, "depth": 12, "heads": 6}
    return build_model("vit", input_shape=shape, num_classes=classes, **size)


SUBJECTS: Mapping[str, Victim] = {
    **VICTIMS,
    "resnet20": Victim("cifar10", lambda shape, classes: ResNet20(shape[0], classes), "ResNet-20, trained by others"),
    "resnet18-imagenet": Victim("photos", imagenet_resnet18, "ResNet-18, ImageNet's stem, 224x224"),
    "vit-s16": Victim("photos", vit_s16, "ViT-S/16, 224x224"),
}


def data_for(model: str) -> Examples:
    """Return the examples that a model reads, as it reads them."""
    kind = SUBJECTS[model].data
    examples = load_data(kind) if kind == "photos" else load_data(kind, split="test")
    return examples.normalised(MEAN, STD) if model == "resnet20" else examples


def network(model: str, state: str, data: Examples, cache: Path, places: Sequence[int]) -> nn.Module:
    """Return a network in this state.

    BatchNorm of ``resnet18-imagenet`` has the statistics of all photos but those at ``places``, which are attacked.
    """
    if model == "resnet20":
        return _trained_by_others(data)
    if state != UNTRAINED:
        return victim(model, state, data, cache)
    net = untrained(model, data, SUBJECTS)
    if model == "resnet18-imagenet":
        _estimate_statistics(net, data.subset([place for place in range(len(data)) if place not in places]).x)
    return net


def _trained_by_others(data: Examples) -> nn.Module:
    net = ResNet20(data.shape[0], data.num_classes)
    with np.load(Path(os.environ["LEAKSCOPE_DATA"]) / "resnet20_cifar10.npz") as arrays:
        # The file has no counts of batches.
        told = net.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files}, strict=False)
    missing = [name for name in told.missing_keys if not name.endswith("num_batches_tracked")]
    if missing or told.unexpected_keys:
        raise ValueError(f"resnet20_cifar10.npz: expected all weights, missing {missing}, more {told.unexpected_keys}")
    return net.eval()


def _estimate_statistics(net: nn.Module, x: Tensor) -> None:
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = 1.0  # the statistics of this batch alone
    with torch.no_grad():
        net.train()(x)
    for norm in norms:
        norm.momentum = 0.1
    net.eval()
