"""FedSGD and FedAvg: the client sends one gradient, or trains and sends the weights before minus after.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from leakscope.contracts.channel import Channel
from leakscope.contracts.checks import COUNT
from leakscope.contracts.defense import Defense, Gradient, as_defense, composed
from leakscope.contracts.errors import UserError
from leakscope.contracts.observation import LocalTraining, UpdateKind
from leakscope.contracts.protocol import ClientSide, Record, batch_gradient, own_randomness, train_locally, visits
from leakscope.contracts.settings import setting
from leakscope.contracts.task import Reduction, Task
from leakscope.federation.client import OneMessage


@dataclass(frozen=True, kw_only=True)
class FedSGD(OneMessage):
    """One gradient of the client's loss, averaged (``mean``) or added (``sum``) over the batch."""

    kind: ClassVar[UpdateKind] = "gradient"

    reduction: Reduction = setting("mean", "Whether the examples' gradients are averaged or added.")

    def findings(self) -> tuple[str, ...]:
        return ("floor", "embedding", "utility")

    def _train(self, client: ClientSide) -> tuple[Gradient, LocalTraining]:
        return batch_gradient(client, self.reduction), LocalTraining(epochs=1)


@dataclass(frozen=True, kw_only=True)
class FedAvg(OneMessage):
    """Local training with mini-batches of the mean loss; the last batch may be smaller."""

    kind: ClassVar[UpdateKind] = "weight_delta"

    epochs: int = setting(1, "Local epochs.", ge=1)
    batch_size: int = setting(10, "Examples in a local batch.", ge=1)
    lr: float = setting(0.01, "The client's learning rate.", gt=0)
    shuffle: bool = setting(True, "Whether each epoch visits the examples in another order.")
    optimizer: Literal["sgd", "adam"] = setting("sgd", "The client's optimiser.")
    momentum: float = setting(0.0, "Momentum of SGD.", ge=0, lt=1)

    def problems(self) -> list[str]:
        if self.momentum and self.optimizer != "sgd":
            return ["momentum: applies to optimizer='sgd' only; set it to 0"]
        return []

    def findings(self) -> tuple[str, ...]:
        return ("floor", "trajectory", "embedding", "utility")

    def passes(self, examples: int) -> int:
        return self.epochs

    def easiest_examples(self, examples: int) -> int:
        """Take all: with fewer the client would take fewer local steps."""
        return examples

    def channel(self, defense: Defense, examples: int) -> Channel | None:
        """Return the channel of the difference of weights: noise of every step adds up; clipping is that of each step.

        That of single examples is left out: an adversary here simulates the steps without it.
        """
        steps = [part for part in defense.parts if part.acts_on_steps]
        rest = [part.channel(examples=examples) for part in defense.parts if not part.acts_on_steps]
        if not steps:
            return composed(rest)
        step = as_defense(steps).channel(examples=min(self.batch_size, examples))
        if step is None or type(step) is not Channel or self.optimizer != "sgd" or self.momentum:
            return None
        other_mixtures = step.mixed > 1 and self.steps(examples) > 1
        if other_mixtures or step.masked or step.rounding != "none" or isinstance(step.noise, Mapping):
            return None
        noise = self.lr * math.sqrt(self.steps(examples)) * step.noise
        own = Channel(noise=noise, unreliable=step.unreliable, inexact=step.inexact, mixed=step.mixed)
        if self.steps(examples) == 1:  # one set of masks
            own = replace(own, units_dropped=step.units_dropped, dropped_layers=step.dropped_layers)
        if step.clip is not None and not step.clips_examples:
            own = replace(own, clip=step.clip, clip_per="step")
        return composed([own, *rest])

    def steps(self, examples: int) -> int:
        return self.epochs * -(-examples // self.batch_size)

    def trajectory(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        defense: Defense | None = None,
        generator: torch.Generator | None = None,
        *,
        limit: int = 50,
        task: Task | None = None,
    ) -> Trajectory:
        """Record the training that :meth:`observe` makes of the same arguments, bit for bit; no adversary sees it.

        At most ``limit`` sets of weights are kept, evenly spread, among them those before the first and the last step.
        """
        client, _ = self.client_side(model, x, y, defense, generator, task)
        kept = chosen_steps(self.steps(len(x)), limit)
        weights: list[Gradient] = []
        norms: list[float] = []

        def record(step: int, gradient: Gradient) -> None:
            norms.append(sum(float(g.double().square().sum()) for g in gradient.values()) ** 0.5)
            if step in kept:
                weights.append(client.weights())

        with own_randomness(client.generator):
            self._train(client, record)
        return Trajectory(kept=kept, weights=tuple(weights), after=client.weights(), norms=tuple(norms))

    def _train(self, client: ClientSide, record: Record | None = None) -> tuple[Gradient, LocalTraining]:
        count = len(client.x)
        COUNT.check("epochs: local steps", self.steps(count))
        batches = visits(count, self.batch_size, self.epochs, client.generator if self.shuffle else None)
        delta, order = train_locally(client, batches, self.lr, self.optimizer, self.momentum, record)
        same = {name: getattr(self, name) for name in ("epochs", "batch_size", "optimizer", "momentum")}
        return delta, LocalTraining(**same, learning_rate=self.lr, batch_order=order)


@dataclass(frozen=True, kw_only=True, eq=False)
class Trajectory:
    """Weights before some of the local steps and after the last one, and how long each step's gradient was.

    ``weights[n]`` are those before step ``kept[n]``; ``weights[0] - after`` is the update before a defence of the
    message. ``norms`` has one norm for every step: of the gradient that the client stepped along, after the defence.
    """

    kept: tuple[int, ...]
    weights: tuple[Mapping[str, Tensor], ...] = field(repr=False)
    after: Mapping[str, Tensor] = field(repr=False)
    norms: tuple[float, ...] = field(repr=False)

    @property
    def steps(self) -> int:
        return len(self.norms)


def chosen_steps(total: int, limit: int) -> tuple[int, ...]:
    """Choose at most ``limit`` of ``total`` steps, evenly spread, with the first and the last.

    >>> chosen_steps(3, 50), chosen_steps(100, 4)
    ((0, 1, 2), (0, 33, 66, 99))
    """
    if total < 1 or limit < 2:
        raise UserError(f"expected at least 1 step and a limit of at least 2, got {total} and {limit}")
    if total <= limit:
        return tuple(range(total))
    return tuple(round(place * (total - 1) / (limit - 1)) for place in range(limit))
