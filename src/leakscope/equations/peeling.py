"""Peel a convolutional network: from one layer that is factored downwards, each input follows by least squares.

Where the derivative D at a convolution's output is known, its weight gradient is linear in its input x: for each input
channel the same matrix, with a row for each output channel and offset of the kernel. Behind a ReLU x says which units
were active, which takes D through the activation and the layer below, and so on (R-GAP's recursion; here for a whole
batch, without a head that must be solved first, and in networks with shortcuts and pooling). Units so near to zero that
rounding hides their sign spoil the equations of their own channel only: such channels are weighted down, and the
forward pass of what was solved then tells the right sign. The peel ends where equations run out. BatchNorm multiplies
each channel by a known number in eval mode; equations/batch_statistics.py has what it does in train mode.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.batch_statistics import NormalisedLayer, solve_normalised
from leakscope.equations.convolution_factor import ConvolutionFactors, factor_convolution
from leakscope.equations.robust_solve import SET_ASIDE, robust_solve, scarce_solve
from leakscope.network.gates import GatedNetwork, Step, WeightedLayer, apply_step

#: Equations for each unknown below which a layer is not solved. What is not negative has half as many unknowns, so that
#: they may be scarce; at 1.0 wrong masks are not found, and minutes pass before that is clear.
LEAST_EQUATIONS = 1.1
#: Equations for each unknown below which it counts that nothing behind a ReLU is negative.
SCARCE = 2.0
#: Share of the largest value below which values of scarce equations are errors.
SMALLEST = 2e-5
#: What scarce equations may leave: wrong masks leave hundreds of times as much as right ones.
SOLVED_SCARCE = 1e-5
#: What the equations of a layer may leave (channels set aside not counted), and the forward pass of what was solved.
SOLVED, AGREES = 1e-4, 1e-3
#: Share of a convolution's channels up to which its factors are well conditioned.
ROOMY = 0.6
#: Values behind a ReLU within this factor of the line between rounding and not may be on its other side.
DOUBTED = 100.0
#: Share of a channel's largest value within which values near its smallest count as zeros of a ReLU.
ZERO = 1e-4
#: Times that the forward pass may correct masks above and send the peel back to them.
CORRECTIONS = 8
#: Times that one ReLU may send it back: the sign of a unit within rounding of zero may change for ever.
TWICE = 2
#: Share of the largest singular value below which inputs do not tell the derivatives behind them.
LIFTED = 1e-5
#: What the factor of each image may leave of the bias gradient that tells it.
SCALED = 1e-3
#: Share of the values by which a network must differ from a homogeneous one for its forward pass to tell the factor:
#: with untrained BatchNorm it is homogeneous, and the difference is rounding (1e-9 and less).
LEAST_SLOPE = 1e-4


@dataclass(frozen=True, eq=False, kw_only=True)
class Cut:
    """What one ``step`` of the network gives (images, ...), the derivative there, and what the equations left of it."""

    step: int
    values: Tensor
    signals: Tensor
    residual: float


class Peel:
    """A peel at work: derivatives and values by step, masks by the step of their ReLU, the cuts that were reached.

    ``started`` and ``ended`` say where and why. A cut is a step through which all of the network goes.
    """

    def __init__(self, network: GatedNetwork, gradients: Mapping[str, Tensor]) -> None:
        self.network, self.gradients = network, gradients
        self.signals: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.gates: dict[int, Tensor] = {}
        self.cuts: list[Cut] = []
        self.started = self.ended = ""
        self._layers = {layer.step: layer for layer in network.layers}
        self._readers: list[list[int]] = [[] for _ in network.steps]
        for number, step in enumerate(network.steps):
            for source in step.sources:
                self._readers[source].append(number)
        self._pinned: set[int] = set()
        self._seen: set[int] = set()
        self._corrected: Counter[int] = Counter()
        self._scale_refined = False
        self._unverified: set[int] = set()

    def start(self, layer: WeightedLayer, found: ConvolutionFactors) -> None:
        """Begin at a layer that was factored; NotApplicable where this does not say enough of what is around it."""
        steps, source = self.network.steps, self.network.steps[layer.step].sources[0]
        self.signals[layer.step], self.values[source] = found.signals, found.inputs
        norm = self._norm(layer.step)
        if norm is None:
            self._climb(layer.step)
        past = any(reader not in self.signals for reader in self._readers[source])
        if past and norm is not None:
            raise NotApplicable(f"the input of {steps[layer.step].name!r} also goes past it")
        if steps[source].kind == "relu":
            self.gates[source] = active(found.inputs)
        if past:
            self._rescale(source, *self._sums_behind(layer))
        else:
            self._rescale(source, *self._sums_in_front(source))
        if norm is not None:
            # The statistics are those of the batch, so that they are known once the scale of each image is.
            self.signals[norm] = self._normalised(layer).signal_above(self.values[source], self.signals[layer.step])
            self._climb(norm)
        else:
            self._lift(source)
        if any(reader not in self.signals for reader in self._readers[source]):
            raise NotApplicable(f"the input of {steps[layer.step].name!r} also goes past it")
        self._pinned = set(self.signals)
        self.started = steps[layer.step].name

    def _lift(self, source: int) -> None:
        """Find the derivatives at layers behind a factored one, whose inputs the forward pass tells.

        What a block adds to its input comes back to both: without this, nothing below a bottleneck block is known.
        """
        ahead = self.network.onwards(source, self.values[source] * active(self.values[source]))
        for layer in self.network.layers:
            read = self.network.steps[layer.step].sources[0]
            if layer.step in self.signals or read == source or read not in ahead.values:
                continue
            if not isinstance(layer.module, nn.Conv2d) or layer.weight_name not in self.gradients:
                return
            patches = layer.patches(ahead.values[read])
            images, size, places = patches.shape
            if images * places > size:
                return
            matrix = patches.transpose(0, 1).reshape(size, images * places)
            wanted = self.gradients[layer.weight_name].double().flatten(1).T
            signal = torch.linalg.lstsq(matrix, wanted, driver="gelsd").solution.T
            left = float((matrix @ signal.T - wanted).norm() / wanted.norm().clamp_min(1e-300))
            if not left < SOLVED or int(torch.linalg.matrix_rank(matrix, rtol=LIFTED)) < images * places:
                return
            shape = self.network.steps[layer.step].shape
            self.signals[layer.step] = signal.reshape(-1, images, *shape[1:]).transpose(0, 1)
            self._climb(layer.step)
            self.values[read] = ahead.values[read]
            told = {number: gate for number, gate in ahead.gates.items() if number <= read}
            self.gates.update(told)
            self._seen.update(told)

    def _climb(self, number: int) -> None:
        """Take a derivative up through all that multiplies by known numbers."""
        while len(self._readers[number]) == 1:
            reader = self._readers[number][0]
            scale = _channel_scale(self.network.steps[reader])
            if self.network.steps[reader].kind != "add" and (scale is None or not bool((scale != 0).all())):
                break
            self.signals[reader] = self.signals[number] if scale is None else self.signals[number] / scale
            number = reader

    def _norm(self, number: int) -> int | None:
        """Return the BatchNorm in train mode that reads a step, and nothing else does."""
        readers = self._readers[number]
        module = self.network.steps[readers[0]].module if len(readers) == 1 else None
        return readers[0] if isinstance(module, nn.BatchNorm2d) and module.training else None

    def _normalised(self, layer: WeightedLayer) -> NormalisedLayer:
        norm = self._norm(layer.step)
        assert norm is not None
        step, convolution = self.network.steps[norm], self.network.steps[layer.step]
        module: Any = step.module
        names = [f"{step.name}.weight", f"{step.name}.bias"]
        if any(name not in self.gradients for name in names):
            raise NotApplicable(f"the gradients of {step.name!r} are not in the update")
        shape = self.network.steps[convolution.sources[0]].shape
        return NormalisedLayer(
            signal=self.signals.get(norm, torch.zeros(())),
            gradient=self.gradients[layer.weight_name].double().flatten(2).transpose(1, 2).contiguous(),
            gain=module.weight.detach(),
            gain_gradient=self.gradients[names[0]].double(),
            bias_gradient=self.gradients[names[1]].double(),
            eps=module.eps,
            rows=lambda signal: _rows(layer, signal, shape),
            forward=lambda value: apply_step(convolution, [value], None, bias=False),
        )

    def _sums_in_front(self, source: int) -> tuple[Tensor, list[Tensor]]:
        """Return sums of derivatives (channels, images) in front of a ReLU, and the gradients of biases there."""
        # A max pooling passes each derivative on to one place: the sums behind it are those in front.
        relu = self.network.relu_behind(source)
        assert relu is not None  # or it would not have been factored
        sums = (self._backward(source) * active(self.values[source])).flatten(2).sum(2).T
        return sums, self._bias_gradients(self.network.steps[relu].sources)

    def _sums_behind(self, layer: WeightedLayer) -> tuple[Tensor, list[Tensor]]:
        """Return the same behind a layer: its own bias, or that of the BatchNorm that reads it."""
        for number in (layer.step, *self._readers[layer.step]):
            told = self.gradients.get(f"{self.network.steps[number].name}.bias")
            if told is not None and number in self.signals:
                return self.signals[number].flatten(2).sum(2).T, [told]
        return torch.zeros(()), []

    def _rescale(self, source: int, sums: Tensor, told: list[Tensor]) -> None:
        """Find the factor of each image: biases have the sums of the derivatives as gradients."""
        if not told:
            raise NotApplicable("no bias beside it tells the scale of each image")
        wanted = told[0].double()
        factor = torch.linalg.lstsq(sums, wanted[:, None]).solution[:, 0]
        left = float((sums @ factor - wanted).norm() / wanted.norm().clamp_min(1e-300))
        if not left < SCALED or not bool((factor > 0).all()):
            raise NotApplicable(f"the scale of each image leaves {left:.1e} of the bias gradient")
        factor = factor.reshape(-1, 1, 1, 1)
        self.signals = {number: value * factor for number, value in self.signals.items()}
        self.values[source] = self.values[source] / factor

    def _bias_gradients(self, sources: tuple[int, ...]) -> list[Tensor]:
        found = []
        for number in sources:
            step = self.network.steps[number]
            if step.kind in ("add", "max", "reshape"):
                found += self._bias_gradients(step.sources)
            elif f"{step.name}.bias" in self.gradients:
                found.append(self.gradients[f"{step.name}.bias"])
        return found

    def run(self) -> None:
        """Go down step by step; where the forward pass corrects masks, go on from the highest of them."""
        number, corrections = max(self._pinned) - 1, 0
        while number >= 0:
            changed: int | None = None
            if number not in self._pinned:
                self.signals.pop(number, None)
                if self._readers[number] and all(self._passes(reader) for reader in self._readers[number]):
                    try:
                        changed = self._visit(number)
                    except NotApplicable as error:
                        self.ended = str(error)
                        break
                elif not self.ended and (reader := self._unknown_maxima(number)) is not None:
                    self.ended = f"the places of the maxima of {self.network.steps[reader].name!r} are not known"
            if changed is not None and corrections < CORRECTIONS:
                corrections += 1
                number = changed
            number -= 1
        self.ended = self.ended or "every layer was solved"
        # What scarce equations gave counts where the forward pass agrees.
        kept = self.values.items()
        self.values = {step: value for step, value in kept if step > number and step not in self._unverified}

    def _unknown_maxima(self, number: int) -> int | None:
        known = (n for n in self._readers[number] if n in self.signals)
        return next((n for n in known if not self._passes(n)), None)

    def _passes(self, number: int) -> bool:
        gated = self.network.steps[number].kind in ("relu", "max")
        return number in self.signals and (number in self.gates or not gated)

    def _visit(self, number: int) -> int | None:
        """Find a step's value and derivative; return the highest ReLU whose mask the value shows to be wrong."""
        steps = self.network.steps
        readers = [self._layers[reader] for reader in self._readers[number] if reader in self._layers]
        residual = 0.0
        # What was factored is known.
        if readers and not any(layer.step in self._pinned for layer in readers if len(readers) == 1):
            self.values[number], residual = self._solve(number, readers)
        self.signals[number] = self._backward(number)
        if number not in self.values:
            return None
        relu = steps[number].kind == "relu" and not steps[number].slope
        value = self.values[number]
        if relu and number not in self._seen:
            self.gates[number] = active(value)
        if relu:
            value = value * self.gates[number]
        elif _zeros(self.network, number):
            value = value * active(value)
        return self._check(number, value, residual)

    def _check(self, number: int, value: Tensor, residual: float) -> int | None:
        """Run the network on from a value; NotApplicable where it does not give what was solved above."""
        if number < min(self._pinned) - 1 and not self._scale_refined and not self.network.batched:
            self._scale_refined = True
            value = value * self._refine_scale(number, value)
        ahead = self.network.onwards(number, value)
        changed = []
        for relu, gate in ahead.gates.items():
            # Nothing goes back through those above the layer that was factored.
            if relu < max(self._pinned) and relu in self.gates and not torch.equal(gate, self.gates[relu]):
                changed += [relu] if self._corrected[relu] < TWICE else []
                self._corrected[relu] += 1
            self.gates[relu] = gate
            self._seen.add(relu)
        for step, other in self.values.items():
            if step in ahead.values and step != number and not changed:
                apart = float((ahead.values[step] - other).norm() / other.norm().clamp_min(1e-300))
                if apart > AGREES:
                    name = self.network.steps[number].name
                    raise NotApplicable(f"{name!r} was solved, but the forward pass is off by {apart:.1e}")
                self._unverified -= {step, number}
        if changed:
            return max(changed)
        if len(self.network.steps) - 1 in ahead.values:
            self.cuts.append(Cut(step=number, values=value, signals=self.signals[number], residual=residual))
        return None

    def _refine_scale(self, number: int, value: Tensor) -> Tensor:
        """Correct the factor of each image by the forward pass, whose biases have a scale of their own."""
        top = max(self.values)
        known, slightly = self.values[top].flatten(1), 1e-3
        given, moved = (
            self.network.onwards(number, value * scale).values[top].flatten(1) / scale for scale in (1, 1 + slightly)
        )
        slope = (moved - given) / slightly
        change = ((known - given) * slope).sum(1) / slope.square().sum(1).clamp_min(1e-300)
        tells = slope.norm(dim=1) > LEAST_SLOPE * known.norm(dim=1)
        factor = torch.where(tells, 1 + change, 1.0).reshape(-1, 1, 1, 1)
        self.values = {step: value * factor for step, value in self.values.items()}
        self.signals = {step: signal / factor for step, signal in self.signals.items()}
        return factor

    def _backward(self, number: int, readers: Iterable[int] | None = None) -> Tensor:
        total: Tensor | None = None
        for reader in self._readers[number] if readers is None else readers:
            step = self.network.steps[reader]
            signal = self.signals[reader]
            if step.kind == "relu":
                signal = signal * self.gates[reader]
            # What is in front of a BatchNorm in train mode follows with what the layer reads.
            elif step.kind != "add" and reader != self._norm(number):
                start = signal.new_zeros((len(signal), *self.network.steps[number].shape), requires_grad=True)
                with torch.enable_grad():
                    out = apply_step(step, [start], self.gates.get(reader), bias=False)
                    (signal,) = torch.autograd.grad(out, start, signal.reshape(out.shape))
            total = signal if total is None else total + signal
        assert total is not None
        return total

    def _solve(self, number: int, readers: list[WeightedLayer]) -> tuple[Tensor, float]:
        """Solve for what convolutions read, and for the derivatives of channels that do not fit it."""
        steps, name = self.network.steps, self.network.steps[number].name
        shape = steps[number].shape
        readers = [one for one in readers if one.weight_name in self.gradients]
        if len(shape) != 3 or not readers or not all(isinstance(one.module, nn.Conv2d) for one in readers):
            raise NotApplicable(f"no convolution of the update reads {name!r}")
        unknowns = len(self.signals[readers[0].step]) * shape[1] * shape[2]
        count = equations([one.module for one in readers])
        normalised = any(self._norm(one.step) is not None for one in readers)
        if count < LEAST_EQUATIONS * unknowns:
            raise NotApplicable(f"{count} equations for {unknowns} unknowns a channel of {name!r}")
        if normalised:
            self._settle_statistics(number, readers)
        matrix = torch.cat([_rows(one, self.signals[one.step], shape) for one in readers])
        kernels = [self.gradients[one.weight_name].double() for one in readers]
        wanted = torch.cat([kernel.flatten(2).transpose(1, 2).flatten(0, 1) for kernel in kernels])
        offsets = [sum(len(kernel) for kernel in kernels[:k]) for k in range(len(kernels))]
        groups = torch.cat(
            [
                offset + torch.arange(len(kernel)).repeat_interleave(kernel[0, 0].numel())
                for kernel, offset in zip(kernels, offsets, strict=True)
            ]
        )
        doubts = torch.cat([self._doubts(one) for one in readers])
        most = SOLVED
        if count < SCARCE * unknowns and steps[number].kind == "relu" and not steps[number].slope:
            before = self.values.get(number)
            start = None if before is None else before.permute(0, 2, 3, 1).flatten(0, 2)
            solution, weights, residual = scarce_solve(matrix, wanted, groups, doubts, start)
            self._unverified.add(number)
            most = SOLVED_SCARCE
        else:
            solution, weights, residual = robust_solve(matrix, wanted, groups, doubts)
        if not residual < most:
            raise NotApplicable(f"the equations of {name!r} leave {residual:.1e}")
        value = self._value(solution, number)
        for one, offset in zip(readers, offsets, strict=True):
            odd = (weights[offset : offset + len(one.module.weight)] < SET_ASIDE).nonzero()[:, 0]
            self._repair(one, value, odd)
        return value, residual

    def _settle_statistics(self, number: int, readers: list[WeightedLayer]) -> None:
        """Find the derivatives at convolutions whose outputs are normalised by the statistics of the batch."""
        name = self.network.steps[number].name
        if any(self._norm(one.step) is None for one in readers):
            raise NotApplicable(f"of the layers that read {name!r} not all have a BatchNorm of their own")
        layers = [self._normalised(one) for one in readers]
        before = self.values.get(number)  # where masks above were corrected
        value, weights = solve_normalised(layers, lambda solution: self._value(solution, number), before)
        odd = [(part < SET_ASIDE).nonzero()[:, 0] for part in weights]
        for one, layer, channels in zip(readers, layers, odd, strict=True):
            self.signals[one.step] = layer.signals(value, scaled=False)
            self._repair(one, value, channels)
        relu = self.network.relu_behind(number)
        told = [] if relu is None else self._bias_gradients(self.network.steps[relu].sources)
        if not told:
            raise NotApplicable(f"no bias in front tells the scale of {name!r}")
        gate = self.gates[number] if number in self._seen else active(value)
        own = {one.step for one in readers}
        others = [reader for reader in self._readers[number] if reader not in own]
        left = told[0].double()
        if others:
            left = left - (self._backward(number, others) * gate).sum((0, 2, 3))
        scale = agreed_ratio((self._backward(number, own) * gate).sum((0, 2, 3)), left)
        for one, layer, channels in zip(readers, layers, odd, strict=True):
            repaired = scale * self.signals[one.step][:, channels]
            self.signals[one.step] = layer.signals(value / scale)
            self.signals[one.step][:, channels] = repaired

    def _value(self, solution: Tensor, number: int) -> Tensor:
        """Make a step's value of a solution (places, channels); hidden constants follow from a ReLU's zeros."""
        shape = self.network.steps[number].shape
        value = solution.reshape(-1, *shape[1:], shape[0]).permute(0, 3, 1, 2).contiguous()
        for lattice in self._hidden_lattices(number):
            places = value[:, :, lattice]
            least = places.amin((0, 2), keepdim=True)
            zero = places - least < ZERO * places.abs().amax((0, 2), keepdim=True)
            value[:, :, lattice] = places - (places * zero).sum((0, 2), keepdim=True) / zero.sum((0, 2), keepdim=True)
        return value

    def _hidden_lattices(self, number: int) -> list[Tensor]:
        """List the places on which derivatives that sum to zero do not tell one constant a channel.

        These are lattices of a stride that each offset of the kernel reads in full or not at all.
        """
        shape = self.network.steps[number].shape
        readers = [self._layers[reader] for reader in self._readers[number] if reader in self._layers]
        if not all(self._norm(one.step) is not None for one in readers):
            return []
        modules: list[Any] = [one.module for one in readers]
        step = max(max(module.stride) for module in modules)
        found = []
        for row, column in itertools.product(range(step), repeat=2):
            lattice = torch.zeros(shape[1:], dtype=torch.float64)
            lattice[row::step, column::step] = 1
            seen = False
            for one in readers:
                outputs = torch.ones((1, 1, *self.network.steps[one.step].shape[1:]), dtype=torch.float64)
                counts = _rows(one, outputs, shape) @ lattice.flatten()
                seen = seen or bool(((counts > 0) & (counts < outputs.numel())).any())
            if not seen:
                found.append(lattice > 0)
        return found

    def _doubts(self, layer: WeightedLayer) -> Tensor:
        """Return for each output channel how near its mask comes to the line between zero and not (one: on it)."""
        count = len(layer.module.weight)
        gate = layer.gate
        if gate is None or gate not in self.values or gate in self._seen:
            return torch.zeros(count, dtype=torch.float64)
        return doubt(self.values[gate], self.gates[gate]).flatten(2).amax((0, 2))

    def _repair(self, layer: WeightedLayer, value: Tensor, odd: Tensor) -> None:
        """Solve for the derivatives of odd channels (a wrong mask), now that what the layer reads is known."""
        patches = layer.patches(value * active(value))
        images, size, places = patches.shape
        if layer.step in self._pinned or not len(odd) or images * places > size:
            return
        matrix = patches.transpose(0, 1).reshape(size, images * places)
        wanted = self.gradients[layer.weight_name].double()[odd].flatten(1).T
        found = torch.linalg.lstsq(matrix, wanted).solution.T
        signal = self.signals[layer.step].clone()
        signal[:, odd] = found.reshape(len(odd), images, *signal.shape[2:]).transpose(0, 1)
        self.signals[layer.step] = signal


def _factor(
    network: GatedNetwork, gradients: Mapping[str, Tensor], layer: WeightedLayer, images: int
) -> ConvolutionFactors:
    height, width = network.steps[network.steps[layer.step].sources[0]].shape[1:]
    found = factor_convolution(gradients[layer.weight_name], (height, width), images=images)
    if not found.holds:
        facts = f"gap {found.gap:.0e}, consistency {found.consistency:.0e}, negative {found.negative:.0e}"
        raise NotApplicable(f"its factors do not hold ({facts})")
    return found


def peel(network: GatedNetwork, gradients: Mapping[str, Tensor], images: int) -> Peel:
    """Factor a layer and go down from it as far as equations last; NotApplicable where no layer can be factored.

    Where that ends above other layers that can be factored, in front of a max pooling say, these are tried, too.
    """
    refusals, best = [], None
    for layer in _startable(network, gradients, images):
        step = network.steps[layer.step]
        if best is not None and step.sources[0] >= best.cuts[-1].step:
            continue
        try:
            attempt = Peel(network, gradients)
            attempt.start(layer, _factor(network, gradients, layer, images))
            attempt.run()
            if not attempt.cuts:
                raise NotApplicable(attempt.ended)
            if best is None or attempt.cuts[-1].step < best.cuts[-1].step:
                best = attempt
        except NotApplicable as error:
            refusals.append(f"{step.name!r}: {error}")
    if best is None:
        raise NotApplicable("; ".join(refusals[:3]) or f"no convolution has channels for {images} images of its size")
    return best


def _startable(network: GatedNetwork, gradients: Mapping[str, Tensor], images: int) -> list[WeightedLayer]:
    """List convolutions that can be factored, the lowest first that has channels to spare: fewer layers lie below."""
    found = []
    for layer in network.layers:
        module = layer.module
        if layer.weight_name not in gradients or not isinstance(module, nn.Conv2d) or module.padding_mode != "zeros":
            continue
        source = network.steps[layer.step].sources[0]
        plain = {*module.stride, *module.dilation} == {1} and min(module.kernel_size) > 1
        same = tuple(2 * p + 1 for p in module.padding if isinstance(p, int)) == module.kernel_size
        fill = images * math.prod(network.steps[source].shape[1:]) / module.in_channels
        if plain and same and fill <= 1 and _zeros(network, source):
            found.append((fill > ROOMY, layer.step if fill <= ROOMY else -layer.step, layer))
    return [layer for *_, layer in sorted(found, key=lambda one: one[:2])]


def _zeros(network: GatedNetwork, number: int) -> bool:
    """Return whether a step gives what a ReLU gave, or the maxima of it: nothing negative, and exact zeros."""
    relu = network.relu_behind(number)
    return relu is not None and not network.steps[relu].slope


def equations(modules: Sequence[Any]) -> int:
    """Count the rows that weight gradients have for a channel of what convolutions read.

    A stride splits the places into lattices, each of which is seen through some offsets of the kernel only: the
    scarcest counts, as often as there are lattices.

    >>> equations([nn.Conv2d(8, 16, 3, stride=2, padding=1)])
    64
    """
    step = max(max(module.stride) for module in modules)
    lattices = dict.fromkeys(itertools.product(range(step), repeat=2), 0)
    for module in modules:
        offsets = [[(o * d - p) % step for o in range(k)] for k, d, p in _axes(module)]
        for place in itertools.product(*offsets):
            if module.stride == (step, step):
                lattices[place] += len(module.weight)
        if module.stride == (1, 1) != (step, step):
            lattices = {place: count + module.weight[:, 0].numel() // step**2 for place, count in lattices.items()}
    return step**2 * min(lattices.values())


def _axes(module: Any) -> list[tuple[int, int, int]]:
    padding = module.padding if not isinstance(module.padding, str) else [0, 0]
    return list(zip(module.kernel_size, module.dilation, padding, strict=True))


def _rows(layer: WeightedLayer, signals: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the matrix (outputs and offsets, places) from a channel of what is read to the weight gradient."""
    module: Any = layer.module
    images, outputs, height, width = signals.shape
    rows, columns = module.kernel_size
    matrix = signals.new_zeros(outputs, rows, columns, images, *shape[1:])
    by_output = signals.transpose(0, 1)
    for row in range(rows):
        for column in range(columns):
            y = torch.arange(height) * module.stride[0] + row * module.dilation[0] - module.padding[0]
            x = torch.arange(width) * module.stride[1] + column * module.dilation[1] - module.padding[1]
            down, across = (y >= 0) & (y < shape[1]), (x >= 0) & (x < shape[2])
            inside = by_output[:, :, down][:, :, :, across]
            matrix[:, row, column][:, :, y[down][:, None], x[across][None]] = inside
    return matrix.reshape(outputs * rows * columns, -1)


def active(values: Tensor) -> Tensor:
    """Return ones where values behind a ReLU are not rounding around zero: the widest gap of small values decides.

    Where nothing is negative (scarce equations), that does not show how large errors are.

    >>> active(torch.tensor([0.9, 1e-9, -2e-9, 0.4, 0.01])).tolist()
    [1.0, 0.0, 0.0, 1.0, 1.0]
    """
    positive = values[values > 0].sort().values
    if not len(positive):
        return torch.zeros_like(values)
    largest = float(positive[-1])
    if not bool((values < 0).any()):
        return (values > SMALLEST * largest).to(values)
    noise = min(float((-values).max().clamp_min(0)), 1e-2 * largest)
    small = positive[(positive >= 0.3 * noise) & (positive < 3e-2 * largest)]
    if len(small) < 2:
        return (values > noise).to(values)
    widest = int((small[1:] / small[:-1]).argmax())
    return (values > (small[widest] * small[widest + 1]).sqrt()).to(values)


def agreed_ratio(known: Tensor, wanted: Tensor) -> float:
    """Return wanted / known by all entries that agree on it; NotApplicable where fewer than half do.

    >>> round(agreed_ratio(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([6.0, 4.0, 7.0])), 6)
    2.0
    """
    ratios = wanted / torch.where(known == 0, torch.ones_like(known), known)
    order = ratios.argsort()
    middle = known.abs()[order].cumsum(0)
    ratio = ratios[order][int((middle < middle[-1] / 2).sum())]
    agree = (ratios - ratio).abs() < SCALED * ratio.abs()
    if float(ratio) <= 0 or float(known[agree].square().sum()) < known.square().sum() / 2:
        raise NotApplicable("the bias gradient in front does not tell the scale")
    return float((known[agree] @ wanted[agree]) / known[agree].square().sum())


def doubt(values: Tensor, gates: Tensor) -> Tensor:
    """Return how near values are to the line that ``active`` drew: one on it, zero beyond a factor of DOUBTED.

    >>> doubt(torch.tensor([1.0, 1e-3, 1e-5]), torch.tensor([1.0, 1.0, 0.0]))[1:].round(decimals=1).tolist()
    [0.5, 0.5]
    """
    least = values[gates > 0].min() if bool((gates > 0).any()) else values.new_ones(())
    most = values[gates == 0].max().clamp_min(1e-300) if bool((gates == 0).any()) else values.new_tensor(1e-300)
    line = (least * most).sqrt()
    apart = (values.clamp_min(1e-300) / line).log().abs() / torch.tensor(DOUBTED).log()
    return (1 - apart).clamp_min(0)


def _channel_scale(step: Step) -> Tensor | None:
    """Return what BatchNorm in eval mode multiplies each channel by; None for other steps."""
    module = step.module
    if not isinstance(module, nn.BatchNorm2d) or module.training:
        return None
    assert module.running_var is not None  # read_gated refuses others
    scale = torch.rsqrt(module.running_var + module.eps) * (1 if module.weight is None else module.weight)
    return scale.detach().reshape(1, -1, 1, 1)
