"""The victims of ``strength.py``: nets of the house and others, untrained or after some epochs of Adam."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save
from torch import nn
from torch.nn import functional as F

from leakscope.contracts.disk import atomic_write
from leakscope.data import Examples, load_data
from leakscope.models import build_model
from leakscope.models.resnet import ResidualNet
from leakscope.models.weights import load_weights

UNTRAINED = "untrained"
#: Images of the training split, images in a step, and Adam's step size.
IMAGES, BATCH, RATE = 10_000, 64, 1e-3


@dataclass(frozen=True)
class Victim:
    """A net by its factory of (input shape, classes), the data it reads, and what it is, in a few words."""

    data: str
    make: Callable[[tuple[int, ...], int], nn.Module]
    summary: str


def _house(name: str, **options: object) -> Callable[[tuple[int, ...], int], nn.Module]:
    return lambda shape, classes: build_model(name, input_shape=shape, num_classes=classes, **options)


def strided(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two 5x5 and one 3x3 convolution without bias, strides 2, 1, 2, and the map as it is before the linear layer."""
    side = shape[1] // 4
    return nn.Sequential(
        nn.Conv2d(shape[0], 48, 5, stride=2, padding=2, bias=False),
        nn.ReLU(),
        nn.Conv2d(48, 64, 5, padding=2, bias=False),
        nn.ReLU(),
        nn.Conv2d(64, 96, 3, stride=2, padding=1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96 * side * side, classes),
    )


def max_pool_lenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet as it is taught today: ReLU and max-pooling."""
    side = (shape[1] // 2 - 4) // 2
    return nn.Sequential(
        nn.Conv2d(shape[0], 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * side * side, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def narrow_resnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-18 of the house with a quarter of its filters."""
    widths = (16, 32, 64, 128)
    pool = nn.AvgPool2d(shape[1] // 8)
    return ResidualNet(
        channels=shape[0],
        widths=widths,
        strides=(1, 2, 2, 2),
        blocks=2,
        pool=pool,
        features=widths[-1],
        head=(classes,),
    )


def vgg11(shape: tuple[int, ...], classes: int) -> nn.Module:
    """VGG-11 with BatchNorm and one linear layer (Simonyan and Zisserman, 2015, as it is used for small images)."""
    layers: list[nn.Module] = []
    inputs = shape[0]
    for outputs in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if outputs:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
            inputs = outputs
        else:
            layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm, added to the input (He et al., 2016, the bottleneck block)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return F.relu(self.norm3(self.conv3(inner)) + self.shortcut(x))


def resnet50_half(shape: tuple[int, ...], classes: int) -> nn.Module:
    """ResNet-50's 3, 4, 6, 3 bottleneck blocks with half of its filters and the stem for small images."""
    blocks: list[nn.Module] = []
    inputs = 32
    for width, count, stride in ((32, 3, 1), (64, 4, 2), (128, 6, 2), (256, 3, 2)):
        for number in range(count):
            blocks.append(Bottleneck(inputs, width, stride if number == 0 else 1))
            inputs = 4 * width
    stem = [nn.Conv2d(shape[0], 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


class PreActivated(nn.Module):
    """BatchNorm and ReLU in front of each 3x3 convolution (Zagoruyko and Komodakis, 2016)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(outputs), nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.plain = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if self.plain else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = F.relu(self.norm1(x))
        inner = self.conv2(F.relu(self.norm2(self.conv1(first))))
        return inner + self.shortcut(x if self.plain else first)


def wide_resnet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """WideResNet-16-4: two pre-activated blocks in each of three stages."""
    layers: list[nn.Module] = [nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)]
    inputs = 16
    for outputs, stride in ((64, 1), (128, 2), (256, 2)):
        layers += [PreActivated(inputs, outputs, stride), PreActivated(outputs, outputs, 1)]
        inputs = outputs
    layers += [nn.BatchNorm2d(inputs), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(inputs, classes))


VICTIMS: Mapping[str, Victim] = {
    "convnet": Victim("cifar10", _house("convnet"), "ConvNet, 3x3, 32-64-128"),
    "convnet-5x5": Victim("cifar10", strided, "ConvNet, 5x5, 48-64-96, no bias"),
    "cifar-cnn": Victim("cifar10", _house("cifar-cnn"), "cifar-cnn"),
    "femnist-cnn": Victim("femnist", _house("femnist-cnn"), "femnist-cnn"),
    "lenet-max": Victim("mnist", max_pool_lenet, "LeNet, max-pooling"),
    "mlp": Victim("cifar10", _house("mlp"), "MLP, 256 hidden"),
    "convnet-gelu": Victim("cifar10", _house("convnet", activation="gelu"), "ConvNet, GELU"),
    "convnet-tanh": Victim("cifar10", _house("convnet", activation="tanh"), "ConvNet, tanh"),
    "convnet-narrow": Victim("cifar10", _house("convnet", filters=16), "ConvNet, 16-32-64"),
    "resnet18": Victim("cifar10", _house("resnet18"), "ResNet-18, 64-512"),
    "resnet18-half": Victim("cifar10", _house("resnet18", width=32), "ResNet-18, 32-256"),
    "vgg11": Victim("cifar10", vgg11, "VGG-11, BatchNorm"),
    "resnet50-half": Victim("cifar10", resnet50_half, "ResNet-50's blocks, 32-256"),
    "wrn-16-4": Victim("cifar10", wide_resnet, "WideResNet-16-4"),
    "vit-96": Victim("cifar10", _house("vit"), "standard ViT, 64 tokens of 96"),
    "vit-192": Victim("cifar10", _house("vit", dim=192), "standard ViT, 64 tokens of 192"),
    "resnet18-narrow": Victim("cifar10", narrow_resnet, "ResNet-18, 16-128, BatchNorm eval"),
    "s3-vit": Victim(
        "cifar10", _house("s3-vit", patch_size=4, dim=96, heads=4, layers=2), "ViT of SME, 4x4 patches, 2 layers of 96"
    ),
}


def untrained(name: str, data: Examples, victims: Mapping[str, Victim] = VICTIMS, seed: int = 0) -> nn.Module:
    """The net called ``name`` with its initial weights, which depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return victims[name].make(data.shape, data.num_classes).eval()


def victim(name: str, state: str, data: Examples, cache: Path) -> nn.Module:
    """The net in this state: ``untrained``, or a number of epochs; trained nets are kept in ``cache``."""
    net = untrained(name, data)
    if state == UNTRAINED:
        return net
    file = partial(_file, cache, name, fingerprint(net))
    if not file(int(state)).exists():
        print(f"{name}: training for {state} epochs", flush=True)
        train(net, int(state), load_data(VICTIMS[name].data, split="train", limit=IMAGES), file)
    load_weights(net, file(int(state)))
    return net.eval()


def train(net: nn.Module, epochs: int, data: Examples, file: Callable[[int], Path], seed: int = 0) -> None:
    """Plain training; the weights after each epoch that the matrix asks for, and after the last, are kept."""
    net.train()
    optimiser, draws = torch.optim.Adam(net.parameters(), RATE), torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs + 1):
        for rows in torch.randperm(len(data), generator=draws).split(BATCH):
            optimiser.zero_grad()
            F.cross_entropy(net(data.x[rows]), data.y[rows]).backward()
            optimiser.step()
        if epoch in (1, epochs):
            file(epoch).parent.mkdir(parents=True, exist_ok=True)
            atomic_write(file(epoch), save({name: value.contiguous() for name, value in net.state_dict().items()}))


def fingerprint(net: nn.Module) -> str:
    """Of structure and initial weights and of how it is trained, so that a net that was changed is trained anew."""
    digest = hashlib.sha256(f"{net!r} {IMAGES} {BATCH} {RATE}".encode())
    for value in net.state_dict().values():
        digest.update(value.numpy().tobytes())
    return digest.hexdigest()[:12]


def data_of(names: Iterable[str]) -> dict[str, Examples]:
    """The test split of every data set that these nets read."""
    return {kind: load_data(kind, split="test") for kind in dict.fromkeys(VICTIMS[name].data for name in names)}


def _file(cache: Path, name: str, mark: str, epochs: int) -> Path:
    return cache / f"{name}-{mark}-{epochs}.safetensors"
