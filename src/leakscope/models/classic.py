"""Small feed-forward victims without normalisation layers: LeNets, convolutional and fully connected nets, and chains.

In a chain every layer is a convolution or linear, and every activation invertible. ``cnn2-c1`` to ``cnn4-c3`` are of
Chen and Campbell, "Analysing Training-Data Leakage from Gradients through Linear Systems and Gradient Matching", BMVC
2022: tanh, convolutions without bias, one linear layer with a bias. ``cnn6``, ``cnn6-d`` and ``fcn3`` are of Zhu and
Blaschko, "R-GAP: Recursive Gradient Attack on Privacy", ICLR 2021: LeakyReLU of slope 0.2 and no bias. R-GAP's nets
have one output and a logistic loss (``num_classes=1`` and ``head_bias=False``); the default is a head with a bias.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from leakscope.contracts.checks import PIECES, brief
from leakscope.contracts.errors import UserError
from leakscope.contracts.task import Shape
from leakscope.models.common import (
    activation_layer,
    average_pool_to,
    image_shape,
    output_size,
    positive_int,
    sequence,
    sides_after,
    signal_shape,
    too_small,
)


@dataclass(frozen=True)
class Convolution:
    """What a square convolution has besides its number of input channels."""

    filters: int
    kernel: int
    stride: int
    padding: int

    def __str__(self) -> str:
        return f"{self.filters} of {self.kernel}x{self.kernel}" + (f" stride {self.stride}" if self.stride > 1 else "")


def _layers(*rows: tuple[int, int, int, int]) -> tuple[Convolution, ...]:
    return tuple(Convolution(*row) for row in rows)


def _convolutions(
    channels: int, layers: tuple[Convolution, ...], activation: str, *, bias: bool = True
) -> dict[str, nn.Module]:
    modules: dict[str, nn.Module] = {}
    for number, layer in enumerate(layers, start=1):
        modules[f"conv{number}"] = nn.Conv2d(
            channels, layer.filters, layer.kernel, stride=layer.stride, padding=layer.padding, bias=bias
        )
        modules[f"activation{number}"] = activation_layer(activation)
        channels = layer.filters
    return modules


def dlg_lenet(
    *, input_shape: Shape, num_classes: int, activation: str = "sigmoid", init: str = "uniform"
) -> nn.Sequential:
    """Build the net of Deep Leakage from Gradients (Zhu, Liu, Han, NeurIPS 2019) and iDLG.

    ``init="uniform"`` draws every weight and bias from U(-0.5, 0.5) as that code does; the attack lives on the large
    gradients that this choice gives. ``init="default"`` keeps PyTorch's own.
    """
    if init not in ("uniform", "default"):
        raise UserError(f"dlg-lenet: init: expected 'uniform' or 'default', got {init!r}")
    channels, height, width = image_shape("dlg-lenet", input_shape)
    height, width = sides_after((height, width), kernel=5, strides=(2, 2, 1), padding=2)
    modules = _convolutions(channels, _layers((12, 5, 2, 2), (12, 5, 2, 2), (12, 5, 1, 2)), activation)
    model = sequence(**modules, flatten=nn.Flatten(), fc=nn.Linear(12 * height * width, num_classes))
    if init == "uniform":
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model


class LeNetTanh(nn.Module):
    """LeNet-5 with tanh and padded average pooling, of Surrogate Model Extension (ICML 2023).

    As in its published code it ends in a softmax, though the loss applies another; ``softmax=False`` gives logits.
    """

    def __init__(self, *, input_shape: Shape, num_classes: int, softmax: bool = True) -> None:
        super().__init__()
        channels, *sides = image_shape("lenet-tanh", input_shape)
        for _ in range(2):
            sides = [output_size(output_size(side, kernel=5), kernel=2, stride=2, padding=1) for side in sides]
            if min(sides) < 2:
                raise too_small("lenet-tanh", input_shape, "two 5x5 convolutions without padding need 10 pixels a side")
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.AvgPool2d(2, 2, padding=1)
        self.activation = nn.Tanh()
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(16 * math.prod(sides), 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)
        self.output = nn.Softmax(dim=1) if softmax else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.activation(self.conv1(x)))
        x = self.pool(self.activation(self.conv2(x)))
        x = self.activation(self.fc1(self.flatten(x)))
        x = self.activation(self.fc2(x))
        return self.output(self.fc3(x))


def convnet(*, input_shape: Shape, num_classes: int, activation: str = "relu", filters: int = 32) -> nn.Sequential:
    """Three 3x3 convolutions (32, 64, 128 filters; strides 1, 2, 2), average pooling to 4x4, a linear layer.

    The victim of the default audit, small enough to attack within minutes on a CPU. ``filters``: of the first layer.
    """
    channels, height, width = image_shape("convnet", input_shape)
    filters = positive_int(filters, "convnet: filters")
    height, width = sides_after((height, width), kernel=3, strides=(2, 2), padding=1)
    layers = _layers((filters, 3, 1, 1), (2 * filters, 3, 2, 1), (4 * filters, 3, 2, 1))
    return sequence(
        **_convolutions(channels, layers, activation),
        pool=average_pool_to(height, width, 4),
        flatten=nn.Flatten(),
        fc=nn.Linear(4 * filters * 16, num_classes),
    )


def _two_convolutions(
    name: str, input_shape: Shape, num_classes: int, filters: tuple[int, int], hidden: int, activation: str
) -> nn.Sequential:
    channels, height, width = image_shape(name, input_shape)
    if min(height, width) < 4:
        raise too_small(name, input_shape, "two 2x2 poolings need 4 pixels a side")
    first, second = filters
    return sequence(
        conv1=nn.Conv2d(channels, first, 3, padding=1),
        activation1=activation_layer(activation),
        pool1=nn.AvgPool2d(2, 2),
        conv2=nn.Conv2d(first, second, 3, padding=1),
        activation2=activation_layer(activation),
        pool2=nn.AvgPool2d(2, 2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(second * (height // 4) * (width // 4), hidden),
        activation3=activation_layer(activation),
        fc2=nn.Linear(hidden, num_classes),
    )


def femnist_cnn(*, input_shape: Shape, num_classes: int, activation: str = "relu") -> nn.Sequential:
    """The FEMNIST net of Dimitrov et al. and Surrogate Model Extension: 32-pool-64-pool-100-classes."""
    return _two_convolutions("femnist-cnn", input_shape, num_classes, (32, 64), 100, activation)


def cifar_cnn(*, input_shape: Shape, num_classes: int, activation: str = "relu") -> nn.Sequential:
    """The CIFAR-100 net of Dimitrov et al. and Surrogate Model Extension: 64-pool-128-pool-200-classes."""
    return _two_convolutions("cifar-cnn", input_shape, num_classes, (64, 128), 200, activation)


def one_layer_cnn(
    *, input_shape: Shape, num_classes: int, filters: int = 12, activation: str = "sigmoid"
) -> nn.Sequential:
    """One 5x5 convolution with stride 2, an activation, one linear layer, of What Can We Learn from Gradients (2021).

    Twelve filters are the fewest with which one RGB image is identifiable: (32/16)^2 x 3 channels.
    """
    channels, height, width = image_shape("one-layer-cnn", input_shape)
    filters = positive_int(filters, "one-layer-cnn: filters")
    height, width = sides_after((height, width), kernel=5, strides=(2,), padding=2)
    return sequence(
        conv=nn.Conv2d(channels, filters, 5, stride=2, padding=2),
        activation=activation_layer(activation),
        flatten=nn.Flatten(),
        fc=nn.Linear(filters * height * width, num_classes),
    )


def signal_cnn(*, input_shape: Shape, num_classes: int, activation: str = "relu") -> nn.Sequential:
    """Three one-dimensional convolutions (16, 32, 64 filters; stride 2) and one linear layer, for signals."""
    channels, length = signal_shape("signal-cnn", input_shape)
    layers: dict[str, nn.Module] = {}
    for number, (filters, kernel) in enumerate(((16, 7), (32, 5), (64, 5)), start=1):
        layers[f"conv{number}"] = nn.Conv1d(channels, filters, kernel, stride=2, padding=kernel // 2)
        layers[f"activation{number}"] = activation_layer(activation)
        channels, length = filters, output_size(length, kernel=kernel, stride=2, padding=kernel // 2)
    return sequence(**layers, flatten=nn.Flatten(), fc=nn.Linear(64 * length, num_classes))


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

    As in its published code there is a ReLU on the logits too: the sign rules for labels in the last bias do not hold.
    """
    layers = mlp(input_shape=input_shape, num_classes=num_classes, hidden=(1000, 1000))
    layers.add_module("activation3", nn.ReLU())
    return layers


def logistic(*, input_shape: Shape, num_classes: int, bias: bool = True) -> nn.Sequential:
    """Multinomial logistic regression: one linear layer on the flattened input."""
    return sequence(flatten=nn.Flatten(), fc=nn.Linear(math.prod(input_shape), num_classes, bias=bias))


#: Filters, kernel, stride and padding of each convolution.
HYBRID_LAYERS: Mapping[str, tuple[Convolution, ...]] = {
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
RGAP_LAYERS: Mapping[str, tuple[Convolution, ...]] = {
    "cnn6": _layers((12, 4, 2, 2), (36, 3, 2, 1), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1)),
    "cnn6-d": _layers((12, 4, 2, 2), (20, 3, 2, 1), (36, 3, 1, 1), (36, 3, 1, 1), (64, 3, 2, 1), (128, 3, 1, 1)),
}


def chain_cnns() -> Iterator[tuple[str, str, Callable[..., nn.Sequential]]]:
    """Name, words and factory of every convolutional net of Chen and Campbell, and of R-GAP."""
    tanh, leaky = "tanh net of Chen and Campbell", "LeakyReLU net of R-GAP"
    for table, activation, words in ((HYBRID_LAYERS, "tanh", tanh), (RGAP_LAYERS, "leaky-relu", leaky)):
        for name, layers in table.items():
            build = partial(convolution_chain, name, layers, activation=activation)
            yield name, f"{words}: {', '.join(map(str, layers))}", build


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
    channels, *sides = image_shape(name, input_shape)
    for number, layer in enumerate(layers, start=1):
        sides = [output_size(side, kernel=layer.kernel, stride=layer.stride, padding=layer.padding) for side in sides]
        if min(sides) < 1:
            raise too_small(name, input_shape, f"nothing is left after conv{number}")
    modules = _convolutions(channels, layers, activation, bias=False)
    head = nn.Linear(layers[-1].filters * math.prod(sides), num_classes, bias=head_bias)
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
