"""Which of the published propositions speak of a given model, and what they say of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from leakscope.limits.counting import Filters, HiddenUnits, SingleExample, filters, hidden_units, single_example
from leakscope.network.layers import Structure


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
    one: SingleExample | str
    two: HiddenUnits | str
    first, hidden, features = linear_first(net), one_hidden_layer(net), math.prod(input_shape)
    one = first if isinstance(first, str) else single_example(batch, first.out_features, net.first.has_bias)
    two = (
        hidden
        if isinstance(hidden, str)
        else _unobserved(net) or hidden_units(batch, features, net.outputs, hidden.out_features)
    )
    three = _one_convolution(net, input_shape, batch)
    return _apply("Proposition 1", one), _apply("Proposition 2", two), _apply("Proposition 3", three)


def _apply(name: str, result: SingleExample | HiddenUnits | Filters | str) -> Proposition:
    if isinstance(result, str):
        return Proposition(name, False, None, f"does not apply because {result}")
    return Proposition(name, True, result.met, result.statement, dataclasses.asdict(result))


def linear_first(net: Structure) -> nn.Linear | str:
    """The first layer where it is linear, reads the input itself and is in the update; else why it is not so."""
    first = net.linear_first
    if isinstance(first, str):
        return first
    assert isinstance(first.module, nn.Linear)
    if not first.module.weight.requires_grad:
        return f"the first layer {first.name!r} is frozen, so the update has no gradient of it"
    return first.module


def one_hidden_layer(net: Structure) -> nn.Linear | str:
    """The hidden layer of two linear ones; else why the model is something else."""
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
    """Why a count, which takes every weight and bias for observed, does not hold; None where it does."""
    for layer in net.layers:
        if not layer.trainable or not layer.has_bias:
            return f"layer {layer.name!r} is frozen or has no bias, and the count takes both gradients for observed"
    return None
