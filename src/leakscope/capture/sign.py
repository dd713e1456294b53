"""Tell which way an update points from the gradient of the last linear layer and from counters of training steps.

With cross-entropy of logits z = W f + b the gradient by row k of (W, b) is the mean over examples of (p_k - y_k)(f, 1).
For a class that no example has, y_k = 0: the row is a sum of (f, 1) with positive weights. So along any direction a
with a'(f, 1) > 0 for every f (the bias alone; where features are not negative, their usual direction too) the numbers
t_k = a'(row k) are positive for every class that is absent, and n examples leave at most n of them negative. In an
update of the opposite sign at most n are positive.

The rows add up to zero, so the n most negative numbers outweigh the n most positive ones, unless no more than n are
positive: then both signs are possible. What the sum of the rows holds is noise, rounding, weight decay, or a defence;
it gives the deviation of a single entry, and a surplus counts only where it is several of them. All of this holds for a
sum of gradients with positive weights: several local steps, momentum, a mean of clients.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from leakscope.contracts.task import outputs_of

SignAnswer = Literal["right", "wrong", "cannot be told"]
#: Deviations of the noise that a surplus must have to count: one in thirty thousand by chance.
DEVIATIONS = 4.0
#: A surplus below this share of all there is may come of anything, such as a little weight decay.
SURPLUS = 0.02
#: How well weights are stored: a difference of weights is no better than that.
ROUNDING = torch.finfo(torch.float32).eps
#: Inputs on which the features are looked at.
PROBES = 8
COUNTER = "num_batches_tracked"


@dataclass(frozen=True)
class SignCheck:
    """Say whether an update points as this package has it (a gradient, or weights before minus after), and why."""

    answer: SignAnswer
    reason: str

    def __str__(self) -> str:
        return f"{self.answer}: {self.reason}"


@dataclass(frozen=True, eq=False)
class LogitLayer:
    """Hold the linear layer whose outputs are the logits, and the features it reads of random inputs."""

    weight_name: str
    bias_name: str | None
    features: Tensor
    weight: Tensor
    bias: Tensor | None

    @property
    def rounding(self) -> float:
        """Return what rounding may add to the difference of two such biases; that of the weights shows in their sum."""
        return 0.0 if self.bias is None else ROUNDING * float(self.bias.abs().max())

    @property
    def direction(self) -> Tensor | None:
        """Return the usual direction of the features where none is ever negative; None elsewhere."""
        mean = self.features.double().mean(0)
        usable = bool((self.features >= 0).all()) and float(mean.norm()) > 0
        return mean / mean.norm() if usable else None


def logit_layer(model: nn.Module, input_shape: tuple[int, ...], num_classes: int) -> LogitLayer | None:
    """Find the layer that gives the logits by derivatives: outputs 0 and 1 differ by its rows 0 and 1 alone.

    So they do behind a log_softmax, too, whose cross-entropy is that of the logits. None without such a layer.

    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3))
    >>> layer = logit_layer(net, (1, 2, 2), 3)
    >>> layer.weight_name, layer.direction is not None
    ('3.weight', True)
    >>> [logit_layer(nn.Sequential(*net, tail), (1, 2, 2), 3) is None for tail in (nn.LogSoftmax(1), nn.Softmax(1))]
    [False, True]
    """
    twin = copy.deepcopy(model).eval().requires_grad_(True)
    weights = {name: value for name, value in twin.named_parameters() if value.shape[:1] == (num_classes,)}
    matrices = [name for name, value in weights.items() if value.dim() == 2]
    if not matrices or num_classes < 2:
        return None
    like = next(iter(weights.values()))
    draws = torch.Generator().manual_seed(0)
    sizes = torch.logspace(-1, 1, PROBES).reshape(-1, *[1] * len(input_shape))
    # Mostly positive, as pictures are: their features then point the way that real ones do.
    probes = (sizes * (1 + torch.randn((PROBES, *input_shape), generator=draws))).to(like)
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
            bias_value = None if bias_name is None else weights[bias_name].detach()
            return LogitLayer(name, bias_name, features, weights[name].detach(), bias_value)
    return None


def _features(outputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    rows = []
    wanted = [weight] if bias is None else [weight, bias]
    gaps = outputs[:, 0] - outputs[:, 1]
    for example in range(len(outputs)):
        slope, *of_bias = torch.autograd.grad(gaps[example], wanted, retain_graph=True, allow_unused=True)
        if slope is None or bool(slope[2:].any()) or bool((slope[0] + slope[1]).any()):
            return None
        if any(unit is None or unit[:2].tolist() != [1.0, -1.0] or bool(unit[2:].any()) for unit in of_bias):
            return None
        rows.append(slope[0])
    features = torch.stack(rows).detach()
    shift = 0.0 if bias is None else (bias[0] - bias[1]).detach()
    left = gaps.detach() - features @ (weight[0] - weight[1]).detach() - shift
    scale = outputs.detach().abs().max().clamp_min(1e-12)
    return features if float(left.abs().max() / scale) < 1e-3 else None


def check_sign(
    update: Mapping[str, Tensor], layer: LogitLayer | None, num_examples: int | None, counters: Mapping[str, float]
) -> SignCheck:
    """Check whether the update points as a gradient does.

    ``counters`` are the steps that BatchNorm layers counted, after minus before as the given sign has it: training
    counts upwards.
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
    rows = head_rows(update, layer)
    if not bool(torch.isfinite(rows[0]).all()):
        return _open("the last layer has NaN or infinite entries")
    numbers = row_numbers(rows, layer)
    if numbers is None:
        return _open("the last layer has no bias and its features may have either sign")
    answer = weigh_signs(numbers, row_deviation(rows[0]) + layer.rounding, num_examples)
    # Where the examples are learnt already, weight decay is all that moves the weights, and it has signs of its own.
    decayed = without_decay(rows, layer)
    other = weigh_signs(row_numbers(decayed, layer), row_deviation(decayed[0]) + layer.rounding, num_examples)
    if other.answer != answer.answer:
        return _open("without what may be weight decay the last layer answers differently")
    return answer


#: Rows of the last layer's weight, and its bias where it has one; float64.
Rows = tuple[Tensor, Tensor | None]


def head_rows(tensors: Mapping[str, Tensor], layer: LogitLayer) -> Rows:
    bias = None if layer.bias_name is None else tensors.get(layer.bias_name)
    return tensors[layer.weight_name].detach().double().cpu(), None if bias is None else bias.detach().double().cpu()


def without_decay(rows: Rows, layer: LogitLayer) -> Rows:
    """Take off the rows' part along the weights themselves."""
    weight, bias = (None if value is None else value.detach().double().cpu() for value in (layer.weight, layer.bias))
    assert weight is not None
    share = float((rows[0] * weight).sum() / weight.square().sum().clamp_min(1e-300))
    moved = rows[1] if rows[1] is None or bias is None else rows[1] - share * bias
    return rows[0] - share * weight, moved


def row_deviation(weight: Tensor) -> float:
    """Return the deviation of one entry: the rows add up to zero but for noise, and a sum of C has C times the
    variance.

    >>> row_deviation(torch.tensor([[1.0, -2.0], [-1.0, 2.0]]))
    0.0
    """
    return float(weight.sum(0).square().mean().div(len(weight)).sqrt())


def row_numbers(rows: Rows, layer: LogitLayer) -> Tensor | None:
    """Return t_k for each class, along a direction of length one."""
    weight, bias = rows
    direction = layer.direction
    if direction is None:
        return bias
    along = weight @ direction.cpu()
    if bias is None:
        return along
    # (f, 1) along (length x direction, 1): the direction that a usual feature itself has.
    length = float(layer.features.double().norm(dim=1).mean()) or 1.0
    return (along * length + bias) / math.hypot(length, 1.0)


def weigh_signs(numbers: Tensor | None, deviation: float, num_examples: int) -> SignCheck:
    """Answer from the numbers t of all classes, of which noise has moved each by its ``deviation``.

    >>> one_example = torch.tensor([0.1, 0.2, -0.5, 0.2])
    >>> weigh_signs(one_example, 0.0, 1).answer, weigh_signs(-one_example, 0.0, 1).answer
    ('right', 'wrong')
    >>> weigh_signs(one_example, 0.1, 1).answer, weigh_signs(one_example, 0.0, 3).answer
    ('cannot be told', 'cannot be told')
    """
    assert numbers is not None
    most = min(num_examples, len(numbers))
    size = float(numbers.abs().sum()) / 2
    ordered = numbers.sort().values
    surplus = float(-ordered[:most].clamp(max=0).sum() - ordered[-most:].clamp(min=0).sum())
    floor = max(DEVIATIONS * deviation, SURPLUS * size / len(numbers))
    positive, negative = int((numbers > floor).sum()), int((numbers < -floor).sum())
    examples = f"{num_examples} example{'s' if num_examples > 1 else ''}"
    if positive > most and negative > most:
        facts = f"of {len(numbers)} classes {negative} go down and {positive} go up in the last layer"
        return _open(f"{facts}: this is no gradient of cross-entropy of {examples}")
    if abs(float(numbers.sum())) > DEVIATIONS * deviation * math.sqrt(len(numbers)) + SURPLUS * size:
        # Adam's steps do not add up to zero, but have the signs of gradients: more rows than examples decide.
        surplus = size * ((positive > most) - (negative > most))
    noise = DEVIATIONS * deviation * math.sqrt(2 * most)
    if abs(surplus) <= max(noise, SURPLUS * size):
        why = "the noise is too large" if noise > SURPLUS * size else "both signs are possible"
        return _open(f"with {examples} and {len(numbers)} classes {why} in the last layer")
    first, second = ("negative", "positive") if surplus > 0 else ("positive", "negative")
    facts = f"the {most} most {first} rows of the last layer outweigh the {most} most {second} ones"
    if most == 1:
        facts = f"the most {first} row of the last layer outweighs the most {second} one"
    if surplus > 0:
        return SignCheck("right", f"{facts}, as it must be with {examples}")
    return SignCheck("wrong", f"{facts}, which cannot be with {examples}")


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
