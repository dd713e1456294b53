"""Begin a peel at a convolution that was factored: the scale of each image, and the derivatives around the layer.

What was factored are the images of all local steps of a client at once, in no order. Each step's weights follow from
what the steps before it changed, so that the scales fit the bias gradient in front in the right order alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Container, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.convolution_equations import gradient_rows
from leakscope.equations.convolution_factor import ConvolutionFactors, Geometry, factor_convolution, most_images
from leakscope.equations.local_networks import LocalNetworks
from leakscope.equations.non_negative import solve_non_negative
from leakscope.equations.peel_state import PeelState, active, rectified
from leakscope.equations.robust_solve import robust_solve
from leakscope.network.gates import GatedNetwork, WeightedLayer, padding_of

#: Share of a convolution's channels up to which its factors are well conditioned.
ROOMY = 0.6
#: Share of the largest singular value below which inputs do not tell the derivatives behind them, and what the
#: equations of these may leave.
LIFTED, TOLD = 1e-5, 1e-4
#: What the factor of each image may leave of the bias gradient that tells it.
SCALED = 1e-3
#: Rounds in which factors of a noisy gradient are refined: each takes less off than the one before.
REFINEMENTS = 5
#: Share of the smallest singular value that noise is, above which factors are refined.
BLURRED = 1e-4
#: Orders of the images of all steps that are tried: seconds at full width.
MOST_ORDERS = 256
#: What keeps a layer's gradient from telling by itself what more images are: the batch has more places than there are
#: channels; no ReLU is in front; the others are what the layer is.
StartLimit = Literal["places", "relu", "padding", "kernel", "dilation", "stride", "dense", "frozen"]


def told_alone(
    network: GatedNetwork | LocalNetworks, layer: WeightedLayer, names: Container[str]
) -> tuple[int, StartLimit]:
    """Return of how many images a layer's gradient tells by itself what it reads, and what limits it.

    ``names``: the parameters of the update.
    """
    module = layer.module
    if layer.weight_name not in names:
        return 0, "frozen"
    if not isinstance(module, nn.Conv2d):
        return 0, "dense"
    if {*module.stride} != {1}:
        return 0, "stride"
    if {*module.dilation} != {1}:
        return 0, "dilation"
    if min(module.kernel_size) < 2:
        return 0, "kernel"
    geometry, (before, after) = geometry_of(network, layer), padding_of(module)
    if before != after or not geometry.tells_places:
        return 0, "padding"
    if not rectified(network, network.steps[layer.step].sources[0]):
        return 0, "relu"
    return most_images(geometry, module.in_channels, module.out_channels), "places"


def geometry_of(network: GatedNetwork | LocalNetworks, layer: WeightedLayer) -> Geometry:
    height, width = network.steps[network.steps[layer.step].sources[0]].shape[1:]
    (above, beside), _ = padding_of(layer.module)
    rows, columns = layer.module.weight.shape[2:]
    return Geometry(kernel=(rows, columns), padding=(above, beside), size=(height, width))


def startable(network: LocalNetworks, gradients: Mapping[str, Tensor], images: int) -> list[WeightedLayer]:
    """List convolutions that can be factored, the lowest first that has channels to spare: fewer layers lie below."""
    found = []
    for layer in network.layers:
        if images <= told_alone(network, layer, gradients)[0]:
            source = network.steps[layer.step].sources[0]
            fill = images * math.prod(network.steps[source].shape[1:]) / layer.module.weight.shape[1]
            found.append((fill > ROOMY, layer.step if fill <= ROOMY else -layer.step, layer))
    return [layer for *_, layer in sorted(found, key=lambda one: one[:2])]


def refine(layer: WeightedLayer, gradient: Tensor, found: ConvolutionFactors) -> ConvolutionFactors:
    """Solve for derivatives and inputs in turn, each from the other: what noise leaves of factors falls to a third."""
    inputs, signals = found.inputs, found.signals
    images, channels, *size = inputs.shape
    outputs = signals.shape[2:]
    kernels = gradient.double().flatten(2)
    for _ in range(REFINEMENTS):
        inputs = inputs / inputs.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
        patches = layer.patches(inputs).transpose(0, 1).flatten(1)
        signals = torch.linalg.lstsq(patches, kernels.flatten(1).T).solution.T
        signals = signals.reshape(-1, images, *outputs).transpose(0, 1)
        matrix = gradient_rows(layer, signals, (channels, *size))
        start, right = inputs.permute(0, 2, 3, 1).flatten(0, 2), matrix.T @ kernels.transpose(1, 2).flatten(0, 1)
        solution = solve_non_negative(matrix.T @ matrix, right, start)
        inputs = solution.reshape(images, *size, channels).permute(0, 3, 1, 2)
    # What is negative tells how large errors are.
    plain = torch.linalg.lstsq(matrix.T @ matrix, right).solution.reshape(images, *size, channels).permute(0, 3, 1, 2)
    return dataclasses.replace(found, inputs=torch.where(active(plain) > 0, inputs, plain), signals=signals)


def factor_layer(
    network: GatedNetwork, gradients: Mapping[str, Tensor], layer: WeightedLayer, images: int, noise: float
) -> ConvolutionFactors:
    """Factor a layer's gradient; NotApplicable where its certificates do not hold."""
    geometry = geometry_of(network, layer)
    found = factor_convolution(
        gradients[layer.weight_name], geometry.size, padding=geometry.padding, images=images, noise=noise
    )
    if not found.holds:
        facts = f"gap {found.gap:.0e}, consistency {found.consistency:.0e}, negative {found.negative:.0e}"
        raise NotApplicable(f"its factors do not hold ({facts})")
    return refine(layer, gradients[layer.weight_name], found) if found.blur > BLURRED else found


def begin(state: PeelState, layer: WeightedLayer, found: ConvolutionFactors) -> None:
    """Begin at a layer that was factored; NotApplicable where this does not say enough of what is around it."""
    steps, source = state.network.steps, state.network.steps[layer.step].sources[0]
    beside = f"the input of {steps[layer.step].name!r} also goes past it"
    state.signals[layer.step], state.values[source] = found.signals, found.inputs
    norm = state.norm_behind(layer.step)
    if norm is None:
        state.climb(layer.step)
    past = any(reader not in state.signals for reader in state.readers[source])
    if past and (norm is not None or len(state.network) > 1):
        raise NotApplicable(beside)
    if len(state.network) > 1:
        _order_steps(state, layer)
    if steps[source].kind == "relu":
        state.gates[source] = active(state.values[source])
    sums, told = _sums_behind(state, layer) if past else _sums_in_front(state, source)
    factor, left = _scales(sums, told)
    if not left < SCALED or not bool((factor > 0).all()):
        raise NotApplicable(f"the scale of each image leaves {left:.1e} of the bias gradient")
    factor = factor.reshape(-1, 1, 1, 1)
    state.signals = {number: value * factor for number, value in state.signals.items()}
    state.values[source] = state.values[source] / factor
    state.settle(layer, state.gated(source, state.values[source]), derived=True)
    if norm is not None:
        # The statistics are those of the batch, so that they are known once the scale of each image is.
        state.signals[norm] = state.normalised(layer).signal_above(state.values[source], state.signals[layer.step])
        state.climb(norm)
    else:
        state.climb(layer.step)
        _lift(state, source)
    if any(reader not in state.signals for reader in state.readers[source]):
        raise NotApplicable(beside)
    state.pinned = set(state.signals)


def _order_steps(state: PeelState, layer: WeightedLayer) -> None:
    """Put the images of each step where its network takes them; NotApplicable where no order fits."""
    source, steps = state.network.steps[layer.step].sources[0], len(state.network)
    signals, values = state.signals[layer.step], state.values[source]
    best: tuple[float, Tensor] | None = None
    for order in _orders(_copies(values, steps)):
        state.signals = {layer.step: signals[order]}
        state.values[source] = values[order]
        state.settle(layer, state.gated(source, values[order]), derived=True)
        _, left = _scales(*_sums_in_front(state, source))
        if best is None or left < best[0]:
            best = left, order
    assert best is not None
    state.signals, state.values[source] = {layer.step: signals[best[1]]}, values[best[1]]
    state.settle(layer, state.gated(source, values[best[1]]), derived=True)


def _copies(values: Tensor, steps: int) -> Tensor:
    """Return the copies of each image (images, steps): what local steps change is less than what images differ in."""
    rows = F.normalize(values.flatten(1), dim=1)
    alike, left, found = rows @ rows.T, list(range(len(rows))), []
    while left:
        nearest = sorted(left, key=lambda one: -float(alike[left[0], one]))[:steps]
        found.append(nearest)
        left = [one for one in left if one not in nearest]
    return torch.tensor(found)


def _orders(copies: Tensor) -> Iterator[Tensor]:
    """Yield orders of the images, first step first, for each way to tell the steps of the copies."""
    images, steps = copies.shape
    if math.factorial(steps) ** images > MOST_ORDERS:
        raise NotApplicable(f"too many orders of {steps} steps on {images} images")
    for ways in itertools.product(itertools.permutations(range(steps)), repeat=images):
        yield torch.stack([row[list(way)] for row, way in zip(copies, ways, strict=True)], 1).flatten()


def _lift(state: PeelState, source: int) -> None:
    """Find the derivatives at layers behind a factored one, whose inputs the forward pass tells.

    What a block adds to its input comes back to both: without this, nothing below a bottleneck block is known.
    """
    if len(state.network) > 1:
        return  # weights of later steps are not known there
    ahead = state.network.onwards(source, state.values[source] * active(state.values[source]))
    for layer in state.network.layers:
        read = state.network.steps[layer.step].sources[0]
        if layer.step in state.signals or read == source or read not in ahead.values:
            continue
        if not isinstance(layer.module, nn.Conv2d) or layer.weight_name not in state.gradients:
            return
        patches = layer.patches(ahead.values[read])
        images, size, places = patches.shape
        if images * places > size:
            return
        matrix = patches.transpose(0, 1).reshape(size, images * places)
        wanted = state.gradients[layer.weight_name].double().flatten(1).T
        signal = torch.linalg.lstsq(matrix, wanted, driver="gelsd").solution.T
        left = float((matrix @ signal.T - wanted).norm() / wanted.norm().clamp_min(1e-300))
        if not left < TOLD or int(torch.linalg.matrix_rank(matrix, rtol=LIFTED)) < images * places:
            return
        shape = state.network.steps[layer.step].shape
        state.signals[layer.step] = signal.reshape(-1, images, *shape[1:]).transpose(0, 1)
        state.climb(layer.step)
        state.values[read] = ahead.values[read]
        told = {number: gate for number, gate in ahead.gates.items() if number <= read}
        state.gates.update(told)
        state.seen.update(told)


def _sums_in_front(state: PeelState, source: int) -> tuple[Tensor, list[Tensor]]:
    """Return sums of derivatives (channels, images) in front of a ReLU, and the gradients of biases there."""
    # A max pooling passes each derivative on to one place: the sums behind it are those in front.
    relu = state.network.relu_behind(source)
    assert relu is not None  # or it would not have been factored
    sums = (state.backward(source) * active(state.values[source])).flatten(2).sum(2).T
    return sums, state.bias_gradients(state.network.steps[relu].sources)


def _sums_behind(state: PeelState, layer: WeightedLayer) -> tuple[Tensor, list[Tensor]]:
    """Return the same behind a layer: its own bias, or that of the BatchNorm that reads it."""
    for number in (layer.step, *state.readers[layer.step]):
        told = state.gradients.get(f"{state.network.steps[number].name}.bias")
        if told is not None and number in state.signals:
            return state.signals[number].flatten(2).sum(2).T, [told]
    return torch.zeros(()), []


def _scales(sums: Tensor, told: list[Tensor]) -> tuple[Tensor, float]:
    """Find the factor of each image: biases have the sums of the derivatives as gradients; return also what is left.

    Units within noise of zero may have a wrong mask, which spoils their channel.
    """
    if not told:
        raise NotApplicable("no bias beside it tells the scale of each image")
    factor, _, left = robust_solve(sums, told[0].double()[:, None], torch.arange(len(sums)))
    return factor[:, 0], left
