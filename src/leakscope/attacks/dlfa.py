"""Data Leakage in Federated Averaging (DLFA). Dimitrov, Balunovic, Konstantinov, Vechev. TMLR 2022.

The server knows the recipe (epochs E, batch size B, learning rate) but not the order of the examples. It replays the
client's steps on a guess and matches the whole difference of weights, u = (w_0 - w_T) / lr:

    f / (E K / B)  sum over layers l of exp(-l) ||u_l - û_l(x)||^2  +  tv TV(x)  +  range ||x - clip(x)||^2
    + agreement * mean over pairs of epochs ||g(x_e) - g(x_e')||^2

The guess holds one copy of the examples *an epoch*, and g, which no order changes (the mean or maximum over an epoch's
pictures, by itself or of random filters), ties the copies together. In the end the copies are aligned by linear
assignment and averaged. Labels are known up to order. ``variant``: "copies" as above; "shared" one copy, in the same
order each epoch; "epoch" one step an epoch on all examples, times the number of batches; "single" one gradient times
the number of steps.

Differences. Only the client's state before each step is kept and the rest computed again in the backward pass. Momentum
and Adam are replayed too. Where a batch holds all examples, or their order is known, one copy serves all epochs. The
default compares directions by their L1 distance under a hard box and total variation, as SME does here; the published
distance is "layered-l2", and ``preset("paper-femnist")`` and ``preset("paper-cifar")`` carry all published settings.
Where the recipe is unknown the update is taken for one gradient and flagged "steps not simulated".
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from leakscope.attacks.gradient_matching import (
    MOST_TRIALS,
    NORMAL_START,
    GradientMatching,
    hides_steps,
    replay,
    replay_recipe,
    weighted,
)
from leakscope.contracts.inputs import Start
from leakscope.contracts.observation import Observation
from leakscope.contracts.settings import setting
from leakscope.labels import local_steps
from leakscope.matching import Matcher, Pixels, Ramp, Simulation, SingleGradient, steps_in_order
from leakscope.matching.distances import DISTANCES, Cosine, Distance, SquaredL2, as_distance
from leakscope.matching.optimisers import Adam, Schedule
from leakscope.matching.orders import Order, least_orders
from leakscope.matching.priors import EpochAgreement, SoftRange, TotalVariation, TVVariant, assignment

_PAPER = {"distance": "layered-l2", "tv_variant": "sq_roll", "clamp": False, "schedule": "constant", **NORMAL_START}
_FEMNIST = {
    **_PAPER,
    "lr": 0.4,
    "decay": 0.995**0.1,
    "factor": (1.0, 2.0),
    "tv": 1e-3,
    "soft_range": 2.0,
    "agreement": 1000.0,
}
_CIFAR = {
    **_PAPER,
    "lr": 0.1,
    "decay": 0.997**0.05,
    "factor": (4.0, 2.0),
    "tv": 2e-4,
    "soft_range": 10.0,
    "agreement": 6.075,
    "statistic": "max",
    "filters": 96,
}


@dataclass(frozen=True, kw_only=True)
class DLFA(GradientMatching):
    """Replay every local step of a weight update, one copy of the examples an epoch."""

    presets = MappingProxyType({"paper-femnist": _FEMNIST, "paper-cifar": _CIFAR})

    iterations: int = setting(400, "Steps of the search.", ge=1)
    variant: Literal["copies", "shared", "epoch", "single"] = setting(
        "copies", "What is replayed: every step on one copy an epoch, on one copy, one step an epoch, or one gradient."
    )
    distance: str = setting(
        "direction-l1",
        'How two updates are compared; "layered-l2" is the published way.',
        choices=(*DISTANCES, "layered-l2"),
    )
    tv: float = setting(0.05, "Weight of total variation.", ge=0)
    tv_variant: TVVariant = setting("l1mean_avg", "Which definition of total variation.")
    agreement: float = setting(1.0, "Weight of what the copies must have in common.", ge=0)
    statistic: Literal["mean", "max"] = setting("mean", "What of an epoch's pictures must agree.")
    norm: Literal["l1", "l2"] = setting("l2", "How disagreement is measured.")
    filters: int = setting(0, "Random 3x3 filters before the statistic; 0 takes the pictures themselves.", ge=0)
    factor: tuple[float, float] = setting(
        (1.0, 1.0), "What the distance is multiplied by, at the first step and from factor_steps on.", gt=0
    )
    factor_steps: int = setting(200, "Steps from the first factor to the last.", ge=1)
    soft_range: float = setting(0.0, "Weight of the soft box around [0, 1]; it needs a known value range.", ge=0)
    clamp: bool = setting(True, "Whether inputs are kept in the valid box.")
    lr: float = setting(0.2, "Step size of Adam.", gt=0)
    schedule: Schedule = setting("cosine", "How the step size falls over the run.")
    decay: float = setting(1.0, "Factor of the step size at each step.", gt=0, le=1)
    start: Start = setting("grey", "Where the search starts.")
    space: Literal["unit", "model"] = setting("unit", "Whether inputs in [0, 1] or the model's own are searched.")
    checkpoint: bool = setting(True, "Keep only the weights before each local step and compute the rest again.")

    def problems(self) -> list[str]:
        if self.compile == "always" and self.variant != "single":
            return ["compile: expected 'auto' or 'never' for replayed local steps, got 'always'"]
        return []

    def matcher(self, observation: Observation) -> Matcher:
        simulation, layered = self._replay(observation)
        copies = self.copies(observation)
        weight = self.agreement if copies > 1 else 0.0
        priors = weighted(
            TotalVariation(weight=self.tv, variant=self.tv_variant),
            SoftRange(weight=self.soft_range if observation.inputs.bounded else 0.0, total=True),
            EpochAgreement(
                weight=weight, copies=copies, statistic=self.statistic, norm=self.norm, features=self.filters
            ),
        )
        return self.engine(
            distance=layered if self.distance == "layered-l2" else as_distance(self.distance),
            priors=priors,
            canvas=Pixels(space=self.space, start=self.start, clamp=self.clamp),
            optimiser=Adam(lr=self.lr, schedule=self.schedule, decay=self.decay),
            simulation=simulation,
            emphasis=Ramp(first=self.factor[0], last=self.factor[1], steps=self.factor_steps),
        )

    def copies(self, observation: Observation) -> int:
        recipe = replay_recipe(observation)
        if self.variant != "copies" or observation.message.kind == "gradient" or recipe is None:
            return 1
        examples, epochs, batch_size, _ = recipe
        # Where the order is known, or all orders can be tried, one copy serves all epochs.
        few = least_orders(range(examples), batch_size, epochs) <= MOST_TRIALS
        return 1 if few or self.order_is_known(observation) else epochs

    def order_is_known(self, observation: Observation) -> bool:
        return self.variant == "epoch" or super().order_is_known(observation)

    def orders(
        self, observation: Observation, labels: list[int], most: int, generator: torch.Generator
    ) -> tuple[list[Order], str]:
        found, exist = super().orders(observation, labels, most, generator)
        copies, examples = self.copies(observation), len(labels)
        if copies == 1:
            return found, exist
        # Each epoch visits a copy of its own, whose examples are free: only the labels of its batches are to be tried.
        apart = {tuple(tuple(sorted(labels[row] for row in batch)) for batch in order): order for order in found}
        batches = len(found[0]) // copies
        found = [
            tuple(tuple(row + step // batches * examples for row in batch) for step, batch in enumerate(order))
            for order in apart.values()
        ]
        return found, exist

    def merge(self, pictures: Tensor) -> Tensor:
        return average_aligned(pictures)

    def cautions(self, observation: Observation) -> tuple[str, ...]:
        return ("steps not simulated",) if hides_steps(observation) else ()

    def _replay(self, observation: Observation) -> tuple[Simulation, Distance]:
        recipe, whole = replay_recipe(observation), observation.message.kind == "gradient"
        if whole or recipe is None:
            # A weight update of unknown scale can only be compared by direction.
            return SingleGradient(), SquaredL2(weights="layers") if whole else Cosine()
        examples, epochs, batch_size, rate = recipe
        steps = local_steps(examples, epochs, batch_size)
        if self.variant == "single":
            return SingleGradient(), SquaredL2(weights="layers", scale=float(steps))
        copies = self.copies(observation)
        distance = SquaredL2(weights="layers", scale=1 / (steps * rate**2))
        if self.variant == "epoch":
            order = steps_in_order(examples, examples, epochs)
            rate *= 1 if observation.reduction == "sum" else math.ceil(examples / batch_size)
        elif copies > 1:
            # Epoch e visits copy e, front to back; the order within a copy is what the search is free to choose.
            order = steps_in_order(examples, batch_size, 1)
            order = tuple(tuple(row + epoch * examples for row in rows) for epoch in range(copies) for rows in order)
        else:
            order = observation.training.batch_order or steps_in_order(examples, batch_size, epochs)
        return replay(self, observation, order, rate, self.checkpoint), distance


def average_aligned(pictures: Tensor) -> Tensor:
    """The mean of (copies, examples, ...) after each copy was put into the order of the first, by least squares.

    >>> first = torch.tensor([[0.0], [1.0]])
    >>> average_aligned(torch.stack([first, torch.tensor([[1.2], [0.2]])])).flatten().tolist()
    [0.10000000149011612, 1.100000023841858]
    """
    flat = pictures.flatten(2)
    total = pictures[0].clone()
    for copy, picture in zip(flat[1:], pictures[1:], strict=True):
        total = total + picture[assignment(torch.cdist(flat[0].double(), copy.double()).square())]
    return total / len(pictures)
