"""What every family of models shares: checked shapes, activations by name, sizes of feature maps."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import nn

from leakscope.contracts.checks import PARAMETERS, brief, is_whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.task import Shape

ACTIVATIONS: Mapping[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
    "silu": nn.SiLU,
    "leaky-relu": partial(nn.LeakyReLU, 0.2),
    "identity": nn.Identity,
}


def activation_layer(name: str) -> nn.Module:
    """Build a fresh activation module.

    >>> activation_layer("tanh")
    Tanh()
    """
    if name not in ACTIVATIONS:
        raise UserError(f"activation: expected one of {', '.join(ACTIVATIONS)}, got {name!r}")
    return ACTIVATIONS[name]()


def positive_int(value: object, what: str) -> int:
    """Return ``value`` as an int of at least 1, or raise an error that names ``what``.

    >>> positive_int(12, "filters")
    12
    """
    if not is_whole(value):
        raise UserError(f"{what}: expected an integer of at least 1, got {brief(value)}")
    PARAMETERS.check(what, value)
    return value


def image_shape(model: str, input_shape: Shape) -> tuple[int, int, int]:
    """Return channels, height and width, or say that ``model`` reads images.

    >>> image_shape("convnet", (1, 28, 28))
    (1, 28, 28)
    """
    if len(input_shape) != 3:
        raise UserError(
            f"{model}: expected an image shape (channels, height, width), got {tuple(input_shape)}. "
            "For signals use 'signal-cnn', for tables 'mlp' or 'logistic'."
        )
    channels, height, width = input_shape
    return channels, height, width


def signal_shape(model: str, input_shape: Shape) -> tuple[int, int]:
    """Return channels and length, or say that ``model`` reads signals.

    >>> signal_shape("signal-cnn", (1, 256))
    (1, 256)
    """
    if len(input_shape) != 2:
        raise UserError(
            f"{model}: expected a signal shape (channels, length), got {tuple(input_shape)}. "
            "For images use 'convnet', for tables 'mlp' or 'logistic'."
        )
    channels, length = input_shape
    return channels, length


def sequence(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


def output_size(size: int, *, kernel: int, stride: int = 1, padding: int = 0) -> int:
    """Return the length of one axis after a convolution or a pooling; 0 or less means that nothing is left.

    >>> output_size(32, kernel=5, stride=2, padding=2)
    16
    """
    return (size + 2 * padding - kernel) // stride + 1


def sides_after(sides: Iterable[int], *, kernel: int, strides: Iterable[int], padding: int) -> tuple[int, ...]:
    """Return the sides of a feature map after one convolution for each of the ``strides``.

    >>> sides_after((32, 28), kernel=5, strides=(2, 2, 1), padding=2)
    (8, 7)
    """
    sides = tuple(sides)
    for stride in strides:
        sides = tuple(output_size(side, kernel=kernel, stride=stride, padding=padding) for side in sides)
    return sides


def too_small(model: str, input_shape: Shape, why: str) -> UserError:
    """Make the error for inputs of which ``model`` would leave nothing."""
    return UserError(f"{model}: inputs of shape {tuple(input_shape)} are too small: {why}. Use larger inputs.")


def average_pool_to(height: int, width: int, target: int) -> nn.Module:
    """Average a map to target x target, by a fixed window where one fits: its double derivative is faster.

    >>> average_pool_to(8, 8, 4)
    AvgPool2d(kernel_size=(2, 2), stride=(2, 2), padding=0)
    """
    if height % target == 0 and width % target == 0:
        window = (height // target, width // target)
        return nn.AvgPool2d(window, window)
    return nn.AdaptiveAvgPool2d(target)
