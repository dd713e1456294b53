"""What every gradient-matching attack shares: settings of the engine, labels, and the way from a match to a result."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leakscope.attacks.base import Attack, NotApplicable, Progress, Reconstruction
from leakscope.labels import local_steps, mean_gradient_scale, recover_labels
from leakscope.loss import as_labels
from leakscope.matching import Matcher, Victim
from leakscope.observation import Observation


@dataclass(frozen=True, kw_only=True)
class GradientMatching(Attack):
    """Base of attacks that search an input whose update is the observed one.

    ``labels``: "recover" takes known labels where the knowledge grants them and otherwise infers them from the update
    before the search; "joint" optimises them along with the input.
    """

    iterations: int = 300
    restarts: int = 1
    labels: Literal["recover", "joint"] = "recover"
    compile: Literal["auto", "never", "always"] = "auto"

    def __post_init__(self) -> None:
        if self.labels not in ("recover", "joint"):
            raise ValueError(f"labels: expected 'recover' or 'joint', got {self.labels!r}")
        if self.iterations < 1 or self.restarts < 1:
            raise ValueError(f"iterations and restarts: expected at least 1, got {self.iterations} and {self.restarts}")

    @abstractmethod
    def matcher(self, observation: Observation) -> Matcher:
        """The choice of distance, priors, canvas, optimiser and simulation that makes this attack."""

    def run(
        self, observation: Observation, generator: torch.Generator, progress: Progress | None = None
    ) -> Reconstruction:
        targets, flags, notes, method = self._labels(observation, generator)
        matcher = self.matcher(observation)
        examples = observation.num_examples
        assert examples is not None  # granted: num_examples is in ``requires``
        if targets is not None and method != "known" and matcher.simulation.imitates == "weight_delta":
            # Sorted labels would fill whole batches with one class, as no client that shuffles does.
            targets = targets[torch.randperm(examples, generator=generator).to(targets.device)]
        copies = self.copies(observation)
        match = matcher.run(
            Victim.of(observation),
            self._observed(observation, matcher),
            shape=(copies * examples, *observation.input_shape),
            box=observation.value_range,
            targets=None if targets is None else targets.repeat(copies),
            num_classes=observation.num_classes,
            generator=generator,
            progress=progress,
        )
        labels = targets if match.label_logits is None else as_labels(match.label_logits)[:examples]
        return Reconstruction(
            inputs=self.merge(match.inputs.reshape(copies, examples, *observation.input_shape)),
            labels=labels,
            scores=torch.full((examples,), match.objective),
            history={"objective": match.curves},
            flags=(*match.flags, *flags, *self.cautions(observation)),
            notes=notes,
            info={**match.info, "distance": match.distance, "labels": method, **match.numbers},
        )

    def cautions(self, observation: Observation) -> tuple[str, ...]:
        """Flags that follow from what is known before the search."""
        return ()

    def copies(self, observation: Observation) -> int:
        """How many pictures of each example are searched."""
        return 1

    def merge(self, pictures: Tensor) -> Tensor:
        """One picture of each example from (copies, examples, ...)."""
        return pictures[0]

    def _observed(self, observation: Observation, matcher: Matcher) -> dict[str, Tensor]:
        """The update in the units of what is simulated: a weight difference taken for one gradient loses its scale."""
        update = dict(observation.message.update)
        if observation.message.kind == matcher.simulation.imitates:
            return update
        scale, _ = mean_gradient_scale(observation)
        return update if scale is None and matcher.distance.scale_free else as_gradient(observation)

    def _labels(
        self, observation: Observation, generator: torch.Generator
    ) -> tuple[Tensor | None, tuple[str, ...], tuple[str, ...], str]:
        """Targets (None where they are optimised), flags, notes, and how they were found."""
        if observation.labels is None and self.labels == "joint":
            return None, (), (), "joint"
        return find_targets(observation, generator)


def find_targets(
    observation: Observation, generator: torch.Generator
) -> tuple[Tensor | None, tuple[str, ...], tuple[str, ...], str]:
    """Known or recovered labels (None where they cannot be read), flags, notes, and how they were found."""
    try:
        found = recover_labels(observation, generator=generator)
    except ValueError as error:
        return None, ("labels uncertain",), (f"labels optimised along, for they cannot be read: {error}",), "joint"
    flags = () if found.exact else ("labels uncertain",)
    return found.labels, flags, found.notes, found.method


def as_gradient(observation: Observation) -> dict[str, Tensor]:
    """The update as one gradient of the whole batch in the client's reduction; NotApplicable without a scale."""
    update = dict(observation.message.update)
    if observation.message.kind == "gradient":
        return update
    scale, why = mean_gradient_scale(observation)
    if scale is None:
        raise NotApplicable(f"the length of the update counts, but {why[0]}")
    if observation.reduction == "sum":
        scale /= observation.num_examples or 1
    return {name: value / scale for name, value in update.items()}


def several_steps(observation: Observation) -> bool:
    """Whether it is a weight update that is not one plain gradient step, as far as is known."""
    if observation.message.kind == "gradient":
        return False
    return not (_single_step(observation) and _plain_descent(observation))


def can_replay(observation: Observation) -> bool:
    """Whether the client's local steps can be simulated: recipe known, and plain gradient descent."""
    facts = observation.training
    known = None not in (observation.num_examples, facts.epochs, facts.batch_size, facts.learning_rate)
    return known and _plain_descent(observation)


def hides_steps(observation: Observation) -> bool:
    """Whether it is a weight update whose steps cannot be replayed, and that is more than one gradient."""
    return several_steps(observation) and not can_replay(observation)


def _plain_descent(observation: Observation) -> bool:
    facts = observation.training
    # The first step of momentum is a plain one.
    return facts.optimizer in (None, "sgd") and (not facts.momentum or _single_step(observation))


def _single_step(observation: Observation) -> bool:
    facts, examples = observation.training, observation.num_examples
    if examples is None or facts.epochs is None or facts.batch_size is None:
        return False
    return local_steps(examples, facts.epochs, facts.batch_size) == 1
