"""How many images the gradient of each layer determines by itself, and how far down equations last from there.

Counts only, for networks as head-first peels them (docs/strength.md). A convolution of stride 1 with padding is
factored while the batch has no more places than the layer has input channels. Below a layer that is known, the input of
a layer follows by least squares while it has 1.2 times as many equations (outputs times kernel size) as places; where
a stride splits the places into lattices, in each of them. A head tells as many examples as it has classes, but one; a
patch embedding with learned positions one image.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.convolution_equations import LEAST_EQUATIONS, equations
from leakscope.network.patches import find_patches
from leakscope.network.recorder import Call, probe, probe_input


@dataclass(frozen=True, kw_only=True)
class LayerReach:
    """What one layer's gradient determines, in images.

    ``alone``: of how many images it gives the layer's input by itself. ``below``: of how many, once what comes back to
    the layer's output is known; zero behind attention and in front of pooling, which are not peeled. ``reason`` says
    what limits ``alone``.
    """

    name: str
    kind: str
    alone: int
    below: int
    reason: str


def layer_reaches(model: nn.Module, input_shape: tuple[int, ...]) -> tuple[LayerReach, ...]:
    """Return what each convolution and linear layer determines, in the order in which they run.

    >>> layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1), nn.Flatten(), nn.Linear(4, 3)
    >>> net = nn.Sequential(*layers)
    >>> [(layer.name, layer.alone, layer.below) for layer in layer_reaches(net, (1, 2, 2))]
    [('0', 0, 16), ('2', 0, 3), ('4', 2, 3)]
    """
    x = probe_input(model, input_shape)
    calls = probe(model, torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x)).calls
    calls = tuple(call for call in calls if isinstance(call.module, nn.Linear | nn.Conv2d))
    readers: dict[int, list[nn.Linear | nn.Conv2d]] = defaultdict(list)
    for call in calls:  # a 1x1 shortcut reads what the convolution beside it reads
        assert isinstance(call.module, nn.Linear | nn.Conv2d)
        readers[id(call.inputs)].append(call.module)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    try:
        patches = find_patches(model, input_shape, trained)
        embedding, tokens = patches.layer, patches.tokens
    except (NotApplicable, RuntimeError):
        embedding, tokens = None, 0
    found = []
    for place, call in enumerate(calls):
        alone, reason = _alone(call, last=place == len(calls) - 1)
        if call.name == embedding:
            units = len(call.module.weight)  # type: ignore[arg-type]
            alone = int(tokens < units)
            reason = f"learned positions; {tokens} tokens, {units} units"
        if not all(parameter.requires_grad for parameter in call.module.parameters()):
            alone, reason = 0, "frozen"
        tokens_read = isinstance(call.module, nn.Linear) and _places(call) > 1
        below = 0 if reason == "frozen" or tokens_read else _equations(readers[id(call.inputs)]) // _places(call)
        if place + 1 < len(calls) and _pooled(call, calls[place + 1]):
            below = 0  # where the maxima came from is not known
        kind = type(call.module).__name__
        found.append(LayerReach(name=call.name, kind=kind, alone=alone, below=max(alone, below), reason=reason))
    return tuple(found)


def lowest_layer(layers: Sequence[LayerReach], batch: int) -> tuple[str, str] | None:
    """Return where a peel of so many images begins, and the lowest layer whose input it reaches; None without any.

    >>> facts = {"kind": "Conv2d", "reason": ""}
    >>> counts = enumerate([(0, 1), (0, 8), (4, 9)])
    >>> layers = [LayerReach(name=str(n), alone=a, below=b, **facts) for n, (a, b) in counts]
    >>> lowest_layer(layers, 1), lowest_layer(layers, 2), lowest_layer(layers, 5)
    (('2', '0'), ('2', '1'), None)
    """
    best: tuple[int, int] | None = None
    for start in (place for place, layer in enumerate(layers) if layer.alone >= batch):
        end = start
        # Between dense layers and convolutions lies pooling, whose masks are not known.
        while end > 0 and layers[end - 1].below >= batch and layers[end - 1].kind == layers[start].kind:
            end -= 1
        if best is None or end < best[1]:
            best = start, end
    return None if best is None else (layers[best[0]].name, layers[best[1]].name)


def _pooled(call: Call, reader: Call) -> bool:
    """Return whether the next convolution reads smaller maps than a convolution gives: pooling lies between."""
    maps = isinstance(call.module, nn.Conv2d) and isinstance(reader.module, nn.Conv2d)
    return maps and math.prod(reader.inputs.shape[2:]) < math.prod(call.output.shape[2:])


def _places(call: Call) -> int:
    """Return the places of one image at which the layer's weights read."""
    shape = call.inputs.shape[1:]
    return math.prod(shape[1:] if isinstance(call.module, nn.Conv2d) else shape[:-1])


def _equations(readers: Sequence[nn.Linear | nn.Conv2d]) -> int:
    """Count the equations for what layers read, as a peel counts them where it is made of convolutions."""
    if all(isinstance(layer, nn.Conv2d) and layer.groups == 1 for layer in readers):
        return int(equations(readers) / LEAST_EQUATIONS)
    kernels = (math.prod(one.kernel_size) // one.groups if isinstance(one, nn.Conv2d) else 1 for one in readers)
    return sum(len(one.weight) * kernel for one, kernel in zip(readers, kernels, strict=True))


def _alone(call: Call, *, last: bool) -> tuple[int, str]:
    layer, places = call.module, _places(call)
    if isinstance(layer, nn.Linear):
        if last and places == 1:
            known = max(1, layer.out_features - (1 if layer.bias is not None else 2))
            return known, f"head of {layer.out_features} classes"
        return 0, "no head" if places == 1 else f"reads {places} tokens"
    assert isinstance(layer, nn.Conv2d)
    same = call.output.shape[2:] == call.inputs.shape[2:]
    if layer.groups > 1 or max(layer.stride) > 1 or min(layer.kernel_size) < 3 or not same:
        return 0, "needs stride 1, a kernel of 3 or more, padding, and no groups"
    return layer.in_channels // places, f"{layer.in_channels} channels, {places} places"
