"""Pictures, models and observations that the tests of Robbing the Fed share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import leakscope as ls
from leakscope.attacks import RobbingTheFed
from leakscope.attacks.robbing_the_fed.imprint import read_bins
from leakscope.contracts.inputs import ValueRange
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.observation import Observation
from leakscope.metrics import assign

SERVER = Knowledge.malicious_server
SHAPE = (3, 8, 8)


def draws(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(brightness: list[float], shape: tuple[int, ...] = SHAPE, seed: int = 0, eight_bit: bool = False) -> Tensor:
    """Random pictures in [0, 1] with exactly these means, or nearly where their values are those of 8-bit pictures."""
    x = torch.rand(len(brightness), *shape, generator=draws(seed), dtype=torch.float64)
    wanted = torch.tensor(brightness, dtype=torch.float64).reshape(-1, *[1] * len(shape))
    mean = x.flatten(1).mean(1).reshape(wanted.shape)
    small = torch.minimum(wanted, 1 - wanted)
    x = wanted + (x - mean) * small
    return (x * 255).round() / 255 if eight_bit else x


def net(shape: tuple[int, ...] = SHAPE, seed: int = 0, name: str = "convnet") -> nn.Module:
    model = ls.build_model(name, input_shape=shape, num_classes=4, seed=seed)
    return model.double()


def look(
    attack: RobbingTheFed, x: Tensor, y: Tensor | None = None, protocol: Any = None, model: Any = None, **how: Any
) -> Observation:
    shape = tuple(x.shape[1:])
    sent = attack.prepare(net(shape) if model is None else model, shape)
    labels = torch.arange(len(x)) % 4 if y is None else y
    how.setdefault("knowledge", SERVER)
    how.setdefault("value_range", ValueRange(0, 1))
    return (protocol or ls.FedSGD()).observe(sent, x, labels, **how)


def errors(x: Tensor, found: Tensor) -> Tensor:
    """The largest error of each example's nearest reconstruction."""
    found = found[assign(x, found, cost="psnr")]
    return (x - found).flatten(1).abs().amax(1)


def truly_alone(x: Tensor, model: Any) -> set[int]:
    places = torch.bucketize(x.flatten(1).double() @ model.imprint.row.double(), model.imprint.edges.double()) - 1
    counts = torch.bincount(places, minlength=len(model.imprint.edges) - 1)
    return set(places[counts[places] == 1].tolist())


def certified(attack: RobbingTheFed, seen: Observation) -> set[int]:
    reading = read_bins(seen, seen.model, attack.tolerance)
    return set(reading.places[reading.alone].tolist())
