"""FedAvg: the client trains for some epochs and sends the difference of weights, before minus after.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from leakscope.federation.base import (
    Defense,
    Gradient,
    Protocol,
    batch_gradient,
    check_batch,
    client_copy,
    client_generator,
    own_randomness,
)
from leakscope.federation.trajectory import Trajectory, chosen_steps
from leakscope.observation import LocalTraining, UpdateKind

#: Told before each local step: its number, the weights it starts from, and the gradient it will follow.
Record = Callable[[int, Mapping[str, Tensor], Gradient], None]


@dataclass(frozen=True, kw_only=True)
class FedAvg(Protocol):
    """Local training with mini-batches of mean cross-entropy; the last batch may be smaller."""

    kind: ClassVar[UpdateKind] = "weight_delta"

    epochs: int = 1
    batch_size: int = 10
    lr: float = 0.01
    shuffle: bool = True
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        if self.epochs < 1:
            problems.append(f"epochs: expected at least 1, got {self.epochs}")
        if self.batch_size < 1:
            problems.append(f"batch_size: expected at least 1, got {self.batch_size}")
        if not self.lr > 0:
            problems.append(f"lr: expected a positive number, got {self.lr}")
        if self.optimizer not in ("sgd", "adam"):
            problems.append(f"optimizer: expected 'sgd' or 'adam', got {self.optimizer!r}")
        if not 0 <= self.momentum < 1:
            problems.append(f"momentum: expected 0 <= momentum < 1, got {self.momentum}")
        elif self.momentum and self.optimizer != "sgd":
            problems.append("momentum: applies to optimizer='sgd' only; set it to 0")
        if problems:
            raise ValueError("FedAvg:\n  - " + "\n  - ".join(problems))

    def trajectory(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        defense: Defense | None = None,
        generator: torch.Generator | None = None,
        *,
        limit: int = 50,
    ) -> Trajectory:
        """The way of the training that :meth:`observe` makes of the same arguments, bit for bit.

        Truth, for the audit alone: no adversary sees it. At most ``limit`` sets of weights are kept, evenly spread,
        among them those before the first and before the last step.
        """
        check_batch(model, x, y, None)
        kept = chosen_steps(self.epochs * -(-len(x) // self.batch_size), limit)
        weights: list[Gradient] = []
        norms: list[float] = []
        wanted = frozenset(kept)

        def record(step: int, before: Mapping[str, Tensor], gradient: Gradient) -> None:
            norms.append(sum(float(g.double().square().sum()) for g in gradient.values()) ** 0.5)
            if step in wanted:
                weights.append({name: p.detach().clone() for name, p in before.items()})

        x, y = x.detach().clone(), y.clone()
        generator = generator if generator is not None else client_generator()
        client = client_copy(model, self.batchnorm)
        with own_randomness(generator):
            self._train(client, x, y, defense if defense is not None else Defense(), generator, record=record)
        after = {name: p.detach().clone() for name, p in client.named_parameters() if p.requires_grad}
        return Trajectory(kept=kept, weights=tuple(weights), after=after, norms=tuple(norms))

    def _train(
        self,
        client: nn.Module,
        x: Tensor,
        y: Tensor,
        defense: Defense,
        generator: torch.Generator,
        *,
        record: Record | None = None,
    ) -> tuple[Gradient, LocalTraining]:
        trained = {name: p for name, p in client.named_parameters() if p.requires_grad}
        before = {name: p.detach().clone() for name, p in trained.items()}
        optimizer: torch.optim.Optimizer
        if self.optimizer == "adam":
            optimizer = torch.optim.Adam(trained.values(), lr=self.lr)
        else:
            optimizer = torch.optim.SGD(trained.values(), lr=self.lr, momentum=self.momentum)
        order: list[tuple[int, ...]] = []
        for _ in range(self.epochs):
            visits = torch.randperm(len(x), generator=generator) if self.shuffle else torch.arange(len(x))
            for batch in visits.split(self.batch_size):
                rows = batch.to(x.device)
                gradient = batch_gradient(client, x[rows], y[rows], "mean", defense, generator)
                if record is not None:
                    record(len(order), trained, gradient)
                for name, p in trained.items():
                    p.grad = gradient[name]
                optimizer.step()
                order.append(tuple(batch.tolist()))
        delta = {name: before[name] - p.detach() for name, p in trained.items()}
        recipe = LocalTraining(
            epochs=self.epochs,
            batch_size=self.batch_size,
            learning_rate=self.lr,
            optimizer=self.optimizer,
            momentum=self.momentum,
            batch_order=tuple(order),
        )
        return delta, recipe
