"""Evaluate a matching problem: a row of numbers becomes inputs, labels and other unknowns, and an objective.

All ways to evaluate give the same numbers up to rounding. "plain" takes rows one after another by plain autograd.
"batched" takes all at once through ``torch.func``, which pays for small models: it saves calls, not arithmetic.
"compiled" takes rows one after another through one compiled graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import InputSpace
from leakscope.matching.compilation import FUNCTIONS, Compiled
from leakscope.matching.distances import Distance
from leakscope.matching.priors import Scene
from leakscope.matching.search import Evaluation
from leakscope.matching.simulations import Unknown
from leakscope.matching.victim import Tensors, Victim, forward_flops, gradients

if TYPE_CHECKING:
    from leakscope.matching.loop import Matcher


Way = Literal["plain", "batched", "compiled"]
#: The objective and its judged values (k,), of an example, the other numbers, the iteration, and facts that stay.
Objective = Callable[[Tensor, Tensor, Tensor, Any], tuple[Tensor, Tensor]]
#: From examples (rows, n), other numbers (rows, m), and the iteration.
Step = Callable[[Tensor, Tensor, Tensor], Evaluation]


def make_step(
    way: Way, objective: Objective, facts: Any, example: tuple[Tensor, Tensor, Tensor], numbers: bool
) -> tuple[Step, Compiled | None]:
    """Return the step, and how it was compiled, for shapes as in ``example``; ``numbers``: derive by these too."""
    if way == "batched":
        return _batched(objective, facts, numbers), None
    if way == "plain":
        return _one_by_one(lambda *row: _differentiate(objective, facts, numbers, *row)), None
    if way != "compiled":
        raise UserError(f"way: expected one of {', '.join(get_args(Way))}, got {way!r}")
    leaves, form = tree_flatten(facts)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    held = [leaves[place] for place in places]

    def function(main: Tensor, others: Tensor, iteration: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        given = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            given[place] = tensor
        return _differentiate(objective, tree_unflatten(given, form), numbers, main, others, iteration)

    with sdpa_kernel(SDPBackend.MATH):
        compiled = FUNCTIONS.get(function, (*example, *held))
    return _one_by_one(lambda *row: compiled.function(*row, *held)), compiled


def _differentiate(
    objective: Objective, facts: Any, numbers: bool, main: Tensor, others: Tensor, iteration: Tensor
) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        main = main.detach().requires_grad_()
        others = others.detach().requires_grad_(numbers)
        value, judged = objective(main, others, iteration, facts)
        found = gradients(value, (main, others) if numbers else (main,))
    return value.detach(), judged.detach(), torch.cat(found) if numbers else found[0]


def _one_by_one(evaluate: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]) -> Step:
    def step(mains: Tensor, others: Tensor, iteration: Tensor) -> Evaluation:
        # Only the plain form of attention can be differentiated twice.
        with sdpa_kernel(SDPBackend.MATH):
            each = [evaluate(main, other, iteration) for main, other in zip(mains, others, strict=True)]
        if len(each) == 1:
            value, judged, gradient = each[0]
            return value[None], judged[None], gradient[None]
        value, judged, gradient = map(torch.stack, zip(*each, strict=True))
        return value, judged, gradient

    return step


def _batched(objective: Objective, facts: Any, numbers: bool) -> Step:
    derivative = grad_and_value(objective, argnums=(0, 1) if numbers else (0,), has_aux=True)
    together = vmap(derivative, in_dims=(0, 0, None, None))

    def step(mains: Tensor, others: Tensor, iteration: Tensor) -> Evaluation:
        with sdpa_kernel(SDPBackend.MATH):
            found, (value, judged) = together(mains, others, iteration, facts)
        return value.detach(), judged.detach(), torch.cat(found, dim=1).detach()

    return step


#: From so many restarts on, up to so many weights and forward operations, restarts at once are faster (measured).
BATCHED_RESTARTS, BATCHED_WEIGHTS, BATCHED_OPERATIONS = 4, 350_000, 40_000_000
#: Up to so many entries, an update is compared as one tensor: fewer calls, and a copy that still fits the cache.
JOINED_ENTRIES = 2**20


@dataclass(frozen=True, eq=False)
class Problem:
    """Hold the problem of a row: the canvas's ``size`` variables, label logits where searched, unknown numbers.

    An unknown number is in units of its own learning rate over the optimiser's, so that each moves at its own pace.
    """

    matcher: Matcher
    victim: Victim
    observed: Tensors
    inputs: InputSpace
    count: int
    targets: Tensor | None
    output_shape: tuple[int, ...]
    size: int = field(init=False)
    unknowns: tuple[Unknown, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", self.matcher.canvas.variables(self.count, self.inputs))
        object.__setattr__(self, "unknowns", self.matcher.simulation.unknowns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.inputs.shape)

    def start(self, generator: torch.Generator, like: Tensor) -> Tensor:
        canvas = self.matcher.canvas
        first = canvas.initial(self.count, self.inputs, generator, like).reshape(1, -1)
        parts = [canvas.project_rows(first, self.inputs)[0]]
        if self.targets is None:
            draw = torch.rand if canvas.start == "uniform" else torch.randn
            parts.append(draw((self.count, *self.output_shape), generator=generator).to(like).flatten())
        parts += [like.new_full((1,), unknown.start / self._unit(unknown)) for unknown in self.unknowns]
        return torch.cat(parts)

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        place = len(row) - len(self.unknowns)
        return *self._example(row[:place]), self._numbers(row[place:])

    def _example(self, main: Tensor) -> tuple[Tensor, Tensor | None]:
        picture = self.matcher.canvas.draw(main[: self.size], self.count, self.inputs)
        if self.targets is not None:
            return picture, None
        return picture, main[self.size :].reshape(self.count, *self.output_shape)

    def _numbers(self, others: Tensor) -> dict[str, Tensor]:
        return {unknown.name: others[place] * self._unit(unknown) for place, unknown in enumerate(self.unknowns)}

    def to_model(self, picture: Tensor) -> Tensor:
        return self.matcher.canvas.to_model(picture, self.inputs)

    def project(self, rows: Tensor) -> Tensor:
        place = rows.shape[1] - len(self.unknowns)
        parts = [self.matcher.canvas.project_rows(rows[:, : self.size], self.inputs), rows[:, self.size : place]]
        for number, unknown in enumerate(self.unknowns, start=place):
            unit = self._unit(unknown)
            parts.append(rows[:, number : number + 1].clamp(unknown.low / unit, unknown.high / unit))
        return torch.cat(parts, dim=1) if self.size < rows.shape[1] else parts[0]

    def evaluator(self, restarts: int, compiled: bool) -> Evaluator:
        return self.evaluator_by("compiled" if compiled else self._way(restarts))

    def evaluator_by(self, way: Way) -> Evaluator:
        """The same by one way of evaluating; :class:`CannotCompile` where the step cannot be compiled."""
        like, facts = self._like, self._facts()
        example = like.new_zeros(self.size + self.logits), like.new_zeros(len(self.unknowns)), like.new_zeros(())
        objective = self._objective(self._measure())
        whole, compiled = make_step(way, objective, facts, example, bool(self.unknowns))
        inputs_only, every = whole, min((unknown.every for unknown in self.unknowns), default=1)
        if every > 1:
            # The derivative by an unknown of the weights costs as much as a gradient of all weights, a fifth of a
            # step; it changes slowly, as its unknown does.
            inputs_only, _ = make_step(way, objective, facts, example, False)
        return Evaluator(way, compiled, whole, inputs_only, every, len(self.unknowns))

    @property
    def logits(self) -> int:
        return self.count * math.prod(self.output_shape) if self.targets is None else 0

    def _way(self, restarts: int) -> Way:
        """Batched where calls cost more than arithmetic; a rule of counts, so that a run is the same each time."""
        if restarts < BATCHED_RESTARTS or self._entries > BATCHED_WEIGHTS:
            return "plain"
        work = forward_flops(self.victim.model, self._like.new_zeros(self.shape))
        return "batched" if work <= BATCHED_OPERATIONS else "plain"

    @property
    def _entries(self) -> int:
        return sum(value.numel() for value in self.observed.values())

    @property
    def _like(self) -> Tensor:
        return next(iter(self.observed.values()))

    def _unit(self, unknown: Unknown) -> float:
        return unknown.step / self.matcher.optimiser.lr

    def _facts(self) -> dict[str, Any]:
        tensors, statistics = self.victim.tensors, dict(self.victim.batchnorm_targets)
        return {"tensors": tensors, "targets": self.targets, "batchnorm": statistics}

    def _measure(self) -> Callable[[Tensors], tuple[Tensor, Tensor]]:
        distance, judge = self.matcher.distance, self.matcher.judge
        names, joins = tuple(self.observed), self._entries <= JOINED_ENTRIES

        def against(distance: Distance) -> Callable[[Tensors], Tensor]:
            if not (joins and distance.joins):
                return distance.against(self.observed)
            apart = distance.against(_joined(self.observed, names))
            return lambda candidate: apart(_joined(candidate, names))

        apart = against(distance)
        if judge is None or judge == distance:
            return lambda candidate: (apart(candidate),) * 2
        judged = against(judge)
        return lambda candidate: (apart(candidate), judged(candidate))

    def _objective(
        self, measure: Callable[[Tensors], tuple[Tensor, Tensor]]
    ) -> Callable[[Tensor, Tensor, Tensor, dict[str, Any]], tuple[Tensor, Tensor]]:
        matcher, emphasis = self.matcher, self.matcher.emphasis
        space = self.inputs if matcher.canvas.space == "model" else None

        def objective(main: Tensor, others: Tensor, iteration: Tensor, facts: dict[str, Any]) -> tuple[Tensor, Tensor]:
            # Apart, so that a derivative by the example alone does not drag the unknown numbers' along.
            (picture, logits), numbers = self._example(main), self._numbers(others)
            targets = self.victim.task.from_search(logits) if logits is not None else facts["targets"]
            candidate, recorded = matcher.simulation(
                self.victim, facts["tensors"], self.to_model(picture), targets, numbers
            )
            distance, judged = measure(candidate)
            value, final = emphasis(iteration) * distance, emphasis.last * judged
            if matcher.priors:
                scene = Scene(iteration, recorded, facts["batchnorm"], space)
                penalty = sum(prior(picture, scene) for prior in matcher.priors)
                value, final = value + penalty, final + penalty
            return value, torch.stack([final, judged])

        return objective


def _joined(update: Tensors, names: tuple[str, ...]) -> Tensors:
    return {"all": torch.cat([update[name].reshape(-1) for name in names])}


@dataclass(frozen=True, eq=False)
class Evaluator:
    way: Way
    compiled: Compiled | None
    _whole: Step
    _inputs_only: Step
    _every: int
    _unknowns: int
    _held: list[Tensor] = field(default_factory=list, init=False)

    def __call__(self, rows: Tensor, iteration: int) -> Evaluation:
        place = rows.shape[1] - self._unknowns
        number = rows.new_full((), float(iteration))
        step = self._whole if iteration % self._every == 0 or not self._held else self._inputs_only
        value, judged, gradient = step(rows[:, :place], rows[:, place:], number)
        if self._every > 1:
            if step is self._whole:
                self._held[:] = [gradient[:, place:]]
            else:
                gradient = torch.cat([gradient, *self._held], dim=1)
        return value, judged, gradient
