"""How a candidate batch becomes an update: one gradient, a gradient on the way, or every local step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal, Protocol

from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.contracts.observation import UpdateKind
from leakscope.matching.replay import LocalOptimiser, LocalSteps, Replay
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
            raise UserError(f"beta: expected a point in [0, 1] (0 = weights before, 1 = after), got {self.beta}")
        if self.step < 0 or self.every < 1:
            raise UserError(f"step and every: expected step >= 0 and every >= 1, got {self.step} and {self.every}")

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
    """The client's own steps over ``order`` (one tuple of example numbers a step): before minus after.

    ``optimizer`` and ``momentum`` are the client's. ``checkpoint`` remembers only the client's state before each step
    and computes the rest again in the backward pass: exact, and memory no longer grows with the activations of every
    step. Without it all steps stay in one graph. ``compiled`` compiles one step, which serves them all.
    """

    learning_rate: float
    order: tuple[tuple[int, ...], ...]
    checkpoint: bool = True
    optimizer: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0
    compiled: bool = False
    imitates: ClassVar[UpdateKind] = "weight_delta"
    #: Compiling three steps in one graph took two minutes, and the compiler does not read the checkpoints.
    compiles: ClassVar[bool] = False
    unknowns: ClassVar[tuple[Unknown, ...]] = ()
    #: Of the victim seen last: a step is compiled once, not at each evaluation.
    _steps: list[LocalSteps] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.compiled and not self.checkpoint:
            raise UserError("compiled: expected checkpoint=True with it, for one graph of all steps is not compiled")

    def __call__(self, victim: Victim, tensors: VictimTensors, x: Tensor, targets: Tensor, numbers: Tensors) -> Answer:
        recorded: Tensors = {}
        if victim.records:
            # Of all examples at the first weights, as the statistics that they are compared with.
            recorded = victim.loss(tensors, x, targets)[1]
        steps = self._steps_of(victim)
        weights = steps.flatten(tensors.weights.values())
        if self.checkpoint:
            moved = Replay.apply(steps, x, targets, weights)[0]
        else:
            state = steps.optimiser.start(weights)
            for number in range(len(self.order)):
                state = steps.pure_advance(state, *steps.batch(number, x, targets))
            moved = weights - state[0]
        return victim.sent_update(steps.unflatten(moved), tensors), recorded

    def _steps_of(self, victim: Victim) -> LocalSteps:
        if not self._steps or self._steps[0].victim is not victim:
            optimiser = LocalOptimiser(rate=self.learning_rate, name=self.optimizer, momentum=self.momentum)
            self._steps[:] = [LocalSteps(victim, optimiser, self.order, self.compiled)]
        return self._steps[0]
