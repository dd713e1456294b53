"""Count how many images the gradient of each layer determines by itself, and how far down equations last from there.

Counts only, for networks as head-first peels them (docs/exact-inversion.md), and by the functions that it uses
itself. A convolution of stride 1 behind a ReLU is factored while the batch has no more places than the layer has input
channels. Below a layer that is known, the input of a layer follows by least squares while it has a little more
equations (outputs times kernel size) than places; where a stride splits the places into lattices, in each of them. A
head tells as many examples as it has classes, but one; a patch embedding with learned positions one image, and so does
a 1x1 convolution in front of a ReLU and a mean over few places.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.binary_factor import MOST_COLUMNS
from leakscope.equations.convolution_equations import LEAST_EQUATIONS, equations, every_place_is_read
from leakscope.equations.peel_start import StartLimit, told_alone
from leakscope.equations.peel_top import find_top
from leakscope.network.gates import GatedNetwork, WeightedLayer, read_gated
from leakscope.network.patches import find_patches
from leakscope.network.recorder import Call, probe, probe_input

#: What limits how many images a layer's gradient determines: what StartLimit says of convolutions; the layer is a head,
#: a patch embedding with learned positions, or reads tokens; masks of one image are all that is told in front of a
#: mean; groups; the model is not peeled, or the layer is not on the way to its head.
Limit = Literal[StartLimit, "head", "positions", "tokens", "masks", "groups", "model"]


@dataclass(frozen=True, kw_only=True)
class LayerReach:
    """What one layer's gradient determines, in images.

    ``alone``: of how many it gives the layer's input by itself, and ``limit`` what keeps it from more. ``below``:
    of how many, once what comes back to the layer's output is known; ``pooled`` says that it is zero since nobody knows
    which places a pooling behind the layer passed on. ``units`` are the input channels, for a linear layer the outputs;
    ``places`` those of one image, of which the layer ``reads`` so many numbers. ``reason``: why it is not
    peeled.
    """

    name: str
    kind: str
    alone: int
    below: int
    limit: Limit
    units: int
    places: int
    reads: int = 0
    pooled: bool = False
    reason: str = ""


def layer_reaches(model: nn.Module, input_shape: tuple[int, ...]) -> tuple[LayerReach, ...]:
    """Return what each convolution and linear layer determines, in the order in which they run.

    >>> layers = nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, 2, 1), nn.Flatten(), nn.Linear(4, 3)
    >>> net = nn.Sequential(*layers)
    >>> [(layer.name, layer.alone, layer.below, layer.limit) for layer in layer_reaches(net, (1, 2, 2))]
    [('0', 0, 16, 'relu'), ('2', 0, 3, 'stride'), ('4', 2, 3, 'head')]
    """
    x = probe_input(model, input_shape)
    calls = probe(model, torch.rand(x.shape, generator=torch.Generator().manual_seed(0)).to(x)).calls
    calls = tuple(call for call in calls if isinstance(call.module, nn.Linear | nn.Conv2d))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    network: GatedNetwork | str = "it has no layers"
    try:
        network = read_gated(model, input_shape, calls[-1].name if calls else "")
    except NotApplicable as error:
        network = str(error)
    try:
        patches = find_patches(model, input_shape, sorted(trained))
        embedding, tokens = patches.layer, patches.tokens
    except (NotApplicable, RuntimeError):
        embedding, tokens = None, 0
    found = []
    for call in calls:
        one = _reach(call, network, trained, last=call is calls[-1])
        if call.name == embedding and one.limit != "frozen":
            units = len(call.module.weight)  # type: ignore[arg-type]
            alone = int(tokens < units)
            one = _facts(call, alone=alone, below=alone, limit="positions", units=units, places=tokens)
        found.append(one)
    return tuple(found)


def lowest_layer(layers: Sequence[LayerReach], batch: int) -> tuple[str, str] | None:
    """Return where a peel of so many images begins, and the lowest layer whose input it reaches; None without any.

    >>> facts = {"kind": "Conv2d", "limit": "places", "units": 8, "places": 2}
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


def _reach(call: Call, network: GatedNetwork | str, trained: Collection[str], *, last: bool) -> LayerReach:
    module, places = call.module, _places(call)
    assert isinstance(module, nn.Linear | nn.Conv2d)
    frozen = not all(parameter.requires_grad for parameter in module.parameters())
    if frozen:
        return _facts(call, limit="frozen")
    if isinstance(module, nn.Linear):
        if places > 1:
            return _facts(call, limit="tokens")
        alone = max(1, module.out_features - (1 if module.bias is not None else 2)) if last else 0
        return _facts(call, alone=alone, below=module.out_features, limit="head" if last else "dense")
    if module.groups > 1:
        return _facts(call, limit="groups")
    layer = None
    if not isinstance(network, str):
        layer = next((one for one in network.layers if network.steps[one.step].name == call.name), None)
    if isinstance(network, str) or layer is None:
        reason = network if isinstance(network, str) else "the layer is not on the way to the head"
        return _facts(call, limit="model", reason=reason)
    alone, limit = told_alone(network, layer, trained)
    if _pooled(network, layer):
        if _tells_masks(network, layer, trained):
            return _facts(call, alone=1, below=1, limit="masks", pooled=True)
        return _facts(call, alone=alone, below=alone, limit=limit, pooled=True)
    source = network.steps[layer.step].sources[0]
    readers = [one for one in network.layers if network.steps[one.step].sources[0] == source]
    convolutions = [one for one in readers if one.weight_name in trained and isinstance(one.module, nn.Conv2d)]
    outputs = [network.steps[one.step].shape for one in convolutions]
    below = 0
    if every_place_is_read(convolutions, outputs, network.steps[source].shape):
        below = int(equations([one.module for one in convolutions]) / LEAST_EQUATIONS) // places
    return _facts(call, alone=alone, below=max(alone, below), limit=limit)


def _facts(
    call: Call,
    *,
    limit: Limit,
    alone: int = 0,
    below: int = 0,
    units: int | None = None,
    places: int | None = None,
    pooled: bool = False,
    reason: str = "",
) -> LayerReach:
    module = call.module
    assert isinstance(module, nn.Linear | nn.Conv2d)
    own = module.in_channels if isinstance(module, nn.Conv2d) else module.out_features
    return LayerReach(
        name=call.name,
        kind=type(module).__name__,
        alone=alone,
        below=below,
        limit=limit,
        units=own if units is None else units,
        places=_places(call) if places is None else places,
        reads=call.inputs[0].numel(),
        pooled=pooled,
        reason=reason,
    )


def _places(call: Call) -> int:
    """Return the places of one image at which the layer's weights read."""
    shape = call.inputs.shape[1:]
    return math.prod(shape[1:] if isinstance(call.module, nn.Conv2d) else shape[:-1])


def _tells_masks(network: GatedNetwork, layer: WeightedLayer, trained: Collection[str]) -> bool:
    """Return whether a layer's gradient tells the masks of the ReLU behind it, of one image."""
    try:
        top, _ = find_top(network, trained)
    except NotApplicable:
        return False
    places = math.prod(network.steps[layer.step].shape[1:])
    return top is layer and places <= min(MOST_COLUMNS, *layer.module.weight.shape[:2])


def _pooled(network: GatedNetwork, layer: WeightedLayer) -> bool:
    """Return whether a pooling behind a layer hides which units passed: no other layer reads what was pooled.

    Behind a sum, what comes back follows from the other branch.
    """
    waiting = [layer.step]
    while waiting:
        number = waiting.pop()
        readers = [reader for reader, step in enumerate(network.steps) if number in step.sources]
        if any(network.steps[reader].kind == "weighted" for reader in readers):
            continue
        for reader in readers:
            step = network.steps[reader]
            if step.kind == "max" or (step.kind == "affine" and step.module is None):
                return True
            if step.kind != "add":
                waiting.append(reader)
    return False
