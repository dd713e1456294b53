"""Plain convolutional victims for images and signals; none has a normalisation layer."""

from __future__ import annotations

from torch import nn

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


def convnet(*, input_shape: Shape, num_classes: int, activation: str = "relu", filters: int = 32) -> nn.Sequential:
    """Three 3x3 convolutions (32, 64, 128 filters; strides 1, 2, 2), average pooling to 4x4, a linear layer.

    The victim of the default audit: small enough to attack within minutes on a CPU, and it has what real nets
    have: ReLU, strides, pooling, and a linear layer at the end. ``filters`` is the number in the first layer.
    """
    channels, height, width = image_shape("convnet", input_shape)
    filters = positive_int(filters, "convnet: filters")
    height, width = sides_after((height, width), kernel=3, strides=(2, 2), padding=1)
    return sequence(
        conv1=nn.Conv2d(channels, filters, 3, stride=1, padding=1),
        activation1=activation_layer(activation),
        conv2=nn.Conv2d(filters, 2 * filters, 3, stride=2, padding=1),
        activation2=activation_layer(activation),
        conv3=nn.Conv2d(2 * filters, 4 * filters, 3, stride=2, padding=1),
        activation3=activation_layer(activation),
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
    """One 5x5 convolution with stride 2, an activation, one linear layer.

    The net of What Can We Learn from Gradients (2021). Twelve filters are the fewest with which one RGB image is
    identifiable: (32/16)^2 x 3 channels.
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
    for kernel in (7, 5, 5):
        length = output_size(length, kernel=kernel, stride=2, padding=kernel // 2)
    return sequence(
        conv1=nn.Conv1d(channels, 16, 7, stride=2, padding=3),
        activation1=activation_layer(activation),
        conv2=nn.Conv1d(16, 32, 5, stride=2, padding=2),
        activation2=activation_layer(activation),
        conv3=nn.Conv1d(32, 64, 5, stride=2, padding=2),
        activation3=activation_layer(activation),
        flatten=nn.Flatten(),
        fc=nn.Linear(64 * length, num_classes),
    )
