"""What every gradient-matching attack shares: settings of the engine, labels, and the way from a match to a result."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from leakscope.attacks.mixtures import is_mixed, search_parts
from leakscope.attacks.shared_work import read_labels, run_matcher
from leakscope.contracts.attack import Attack, Progress
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.contracts.settings import setting
from leakscope.equations.noise_test import drowned
from leakscope.labels import RecoveredLabels, mean_gradient_scale
from leakscope.matching import Match, Matcher, Prior, UnrolledSteps, Victim
from leakscope.matching.loop import ASSUMED_FLOPS_PER_SECOND, WORTH_COMPILING_SECONDS
from leakscope.matching.orders import Order, candidate_orders, least_orders
from leakscope.matching.recipe import client_steps, reliable_update, replay_recipe, several_steps
from leakscope.matching.unexplained import MOST_REPLAYS
from leakscope.matching.victim import forward_flops

LabelChoice = Literal["recover", "joint"]
#: Where most published code begins.
NORMAL_START: dict[str, Any] = {"start": "normal", "space": "model"}
#: Pairs of labels and visiting order that a short search tries. All orders are tried where there are so few.
MOST_TRIALS = MOST_REPLAYS
#: The best trials are tried again with as many times the steps; of too many orders one in so many trials is drawn.
FINALISTS = 4
#: Steps of a search in known noise that drowns the update: enough to show what it makes of noise; a longer one fits it.
DROWNED_STEPS = 30
LABELS = "Labels that are not known: inferred before the search, or searched along with the input."


@dataclass(frozen=True, kw_only=True)
class GradientMatching(Attack):
    """Base of attacks that search an input whose update is the observed one."""

    reads_channel: ClassVar[bool] = True

    iterations: int = setting(300, "Steps of the search; with L-BFGS one evaluation a step.", ge=1)
    restarts: int = setting(1, "Searches from different starts, side by side; the smallest objective wins.", ge=1)
    labels: LabelChoice = setting("recover", LABELS)
    compile: Literal["auto", "never", "always"] = setting("auto", "Whether the step is compiled.")

    @abstractmethod
    def matcher(self, observation: Observation) -> Matcher:
        """The choice of distance, priors, canvas, optimiser and simulation that makes this attack."""

    def engine(self, **choice: Any) -> Matcher:
        """Return the matcher of this choice with the settings that all attacks share."""
        return Matcher(iterations=self.iterations, restarts=self.restarts, compile=self.compile, **choice)

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        matcher = self.matcher(observation)
        if not drowned(observation):
            return self.search(observation, matcher, generator, progress)
        short = replace(matcher, iterations=min(matcher.iterations, DROWNED_STEPS))
        result = self.search(observation, short, generator, progress)
        # That the objective would go on falling does not mean that more steps would find anything.
        flags = tuple(flag for flag in result.flags if flag != "did not converge")
        note = f"the known noise drowns the clipped update, so the search ends after at most {DROWNED_STEPS} steps"
        return replace(result, flags=flags, notes=(*result.notes, note))

    def search(
        self, observation: Observation, matcher: Matcher, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        if is_mixed(observation):
            return search_parts(observation, generator, lambda seen: self.search(seen, matcher, generator, progress))
        examples = observation.num_examples
        assert examples is not None  # granted: num_examples is in ``requires``
        copies = self.copies(observation)

        def match_with(matcher: Matcher, targets: Tensor | None, before: int = 0) -> Match:
            return run_matcher(
                observation.shared,
                matcher,
                Victim.of(observation, matcher.record),
                self._observed(observation, matcher),
                inputs=observation.inputs,
                count=copies * examples,
                targets=None if targets is None else torch.cat([targets] * copies),
                output_shape=observation.output_shape,
                generator=generator,
                progress=None if progress is None else lambda done, _, value: progress(before + done, steps, value),
            )

        order_known = self.order_is_known(observation) or not isinstance(matcher.simulation, UnrolledSteps)
        shuffled = matcher.simulation.imitates == "weight_delta" and order_known
        readings, flags, notes = self._readings(observation, generator, shuffled)
        trials = [_Trial(reading, None) for reading in readings] or [_Trial(None, None)]
        if not order_known:
            trials, tried = self._with_orders(observation, trials, generator)
            notes = (*notes, tried)
        rounds = _rounds(matcher, len(trials))
        steps = sum(len(trials[:count]) * short.iterations for count, short in rounds) + matcher.iterations
        before = 0
        for count, short in rounds:
            # A wrong label or order leaves its mark on the head's tensors at once, so a short search tells.
            misfits = []
            for trial in trials[:count]:
                misfits.append(match_with(trial.matcher(short), trial.targets, before).distance)
                before += short.iterations
            ranked = sorted(range(len(misfits)), key=lambda n: misfits[n] if math.isfinite(misfits[n]) else math.inf)
            trials = [trials[place] for place in ranked]
        chosen = trials[0]
        targets, method = chosen.targets, "joint" if chosen.reading is None else chosen.reading.method
        if len(readings) > 1:
            notes = (*notes, f"{len(readings)} readings of the labels were tried; {method} fits best")
        match = match_with(chosen.matcher(matcher), targets, before)
        labels = targets if match.label_logits is None else observation.task.decode(match.label_logits)[:examples]
        found_order = {"batch_order": chosen.order} if chosen.order is not None and copies == 1 else {}
        return Reconstruction(
            inputs=self.merge(match.inputs.reshape(copies, examples, *observation.input_shape)),
            labels=labels,
            scores=torch.full((examples,), match.objective),
            history={"objective": match.curves},
            flags=(*match.flags, *flags, *self.cautions(observation)),
            notes=notes,
            info={**match.info, "distance": match.distance, "labels": method, **match.numbers, **found_order},
        )

    def cautions(self, observation: Observation) -> tuple[str, ...]:
        """Return flags that follow from what is known before the search."""
        return ()

    def order_is_known(self, observation: Observation) -> bool:
        """Check that nothing about the visiting order is left to search."""
        recipe = replay_recipe(observation)
        return recipe is None or recipe[2] >= recipe[0] or observation.training.batch_order is not None

    def orders(
        self, observation: Observation, labels: list[int], most: int, generator: torch.Generator
    ) -> tuple[list[Order], str]:
        """Return visiting orders to try, at most ``most`` where all are tried, and how many exist in words."""
        recipe = replay_recipe(observation)
        assert recipe is not None  # or the order would not be searched
        _, epochs, batch_size, _ = recipe
        found, complete = candidate_orders(labels, batch_size, epochs, most, generator)
        if complete:
            return found, f"{len(found)} visiting orders exist"
        exist = least_orders(labels, batch_size, epochs)
        words = f"{exist:,}" if exist < 10**6 else f"10^{len(str(exist)) - 1}"
        return found[: MOST_TRIALS // FINALISTS], f"{words} visiting orders or more exist"

    def _with_orders(
        self, observation: Observation, trials: list[_Trial], generator: torch.Generator
    ) -> tuple[list[_Trial], str]:
        pairs, exist = [], ""
        for trial in trials:
            classes = _told_apart(trial.targets, observation.num_examples or 1)
            orders, exist = self.orders(observation, classes, MOST_TRIALS // len(trials), generator)
            pairs += [replace(trial, order=order) for order in orders]
        return pairs, f"{exist}; {len({pair.order for pair in pairs})} were tried"

    def copies(self, observation: Observation) -> int:
        """Return how many pictures of each example are searched."""
        return 1

    def merge(self, pictures: Tensor) -> Tensor:
        """Make one picture of each example from (copies, examples, ...)."""
        return pictures[0]

    def _observed(self, observation: Observation, matcher: Matcher) -> dict[str, Tensor]:
        """The update in the units of what is simulated: a weight difference taken for one gradient loses its scale."""
        update = reliable_update(observation)
        if observation.message.kind == matcher.simulation.imitates:
            return update
        scale, _ = mean_gradient_scale(observation)
        return update if scale is None and matcher.distance.scale_free else as_gradient(observation)

    def _readings(
        self, observation: Observation, generator: torch.Generator, shuffled: bool
    ) -> tuple[list[RecoveredLabels], tuple[str, ...], tuple[str, ...]]:
        """Return labels to try, none where they are searched, in random order if ``shuffled``; flags and notes."""
        if observation.labels is None and self.labels == "joint" and observation.task.searchable:
            return [], (), ()
        readings, flags, notes = find_readings(observation, generator)
        if not readings:
            require_searchable(observation)
        if shuffled and observation.labels is None:
            # Sorted labels would fill whole batches with one class, as no client that shuffles does.
            orders = [torch.randperm(len(reading.labels), generator=generator) for reading in readings]
            pairs = zip(readings, orders, strict=True)
            readings = [replace(one, labels=one.labels[order.to(one.labels.device)]) for one, order in pairs]
        return readings, flags, notes


def weighted(*priors: Any) -> tuple[Prior, ...]:
    return tuple(prior for prior in priors if prior.weight)


def require_searchable(observation: Observation) -> None:
    task = observation.task
    if not task.searchable:
        raise NotApplicable(f"the labels are not known, and {task!r} does not say how to search them; grant them")


def find_readings(
    observation: Observation, generator: torch.Generator
) -> tuple[list[RecoveredLabels], tuple[str, ...], tuple[str, ...]]:
    """Known or recovered labels, the likeliest first, none where they cannot be read; flags and notes."""
    if observation.labels is None and not observation.task.has_classes:
        return [], (), ()  # no rule reads them, and nothing is uncertain about a search
    try:
        readings = read_labels(observation, generator)
    except ValueError as error:
        return [], ("labels uncertain",), (f"labels searched along, for they cannot be read: {error}",)
    return readings, () if readings[0].exact else ("labels uncertain",), readings[0].notes


@dataclass(frozen=True, eq=False)
class _Trial:
    """Labels and a visiting order to try; None where they are searched along, or known."""

    reading: RecoveredLabels | None
    order: Order | None

    @property
    def targets(self) -> Tensor | None:
        return None if self.reading is None else self.reading.labels

    def matcher(self, matcher: Matcher) -> Matcher:
        simulation = matcher.simulation
        if self.order is None or not isinstance(simulation, UnrolledSteps):
            return matcher
        return replace(matcher, simulation=replace(simulation, order=self.order))


def _told_apart(labels: Tensor | None, examples: int) -> list[int]:
    """Return equal numbers for examples that a search may exchange: those of one class, all where labels are free."""
    if labels is None:
        return [0] * examples
    return labels.tolist() if labels.dim() == 1 and not labels.is_floating_point() else list(range(examples))


def _rounds(matcher: Matcher, trials: int) -> list[tuple[int, Matcher]]:
    if trials < 2:
        return []
    simulation, iterations = matcher.simulation, matcher.iterations
    if isinstance(simulation, UnrolledSteps):
        simulation = replace(simulation, compiled=False)
    steps = min(iterations, max(10, iterations // 20))
    brief = replace(matcher, iterations=steps, restarts=1, compile="never", simulation=simulation)
    finals = [(FINALISTS, replace(brief, iterations=min(iterations, FINALISTS * steps)))]
    return [(trials, brief), *(finals if trials >= FINALISTS else [])]


def as_gradient(observation: Observation) -> dict[str, Tensor]:
    """Return the update as one gradient of the whole batch in the client's reduction; NotApplicable without a scale."""
    update = reliable_update(observation)
    if observation.message.kind == "gradient":
        return update
    scale, why = mean_gradient_scale(observation)
    if scale is None:
        raise NotApplicable(f"the length of the update counts, but {why[0]}")
    if observation.reduction == "sum":
        scale /= observation.num_examples or 1
    return {name: value / scale for name, value in update.items()}


def replay(
    attack: GradientMatching, observation: Observation, order: Order, rate: float, checkpoint: bool = True
) -> UnrolledSteps:
    """Replay the client's steps over ``order``; whether one is compiled follows from counts, so that a run repeats."""
    compiled = False
    if attack.compile == "auto" and checkpoint:
        like = next(iter(observation.message.update.values()))
        forward = forward_flops(Victim.of(observation).model, like.new_zeros(len(order[0]), *observation.input_shape))
        # A step is twelve forward passes: two gradients of three each, and six to pull an adjoint back.
        work = attack.iterations * attack.restarts * len(order) * 12 * forward
        compiled = work / ASSUMED_FLOPS_PER_SECOND > WORTH_COMPILING_SECONDS
    return client_steps(observation, order, rate, checkpoint=checkpoint, compiled=compiled)


def hides_steps(observation: Observation) -> bool:
    return several_steps(observation) and replay_recipe(observation) is None
