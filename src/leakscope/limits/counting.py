"""Equations against unknowns: the three propositions of "What Can We Learn from Gradients?" as calculators.

Jia Qian, Lars Kai Hansen, 2021. Propositions 2 and 3 count the hidden features, the output gradients and the labels as
free unknowns although the net ties them to the inputs, so a condition neither excludes a recovery nor proves it: the
rank in :mod:`leakscope.limits.jacobian` decides. The formulas are derived again from the counts, because the printed
ones lost a term and a division. Proposition 3 counts one set of features for the whole batch although each image has
its own; with those the batch size cancels, so its factor B is a rule of thumb.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from leakscope.contracts.checks import is_whole
from leakscope.contracts.errors import UserError
from leakscope.network.layers import Structure


@dataclass(frozen=True)
class SingleExample:
    """Proposition 1: one example behind a first linear layer with a bias is recovered exactly."""

    batch: int
    hidden: int
    bias: bool
    met: bool
    statement: str


@dataclass(frozen=True)
class HiddenUnits:
    """Proposition 2: how many hidden units a net with one hidden layer needs to give a batch away.

    ``bound`` is exact, ``needed`` the next whole number (None where no number is enough), ``rule`` the limit for large
    inputs, about one unit an example; ``met`` speaks of the exact bound, ``met_by_rule`` of the rule.
    """

    batch: int
    features: int
    classes: int
    hidden: int
    equations: int
    unknowns: int
    bound: float
    needed: int | None
    rule: int
    met: bool
    met_by_rule: bool
    statement: str


@dataclass(frozen=True)
class Filters:
    """Proposition 3: filters and features (``side_bound``) that a net of one convolution and a linear layer needs."""

    batch: int
    side: int
    channels: int
    classes: int
    filters: int
    output_side: int
    bound: float
    needed: int
    features: int
    side_bound: float
    side_met: bool
    met: bool
    statement: str


def single_example(batch: int, hidden: int, bias: bool = True) -> SingleExample:
    """Proposition 1: B = 1 and at least one unit with a bias, whatever the number of classes.

    >>> single_example(batch=1, hidden=1).met, single_example(batch=2, hidden=1).met
    (True, False)
    """
    _positive(batch=batch, hidden=hidden)
    met = batch == 1 and bias
    if met:
        statement = "One example behind a first linear layer with a bias is recovered exactly, in closed form."
    elif batch > 1:
        statement = f"The closed form holds for one example; this batch has {batch}."
    else:
        statement = "The closed form needs the gradient of a bias; the first linear layer has none."
    return SingleExample(batch, hidden, bias, met, statement)


def hidden_units_bound(batch: int, features: int, classes: int) -> float:
    """(B(d + n2) - n2) / (d + n2 + 1 - B), the least n1; infinite from B = d + n2 + 1 on.

    >>> [round(hidden_units_bound(b, 1024, 10), 3) for b in (1, 2, 4, 8, 16)]
    [0.99, 1.992, 4.002, 8.045, 16.226]
    >>> hidden_units_bound(7, features=4, classes=2)
    inf
    """
    _positive(batch=batch, features=features, classes=classes)
    slack = features + classes + 1 - batch
    if slack <= 0:  # a unit brings d + n2 + 1 equations and B unknowns: each makes the count worse or leaves it
        return math.inf
    return (batch * (features + classes) - classes) / slack


def hidden_units(batch: int, features: int, classes: int, hidden: int) -> HiddenUnits:
    """Proposition 2: n2 + n1 n2 + n1 + n1 d equations against B n2 + n1 B + B d unknowns.

    >>> four = hidden_units(batch=4, features=1024, classes=10, hidden=4)
    >>> four.needed, four.rule, four.met, four.met_by_rule
    (5, 4, False, True)
    >>> hidden_units(batch=4, features=1024, classes=10, hidden=5).met
    True
    """
    bound = hidden_units_bound(batch, features, classes)
    _positive(hidden=hidden)
    equations = classes + hidden * classes + hidden + hidden * features
    unknowns = batch * classes + hidden * batch + batch * features
    needed = None if math.isinf(bound) else math.ceil(bound)
    met = equations >= unknowns
    if needed is None:
        statement = f"No number of hidden units gives away {batch} examples: the batch is too large by the count."
    else:
        statement = (
            f"{batch} examples need at least {bound:.3f}, that is {needed}, hidden units (about {batch} by the rule "
            f"of thumb); there are {hidden}: {'enough' if met else 'too few'}."
        )
    sizes = (batch, features, classes, hidden, equations, unknowns)
    return HiddenUnits(*sizes, bound, needed, batch, met, hidden >= batch, statement)


def output_side(side: int, kernel: int, padding: int, stride: int) -> int:
    """d' = floor((d - k + 2p) / s) + 1, the side of a convolution's output.

    >>> output_side(32, kernel=5, padding=2, stride=2)
    16
    """
    _positive(side=side, kernel=kernel, stride=stride)
    if padding < 0:
        raise UserError(f"padding: expected 0 or more, got {padding}")
    result = (side - kernel + 2 * padding) // stride + 1
    if result < 1:
        raise UserError(f"a {kernel}x{kernel} kernel leaves nothing of side {side} with padding {padding}")
    return result


def filters_bound(batch: int, side: int, kernel: int, padding: int, stride: int, channels: int) -> float:
    """(d / d')^2 B C, the least number of filters.

    >>> [filters_bound(b, side=32, kernel=5, padding=2, stride=2, channels=3) for b in (1, 4)]
    [12.0, 48.0]
    """
    _positive(batch=batch, channels=channels)
    return side**2 * batch * channels / output_side(side, kernel, padding, stride) ** 2


def features_bound(batch: int, classes: int) -> float:
    """n2 (B - 1) / (n2 - B), the least n1 = h d'^2 from which the last layer gives its features; infinite from B = n2.

    >>> features_bound(4, 100), features_bound(1, 10), features_bound(10, 10)
    (3.125, 0.0, inf)
    """
    _positive(batch=batch, classes=classes)
    if batch == 1:
        return 0.0
    return math.inf if batch >= classes else classes * (batch - 1) / (classes - batch)


def filters(
    batch: int, side: int, kernel: int, padding: int, stride: int, channels: int, classes: int, filters: int
) -> Filters:
    """Proposition 3: h >= (d / d')^2 B C, and h d'^2 >= n2 (B - 1) / (n2 - B).

    >>> one = filters(batch=1, side=32, kernel=5, padding=2, stride=2, channels=3, classes=100, filters=12)
    >>> one.output_side, one.needed, one.met
    (16, 12, True)
    """
    bound = filters_bound(batch, side, kernel, padding, stride, channels)
    _positive(filters=filters)
    out = output_side(side, kernel, padding, stride)
    side_bound = features_bound(batch, classes)
    features = filters * out**2
    side_met = features >= side_bound
    met = filters >= bound and side_met
    needed = math.ceil(bound)
    statement = (
        f"{batch} image{'s need' if batch > 1 else ' needs'} at least {needed} filters; there are {filters}: "
        f"{'enough' if filters >= bound else 'too few'}."
    )
    if not side_met:
        statement = f"{statement[:-1]}, and the last layer does not give its {features} features by the count."
    sizes = (batch, side, channels, classes, filters, out)
    return Filters(*sizes, bound, needed, features, side_bound, side_met, met, statement)


def _positive(**numbers: int) -> None:
    for name, value in numbers.items():
        if not is_whole(value):
            raise UserError(f"{name}: expected an integer of at least 1, got {value!r}")


@dataclass(frozen=True)
class Proposition:
    """A proposition and this model: whether it applies, and if so whether its condition is met (else None)."""

    name: str
    applies: bool
    met: bool | None
    statement: str
    numbers: Mapping[str, Any] = field(default_factory=dict, repr=False)


def propositions(net: Structure, input_shape: tuple[int, ...], batch: int) -> tuple[Proposition, ...]:
    """Propositions 1 to 3 for a model whose structure was found by running it."""
    first, hidden = linear_first(net), one_hidden_layer(net)
    one = first if isinstance(first, str) else single_example(batch, first.out_features, net.first.has_bias)
    two: HiddenUnits | str = hidden if isinstance(hidden, str) else _unobserved(net) or ""
    if not two and isinstance(hidden, nn.Linear):
        two = hidden_units(batch, math.prod(input_shape), net.outputs, hidden.out_features)
    results = (one, two, _one_convolution(net, input_shape, batch))
    return tuple(
        Proposition(f"Proposition {number}", False, None, f"does not apply because {result}")
        if isinstance(result, str)
        else Proposition(f"Proposition {number}", True, result.met, result.statement, dataclasses.asdict(result))
        for number, result in enumerate(results, start=1)
    )


def linear_first(net: Structure) -> nn.Linear | str:
    """Return the first layer where it is linear, reads the input itself and is in the update; else why not."""
    first = net.linear_first
    if isinstance(first, str):
        return first
    assert isinstance(first.module, nn.Linear)
    if not first.module.weight.requires_grad:
        return f"the first layer {first.name!r} is frozen, so the update has no gradient of it"
    return first.module


def one_hidden_layer(net: Structure) -> nn.Linear | str:
    """Return the hidden layer of two linear ones; else why the model is something else."""
    layer, last = linear_first(net), net.layers[-1].module
    if isinstance(layer, str):
        return layer
    if len(net.layers) != 2 or not isinstance(last, nn.Linear) or last.in_features != layer.out_features:
        return "the model is not two linear layers with an activation between them"
    return layer


def _one_convolution(net: Structure, input_shape: tuple[int, ...], batch: int) -> Filters | str:
    first, last = net.first.module, net.layers[-1].module
    if not isinstance(first, nn.Conv2d):
        return f"the first layer {net.first.name!r} is {net.first.kind}, not Conv2d"
    if len(net.layers) != 2 or not isinstance(last, nn.Linear):
        return "the model is not one convolution and one linear layer"
    if not net.first.reads_input:
        return f"the convolution {net.first.name!r} does not read the input itself"
    channels, height, width = input_shape
    if reason := _unobserved(net):
        return reason
    if height != width:
        return f"the images are {height}x{width}, not square"
    options = (first.kernel_size, first.stride, first.padding)
    square = all(not isinstance(pair, str) and pair[0] == pair[1] for pair in options)
    if not square or first.groups != 1 or first.dilation != (1, 1):
        return "the convolution is not square, or it is grouped, dilated or padded by name"
    kernel, padding, stride = first.kernel_size[0], int(first.padding[0]), first.stride[0]
    result = filters(batch, height, kernel, padding, stride, channels, net.outputs, first.out_channels)
    if last.in_features != result.features:
        return "there is a pooling between the convolution and the linear layer"
    return result


def _unobserved(net: Structure) -> str | None:
    """Say why a count, which takes every weight and bias for observed, does not hold; None where it does."""
    odd = next((layer.name for layer in net.layers if not layer.trainable or not layer.has_bias), None)
    if odd is None:
        return None
    return f"layer {odd!r} is frozen or has no bias, and the count takes both gradients for observed"
