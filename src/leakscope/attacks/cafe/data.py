"""Step III of CAFE: search the data from the workers' representations and from the gradients.

:func:`invert` searches each sample by itself, :class:`RoundSearch` goes round by round; both share :class:`Terms`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import grad_and_value

from leakscope.attacks.cafe.rounds import Rounds, RunningSteps
from leakscope.contracts.attack import Progress
from leakscope.contracts.inputs import InputSpace
from leakscope.contracts.observation import Message
from leakscope.matching import DISTANCES, Adam, BatchNormStatistics, Victim, total_variation
from leakscope.matching.optimisers import RowAdam, schedule_factor
from leakscope.matching.priors import Scene
from leakscope.matching.search import AT_ONCE, Evaluation, search
from leakscope.models.split import VerticalModel, assemble
from leakscope.network.layers import FirstDense
from leakscope.network.recorder import inputs_of

if TYPE_CHECKING:
    from leakscope.attacks.cafe import CAFE


@dataclass(frozen=True, eq=False)
class Data:
    inputs: Tensor
    scores: Tensor
    curve: list[float]
    label_logits: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Terms:
    settings: CAFE
    rounds: Rounds

    @property
    def space(self) -> InputSpace:
        return self.rounds.observation.inputs

    def start(self, generator: torch.Generator) -> Tensor:
        start = self.space.start(self.settings.start, self.rounds.samples, generator, self.rounds.like)
        return self.space.project_unit(start)

    def variation(self, pictures: Tensor, step: int) -> Tensor:
        """The term of total variation, the mean per sample; as published it counts only from the threshold on."""
        settings = self.settings
        if not settings.tv:
            return pictures.new_zeros(())
        if settings.relative:
            size = total_variation(pictures, "joint")
        else:
            parts = [total_variation(share.take(pictures), "l1sum") for share in self.rounds.model.shares]
            size = torch.stack(parts).mean()
        weight = settings.tv * settings.fade ** (step / settings.iterations)
        return weight * size * (size.detach() >= settings.threshold)

    def misfit(self, candidate: Tensor, target: Tensor) -> Tensor:
        square = (candidate - target).square().sum(1)
        return square / target.square().sum(1).clamp_min(1e-30) if self.settings.relative else square


def invert(
    settings: CAFE,
    rounds: Rounds,
    representations: Sequence[Tensor],
    determined: Tensor,
    generator: torch.Generator,
    progress: Progress | None,
) -> Data:
    """Search each sample by its ``representations`` (samples, inputs), by total variation where not ``determined``."""
    # A copy in the clients' mode: neither weights nor statistics of the observed model may change.
    model = copy.deepcopy(rounds.model).eval().requires_grad_(False)
    rows = [table.to(rounds.like) for table in representations]
    inversion = _Inversion(Terms(settings, rounds), model, rows, determined.to(rounds.like))
    exact = [reads_features(inversion.model, layer) for layer in rounds.layers]
    if all(exact):
        return inversion.read_off()
    data = inversion.run(generator, progress)
    return Data(inversion.with_features(data.inputs, exact), data.scores, data.curve)


@dataclass(frozen=True, eq=False)
class _Inversion:
    terms: Terms
    model: VerticalModel
    representations: list[Tensor]
    determined: Tensor

    def read_off(self) -> Data:
        rounds, model = self.terms.rounds, self.model
        grey = 0.5 if rounds.observation.inputs.bounded else 0.0
        middle = self.terms.space.from_unit(rounds.like.new_full((1, *model.input_shape), grey))
        parts = [
            torch.where(determined[:, None] > 0, rows, layer.share.take(middle).flatten(1))
            for determined, rows, layer in zip(self.determined, self.representations, rounds.layers, strict=True)
        ]
        return Data(assemble(model.shares, parts, model.input_shape), rounds.like.new_zeros(rounds.samples), [])

    def run(self, generator: torch.Generator, progress: Progress | None) -> Data:
        iterations, samples = self.terms.settings.iterations, self.terms.rounds.samples
        start = self.terms.start(generator)
        curve = torch.zeros(iterations)
        pieces, scores = [], []
        for first in range(0, samples, AT_ONCE):
            rows = slice(first, min(first + AT_ONCE, samples))

            def watch(done: int, values: Tensor, _best: Tensor, rows: slice = rows) -> None:
                curve[done - 1] += float(values.sum()) / samples
                if progress is not None:
                    visited = rows.start * iterations + len(values) * done
                    progress(visited, samples * iterations, float(curve[done - 1]))

            result = search(
                functools.partial(self._evaluate, rows=rows),
                start[rows].flatten(1),
                Adam(lr=self.terms.settings.lr, schedule=self.terms.settings.schedule),
                project=lambda flat: self.terms.space.project_unit(self._pictures(flat)).reshape(len(flat), -1),
                iterations=iterations,
                keep="last",
                watch=watch,
            )
            pieces.append(self._pictures(result.points))
            scores.append(result.judged[:, 0])
        return Data(self.terms.space.from_unit(torch.cat(pieces)), torch.cat(scores), curve.tolist())

    def with_features(self, inputs: Tensor, exact: list[bool]) -> Tensor:
        for number, layer in enumerate(self.terms.rounds.layers):
            if exact[number]:
                places = torch.tensor(layer.share.places, device=inputs.device)
                searched = inputs.flatten(1)[:, places]
                features = torch.where(self.determined[number][:, None] > 0, self.representations[number], searched)
                inputs = inputs.flatten(1).index_copy(1, places, features).reshape(inputs.shape)
        return inputs

    def _pictures(self, flat: Tensor) -> Tensor:
        return flat.reshape(-1, *self.model.input_shape)

    def _evaluate(self, points: Tensor, step: int, rows: slice) -> Evaluation:
        points = points.detach().requires_grad_(True)
        objectives = self._objectives(points, step, rows)
        (gradients,) = torch.autograd.grad(objectives.sum(), points)
        values = objectives.detach()
        return values, values[:, None], gradients

    def _objectives(self, flat: Tensor, step: int, rows: slice) -> Tensor:
        terms, settings = self.terms, self.terms.settings
        pictures = self._pictures(flat)
        x = terms.space.from_unit(pictures)
        total = flat.new_zeros(len(flat))
        for number, layer in enumerate(terms.rounds.layers):
            candidate = inputs_of(layer.module(self.model), self.model.workers[layer.worker], layer.share.take(x))
            misfit = terms.misfit(candidate, self.representations[number][rows])
            total = total + self.determined[number, rows] * misfit
        if settings.relative:
            total = total / self.determined[:, rows].sum(0).clamp_min(1)
        return settings.representation * total + terms.variation(pictures, step)


def reads_features(model: VerticalModel, layer: FirstDense) -> bool:
    if layer.inputs != len(layer.share.places):
        return False
    weight = layer.module(model).weight
    # Two probes: an activation may happen to leave one of them alone.
    probe = torch.linspace(-1, 1, 2 * layer.inputs).to(weight).reshape(2, *layer.share.shape)
    with torch.no_grad():
        inputs = inputs_of(layer.module(model), model.workers[layer.worker], probe)
    return bool(torch.equal(inputs, probe.flatten(1)))


class RoundSearch:
    """Search all samples, one recorded round at a time, each with its own count of Adam's steps; weights move on."""

    def __init__(self, settings: CAFE, rounds: Rounds, targets: Tensor | None, generator: torch.Generator) -> None:
        observation = rounds.observation
        self.settings, self.rounds, self.targets = settings, rounds, targets
        self.terms = Terms(settings, rounds)
        self.victim = Victim.of(observation, record=[layer.name for layer in rounds.layers])
        self.groups = [self.terms.start(generator) for _ in range(settings.group)]
        self.logits = torch.rand((rounds.samples, *observation.output_shape), generator=generator).to(rounds.like)
        self.movers, self.label_mover = [RowAdam(group) for group in self.groups], RowAdam(self.logits)
        self.scores = rounds.like.new_full((settings.group, rounds.samples), torch.inf)

    def run(self, tables: Sequence[RunningSteps], progress: Progress | None, *, move_tables: bool = False) -> Data:
        """``tables`` hold the representations to match, if any; with ``move_tables`` each round moves them first."""
        messages, iterations = self.rounds.whole, self.settings.iterations
        lr = self.rounds.observation.training.learning_rate or 0.0
        curve, weights = [], self.victim.tensors.weights
        for step in range(iterations):
            message = messages[step % len(messages)]
            if step % len(messages) == 0:
                weights = self.victim.tensors.weights
            if move_tables:
                batch = torch.tensor(message.indices)
                for table, layer in zip(tables, self.rounds.layers, strict=True):
                    table.step_one(batch, message.update[f"{layer.name}.bias"].cpu().to(table.output_gradients))
                    table.step_two(batch, message.update[f"{layer.name}.weight"].cpu().to(table.inputs))
            curve.append(self._visit(step, message, weights, tables))
            if progress is not None:
                progress(step + 1, iterations, curve[-1])
            if lr:
                weights = {name: value - lr * message.update[name] for name, value in weights.items()}
        # A sample that is in no round has no score; it cannot tell which of the group is best.
        best = int(torch.where(torch.isfinite(self.scores), self.scores, 0.0).mean(1).argmin())
        logits = self.logits if self.targets is None else None
        return Data(self.terms.space.from_unit(self.groups[best]), self.scores[best], curve, logits)

    def _visit(self, step: int, message: Message, weights: dict[str, Tensor], tables: Sequence[RunningSteps]) -> float:
        terms, settings, victim, like = self.terms, self.settings, self.victim, self.rounds.like
        batch = torch.tensor(message.indices)
        rows = batch.to(like.device)
        tensors, observed = victim.tensors._replace(weights=weights), dict(message.update)
        statistics, known = dict(victim.batchnorm_targets), message.batchnorm_statistics
        if known is not None:
            statistics = {name: (known[f"{name}.mean"], known[f"{name}.var"]) for name in statistics}
        representations = [table.inputs[batch].to(like) for table in tables]
        centre = torch.stack([group[rows] for group in self.groups]).mean(0)

        def objective(pictures: Tensor, logits: Tensor) -> Tensor:
            targets = victim.task.from_search(logits) if self.targets is None else self.targets[rows]
            x = terms.space.from_unit(pictures)
            total = terms.variation(pictures, step)
            if settings.gradient:
                candidate, recorded = victim.gradient(tensors, x, targets)
                total = total + settings.gradient * DISTANCES[settings.distance](observed, candidate)
            else:
                _, recorded = victim.loss(tensors, x, targets)
            if representations and settings.representation:
                pairs = zip(self.rounds.layers, representations, strict=True)
                misfits = torch.stack([terms.misfit(recorded[layer.name], target) for layer, target in pairs])
                total = total + settings.representation * (misfits.mean() if settings.relative else misfits.sum())
            if settings.batchnorm:
                scene = Scene(torch.zeros(()), recorded, statistics)
                total = total + BatchNormStatistics(weight=settings.batchnorm)(pictures, scene)
            if settings.group > 1:
                total = total + settings.consistency * (pictures - centre).square().flatten(1).sum(1).mean()
            return total

        derivative = grad_and_value(objective, argnums=(0, 1))
        lr = settings.lr * schedule_factor(settings.schedule, step, settings.iterations)
        values = []
        for number, group in enumerate(self.groups):
            (gradient, label_gradient), value = derivative(group[rows], self.logits[rows])
            if bool(torch.isfinite(gradient).all()) and bool(torch.isfinite(value)):
                moved = group[rows] - self.movers[number].move(rows, gradient.detach(), lr)
                group[rows] = terms.space.project_unit(moved)
                if self.targets is None and number == 0:
                    self.logits[rows] -= self.label_mover.move(rows, label_gradient.detach(), lr)
            values.append(float(value.detach()))
            self.scores[number, rows] = value.detach()
        return min(values)
