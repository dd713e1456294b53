"""Twelve nets as people bring them: one factory each, for pictures of any size, small enough for a test."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Shape = tuple[int, ...]


def lenet(input_shape: Shape, num_classes: int) -> nn.Module:
    side = (input_shape[1] // 2 - 4) // 2
    return nn.Sequential(
        *(nn.Conv2d(input_shape[0], 4, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(4, 8, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(8 * side * side, 32), nn.ReLU(), nn.Linear(32, num_classes)),
    )


class MnistExample(nn.Module):
    """The net of PyTorch's MNIST example: dropout, and log_softmax at its end."""

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(input_shape[0], 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        side = (input_shape[1] - 4) // 2
        self.fc1 = nn.Linear(8 * side * side, 16)
        self.fc2 = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)


def stride_cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    side = -(-input_shape[1] // 4)
    return nn.Sequential(
        *(nn.Conv2d(input_shape[0], 6, 3, 2, 1), nn.ReLU(), nn.Conv2d(6, 8, 3, 2, 1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8 * side * side, num_classes)),
    )


def max_pool_cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    side = input_shape[1] // 4
    return nn.Sequential(
        *(nn.Conv2d(input_shape[0], 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(6 * side * side, num_classes)),
    )


def average_cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    """Global average pooling before the last layer."""
    return nn.Sequential(
        *(nn.Conv2d(input_shape[0], 8, 3, 2, 1), nn.ReLU(), nn.Conv2d(8, 16, 3, 2, 1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, num_classes)),
    )


def frozen_backbone(input_shape: Shape, num_classes: int) -> nn.Module:
    model = stride_cnn(input_shape, num_classes)
    for parameter in list(model.parameters())[:-2]:
        parameter.requires_grad_(False)
    return model


def batchnorm_cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    side = -(-input_shape[1] // 4)
    return nn.Sequential(
        *(nn.Conv2d(input_shape[0], 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU()),
        *(nn.Conv2d(6, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(8 * side * side, num_classes)),
    )


def dropout_mlp(input_shape: Shape, num_classes: int) -> nn.Module:
    pixels = input_shape[0] * input_shape[1] * input_shape[2]
    return nn.Sequential(
        nn.Flatten(), nn.Linear(pixels, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, num_classes), nn.Dropout(0.1)
    )


class RowLstm(nn.Module):
    """Reads a picture row by row."""

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(input_shape[0] * input_shape[2], 16, batch_first=True)
        self.head = nn.Linear(16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 1, 3).flatten(2)
        answer: Tensor = self.head(self.lstm(rows)[0][:, -1])
        return answer


class Transformer(nn.Module):
    """Patches, a class token, one layer of PyTorch's own encoder."""

    def __init__(self, input_shape: Shape, num_classes: int, patch: int = 4, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(input_shape[0], width, patch, patch)
        count = (input_shape[1] // patch) * (input_shape[2] // patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) / 4)
        self.places = nn.Parameter(torch.randn(1, count + 1, width) / 4)
        self.encoder = nn.TransformerEncoderLayer(width, 2, 32, batch_first=True, dropout=0.1)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], 1) + self.places
        answer: Tensor = self.head(self.encoder(tokens)[:, 0])
        return answer


def depthwise_cnn(input_shape: Shape, num_classes: int) -> nn.Module:
    channels = input_shape[0]
    return nn.Sequential(
        *(nn.Conv2d(channels, 8, 3, 2, 1), nn.ReLU6()),
        *(nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 16, 1), nn.ReLU6()),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, num_classes)),
    )


class UNet(nn.Module):
    """Down, up again with a skip, and a classifier on what comes out."""

    def __init__(self, input_shape: Shape, num_classes: int) -> None:
        super().__init__()
        self.down1 = nn.Conv2d(input_shape[0], 4, 3, padding=1)
        self.down2 = nn.Conv2d(4, 8, 3, padding=1)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.merge = nn.Conv2d(8, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.head = nn.Linear(4 * 16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.leaky_relu(self.down1(x))
        coarse = F.leaky_relu(self.down2(F.max_pool2d(fine, 2)))
        merged = self.norm(self.merge(torch.cat([fine, self.up(coarse)], 1)))
        answer: Tensor = self.head(F.adaptive_avg_pool2d(F.gelu(merged), 4).flatten(1))
        return answer


#: What is audited: the factory, and settings of the protocol.
NETS: dict[str, tuple[str, dict[str, Any]]] = {
    "LeNet": ("lenet", {}),
    "PyTorch's MNIST example": ("MnistExample", {}),
    "stride CNN": ("stride_cnn", {}),
    "max-pool CNN": ("max_pool_cnn", {}),
    "global average pooling": ("average_cnn", {}),
    "frozen backbone": ("frozen_backbone", {}),
    "BatchNorm, running statistics": ("batchnorm_cnn", {}),
    "BatchNorm, statistics of the batch": ("batchnorm_cnn", {"batchnorm": "train"}),
    "dropout": ("dropout_mlp", {}),
    "LSTM over rows": ("RowLstm", {}),
    "transformer": ("Transformer", {}),
    "depthwise-separable": ("depthwise_cnn", {}),
    "U-Net-like": ("UNet", {}),
}
