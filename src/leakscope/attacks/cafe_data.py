"""Step III of CAFE: the data, from what the workers' first dense layers read (see cafe.py)."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad_and_value

from leakscope.attacks.back_signals import RowAdam, RunningSteps
from leakscope.attacks.base import Progress
from leakscope.loss import as_probabilities
from leakscope.matching import DISTANCES, Adam, BatchNormStatistics, Pixels, Victim, total_variation
from leakscope.matching.optimisers import Schedule, schedule_factor
from leakscope.matching.priors import Scene
from leakscope.observation import Message, Observation
from leakscope.vertical import FirstDense, VerticalModel, assemble, dense_layer, representation

#: Samples searched at a time: they do not influence each other, and so many fit into a processor's cache.
CHUNK = 32


@dataclass(frozen=True, eq=False)
class Picture:
    """What was found: inputs in the model's space, label logits where searched, the objective of each sample."""

    inputs: Tensor
    scores: Tensor
    curve: list[float]
    label_logits: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class StepThree:
    """The terms and the search. ``gradient``, ``tv`` and ``representation`` are the paper's alpha, beta and gamma.

    ``group`` pictures of each sample are searched side by side, and ``consistency`` is the weight of their squared
    distance from their mean (GradInversion's group consistency); the picture with the best objective is taken.
    """

    iterations: int
    lr: float
    schedule: Schedule
    start: Literal["grey", "normal", "uniform"]
    gradient: float
    distance: str
    tv: float
    fade: float
    threshold: float
    representation: float
    relative: bool
    batchnorm: float
    group: int
    consistency: float
    canvas: Pixels = field(init=False)

    def __post_init__(self) -> None:
        problems = []
        if self.iterations < 1 or self.group < 1:
            problems.append(f"iterations and group: expected at least 1, got {self.iterations} and {self.group}")
        if not self.lr > 0 or not 0 < self.fade <= 1:
            problems.append(f"lr and fade: expected lr > 0 and 0 < fade <= 1, got {self.lr} and {self.fade}")
        for name in ("gradient", "tv", "threshold", "representation", "batchnorm", "consistency"):
            if not getattr(self, name) >= 0:
                problems.append(f"{name}: expected a number >= 0, got {getattr(self, name)}")
        if self.distance not in DISTANCES:
            problems.append(f"distance: expected one of {', '.join(DISTANCES)}, got {self.distance!r}")
        if problems:
            raise ValueError("CAFE:\n  - " + "\n  - ".join(problems))
        schedule_factor(self.schedule, 0, 1)
        object.__setattr__(self, "canvas", Pixels(start=self.start))

    def variation(self, picture: Tensor, model: VerticalModel, step: int) -> Tensor:
        """The term of total variation, a sample's mean; as published it counts only from the threshold on."""
        if not self.tv:
            return picture.new_zeros(())
        if self.relative:
            size = total_variation(picture, "joint")
        else:
            parts = [total_variation(share.take(picture), "l1sum") for share in model.shares]
            size = torch.stack(parts).mean()
        weight = self.tv * self.fade ** (step / self.iterations)
        return weight * size * (size.detach() >= self.threshold)

    def misfit(self, found: Tensor, wanted: Tensor) -> Tensor:
        """How far a worker's representation is from the wanted one, for each sample."""
        square = (found - wanted).square().sum(1)
        return square / wanted.square().sum(1).clamp_min(1e-30) if self.relative else square

    def invert(
        self,
        observation: Observation,
        layers: Sequence[FirstDense],
        wanted: Sequence[Tensor],
        seen: Tensor,
        generator: torch.Generator,
        progress: Progress | None,
    ) -> Picture:
        """Each sample by itself from the representations ``wanted`` (samples, inputs), one a worker.

        ``seen`` (workers, samples) tells which of them are known at all; elsewhere total variation alone decides.
        """
        # A copy in the clients' mode: neither weights nor statistics of the observed model may change.
        model = copy.deepcopy(observation.model).eval().requires_grad_(False)
        assert isinstance(model, VerticalModel)
        like = next(iter(observation.messages[0].update.values()))
        box = observation.value_range
        wanted = [rows.to(like) for rows in wanted]
        seen = seen.to(like)
        exact = [reads_features(model, layer) for layer in layers]
        if all(exact):
            # Of what no round tells, the middle of the valid range.
            middle = self.canvas.to_model(like.new_full((1, *model.input_shape), 0.0 if box is None else 0.5), box)
            parts = [
                torch.where(known[:, None] > 0, rows, layer.share.take(middle).flatten(1))
                for known, rows, layer in zip(seen, wanted, layers, strict=True)
            ]
            return Picture(assemble(model.shares, parts, model.input_shape), like.new_zeros(len(wanted[0])), [])
        shape = (len(wanted[0]), *model.input_shape)
        start = self.canvas.project(self.canvas.initial(shape, box, generator, like), box)
        pieces, scores = [], []
        curve = torch.zeros(self.iterations)
        for first in range(0, shape[0], CHUNK):
            rows = slice(first, min(first + CHUNK, shape[0]))
            size = rows.stop - first

            def objective(flat: Tensor, step: int, rows: slice = rows) -> Tensor:
                picture = flat.reshape(-1, *shape[1:])
                x = self.canvas.to_model(picture, box)
                total = flat.new_zeros(len(flat))
                for number, layer in enumerate(layers):
                    worker = model.workers[layer.worker]
                    made = representation(worker, dense_layer(model, layer), layer.share.take(x))
                    total = total + seen[number, rows] * self.misfit(made, wanted[number][rows])
                if self.relative:
                    total = total / seen[:, rows].sum(0).clamp_min(1)
                return self.representation * total + self.variation(picture, model, step)

            def project(flat: Tensor) -> Tensor:
                return self.canvas.project(flat.reshape(-1, *shape[1:]), box).reshape(len(flat), -1)

            run = Adam(lr=self.lr, schedule=self.schedule).begin(start[rows].flatten(1), self.iterations, project)
            usable = torch.ones(size, dtype=torch.bool, device=like.device)
            values = start.new_zeros(size)
            for step in range(self.iterations):
                points = run.ask().detach().requires_grad_(True)
                each = objective(points, step)
                (slope,) = torch.autograd.grad(each.sum(), points)
                values = each.detach()
                usable = torch.isfinite(values) & torch.isfinite(slope).all(1)
                run.tell(values, torch.where(usable[:, None], slope, 0.0), usable)
                curve[step] += float(values.sum()) / shape[0]
                if progress is not None:
                    progress(
                        first * self.iterations + size * (step + 1), shape[0] * self.iterations, float(curve[step])
                    )
            pieces.append(run.ask().detach().reshape(size, *shape[1:]))
            scores.append(values)
        inputs = self.canvas.to_model(torch.cat(pieces), box)
        for number, layer in enumerate(layers):
            if exact[number]:
                places = torch.tensor(layer.share.places, device=inputs.device)
                told = torch.where(seen[number][:, None] > 0, wanted[number], inputs.flatten(1)[:, places])
                inputs = inputs.flatten(1).index_copy(1, places, told).reshape(shape)
        return Picture(inputs, torch.cat(scores), curve.tolist())

    def match(
        self,
        observation: Observation,
        layers: Sequence[FirstDense],
        targets: Tensor | None,
        generator: torch.Generator,
        progress: Progress | None,
        *,
        tables: Sequence[RunningSteps] = (),
        running: bool = False,
    ) -> Picture:
        """All samples, one recorded round at a time; ``tables`` are steps I and II, moved along if ``running``."""
        model, box = observation.model, observation.value_range
        assert isinstance(model, VerticalModel)
        assert observation.num_examples is not None
        rounds = [message for message in observation.messages if not message.partial]
        like = next(iter(rounds[0].update.values()))
        samples, classes = observation.num_examples, observation.num_classes
        victim = Victim.of(observation, record=[layer.name for layer in layers])
        lr = observation.training.learning_rate or 0.0
        shape = (samples, *observation.input_shape)
        groups = [self.canvas.project(self.canvas.initial(shape, box, generator, like), box) for _ in range(self.group)]
        logits = torch.rand((samples, classes), generator=generator).to(like)
        movers, label_mover = [RowAdam(group) for group in groups], RowAdam(logits)
        scores = like.new_full((self.group, samples), torch.inf)
        derivative = grad_and_value(self._objective, argnums=(0, 1))
        curve, weights = [], victim.known.weights
        for step in range(self.iterations):
            message = rounds[step % len(rounds)]
            if step % len(rounds) == 0:
                weights = victim.known.weights
            batch = torch.tensor(message.indices)
            wanted = []
            for table, layer in zip(tables, layers, strict=bool(tables)):
                if running:
                    table.see_bias(batch, message.update[f"{layer.name}.bias"].cpu().to(table.signals))
                    table.see_weight(batch, message.update[f"{layer.name}.weight"].cpu().to(table.inputs))
                wanted.append(table.inputs[batch].to(like))
            rows = batch.to(like.device)
            given = {
                "victim": victim,
                "weights": weights,
                "model": model,
                "layers": layers,
                "box": box,
                "observed": dict(message.update),
                "statistics": _statistics(victim, message),
                "targets": None if targets is None else targets[rows],
                "wanted": wanted,
                "step": step,
                "centre": torch.stack([group[rows] for group in groups]).mean(0) if self.group > 1 else None,
            }
            factor = self.lr * schedule_factor(self.schedule, step, self.iterations)
            values = []
            for number, group in enumerate(groups):
                (slope, label_slope), value = derivative(group[rows], logits[rows], given)
                if bool(torch.isfinite(slope).all()) and bool(torch.isfinite(value)):
                    moved = group[rows] - movers[number].move(rows, slope.detach(), factor)
                    group[rows] = self.canvas.project(moved, box)
                    if targets is None and number == 0:
                        logits[rows] = logits[rows] - label_mover.move(rows, label_slope.detach(), factor)
                values.append(float(value.detach()))
                scores[number, rows] = value.detach()
            curve.append(min(values))
            if progress is not None:
                progress(step + 1, self.iterations, curve[-1])
            if lr:
                weights = {name: value - lr * message.update[name] for name, value in weights.items()}
        # A sample that is in no round has no score; it cannot tell which of the group is best.
        best = int(torch.where(torch.isfinite(scores), scores, 0.0).mean(1).argmin())
        inputs = self.canvas.to_model(groups[best], box)
        return Picture(inputs, scores[best], curve, None if targets is not None else logits)

    def _objective(self, picture: Tensor, logits: Tensor, given: dict[str, Any]) -> Tensor:
        victim: Victim = given["victim"]
        layers: Sequence[FirstDense] = given["layers"]
        targets = as_probabilities(logits) if given["targets"] is None else given["targets"]
        x = self.canvas.to_model(picture, given["box"])
        total = self.variation(picture, given["model"], given["step"])
        if self.gradient:
            candidate, recorded = victim.gradient(given["weights"], victim.known.fixed, x, targets)
            total = total + self.gradient * DISTANCES[self.distance](given["observed"], candidate)
        else:
            _, recorded = victim.loss(given["weights"], victim.known.fixed, x, targets)
        if given["wanted"] and self.representation:
            misfits = [
                self.misfit(recorded[layer.name], rows) for layer, rows in zip(layers, given["wanted"], strict=True)
            ]
            each = torch.stack(misfits)
            total = total + self.representation * (each.mean() if self.relative else each.sum())
        if self.batchnorm:
            inputs = {name: value for name, value in recorded.items() if name in given["statistics"]}
            scene = Scene(torch.zeros(()), inputs, given["statistics"])
            total = total + BatchNormStatistics(weight=self.batchnorm)(picture, scene)
        if given["centre"] is not None:
            total = total + self.consistency * (picture - given["centre"]).square().flatten(1).sum(1).mean()
        return total


def _statistics(victim: Victim, message: Message) -> dict[str, tuple[Tensor, Tensor]]:
    """Of the BatchNorm layers: those of this batch where they are known, else the running ones."""
    own = message.batchnorm_statistics
    if own is None:
        return dict(victim.batchnorm_targets)
    return {name: (own[f"{name}.mean"], own[f"{name}.var"]) for name in victim.batchnorm_targets}


def reads_features(model: VerticalModel, layer: FirstDense) -> bool:
    """Whether the first dense layer reads the worker's features as they are."""
    if layer.inputs != len(layer.share.places):
        return False
    weight = dense_layer(model, layer).weight
    # Two probes: an activation may happen to leave one of them alone.
    probe = torch.linspace(-1, 1, 2 * layer.inputs, device=weight.device, dtype=weight.dtype)
    probe = probe.reshape(2, *layer.share.shape)
    with torch.no_grad():
        made = representation(model.workers[layer.worker], dense_layer(model, layer), probe)
    return bool(torch.equal(made, probe.flatten(1)))
