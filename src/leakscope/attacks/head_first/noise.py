"""The last stage of ``head-first``, under noise of a known level: find the most probable pictures.

Minus the logarithm of the probability of pictures x, given an update of which every entry carries noise of level s:
``sum over entries of rho((observed - g(x)) / s) + RATE * sum over pixels of |all differences there|``, the noise's
likelihood and a Laplace prior of natural pictures. rho is a square that becomes linear beyond a few levels, so that
what is still far away does not outweigh the rest.

The derivative by the outputs is held; of one example it is the head's leading singular vector, which the noise hardly
moves. The level is inflated at first to each row's own size, so that every layer counts alike from afar, then less and
less. Searches begin at grey and at the best so far, which only what is more probable by the client's loss replaces.
"""

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from leakscope.attacks.candidates import Candidate, Stage
from leakscope.attacks.head_first.case import Case
from leakscope.contracts.attack import Progress
from leakscope.contracts.channel import Channel
from leakscope.contracts.observation import Observation
from leakscope.equations.noise_test import drowned, noise_test
from leakscope.matching import Adam, Victim
from leakscope.matching.priors import total_variation
from leakscope.matching.search import Evaluation, search
from leakscope.matching.victim import Tensors
from leakscope.network.layers import find_head

MOST_PROBABLE = "most probable"
#: One over the scale of the prior: how probable a difference of one between neighbours is. Looked at on tuning images.
RATE = 8.0
#: Residuals of so many levels of noise are where the square becomes linear; Laplace noise is linear nearly from zero.
BEND = {"gaussian": 2.0, "laplace": math.sqrt(2)}
#: The inflation from which on bias gradients count: while the output gradient is held they tell nothing of the picture.
WITH_BIASES = 0.02


def noise_channel(observation: Observation) -> Channel | None:
    """Return the channel where it is nothing but noise on every entry of one gradient of pictures.

    Rounding to evenly spaced values is noise of the size of their spacing.
    """
    channel = observation.channel
    if channel is None or observation.message.kind != "gradient" or observation.has_rounds:
        return None
    pictures = observation.inputs.smooth and observation.inputs.bounded
    altered = channel.masked or channel.inexact or channel.unreliable
    if not pictures or altered or not (channel.rounding == "none" or channel.rounds_evenly):
        return None
    if channel.rounds_evenly:
        update = observation.message.update
        channel = channel.with_least_noise({name: channel.rounding_level(value) for name, value in update.items()})
    return channel if all(channel.level(name) > 0 for name in observation.message.update) else None


class MostProbable(Stage[Case]):
    """Find the most probable of the best and of what two searches find, and test whether it explains all but noise."""

    def applies(self, case: Case) -> bool:
        channel = noise_channel(case.observation) or case.observation.channel
        known = channel is not None and channel.noisy and case.labels is not None
        return known and case.observation.message.kind == "gradient"

    def propose(self, case: Case) -> Iterator[Candidate]:
        observation, best, labels = case.observation, case.best, case.labels
        channel = noise_channel(observation)
        # Of inputs that are no pictures there is no prior to search with, but what is left can be looked at.
        noisy = observation.channel if channel is None else channel
        assert best is not None
        assert labels is not None
        assert noisy is not None
        held = _leading(observation) if observation.num_examples == 1 else None
        if held is None and case.held is not None:
            held = case.held.output_gradients
        posterior = _Posterior(observation, noisy, labels, None if held is None else held.to(case.like))
        if channel is not None and not drowned(observation):
            case.best = dataclasses.replace(best, surprise=posterior.value(best.inputs))
            steps = case.attack.iterations
            near = observation.inputs.to_unit(observation.inputs.project(best.inputs))
            afar = observation.inputs.start("grey", len(best.inputs), case.untouched, case.like)
            for start, lr, first in ((near, 0.01, 0.1), (afar, 0.1, 1.0)):
                inputs = posterior.search(start, steps, case.told(steps), lr=lr, first=first)
                value = posterior.value(inputs)
                yield dataclasses.replace(
                    best,
                    inputs=inputs,
                    method=MOST_PROBABLE,
                    # In the units of what was searched: minus the logarithm of the probability, an entry of the update.
                    distance=value / posterior.count,
                    surprise=value,
                    residual=math.inf,
                    certificates=(),
                    curve=(),
                    score=None,
                )
        inputs = (case.best or best).inputs
        case.noise = noise_test(observation.message.update, posterior.sent(inputs), noisy, inputs.numel())


class _Posterior:
    """``held``: the loss's derivative by the outputs, as well as it is known; None where the labels must do."""

    def __init__(self, observation: Observation, channel: Channel, labels: Tensor, held: Tensor | None) -> None:
        self.channel, self.held = channel, held
        self.victim, self.space = Victim.of(observation), observation.inputs
        self.observed = dict(observation.message.update)
        self.labels = labels.to(observation.device)
        self.count = sum(value.numel() for value in self.observed.values())
        self.bend = BEND[channel.noise_law]
        axes = {name: tuple(range(1, value.dim())) or (0,) for name, value in self.observed.items()}
        self.row_squares = {n: value.square().mean(axes[n], keepdim=True) for n, value in self.observed.items()}

    def sent(self, inputs: Tensor, held: Tensor | None = None) -> Tensors:
        gradient, _ = self.victim.gradient(self.victim.tensors, inputs, self.labels, held)
        return self.channel.stand_in(gradient, {})

    def value(self, inputs: Tensor) -> float:
        with torch.no_grad():
            value = float(self._objective(self.space.to_unit(inputs), self.sent(inputs), inflation=0.0))
        return value if math.isfinite(value) else math.inf

    def search(
        self, pictures: Tensor, iterations: int, progress: Progress | None, *, lr: float, first: float
    ) -> Tensor:
        """Search with steps of ``lr``; the level's inflation falls from ``first`` sizes of a row to a thousandth."""

        def evaluate(rows: Tensor, step: int) -> Evaluation:
            inflation = first * (1e-3 / first) ** (step / iterations)
            with torch.enable_grad():
                point = rows.detach().requires_grad_()
                drawn = point.reshape(pictures.shape)
                update = self.sent(self.space.from_unit(drawn), self.held)
                objective = self._objective(drawn, update, inflation) / self.count
                (gradient,) = torch.autograd.grad(objective, point)
            return objective.detach()[None], objective.detach().reshape(1, 1), gradient

        result = search(
            evaluate,
            pictures.detach().flatten()[None],
            Adam(lr=lr),
            project=lambda rows: self.space.project_unit(rows.reshape(pictures.shape)).reshape(rows.shape),
            iterations=iterations,
            keep="last",
            watch=lambda done, values, _: None if progress is None else progress(done, iterations, float(values[0])),
        )
        return self.space.from_unit(result.points.reshape(pictures.shape))

    def _objective(self, pictures: Tensor, update: Tensors, inflation: float) -> Tensor:
        terms = [RATE * _differences(pictures)]
        for name, value in self.observed.items():
            if inflation > WITH_BIASES and value.dim() == 1:
                continue
            variance = self.channel.level(name) ** 2 + inflation**2 * self.row_squares[name]
            squares = (update[name] - value).square() / variance
            terms.append(self.bend**2 * (torch.sqrt(1 + squares / self.bend**2) - 1).sum())
        return torch.stack(terms).sum()


def _differences(pictures: Tensor) -> Tensor:
    """Sum the length of all differences at a pixel over pixels and pictures."""
    return total_variation(pictures, "joint") * (pictures.numel() / pictures.shape[1])


def _leading(observation: Observation) -> Tensor | None:
    """Return the head's leading singular vector, with the length that the bias gives it."""
    try:
        head = find_head(observation.model, observation.input_shape, observation.num_classes)
    except ValueError:
        return None
    update = observation.message.update
    if not head.gives_logits(observation.task):
        return None
    if head.bias_name is None or not {head.weight_name, head.bias_name} <= set(update):
        return None
    direction = torch.linalg.svd(update[head.weight_name].double(), full_matrices=False).U[:, 0]
    return (direction * (direction @ update[head.bias_name].double()))[None]
