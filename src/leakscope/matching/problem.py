"""One matching problem: how a row of numbers becomes inputs, labels and other unknowns, and its objective."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from leakscope.contracts.inputs import InputSpace
from leakscope.matching.priors import Scene
from leakscope.matching.search import Evaluate, Evaluation
from leakscope.matching.simulations import Unknown
from leakscope.matching.victim import Tensors, Victim

if TYPE_CHECKING:
    from leakscope.matching.loop import Matcher


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

    def evaluator(self, restarts: int, compiled: bool) -> Evaluate:
        """For each row the objective, its judged form with and without priors, and the gradient."""
        every = min((unknown.every for unknown in self.unknowns), default=1)
        if compiled:
            torch.compiler.reset()  # each run compiles its own step; stale ones would count against a limit
        whole = self._step((0, 1), restarts, compiled)
        if every == 1:
            return lambda rows, iteration: self._call(whole, rows, iteration, restarts)
        # The derivative by an unknown of the weights costs as much as a gradient of all weights, a fifth of a step;
        # it changes slowly, as its unknown does.
        inputs_only = self._step((0,), restarts, compiled)
        number_gradients = torch.empty(0)

        def evaluate(rows: Tensor, iteration: int) -> Evaluation:
            nonlocal number_gradients
            if iteration % every == 0 or len(number_gradients) != len(rows):
                answer = self._call(whole, rows, iteration, restarts)
                number_gradients = answer[2][:, -len(self.unknowns) :]
                return answer
            value, judged, gradient = self._call(inputs_only, rows, iteration, restarts)
            return value, judged, torch.cat([gradient, number_gradients], dim=1)

        return evaluate

    def _unit(self, unknown: Unknown) -> float:
        return unknown.step / self.matcher.optimiser.lr

    def _objective(self, main: Tensor, others: Tensor, facts: dict[str, Any]) -> tuple[Tensor, Tensor]:
        matcher = self.matcher
        # Apart, so that a derivative by the example alone does not drag the unknown numbers' along.
        (picture, logits), numbers = self._example(main), self._numbers(others)
        targets = self.victim.task.from_search(logits) if logits is not None else facts["targets"]
        candidate, recorded = matcher.simulation(
            self.victim, facts["tensors"], self.to_model(picture), targets, numbers
        )
        distance = matcher.distance(facts["observed"], candidate)
        space = self.inputs if matcher.canvas.space == "model" else None
        scene = Scene(facts["iteration"], recorded, facts["batchnorm"], space)
        penalty = torch.zeros_like(distance)
        for prior in matcher.priors:
            penalty = penalty + prior(picture, scene)
        judged = distance if matcher.judge is None else matcher.judge(facts["observed"], candidate)
        final = matcher.emphasis.last * judged
        return matcher.emphasis(facts["iteration"]) * distance + penalty, torch.stack([final + penalty, judged])

    def _step(self, arguments: tuple[int, ...], restarts: int, compiled: bool) -> Callable[..., Any]:
        derivative = grad_and_value(self._objective, argnums=arguments, has_aux=True)
        # One restart needs no vmap, whose batched convolutions cost more than plain ones.
        step = derivative if restarts == 1 else vmap(derivative, in_dims=(0, 0, None))
        return torch.compile(step, dynamic=False) if compiled else step

    def _call(self, step: Callable[..., Any], rows: Tensor, iteration: int, restarts: int) -> Evaluation:
        like = next(iter(self.observed.values()))
        facts = {
            "tensors": self.victim.tensors,
            "observed": self.observed,
            "targets": self.targets,
            "batchnorm": dict(self.victim.batchnorm_targets),
            "iteration": torch.tensor(float(iteration), device=like.device, dtype=like.dtype),
        }
        place = rows.shape[1] - len(self.unknowns)
        main, others = rows[:, :place], rows[:, place:]
        # Only the plain form of attention can be differentiated twice.
        with sdpa_kernel(SDPBackend.MATH):
            if restarts == 1:
                gradients, (value, judged) = step(main[0], others[0], facts)
                return value[None].detach(), judged[None].detach(), torch.cat(gradients)[None].detach()
            gradients, (value, judged) = step(main, others, facts)
        return value.detach(), judged.detach(), torch.cat(gradients, dim=1).detach()
