"""Which way an update points: read off the gradient of the last linear layer, and off counters of training steps.

With cross-entropy of logits z = W f + b the gradient by row k of (W, b) is the mean over examples of (p_k - y_k)(f, 1).
For a class that no example has, y_k = 0: the row is a sum of (f, 1) with positive weights. So along any direction a
with a'(f, 1) > 0 for every f (the bias alone; where features are not negative, their usual direction too) the numbers
t_k = a'(row k) are positive for every class that is absent, and n examples leave at most n of them negative. In an
update of the opposite sign at most n are positive. Where more than n are on one side only, the sign is plain.

The rows add up to zero, whatever the examples: what their sum holds is noise, rounding, weight decay, or a defence. It
gives the deviation of a single entry, and an entry of t counts only where it is several deviations away from zero.
All of this holds for a sum of gradients with positive weights: several local steps, momentum, a mean of clients.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from leakscope.contracts.task import outputs_of

SignAnswer = Literal["right", "wrong", "cannot be told"]
#: Deviations of the noise that an entry must be away from zero to count: one in a million by chance.
DEVIATIONS = 5.0
#: Entries below this share of the largest are taken for rounding.
ROUNDING = 1e-5
#: Inputs on which the features are looked at.
PROBES = 8
COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class SignCheck:
    """Whether an update points as this package has it (a gradient, or weights before minus after), and why."""

    answer: SignAnswer
    reason: str

    def __str__(self) -> str:
        return f"{self.answer}: {self.reason}"


@dataclass(frozen=True, eq=False)
class LogitLayer:
    """The linear layer whose outputs are the model's: its parameters, and the features it reads of random inputs."""

    weight_name: str
    bias_name: str | None
    features: Tensor

    @property
    def direction(self) -> Tensor | None:
        """The usual direction of the features where none is ever negative; None elsewhere."""
        mean = self.features.double().mean(0)
        usable = bool((self.features >= 0).all()) and float(mean.norm()) > 0
        return mean / mean.norm() if usable else None


def logit_layer(model: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> LogitLayer | None:
    """The layer that gives the logits, found by derivatives: output k depends on its row k alone.

    None where there is no such layer: the outputs go through a softmax, say, or come from a convolution.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    >>> layer = logit_layer(net, (1, 2, 2), 3)
    >>> layer.weight_name, layer.direction is not None
    ('3.weight', True)
    >>> logit_layer(nn.Sequential(*net, nn.Softmax(1)), (1, 2, 2), 3) is None
    True
    """
    twin = copy.deepcopy(model).eval().requires_grad_(True)
    weights = {name: value for name, value in twin.named_parameters() if value.shape[:1] == (num_classes,)}
    matrices = [name for name, value in weights.items() if value.dim() == 2]
    if not matrices or num_classes < 2:
        return None
    like = next(iter(weights.values()))
    draws = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 1, PROBES).reshape(-1, *[1] * len(input_shape))
    probes = (sizes * torch.randn((PROBES, *input_shape), generator=draws)).to(like)
    try:
        with torch.random.fork_rng(devices=[]):
            outputs = outputs_of(twin(probes))
    except (RuntimeError, ValueError, TypeError, IndexError):
        return None
    if tuple(outputs.shape) != (PROBES, num_classes) or not outputs.requires_grad:
        return None
    for name in reversed(matrices):
        bias = name.removesuffix("weight") + "bias"
        bias_name = bias if bias in weights and weights[bias].dim() == 1 else None
        features = _features(outputs, weights[name], None if bias_name is None else weights[bias_name])
        if features is not None:
            return LogitLayer(name, bias_name, features)
    return None


def _features(outputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """What the layer reads of each probe, or None where it does not give the outputs themselves."""
    rows = []
    wanted = [weight] if bias is None else [weight, bias]
    for example in range(len(outputs)):
        parts = torch.autograd.grad(outputs[example, 0], wanted, retain_graph=True, allow_unused=True)
        slope = parts[0]
        if slope is None or bool(slope[1:].any()):
            return None
        if bias is not None and not _is_first_unit(parts[1]):
            return None
        rows.append(slope[0])
    features = torch.stack(rows).detach()
    last = outputs[:, 0].detach() - features @ weight[0].detach() - (0.0 if bias is None else bias[0].detach())
    scale = outputs.detach().abs().max().clamp_min(1e-12)
    return features if float(last.abs().max() / scale) < 1e-3 else None


def _is_first_unit(slope: Tensor | None) -> bool:
    return slope is not None and float(slope[0]) == 1.0 and not bool(slope[1:].any())


def check_sign(
    update: Mapping[str, Tensor], layer: LogitLayer | None, num_examples: int | None, counters: Mapping[str, float]
) -> SignCheck:
    """Whether the update points as a gradient does.

    ``counters`` are the steps that BatchNorm layers counted, after minus before as the given sign has it: training
    counts upwards. ``num_examples`` is how many examples the client has, None where nobody knows.
    """
    counted = _by_counters(counters)
    if counted is not None:
        return counted
    if layer is None:
        return _open("the model does not end in a linear layer that gives the logits")
    if layer.weight_name not in update:
        return _open(f"the update holds nothing of the last layer ({layer.weight_name})")
    if num_examples is None:
        return _open("the number of examples is not known; with it the signs of the last layer can be counted")
    numbers, deviation = row_numbers(update, layer)
    if numbers is None:
        return _open("the last layer has no bias and its features may have either sign")
    return count_signs(numbers, deviation, num_examples)


def row_numbers(update: Mapping[str, Tensor], layer: LogitLayer) -> tuple[Tensor | None, float]:
    """t_k for each class, and the deviation that noise gives it."""
    weight = update[layer.weight_name].detach().double().cpu()
    # The rows add up to zero but for the noise; a sum of C entries has C times the variance of one.
    deviation = float(weight.sum(0).square().mean().div(len(weight)).sqrt())
    seen = None if layer.bias_name is None else update.get(layer.bias_name)
    bias = None if seen is None else seen.detach().double().cpu()
    direction = layer.direction
    if direction is None:
        return bias, deviation
    along = weight @ direction.cpu()
    if bias is None:
        return along, deviation
    # (f, 1) along (direction, 1/length): both parts are positive, and each counts by what it holds of a usual feature.
    length = float(layer.features.double().norm(dim=1).mean()) or 1.0
    joined = (along * length + bias) / math.hypot(length, 1.0)
    return joined, deviation


def count_signs(numbers: Tensor, deviation: float, num_examples: int) -> SignCheck:
    """The answer from how many of the numbers are clearly positive and negative.

    >>> one_example = torch.tensor([0.1, 0.2, -0.5, 0.2])
    >>> count_signs(one_example, 0.0, 1).answer, count_signs(-one_example, 0.0, 1).answer
    ('right', 'wrong')
    >>> count_signs(one_example, 0.2, 1).answer, count_signs(one_example, 0.0, 3).answer
    ('cannot be told', 'cannot be told')
    """
    floor = max(DEVIATIONS * deviation, ROUNDING * float(numbers.abs().max()))
    positive, negative = int((numbers > floor).sum()), int((numbers < -floor).sum())
    most = min(num_examples, len(numbers))
    facts = f"of {len(numbers)} classes {negative} have a clearly negative gradient in the last layer and {positive} a "
    facts += f"clearly positive one, and {num_examples} example{'s' if num_examples > 1 else ''} can make at most "
    if positive > most >= negative:
        return SignCheck("right", f"{facts}{most} negative")
    if negative > most >= positive:
        return SignCheck("wrong", f"{facts}{most} negative")
    if positive > most and negative > most:
        return _open(f"{facts}{most} negative: this is no gradient of cross-entropy of so few examples")
    noisy = " beyond its noise" if positive + negative < len(numbers) and deviation > 0 else ""
    return _open(f"{facts}{most} negative, so that both signs are possible{noisy}")


def _by_counters(counters: Mapping[str, float]) -> SignCheck | None:
    moved = {name: steps for name, steps in counters.items() if steps}
    if not moved:
        return None
    if all(steps > 0 for steps in moved.values()):
        steps = max(moved.values())
        return SignCheck("right", f"the BatchNorm layers counted {steps:g} training step{'s' if steps > 1 else ''}")
    if all(steps < 0 for steps in moved.values()):
        return SignCheck("wrong", f"the BatchNorm layers counted {min(moved.values()):g} training steps: backwards")
    return _open("some BatchNorm layers counted forwards and some backwards")


def _open(reason: str) -> SignCheck:
    return SignCheck("cannot be told", reason)
