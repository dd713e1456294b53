"""Feed-forward nets of the closed-form attacks: every layer is a convolution or linear, every activation invertible.

The nets ``cnn2-c1`` to ``cnn4-c3`` are of Chen and Campbell, "Analysing Training-Data Leakage from Gradients through
Linear Systems and Gradient Matching", BMVC 2022: tanh, convolutions without bias, one linear layer with a bias.
``cnn6``, ``cnn6-d`` and ``fcn3`` are of Zhu and Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021:
LeakyReLU of slope 0.2 and no bias. R-GAP's nets have one output and a logistic loss, which is ``num_classes=1`` and
``head_bias=False`` here; the default is a head for several classes with a bias, which the cross-entropy needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from torch import nn

from leakscope.contracts.task import Shape
from leakscope.models.common import activation_layer, image_shape, sequence, sides_after, too_small


@dataclass(frozen=True)
class Convolution:
    """One row of the tables below: what a square convolution has besides its number of input channels."""

    filters: int
    kernel: int
    stride: int
    padding: int

    def __str__(self) -> str:
        return f"{self.filters} of {self.kernel}x{self.kernel}" + (f" stride {self.stride}" if self.stride > 1 else "")


def _layers(*rows: tuple[int, int, int, int]) -> tuple[Convolution, ...]:
    return tuple(Convolution(*row) for row in rows)


#: Filters, kernel, stride and padding of each convolution.
HYBRID_LAYERS: Mapping[str, tuple[Convolution, ...]] = MappingProxyType(
    {
        "cnn2-c1": _layers((6, 3, 1, 0)),
        "cnn2-c2": _layers((6, 4, 2, 0)),
        "cnn3-c1": _layers((6, 3, 1, 0), (3, 4, 2, 0)),
        "cnn3-c2": _layers((6, 4, 2, 0), (3, 3, 2, 0)),
        "cnn3-c3": _layers((6, 3, 1, 0), (9, 3, 1, 0)),
        "cnn3-c4": _layers((1, 3, 1, 0), (6, 3, 1, 0)),
        "cnn4-c1": _layers((6, 3, 1, 0), (5, 4, 2, 0), (3, 4, 1, 0)),
        "cnn4-c2": _layers((16, 5, 1, 0), (6, 5, 2, 0), (32, 5, 1, 2)),
        "cnn4-c3": _layers((6, 5, 1, 0), (16, 5, 2, 0), (16, 5, 1, 2)),
    }
)
RGAP_LAYERS: Mapping[str, tuple[Convolution, ...]] = MappingProxyType(
    {
        "cnn6": _layers((12, 4, 2, 2), (36, 3, 2, 1), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1)),
        "cnn6-d": _layers((12, 4, 2, 2), (20, 3, 2, 1), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1)),
    }
)
Factory = Callable[..., nn.Sequential]


def chain_cnns() -> Iterator[tuple[str, str, Factory]]:
    """Name, words and factory of every convolutional net of Chen and Campbell, and of R-GAP."""
    for name, layers in HYBRID_LAYERS.items():
        build = partial(convolution_chain, name, layers, activation="tanh")
        yield name, f"tanh net of Chen and Campbell: {_words(layers)}", build
    for name, layers in RGAP_LAYERS.items():
        build = partial(convolution_chain, name, layers, activation="leaky-relu")
        yield name, f"LeakyReLU net of R-GAP: {_words(layers)}", build


def convolution_chain(
    name: str,
    layers: tuple[Convolution, ...],
    *,
    input_shape: Shape,
    num_classes: int,
    activation: str,
    head_bias: bool = True,
) -> nn.Sequential:
    """Convolutions without bias, an activation after each, and one linear layer whose size follows from the input.

    >>> convolution_chain("x", _layers((6, 3, 1, 0)), input_shape=(3, 32, 32), num_classes=10, activation="tanh").fc
    Linear(in_features=5400, out_features=10, bias=True)
    """
    channels, height, width = image_shape(name, input_shape)
    modules: dict[str, nn.Module] = {}
    for number, layer in enumerate(layers, start=1):
        modules[f"conv{number}"] = nn.Conv2d(
            channels, layer.filters, layer.kernel, stride=layer.stride, padding=layer.padding, bias=False
        )
        modules[f"activation{number}"] = activation_layer(activation)
        channels = layer.filters
        sides = (height, width)
        height, width = sides_after(sides, kernel=layer.kernel, strides=(layer.stride,), padding=layer.padding)
        if min(height, width) < 1:
            raise too_small(name, input_shape, f"nothing is left after conv{number}")
    head = nn.Linear(channels * height * width, num_classes, bias=head_bias)
    return sequence(**modules, flatten=nn.Flatten(), fc=head)


def fcn3(
    *,
    input_shape: Shape,
    num_classes: int,
    activation: str = "leaky-relu",
    head_bias: bool = False,
    head_activation: bool = True,
) -> nn.Sequential:
    """Linear layers of 1000, 100 and ``num_classes`` without bias; as published an activation on the last one too.

    >>> fcn3(input_shape=(1, 28, 28), num_classes=1).fc3
    Linear(in_features=100, out_features=1, bias=False)
    """
    modules: dict[str, nn.Module] = {"flatten": nn.Flatten()}
    sizes = (math.prod(input_shape), 1000, 100, num_classes)
    for number in (1, 2, 3):
        modules[f"fc{number}"] = nn.Linear(sizes[number - 1], sizes[number], bias=head_bias and number == 3)
        if number < 3 or head_activation:
            modules[f"activation{number}"] = activation_layer(activation)
    return sequence(**modules)


def _words(layers: tuple[Convolution, ...]) -> str:
    return ", ".join(map(str, layers))
