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
    "vit-96": Victim("cifar10", _house("vit"), "standard ViT, 64 tokens of 96"),
    "vit-192": Victim("cifar10", _house("vit", dim=192), "standard ViT, 64 tokens of 192"),
    "resnet18-narrow": Victim("cifar10", narrow_resnet, "ResNet-18, 16-128, BatchNorm eval"),
    "s3-vit": Victim(
        "cifar10", _house("s3-vit", patch_size=4, dim=96, heads=4, layers=2), "ViT of SME, 4x4 patches, 2 layers of 96"
    ),
}


def untrained(name: str, data: Examples, seed: int = 0) -> nn.Module:
    """The net called ``name`` with its initial weights, which depend on ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        return VICTIMS[name].make(data.shape, data.num_classes).eval()


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
