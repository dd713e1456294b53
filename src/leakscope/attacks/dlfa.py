"""Data Leakage in Federated Averaging (DLFA). Dimitrov, Balunovic, Konstantinov, Vechev. TMLR 2022.

The server knows the recipe (epochs E, batch size B, learning rate) but not the order of the examples. It replays the
client's steps on a guess and matches the whole difference of weights, u = (w_0 - w_T) / lr:

    f / (E K / B)  sum over layers l of exp(-l) ||u_l - û_l(x)||^2  +  tv TV(x)  +  range ||x - clip(x)||^2
    + agreement * mean over pairs of epochs ||g(x_e) - g(x_e')||^2

In each epoch the examples come in another order, so the guess holds one copy of them *an epoch*, and g, which no order
changes (the mean or maximum over an epoch's pictures, by itself or of random filters), ties the copies together. At the
end the copies are aligned to those of the first epoch by linear assignment and averaged. Labels are known up to order.

``variant``: "copies" as above; "shared" one copy, in the same order each epoch; "epoch" one step an epoch on all
examples, times the number of batches; "single" one gradient times the number of steps.

Differences. The published code keeps all steps in one graph; here only the weights before each step are kept and the
rest is computed again in the backward pass, which is exact. Where a batch holds all examples, or their order is known,
one copy serves all epochs. The default compares directions by their L1 distance under a hard box and total
variation, as this package's Surrogate Model Extension does; the published distance is "layered-l2", and
``preset("paper-femnist")`` and ``preset("paper-cifar")`` carry all published settings. Where the steps cannot be
replayed (recipe unknown, momentum, Adam) the update is taken for one gradient and the result is flagged "steps not
simulated".
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from leakscope.attacks.gradient_matching import GradientMatching, can_replay, hides_steps
from leakscope.contracts.inputs import Start
from leakscope.contracts.observation import Observation
from leakscope.contracts.settings import setting
from leakscope.labels import local_steps
from leakscope.matching import (
    DISTANCES,
    Adam,
    Cosine,
    Distance,
    EpochAgreement,
    Matcher,
    Pixels,
    Prior,
    Ramp,
    Simulation,
    SingleGradient,
    SoftRange,
    SquaredL2,
    TotalVariation,
    UnrolledSteps,
    as_distance,
    steps_in_order,
)
from leakscope.matching.optimisers import Schedule
from leakscope.matching.priors import TVVariant

_PAPER = {
    "distance": "layered-l2",
    "tv_variant": "sq_roll",
    "clamp": False,
    "schedule": "constant",
    "start": "normal",
    "space": "model",
}
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
    """Replay the client's local steps on one copy of the examples an epoch, and match the whole weight update."""

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
        simulation, distance = self._replay(observation)
        priors: list[Prior] = []
        if self.tv:
            priors.append(TotalVariation(weight=self.tv, variant=self.tv_variant))
        if self.soft_range and observation.inputs.bounded:
            priors.append(SoftRange(weight=self.soft_range, total=True))
        copies = self.copies(observation)
        if self.agreement and copies > 1:
            priors.append(
                EpochAgreement(
                    weight=self.agreement,
                    copies=copies,
                    statistic=self.statistic,
                    norm=self.norm,
                    features=self.filters,
                )
            )
        return Matcher(
            distance=distance,
            priors=tuple(priors),
            canvas=Pixels(space=self.space, start=self.start, clamp=self.clamp),
            optimiser=Adam(lr=self.lr, schedule=self.schedule, decay=self.decay),
            simulation=simulation,
            emphasis=Ramp(first=self.factor[0], last=self.factor[1], steps=self.factor_steps),
            iterations=self.iterations,
            restarts=self.restarts,
            compile=self.compile,
        )

    def copies(self, observation: Observation) -> int:
        if self.variant != "copies" or not self._replays(observation):
            return 1
        facts = observation.training
        # Where an epoch is one batch, or the order is known, every copy would be the same.
        one_batch = (facts.batch_size or 1) >= (observation.num_examples or 1)
        return 1 if one_batch or facts.batch_order is not None else facts.epochs or 1

    def merge(self, pictures: Tensor) -> Tensor:
        return average_aligned(pictures)

    def cautions(self, observation: Observation) -> tuple[str, ...]:
        return ("steps not simulated",) if hides_steps(observation) else ()

    def _replays(self, observation: Observation) -> bool:
        return observation.message.kind == "weight_delta" and can_replay(observation)

    def _replay(self, observation: Observation) -> tuple[Simulation, Distance]:
        """The simulation, and the distance; the published one is in units of u = (w_0 - w_T) / lr a batch."""
        facts, examples = observation.training, observation.num_examples
        layered = self.distance == "layered-l2"
        if not self._replays(observation):
            # A weight update of unknown scale can only be compared by direction.
            whole = observation.message.kind == "gradient"
            fallback = SquaredL2(weights="layers") if whole else Cosine()
            return SingleGradient(), fallback if layered else as_distance(self.distance)
        assert examples
        assert facts.epochs
        assert facts.batch_size
        assert facts.learning_rate
        batches = math.ceil(examples / facts.batch_size)
        steps = local_steps(examples, facts.epochs, facts.batch_size)
        if self.variant == "single":
            single = SquaredL2(weights="layers", scale=float(steps))
            return SingleGradient(), single if layered else as_distance(self.distance)
        rate, copies = facts.learning_rate, self.copies(observation)
        distance = SquaredL2(weights="layers", scale=1 / (steps * rate**2))
        if self.variant == "epoch":
            order = steps_in_order(examples, examples, facts.epochs)
            rate *= 1 if observation.reduction == "sum" else batches
        elif copies > 1:
            # Epoch e visits copy e, front to back; the order within a copy is what the search is free to choose.
            everything = steps_in_order(examples, facts.batch_size, 1)
            order = tuple(
                tuple(row + epoch * examples for row in rows) for epoch in range(copies) for rows in everything
            )
        else:
            order = facts.batch_order or steps_in_order(examples, facts.batch_size, facts.epochs)
        return UnrolledSteps(rate, order, self.checkpoint), distance if layered else as_distance(self.distance)


def average_aligned(pictures: Tensor) -> Tensor:
    """The mean of (copies, examples, ...) after each copy was put into the order of the first, by least squares.

    >>> first = torch.tensor([[0.0], [1.0]])
    >>> average_aligned(torch.stack([first, torch.tensor([[1.2], [0.2]])])).flatten().tolist()
    [0.10000000149011612, 1.100000023841858]
    """
    flat = pictures.flatten(2)
    total = pictures[0].clone()
    for copy, picture in zip(flat[1:], pictures[1:], strict=True):
        _, order = linear_sum_assignment(torch.cdist(flat[0].double(), copy.double()).square().cpu().numpy())
        total = total + picture[torch.as_tensor(order, device=pictures.device)]
    return total / len(pictures)
