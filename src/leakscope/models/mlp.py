"""Fully connected victims: a generic one, the one of Surrogate Model Extension, and logistic regression.

All of them flatten their input first, so they read images, signals and tables alike.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from leakscope.contracts.caps import PIECES
from leakscope.contracts.checks import brief
from leakscope.contracts.errors import UserError
from leakscope.contracts.task import Shape
from leakscope.models.common import activation_layer, positive_int, sequence


def mlp(
    *,
    input_shape: Shape,
    num_classes: int,
    hidden: int | Sequence[int] = (256,),
    activation: str = "relu",
    bias: bool = True,
) -> nn.Sequential:
    """Linear layers fc1, fc2, ... with an activation between them, none after the last.

    >>> mlp(input_shape=(4,), num_classes=2, hidden=(3,)).fc1
    Linear(in_features=4, out_features=3, bias=True)
    """
    if isinstance(hidden, str) or not isinstance(hidden, int | Sequence):
        raise UserError(f"mlp: hidden: expected a size or a list such as [256, 128], got {brief(hidden)}")
    PIECES.check("mlp: hidden", 1 if isinstance(hidden, int) else len(hidden))
    sizes = [positive_int(s, "mlp: hidden") for s in ([hidden] if isinstance(hidden, int) else hidden)]
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = math.prod(input_shape)
    for number, size in enumerate(sizes, start=1):
        layers[f"fc{number}"] = nn.Linear(width, size, bias=bias)
        layers[f"activation{number}"] = activation_layer(activation)
        width = size
    layers[f"fc{len(sizes) + 1}"] = nn.Linear(width, num_classes, bias=bias)
    return nn.Sequential(layers)


def s3_mlp(*, input_shape: Shape, num_classes: int) -> nn.Sequential:
    """784-1000-1000-62 of Surrogate Model Extension (Zhu, Yao, Blaschko, ICML 2023).

    As in its published code there is a ReLU on the logits too. A negative logit then has no gradient, which
    matters for label recovery: the sign rules for the last bias do not hold for this net.
    """
    layers = mlp(input_shape=input_shape, num_classes=num_classes, hidden=(1000, 1000))
    layers.add_module("activation3", nn.ReLU())
    return layers


def logistic(*, input_shape: Shape, num_classes: int, bias: bool = True) -> nn.Sequential:
    """Multinomial logistic regression: one linear layer on the flattened input."""
    return sequence(flatten=nn.Flatten(), fc=nn.Linear(math.prod(input_shape), num_classes, bias=bias))
