"""How a candidate batch becomes an update: one gradient, a gradient on the way, or every local step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.func import vjp

from leakscope.contracts.observation import UpdateKind
from leakscope.matching.victim import Answer, Tensors, Victim, VictimTensors


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """One more number that a simulation leaves open; it is searched along with the inputs, in [low, high].

    ``step`` is its learning rate, where the inputs have the optimiser's. Its derivative is taken anew at every
    ``every``-th step and kept in between.
    """

    name: str
    start: float
    step: float
    low: float
    high: float
    every: int = 1


class Simulation(Protocol):
    @property
    def imitates(self) -> UpdateKind:
        """A mean gradient, or the difference of weights before and after."""

    @property
    def compiles(self) -> bool:
        """Whether a step with it can be compiled in reasonable time."""

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        """What is searched besides the inputs."""

    def __call__(self, victim: Victim, tensors: VictimTensors, x: Tensor, targets: Tensor, numbers: Tensors) -> Answer:
        """The candidate's update, and the inputs of the BatchNorm layers."""


@dataclass(frozen=True)
class SingleGradient:
    """One gradient of the whole batch, as in FedSGD; also the first-order stand-in for a weight update."""

    imitates: ClassVar[UpdateKind] = "gradient"
    compiles: ClassVar[bool] = True
    unknowns: ClassVar[tuple[Unknown, ...]] = ()

    def __call__(self, victim: Victim, tensors: VictimTensors, x: Tensor, targets: Tensor, numbers: Tensors) -> Answer:
        update, recorded = victim.gradient(tensors, x, targets)
        return victim.sent_update(update, tensors), recorded


@dataclass(frozen=True, kw_only=True)
class SegmentGradient:
    """One gradient at w_0 - beta (w_0 - w_T): a point between the weights before (0) and after (1), itself unknown.

    With ``step=0`` beta stays where it starts, and with ``beta=0`` besides this is :class:`SingleGradient`.
    """

    beta: float = 0.5
    step: float = 1e-3
    every: int = 1
    imitates: ClassVar[UpdateKind] = "gradient"
    compiles: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.beta <= 1:
            raise ValueError(f"beta: expected a point in [0, 1] (0 = weights before, 1 = after), got {self.beta}")
        if self.step < 0 or self.every < 1:
            raise ValueError(f"step and every: expected step >= 0 and every >= 1, got {self.step} and {self.every}")

    @property
    def unknowns(self) -> tuple[Unknown, ...]:
        if not self.step:
            return ()
        return (Unknown(name="beta", start=self.beta, step=self.step, low=0.0, high=1.0, every=self.every),)

    def __call__(self, victim: Victim, tensors: VictimTensors, x: Tensor, targets: Tensor, numbers: Tensors) -> Answer:
        beta = numbers.get("beta", self.beta)
        surrogate = {name: value - beta * tensors.movement[name] for name, value in tensors.weights.items()}
        update, recorded = victim.gradient(tensors._replace(weights=surrogate), x, targets)
        return victim.sent_update(update, tensors), recorded


@dataclass(frozen=True)
class UnrolledSteps:
    """Plain gradient descent over ``order`` (one tuple of example numbers a step): before minus after.

    ``checkpoint`` remembers only the weights before each step and computes the rest again in the backward pass: exact,
    and memory no longer grows with the activations of every step. Without it all steps stay in one graph.
    """

    learning_rate: float
    order: tuple[tuple[int, ...], ...]
    checkpoint: bool = True
    imitates: ClassVar[UpdateKind] = "weight_delta"
    #: Compiling three steps in one graph took two minutes, and the compiler does not read the checkpoints.
    compiles: ClassVar[bool] = False
    unknowns: ClassVar[tuple[Unknown, ...]] = ()

    def __call__(self, victim: Victim, tensors: VictimTensors, x: Tensor, targets: Tensor, numbers: Tensors) -> Answer:
        recorded: Tensors = {}
        if victim.batchnorm_targets:
            # Of all examples at the first weights, as the statistics that they are compared with.
            recorded = victim.loss(tensors, x, targets)[1]
        steps = _Steps(self, victim, tuple(tensors.weights))
        flat = tuple(tensors.weights.values())
        if self.checkpoint:
            moved = _Checkpointed.apply(steps, x, targets, *flat)[: len(flat)]
        else:
            after = flat
            for rows in self.order:
                after = steps.descend(after, *steps.batch(rows, x, targets))
            moved = tuple(a - b for a, b in zip(flat, after, strict=True))
        return victim.sent_update(dict(zip(steps.names, moved, strict=True)), tensors), recorded


@dataclass(frozen=True, eq=False)
class _Steps:
    """The client's steps as functions of tuples of tensors, which autograd functions want."""

    recipe: UnrolledSteps
    victim: Victim
    names: tuple[str, ...]

    def batch(self, rows: tuple[int, ...], x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        index = torch.tensor(rows, device=x.device)
        return x[index], targets[index]

    def gradient(self, weights: tuple[Tensor, ...], x: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        # The victim's own fixed tensors: an autograd function may only be given others as arguments.
        tensors = self.victim.tensors._replace(weights=dict(zip(self.names, weights, strict=True)))
        gradient, _ = self.victim.gradient(tensors, x, targets)
        return tuple(gradient[name] for name in self.names)

    def descend(self, weights: tuple[Tensor, ...], x: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
        gradient = self.gradient(weights, x, targets)
        return tuple(w - self.recipe.learning_rate * g for w, g in zip(weights, gradient, strict=True))


class _Checkpointed(torch.autograd.Function):
    """Before minus after for each tensor, then the weights before each step, which only the backward pass reads.

    Backward is the adjoint of w' = w - lr g(w, x):  a = a' - lr H a',  dx = -lr d/dx <g, a'>.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(steps: _Steps, x: Tensor, targets: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        # One block for all: tensors kept one by one between short-lived ones leave holes as large as themselves.
        places = x.new_empty((len(steps.recipe.order), sum(w.numel() for w in weights)))
        current = weights
        for number, rows in enumerate(steps.recipe.order):
            places[number] = torch.cat([w.reshape(-1) for w in current])
            current = steps.descend(current, *steps.batch(rows, x, targets))
        return (*(a - b for a, b in zip(weights, current, strict=True)), places)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        steps, x, targets, *weights = inputs
        ctx.steps = steps
        ctx.mark_non_differentiable(output[-1])
        ctx.set_materialize_grads(False)  # zeros for every step's weights would double the memory
        ctx.save_for_backward(x, targets, output[-1], *weights)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        steps: _Steps = ctx.steps
        x, targets, places, *start = ctx.saved_tensors
        rate, soft = steps.recipe.learning_rate, targets.is_floating_point()
        adjoint = tuple(torch.zeros_like(w) if c is None else -c for w, c in zip(start, cotangents, strict=False))
        dx = torch.zeros_like(x)
        dtargets = torch.zeros_like(targets) if soft else None
        for number in reversed(range(len(steps.recipe.order))):
            flat = places[number].split([w.numel() for w in start])
            weights = tuple(part.reshape(w.shape) for part, w in zip(flat, start, strict=True))
            rows = torch.tensor(steps.recipe.order[number], device=x.device)

            def gradient(weights: tuple[Tensor, ...], *batch: Tensor, labels: Tensor = targets[rows]) -> Any:
                return steps.gradient(weights, batch[0], batch[1] if soft else labels)

            # Nobody differentiates a third time; recording it would keep every step's graph after all.
            with torch.no_grad():
                pull = vjp(gradient, weights, x[rows], *((targets[rows],) if soft else ()))[1]
                pushed, *pulled = pull(adjoint)
                adjoint = tuple(a - rate * h for a, h in zip(adjoint, pushed, strict=True))
                dx = dx.index_add(0, rows, -rate * pulled[0])
                if dtargets is not None:
                    dtargets = dtargets.index_add(0, rows, -rate * pulled[1])
        return (None, dx, dtargets, *([None] * len(start)))


def steps_in_order(num_examples: int, batch_size: int, epochs: int) -> tuple[tuple[int, ...], ...]:
    """The visits of a client that does not shuffle; the guess of an adversary who does not know the order.

    >>> steps_in_order(3, 2, 1)
    ((0, 1), (2,))
    """
    rows = tuple(range(num_examples))
    epoch = tuple(rows[i : i + batch_size] for i in range(0, num_examples, batch_size))
    return epoch * epochs
