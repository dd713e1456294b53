"""Models split between workers, for vertical federated learning."""

from __future__ import annotations

import math

from torch import nn

from leakscope.contracts.errors import UserError
from leakscope.contracts.task import Shape
from leakscope.models.common import activation_layer, positive_int, sequence, too_small
from leakscope.models.split import Groups, Share, VerticalModel, make_shares

_DIMENSIONS = {2: (nn.Conv1d, nn.BatchNorm1d), 3: (nn.Conv2d, nn.BatchNorm2d)}
_POOLS = {"max": (nn.MaxPool1d, nn.MaxPool2d), "average": (nn.AvgPool1d, nn.AvgPool2d)}


def cafe_cnn(
    *,
    input_shape: Shape,
    num_classes: int,
    slices: str | Groups = "quadrants",
    workers: int = 4,
    filters: tuple[int, int] = (64, 128),
    hidden: int = 256,
    middle: int = 64,
    activation: str = "relu",
    pool: str = "max",
    batchnorm: bool = False,
    double_softmax: bool = False,
) -> VerticalModel:
    """The workers of CAFE's published code: two 5x5 convolutions with pooling, dense layers of 256, 64 and classes.

    The server joins their outputs by one dense layer. ``hidden`` is the first dense layer, whose output gradients and
    inputs the attack reads. ``double_softmax`` applies a softmax before the loss applies its own, as that code does by
    mistake. Signals get one-dimensional convolutions.
    """
    if len(input_shape) not in _DIMENSIONS:
        raise UserError(f"cafe-cnn: expected images or signals, got shape {tuple(input_shape)}; use 'vertical-mlp'")
    if pool not in _POOLS:
        raise UserError(f"pool: expected 'max' or 'average', got {pool!r}")
    if not isinstance(filters, list | tuple) or len(filters) != 2:
        raise UserError(f"filters: expected two numbers, one a convolution, got {filters!r}")
    shares = make_shares(input_shape, slices, workers)
    sizes = [positive_int(size, "cafe-cnn: filters, hidden, middle") for size in (*filters, hidden, middle)]
    nets = [_cnn_worker(share, num_classes, sizes, activation, pool, batchnorm) for share in shares]
    return _joined(nets, shares, input_shape, num_classes, double_softmax)


def _cnn_worker(
    share: Share, num_classes: int, sizes: list[int], activation: str, pool: str, batchnorm: bool
) -> nn.Sequential:
    channels, *sides = share.shape
    if min(sides) < 2:
        raise too_small("cafe-cnn", share.shape, f"worker {share.name!r} needs 2 pixels a side")
    convolution, normalisation = _DIMENSIONS[len(share.shape)]
    pooling = _POOLS[pool][len(share.shape) - 2]
    first, second, hidden, middle = sizes
    layers: dict[str, nn.Module] = {}
    for number, (before, after) in enumerate(((channels, first), (first, second)), start=1):
        layers[f"conv{number}"] = convolution(before, after, 5, padding=2)
        if batchnorm:
            layers[f"norm{number}"] = normalisation(after)
        layers[f"activation{number}"] = activation_layer(activation)
        # An odd side keeps its last pixel, so 14 pixels become 4 in two steps.
        layers[f"pool{number}"] = pooling(2, ceil_mode=True)
        sides = [-(-side // 2) for side in sides]
    dense = _dense(second * math.prod(sides), (hidden, middle, num_classes), activation)
    return sequence(**layers, flatten=nn.Flatten(), **dense)


def vertical_mlp(
    *,
    input_shape: Shape,
    num_classes: int,
    slices: str | Groups = "strips",
    workers: int = 4,
    hidden: int = 64,
    middle: int = 32,
    activation: str = "relu",
) -> VerticalModel:
    """Workers of dense layers only, for tables: the inputs of the first dense layer are the features themselves."""
    shares = make_shares(input_shape, slices, workers)
    sizes = tuple(positive_int(size, "vertical-mlp: hidden, middle") for size in (hidden, middle))
    nets = [
        sequence(flatten=nn.Flatten(), **_dense(len(share.places), (*sizes, num_classes), activation))
        for share in shares
    ]
    return _joined(nets, shares, input_shape, num_classes, False)


def _dense(width: int, sizes: tuple[int, ...], activation: str) -> dict[str, nn.Module]:
    """Dense layers, each followed by the activation, the last one too."""
    layers: dict[str, nn.Module] = {}
    for number, size in enumerate(sizes, start=1):
        layers[f"fc{number}"] = nn.Linear(width, size)
        layers[f"dense_activation{number}"] = activation_layer(activation)
        width = size
    return layers


def _joined(
    nets: list[nn.Sequential], shares: tuple[Share, ...], input_shape: Shape, num_classes: int, double_softmax: bool
) -> VerticalModel:
    head = sequence(fc=nn.Linear(num_classes * len(nets), num_classes))
    if double_softmax:
        head.add_module("softmax", nn.Softmax(dim=1))
    return VerticalModel(workers=nets, head=head, shares=shares, input_shape=input_shape)
