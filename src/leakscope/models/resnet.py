"""Residual nets: ResNet8 of Surrogate Model Extension, and ResNet18 with the stem usual for small images."""

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.contracts.task import Shape
from leakscope.models.common import image_shape, positive_int, sequence, sides_after


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with BatchNorm, added to the input (He et al., 2016, the basic block)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = sequence(conv=convolution, norm=nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(inner)) + self.shortcut(x))


class ResidualNet(nn.Module):
    """A 3x3 stem, stages of residual blocks, pooling, and a head of linear layers, with or without ReLU between."""

    def __init__(
        self,
        *,
        channels: int,
        widths: tuple[int, ...],
        strides: tuple[int, ...],
        blocks: int,
        pool: nn.Module,
        features: int,
        head: tuple[int, ...],
        activation: bool = False,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(widths[0])
        stages: dict[str, nn.Module] = {}
        inputs = widths[0]
        for number, (outputs, stride) in enumerate(zip(widths, strides, strict=True), start=1):
            row = [ResidualBlock(inputs, outputs, stride)]
            row += [ResidualBlock(outputs, outputs, 1) for _ in range(blocks - 1)]
            stages[f"stage{number}"] = nn.Sequential(*row)
            inputs = outputs
        self.stages = sequence(**stages)
        self.pool = pool
        self.flatten = nn.Flatten()
        layers: dict[str, nn.Module] = {}
        for number, pair in enumerate(pairwise((features, *head)), 1):
            if activation and number > 1:
                layers[f"relu{number - 1}"] = nn.ReLU()
            layers[f"fc{number}"] = nn.Linear(*pair)
        self.head = sequence(**layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stages(F.relu(self.norm(self.conv(x))))
        return self.head(self.flatten(self.pool(x)))


def resnet8(*, input_shape: Shape, num_classes: int) -> nn.Module:
    """ResNet8 of Surrogate Model Extension: no activation between its two linear layers, as in its published code."""
    channels, height, width = image_shape("resnet8", input_shape)
    strides = (1, 2, 2)
    sides = sides_after((height, width), kernel=3, strides=strides, padding=1)
    height, width = sides_after(sides, kernel=2, strides=(2,), padding=1)
    return ResidualNet(
        channels=channels,
        widths=(32, 64, 128),
        strides=strides,
        blocks=1,
        pool=nn.AvgPool2d(2, 2, padding=1),
        features=128 * height * width,
        head=(1000, num_classes),
    )


def resnet18(*, input_shape: Shape, num_classes: int, width: int = 64, hidden: int = 0) -> nn.Module:
    """ResNet18 for small images: 3x3 stem with stride 1, no max-pooling, BatchNorm, global average pool.

    ``width``: filters of the first stage. ``hidden``: neurons of one more linear layer with ReLU in front of the last,
    none with 0; the systematic evaluation of data reconstruction (Liu et al.) has 16384.
    """
    channels, height, columns = image_shape("resnet18", input_shape)
    width = positive_int(width, "resnet18: width")
    if hidden != 0:
        hidden = positive_int(hidden, "resnet18: hidden")
    strides = (1, 2, 2, 2)
    height, columns = sides_after((height, columns), kernel=3, strides=strides, padding=1)
    return ResidualNet(
        channels=channels,
        widths=(width, 2 * width, 4 * width, 8 * width),
        strides=strides,
        blocks=2,
        pool=nn.AvgPool2d((height, columns)),
        features=8 * width,
        head=(hidden, num_classes) if hidden else (num_classes,),
        activation=True,
    )
