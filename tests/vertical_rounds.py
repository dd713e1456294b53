"""Small vertical models with data, and the rounds of one layer made by hand, for tests of CAFE and its equations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from leakscope.contracts.observation import Message
from leakscope.federation.vertical import draw_batches
from leakscope.models import build_model
from leakscope.models.split import VerticalModel

Batches = list[tuple[int, ...]]


def batches_of(samples: int, batch: int, rounds: int, seed: int = 0) -> Batches:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(b.tolist()) for b in draw_batches(samples, batch, rounds, "uniform", generator)]


def rows(samples: int, width: int, seed: int) -> Tensor:
    return torch.randn((samples, width), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sent(batches: Batches, signals: Tensor, inputs: Tensor) -> list[Message]:
    """What a layer sends: plain sums, sample by sample."""
    messages = []
    for batch in batches:
        bias = sum(signals[n] for n in batch)
        weight = sum(torch.outer(signals[n], inputs[n]) for n in batch)
        messages.append(Message(update={"fc.bias": bias, "fc.weight": weight}, indices=batch))
    return messages


def biases(messages: list[Message]) -> Tensor:
    return torch.stack([message.update["fc.bias"] for message in messages])


def mlp(features: int = 8, classes: int = 3, **options: Any) -> VerticalModel:
    options = {"workers": 2, "hidden": 16, "middle": 10, "activation": "tanh", **options}
    model = build_model("vertical-mlp", input_shape=(features,), num_classes=classes, **options)
    assert isinstance(model, VerticalModel)
    return model.double()


def cnn(**options: Any) -> VerticalModel:
    options = {"filters": (4, 6), "hidden": 8, "middle": 6, **options}
    model = build_model("cafe-cnn", input_shape=(1, 8, 8), num_classes=3, **options)
    assert isinstance(model, VerticalModel)
    return model


def data(count: int, shape: tuple[int, ...] = (8,), classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.rand((count, *shape), generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (count,), generator=generator)
