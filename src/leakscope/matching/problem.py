"""One matching problem: how a row of numbers becomes inputs, labels and other unknowns, and its objective."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from leakscope.contracts.inputs import InputSpace
from leakscope.matching.compilation import Compiled
from leakscope.matching.distances import Distance
from leakscope.matching.priors import Scene
from leakscope.matching.search import Evaluation
from leakscope.matching.simulations import Unknown
from leakscope.matching.steps import Step, Way, make_step
from leakscope.matching.victim import Tensors, Victim, forward_flops

if TYPE_CHECKING:
    from leakscope.matching.loop import Matcher

#: Up to so many operations of a forward pass, restarts at once are faster than one after another.
BATCHED_OPERATIONS = 3_000_000
#: Up to so many entries, an update is compared as one tensor: fewer calls, and a copy that still fits the cache.
JOINED_ENTRIES = 2**20


@dataclass(frozen=True, eq=False)
class Problem:
    """A row holds the pictures, then label logits where labels are searched, then the simulation's unknown numbers.

    An unknown number is stored in units of its own learning rate over the optimiser's, so that one optimiser with one
    learning rate moves each at its own pace.
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
        object.__setattr__(self, "size", math.prod(self.shape))
        object.__setattr__(self, "unknowns", self.matcher.simulation.unknowns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.count, *self.inputs.shape)

    def start(self, generator: torch.Generator, like: Tensor) -> Tensor:
        canvas = self.matcher.canvas
        parts = [canvas.project(canvas.initial(self.count, self.inputs, generator, like), self.inputs).flatten()]
        if self.targets is None:
            draw = torch.rand if canvas.start == "uniform" else torch.randn
            parts.append(draw((self.count, *self.output_shape), generator=generator).to(like).flatten())
        parts += [like.new_full((1,), unknown.start / self._unit(unknown)) for unknown in self.unknowns]
        return torch.cat(parts)

    def unpack(self, row: Tensor) -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        """Pictures, label logits (None where labels are given), and the unknown numbers by name."""
        place = len(row) - len(self.unknowns)
        return *self._example(row[:place]), self._numbers(row[place:])

    def _example(self, main: Tensor) -> tuple[Tensor, Tensor | None]:
        picture = main[: self.size].reshape(self.shape)
        if self.targets is not None:
            return picture, None
        return picture, main[self.size :].reshape(self.count, *self.output_shape)

    def _numbers(self, others: Tensor) -> dict[str, Tensor]:
        return {unknown.name: others[place] * self._unit(unknown) for place, unknown in enumerate(self.unknowns)}

    def to_model(self, picture: Tensor) -> Tensor:
        return self.matcher.canvas.to_model(picture, self.inputs)

    def project(self, rows: Tensor) -> Tensor:
        canvas = self.matcher.canvas
        parts = [rows[:, : self.size], rows[:, self.size : rows.shape[1] - len(self.unknowns)]]
        if self.inputs.bounded and canvas.clamp:
            pictures = parts[0].reshape(-1, *self.shape[1:])
            parts[0] = canvas.project(pictures, self.inputs).reshape(len(rows), self.size)
        for place, unknown in enumerate(self.unknowns, start=rows.shape[1] - len(self.unknowns)):
            unit = self._unit(unknown)
            parts.append(rows[:, place : place + 1].clamp(unknown.low / unit, unknown.high / unit))
        return torch.cat(parts, dim=1)

    def evaluator(self, restarts: int, compiled: bool) -> Evaluator:
        """For each of so many rows the objective, its judged form with and without priors, and the gradient."""
        return self.evaluator_by("compiled" if compiled else self._way(restarts))

    def evaluator_by(self, way: Way) -> Evaluator:
        """The same by one way of evaluating; :class:`CannotCompile` where the step cannot be compiled."""
        like, facts = self._like, self._facts()
        example = like.new_zeros(self.size + self.logits), like.new_zeros(len(self.unknowns)), like.new_zeros(())
        whole, compiled = make_step(way, self._objective, facts, example, bool(self.unknowns))
        inputs_only, every = whole, min((unknown.every for unknown in self.unknowns), default=1)
        if every > 1:
            # The derivative by an unknown of the weights costs as much as a gradient of all weights, a fifth of a
            # step; it changes slowly, as its unknown does.
            inputs_only, _ = make_step(way, self._objective, facts, example, False)
        return Evaluator(way, compiled, whole, inputs_only, every, len(self.unknowns))

    @property
    def logits(self) -> int:
        """How many numbers of a row stand for labels."""
        return self.count * math.prod(self.output_shape) if self.targets is None else 0

    def _way(self, restarts: int) -> Way:
        """Batched where calls cost more than arithmetic; a rule of counts, so that a run is the same each time."""
        if restarts == 1:
            return "plain"
        work = forward_flops(self.victim.model, self._like.new_zeros(self.shape))
        return "batched" if work <= BATCHED_OPERATIONS else "plain"

    @property
    def _like(self) -> Tensor:
        return next(iter(self.observed.values()))

    def _unit(self, unknown: Unknown) -> float:
        return unknown.step / self.matcher.optimiser.lr

    def _facts(self) -> dict[str, Any]:
        """What stays the same from step to step."""
        entries = sum(value.numel() for value in self.observed.values())
        return {
            "tensors": self.victim.tensors,
            "observed": self.observed,
            "joined": self._joined(self.observed) if entries <= JOINED_ENTRIES else {},
            "targets": self.targets,
            "batchnorm": dict(self.victim.batchnorm_targets),
        }

    def _joined(self, update: Tensors) -> Tensors:
        return {"all": torch.cat([update[name].reshape(-1) for name in self.observed])}

    def _objective(
        self, main: Tensor, others: Tensor, iteration: Tensor, facts: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        matcher, emphasis = self.matcher, self.matcher.emphasis
        # Apart, so that a derivative by the example alone does not drag the unknown numbers' along.
        (picture, logits), numbers = self._example(main), self._numbers(others)
        targets = self.victim.task.from_search(logits) if logits is not None else facts["targets"]
        candidate, recorded = matcher.simulation(
            self.victim, facts["tensors"], self.to_model(picture), targets, numbers
        )
        joined = self._joined(candidate) if facts["joined"] else {}

        def apart(distance: Distance) -> Tensor:
            if joined and distance.joins:
                return distance(facts["joined"], joined)
            return distance(facts["observed"], candidate)

        space = self.inputs if matcher.canvas.space == "model" else None
        scene = Scene(iteration, recorded, facts["batchnorm"], space)
        distance = apart(matcher.distance)
        judged = distance if matcher.judge in (None, matcher.distance) else apart(matcher.judge)
        value, final = emphasis(iteration) * distance, emphasis.last * judged
        if matcher.priors:
            penalty = sum(prior(picture, scene) for prior in matcher.priors)
            value, final = value + penalty, final + penalty
        return value, torch.stack([final, judged])


@dataclass(frozen=True, eq=False)
class Evaluator:
    """A problem's evaluation by one way; ``compiled`` tells how its step was compiled."""

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
