"""Simulate the update of a candidate batch: one gradient, a gradient on the way, or every local step.

The state of a client is a matrix: its weights, flat, in the first row and what its optimiser remembers below. A replay
keeps the state before each step; the backward sweep takes each step again and pulls the adjoint of the state back. That
is exact, and memory does not grow with the activations of every step.
"""

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor
from torch.func import vjp
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from leakscope.contracts.errors import UserError
from leakscope.contracts.observation import UpdateKind
from leakscope.matching.compilation import FUNCTIONS, CannotCompile, Function
from leakscope.matching.victim import Answer, Tensors, Victim, VictimTensors

#: Of torch.optim.Adam, which clients use.
ADAM_DECAYS = (0.9, 0.999)
ADAM_EPSILON = 1e-8


@dataclass(frozen=True, kw_only=True)
class LocalOptimiser:
    rate: float
    name: Literal["sgd", "adam"] = "sgd"
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in ("sgd", "adam"):
            raise UserError(f"optimiser: expected 'sgd' or 'adam', got {self.name!r}")
        if not 0 <= self.momentum < 1 or (self.momentum and self.name == "adam"):
            raise UserError(f"momentum: expected a number in [0, 1), 0 for Adam, got {self.momentum}")

    def start(self, weights: Tensor) -> Tensor:
        rows = 3 if self.name == "adam" else 2 if self.momentum else 1
        return torch.cat([weights[None], weights.new_zeros(rows - 1, len(weights))])

    def factors(self, number: int, like: Tensor) -> Tensor:
        """Return Adam's corrections of step ``number``, from 0 on, as a tensor so that one compiled step serves all."""
        if self.name == "sgd":
            return like.new_empty(0)
        first, second = (1 - decay ** (number + 1) for decay in ADAM_DECAYS)
        return like.new_tensor([self.rate / first, second**-0.5])

    def advance(self, state: Tensor, gradient: Tensor, factors: Tensor) -> Tensor:
        if self.name == "adam":
            mean = ADAM_DECAYS[0] * state[1] + (1 - ADAM_DECAYS[0]) * gradient
            square = ADAM_DECAYS[1] * state[2] + (1 - ADAM_DECAYS[1]) * gradient.square()
            # The derivative of a root of zero is infinite: weights that never saw a gradient.
            root = torch.where(square > 0, square, 1.0).sqrt() * (square > 0)
            return torch.stack([state[0] - factors[0] * mean / (factors[1] * root + ADAM_EPSILON), mean, square])
        if self.momentum:
            velocity = self.momentum * state[1] + gradient
            return torch.stack([state[0] - self.rate * velocity, velocity])
        return state - self.rate * gradient

    def pull(self, state: Tensor, gradient: Tensor, factors: Tensor, adjoint: Tensor) -> tuple[Tensor, Tensor]:
        """Pull the adjoint of the state after a step back to the state before and to the gradient."""
        before, toward = vjp(lambda s, g: self.advance(s, g, factors), state, gradient)[1](adjoint)
        return before, toward


class LocalSteps:
    """Take the steps over ``order`` of one victim's client.

    ``advance`` goes from the state, the batch, its targets and the step's factors to the state after the step; ``pull``
    from the same and the adjoint of that state to those of the state before, the batch and soft targets.
    """

    def __init__(
        self, victim: Victim, optimiser: LocalOptimiser, order: tuple[tuple[int, ...], ...], compiled: bool = False
    ) -> None:
        weights = victim.tensors.weights
        self.victim, self.optimiser, self.order = victim, optimiser, order
        self.names = tuple(weights)
        self.shapes = tuple(weight.shape for weight in weights.values())
        self.sizes = [weight.numel() for weight in weights.values()]
        self.advance: Callable[..., Tensor] = self._advance
        self.pull: Callable[..., tuple[Tensor, ...]] = self._pull
        if compiled:
            advance = compiled_step(
                lambda *given: (self.pure_advance(*given),), lambda *given: (self._advance(*given),)
            )
            self.advance = lambda *given: advance(*given)[0]
            self.pull = compiled_step(self._pure_pull, self._pull)

    def flatten(self, tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([tensor.reshape(-1) for tensor in tensors])

    def unflatten(self, flat: Tensor) -> Tensors:
        parts = zip(self.names, flat.split(self.sizes), self.shapes, strict=True)
        return {name: part.view(shape) for name, part, shape in parts}

    def batch(self, number: int, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        factors = self.optimiser.factors(number, x)
        if self.takes_all(number, len(x)):
            return x.contiguous(), targets.contiguous(), factors  # laid out as picked ones: a compiled step expects it
        rows = torch.tensor(self.order[number], device=x.device)
        return x[rows], targets[rows], factors

    def takes_all(self, number: int, examples: int) -> bool:
        return self.order[number] == tuple(range(examples))

    def pure_advance(self, state: Tensor, x: Tensor, targets: Tensor, factors: Tensor) -> Tensor:
        return self.optimiser.advance(state, self._pure_gradient(state[0], x, targets), factors)

    def _pure_gradient(self, weights: Tensor, x: Tensor, targets: Tensor) -> Tensor:
        # The victim's own fixed tensors: an autograd function may only be given others as arguments.
        tensors = self.victim.tensors._replace(weights=self.unflatten(weights))
        gradient, _ = self.victim.gradient(tensors, x, targets)
        return self.flatten(gradient[name] for name in self.names)

    def _pure_pull(
        self, state: Tensor, x: Tensor, targets: Tensor, factors: Tensor, adjoint: Tensor
    ) -> tuple[Tensor, ...]:
        if targets.is_floating_point():
            gradient, back, *_ = vjp(self._pure_gradient, state[0], x, targets)
        else:
            gradient, back, *_ = vjp(lambda weights, x: self._pure_gradient(weights, x, targets), state[0], x)
        before, toward = self.optimiser.pull(state, gradient, factors, adjoint)
        weights, *rest = back(toward)
        return torch.cat([before[:1] + weights, before[1:]]), *rest

    def _advance(self, state: Tensor, x: Tensor, targets: Tensor, factors: Tensor) -> Tensor:
        return self.pure_advance(state.detach(), x.detach(), targets.detach(), factors)

    def _pull(self, state: Tensor, x: Tensor, targets: Tensor, factors: Tensor, adjoint: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            weights = {name: part.detach().requires_grad_() for name, part in self.unflatten(state[0]).items()}
            x, soft = x.detach().requires_grad_(), targets.is_floating_point()
            targets = targets.detach().requires_grad_(soft)
            tensors = self.victim.tensors._replace(weights=weights)
            found = self.victim.gradient(tensors, x, targets)[0]
            gradient = [found[name] for name in self.names]
        before, toward = self.optimiser.pull(state, self.flatten(p.detach() for p in gradient), factors, adjoint)
        # What depends on nothing, such as the gradient of a weight that no output reads, has nothing to pull back.
        both = zip(gradient, self.unflatten(toward).values(), strict=True)
        parts, cotangents = zip(*(pair for pair in both if pair[0].requires_grad), strict=True)
        leaves = [*weights.values(), x, *([targets] if soft else [])]
        pulled = torch.autograd.grad(parts, leaves, cotangents, materialize_grads=True)
        moved = before[:1] + self.flatten(pulled[: len(weights)])
        return moved if len(before) == 1 else torch.cat([moved, before[1:]]), *pulled[len(weights) :]


def compiled_step(step: Function, eager: Function) -> Function:
    """Compile ``step`` at the first call with tensors of these shapes; use ``eager`` where that is impossible."""
    ready: dict[tuple[torch.Size, ...], Function] = {}

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        shapes = tuple(tensor.shape for tensor in tensors)
        if shapes not in ready:
            try:
                graph = without_idle_convolutions(make_fx(lambda *inputs: step(*inputs))(*tensors))
                ready[shapes] = FUNCTIONS.get(graph, tensors).function
            except (RuntimeError, CannotCompile):  # such as a model whose Python code reads values of tensors
                ready[shapes] = eager
        return ready[shapes](*tensors)

    return call


def without_idle_convolutions(graph: GraphModule) -> GraphModule:
    """Leave out derivatives of convolutions that nobody reads: a ninth of the work of a pull."""
    graph.graph.eliminate_dead_code()
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default):
        read = {user.args[1] for user in node.users if user.target is operator.getitem}
        *others, mask = node.args
        node.args = (*others, [asked and place in read for place, asked in enumerate(mask)])
    graph.recompile()
    return graph


class Replay(torch.autograd.Function):
    """Weights before minus after, flat; then the state before each step, which only the backward pass reads."""

    @staticmethod
    def forward(steps: LocalSteps, x: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        state = steps.optimiser.start(weights)
        # One block for all: tensors kept one by one between short-lived ones leave holes as large as themselves.
        states = state.new_empty((len(steps.order), *state.shape))
        for number in range(len(steps.order)):
            states[number] = state
            state = steps.advance(state, *steps.batch(number, x, targets))
        return weights - state[0], states

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        steps, x, targets, _ = inputs
        ctx.steps = steps
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)  # zeros for every step's state would double the memory
        ctx.save_for_backward(x, targets, output[1])

    @staticmethod
    def backward(ctx: Any, moved: Tensor | None, _states: Tensor | None) -> tuple[Any, ...]:
        if moved is None:
            return None, None, None, None
        x, targets, states = ctx.saved_tensors
        dx, *dtargets = _Sweep.apply(ctx.steps, x, targets, states, moved)
        return None, dx, dtargets[0] if dtargets else None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return _row_by_row(Replay, info, in_dims, arguments)


class _Sweep(torch.autograd.Function):
    """Sweep backwards through :class:`Replay`; a function of its own sees plain tensors in every transform."""

    @staticmethod
    def forward(steps: LocalSteps, x: Tensor, targets: Tensor, states: Tensor, moved: Tensor) -> tuple[Tensor, ...]:
        found = [torch.zeros_like(x)] + [torch.zeros_like(targets)] * targets.is_floating_point()
        adjoint = steps.optimiser.start(-moved)
        for number in reversed(range(len(steps.order))):
            adjoint, *parts = steps.pull(states[number], *steps.batch(number, x, targets), adjoint)
            rows = None if steps.takes_all(number, len(x)) else torch.tensor(steps.order[number], device=x.device)
            for total, part in zip(found, parts, strict=True):
                total.add_(part) if rows is None else total.index_add_(0, rows, part)
        return tuple(found)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
        return _row_by_row(_Sweep, info, in_dims, arguments)


def _row_by_row(function: Any, info: Any, in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]) -> Any:
    """Take restarts one after the other: each has its own weights, with which batched convolutions cost more."""

    def picked(row: int) -> list[Any]:
        return [a if d is None else a.select(d, row) for a, d in zip(arguments, in_dims, strict=True)]

    rows = [function.apply(*picked(row)) for row in range(info.batch_size)]
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True)), (0,) * len(rows[0])


@dataclass(frozen=True, kw_only=True)
class Unknown:
    """Search one more number in [low, high] with learning rate ``step``, derived anew every ``every`` steps."""

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
    """Take one gradient at w_0 - beta (w_0 - w_T), between the weights before and after; ``step=0`` fixes beta."""

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
    """Replay the client's own steps over ``order`` (one tuple of example numbers a step): weights before minus after.

    ``checkpoint`` keeps only the client's state before each step and computes the rest again in the backward pass;
    without it all steps stay in one graph. ``compiled`` compiles one step, which serves them all.
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
        if not self._steps or self._steps[0].victim is not victim:
            optimiser = LocalOptimiser(rate=self.learning_rate, name=self.optimizer, momentum=self.momentum)
            self._steps[:] = [LocalSteps(victim, optimiser, self.order, self.compiled)]
        (steps,) = self._steps
        weights = steps.flatten(tensors.weights.values())
        if self.checkpoint:
            moved = Replay.apply(steps, x, targets, weights)[0]
        else:
            state = steps.optimiser.start(weights)
            for number in range(len(self.order)):
                state = steps.pure_advance(state, *steps.batch(number, x, targets))
            moved = weights - state[0]
        return victim.sent_update(steps.unflatten(moved), tensors), recorded
