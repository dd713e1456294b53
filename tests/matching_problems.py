"""Matching problems of every kind that the engine supports, small; for tests that compare ways of evaluating them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.knowledge import Knowledge
from leakscope.contracts.task import Regression
from leakscope.federation import FedAvg, FedSGD
from leakscope.matching import (
    DISTANCES,
    BatchNormStatistics,
    Cosine,
    DirectionL1,
    Drawing,
    EpochAgreement,
    FeatureMatching,
    GaussianKernel,
    L2Norm,
    Matcher,
    Orthogonality,
    Pixels,
    Problem,
    Ramp,
    RelativeSquaredL2,
    SegmentGradient,
    SoftRange,
    SquaredL2,
    TotalVariation,
    UnrolledSteps,
    Victim,
    steps_in_order,
)
from leakscope.models import build_model

BATCH, CLASSES, SHAPE = 3, 4, (1, 8, 8)


class Attentive(nn.Module):
    """Eight rows of a picture as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x[:, 0]
        return self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1))


class Uneven(nn.Module):
    """A layer that the outputs do not depend on, a shared one, and a buffer that every pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.idle, self.head = nn.Linear(64, 64), nn.Linear(3, 2), nn.Linear(64, CLASSES)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x.flatten(1))))))


def batchnorm_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Flatten(), nn.Linear(144, CLASSES))


def conv_net(activation: str = "tanh") -> nn.Module:
    return build_model("convnet", input_shape=SHAPE, num_classes=CLASSES, activation=activation, filters=4)


def problem(
    net: Callable[[], nn.Module] = conv_net,
    dtype: torch.dtype = torch.float64,
    *,
    protocol: Any = None,
    labels: bool = True,
    channel: Channel | None = None,
    seed: int = 0,
    **settings: Any,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        model = net().to(dtype)
    x = torch.rand(BATCH, *SHAPE, generator=generator, dtype=dtype)
    y = torch.randint(CLASSES, (BATCH,), generator=generator)
    if isinstance(settings.get("task"), Regression):
        y = torch.rand(BATCH, CLASSES, generator=generator, dtype=dtype)
    task = {"task": settings.pop("task")} if "task" in settings else {}
    seen = (protocol or FedSGD()).observe(model, x, y, knowledge=Knowledge.full, generator=generator, **task)
    matcher = Matcher(**{"distance": Cosine(), **settings})
    victim = Victim.of(seen, matcher.record)
    if channel is not None:
        tensors = victim.tensors._replace(survivors=channel.survivors(seen.message.update))
        victim = dataclasses.replace(victim, channel=channel, tensors=tensors)
    update = dict(seen.message.update)
    return Problem(matcher, victim, update, seen.inputs, BATCH, y if labels else None, (CLASSES,))


def rows_of(task: Problem, rows: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    like = next(iter(task.observed.values()))
    if isinstance(task.matcher.canvas, Drawing):  # weights that are all positive cancel in its norms
        return torch.stack([task.start(generator, like) for _ in range(rows)])
    width = task.size + task.logits + len(task.unknowns)
    return torch.rand(rows, width, generator=generator, dtype=torch.float64).to(like)


#: What somebody knows of the inputs of the linear layer of :func:`batchnorm_net`.
FEATURES = torch.rand(BATCH, 144, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
WEIGHT_UPDATE = FedAvg(epochs=2, batch_size=2, lr=0.1)
BATCH_STATISTICS = {"priors": (BatchNormStatistics(weight=0.1),), "net": batchnorm_net}
SITUATIONS: dict[str, dict[str, Any]] = {
    **{f"distance {name}": {"distance": distance} for name, distance in DISTANCES.items()},
    "depth weights": {"distance": SquaredL2(weights="layers", scale=3.0)},
    "relu": {"net": lambda: conv_net("relu"), "distance": DirectionL1()},
    "another judge": {"distance": GaussianKernel(), "judge": RelativeSquaredL2(), "emphasis": Ramp(last=3.0, steps=4)},
    "the distance as judge": {"distance": DirectionL1(), "judge": DirectionL1()},
    "priors": {
        "priors": (
            TotalVariation(weight=0.1, variant="joint"),
            L2Norm(weight=0.1, decay=0.5),
            Orthogonality(weight=0.1, every=1),
            SoftRange(weight=0.2),
            EpochAgreement(weight=0.1, copies=BATCH, features=2),
        ),
        "canvas": Pixels(space="model"),
    },
    "features": {
        "priors": (FeatureMatching(weight=0.3, layer="4", features=FEATURES), BatchNormStatistics(weight=0.1)),
        "record": ("4",),
        "net": batchnorm_net,
    },
    "span of features, clipped by example": {
        "priors": (FeatureMatching(weight=0.3, layer="4", features=FEATURES, form="span"),),
        "record": ("4",),
        "net": batchnorm_net,
        "channel": Channel(clip=1e-3, clip_per="example"),
    },
    "a network draws": {"canvas": Drawing(features=FEATURES[:, :5])},
    "labels searched": {"labels": False},
    "regression": {"task": Regression(), "labels": False},
    "BatchNorm in eval mode": {**BATCH_STATISTICS, "protocol": FedSGD(batchnorm="eval")},
    "BatchNorm in train mode": {**BATCH_STATISTICS, "protocol": FedSGD(batchnorm="train")},
    "clipped": {"channel": Channel(clip=1e-3), "distance": RelativeSquaredL2()},
    "clipped by example": {"channel": Channel(clip=1e-3, clip_per="example"), "distance": RelativeSquaredL2()},
    "pruned": {"channel": Channel(prune=0.5)},
    "attention": {"net": Attentive},
    "uneven": {"net": Uneven},
    "beta": {"protocol": WEIGHT_UPDATE, "simulation": SegmentGradient(beta=0.3)},
    "a fixed beta": {"protocol": WEIGHT_UPDATE, "simulation": SegmentGradient(beta=0.3, step=0.0)},
    "replayed steps": {
        "protocol": WEIGHT_UPDATE,
        "simulation": UnrolledSteps(0.1, steps_in_order(BATCH, 2, 2)),
    },
    "replayed steps in one graph, labels searched": {
        "protocol": WEIGHT_UPDATE,
        "simulation": UnrolledSteps(0.1, steps_in_order(BATCH, 2, 2), checkpoint=False),
        "labels": False,
    },
}
