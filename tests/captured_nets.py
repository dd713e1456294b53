"""A small network with BatchNorm, named on the command line as people name their own."""

from __future__ import annotations

from torch import nn


def batchnorm_net(num_classes: int = 10) -> nn.Module:
    head = nn.Linear(6 * 9, num_classes)
    return nn.Sequential(nn.Conv2d(3, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), head)
