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

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.batch_statistics import solve_normalised
from leakscope.equations.convolution_equations import (
    LEAST_EQUATIONS,
    LEAST_FOR_BATCHES,
    equations,
    every_place_is_read,
    gradient_rows,
    unseen_lattices,
)
from leakscope.equations.convolution_factor import ConvolutionFactors
from leakscope.equations.joint_solve import Forward, determined_jointly, joint_solve
from leakscope.equations.local_networks import LocalNetworks
from leakscope.equations.mask_decoding import correct_masks
from leakscope.equations.open_equations import OpenEquations
from leakscope.equations.peel_start import begin, factor_layer, startable
from leakscope.equations.peel_state import PeelState, active, doubt
from leakscope.equations.peel_top import begin_at_top
from leakscope.equations.place_decoding import corrected_gates
from leakscope.equations.robust_solve import SET_ASIDE, agreed_ratio, robust_solve, scarce_solve
from leakscope.network.gates import Ahead, GatedNetwork, WeightedLayer

#: Equations for each unknown below which it counts that nothing behind a ReLU is negative.
SCARCE = 2.0
#: What scarce equations may leave: wrong masks leave hundreds of times as much as right ones.
SOLVED_SCARCE = 1e-5
#: What the equations of a layer may leave (channels set aside not counted), and the forward pass of what was solved.
SOLVED, AGREES = 1e-4, 1e-3
#: Share of a channel's largest value within which values near its smallest count as zeros of a ReLU.
ZERO = 1e-4
#: Times that the forward pass may correct masks above and send the peel back to them.
CORRECTIONS = 8
#: Times that one ReLU may send it back: the sign of a unit within rounding of zero may change for ever.
TWICE = 2
#: Share of the values by which a network must differ from a homogeneous one for its forward pass to tell the factor:
#: with untrained BatchNorm it is homogeneous, and the difference is rounding (1e-9 and less).
LEAST_SLOPE = 1e-4
#: What noise of a known level may leave, in units of its own size.
NOISY = 10.0
#: Times that wrong masks are looked for by what they leave.
DECODINGS = 12
#: Times that guessed gates are replaced by those of what was solved with them.
GUESSES = 4
#: Rounds for the gains of later local steps, and what they may still move in the last.
ROUNDS, MOVED = 8, 1e-6


@dataclass(frozen=True, eq=False, kw_only=True)
class Cut:
    """What one ``step`` of the network gives (images, ...), the derivative there, and what the equations left of it."""

    step: int
    values: Tensor
    signals: Tensor
    residual: float


class Peel(PeelState):
    """A peel at work, and the cuts that were reached: steps through which all of the network goes.

    ``started`` and ``ended`` say where and why; ``open`` has the equations that were too few, if this was the reason.
    """

    def __init__(
        self, network: LocalNetworks, gradients: Mapping[str, Tensor], noise: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(network, gradients, noise)
        self.cuts: list[Cut] = []
        self.started = self.ended = ""
        self.open: OpenEquations | None = None
        self._corrected: Counter[int] = Counter()
        self._scale_refined = False
        self._unverified: set[int] = set()
        self._best: dict[int, Tensor] = {}
        self._rejected: tuple[int, Tensor] | None = None

    def start(self, layer: WeightedLayer, found: ConvolutionFactors) -> None:
        begin(self, layer, found)
        self.started = self.network.steps[layer.step].name

    def start_at_top(self, adjoint: Tensor) -> None:
        self.started = self.network.steps[begin_at_top(self, adjoint).step].name

    def run(self) -> None:
        """Go down step by step; where the forward pass corrects masks, go on from the highest of them."""
        number, corrections = max(self.pinned) - 1, 0
        while number >= 0:
            changed: int | None = None
            if number not in self.pinned:
                self.signals.pop(number, None)
                if self.readers[number] and all(self.passes(reader) for reader in self.readers[number]):
                    try:
                        changed = self._visit(number)
                    except NotApplicable as error:
                        self.ended = str(error)
                        break
                elif not self.ended and (reader := self.unknown_maxima(number)) is not None:
                    self.ended = f"the places of the maxima of {self.network.steps[reader].name!r} are not known"
            if number in self.values and changed is None and number < min(self._best, default=len(self.readers)):
                self._best = self._sure(number)
            if changed is not None and corrections < CORRECTIONS:
                corrections += 1
                number = changed
            number -= 1
        self.ended = self.ended or "every layer was solved"
        # A wrong solution changes masks that were right, so that layers above are not solved a second time.
        self.values = min(self._best, self._sure(number + 1), key=lambda found: min(found, default=len(self.readers)))
        self.cuts = sorted((cut for cut in self.cuts if cut.step in self.values), key=lambda cut: -cut.step)
        if self.open is not None and self.open.step in self.values:
            self.open = None  # a step that was solved before masks above it were corrected

    def _sure(self, lowest: int) -> dict[int, Tensor]:
        """Return what was solved down to a step; what scarce equations gave counts where the forward pass agrees."""
        return {n: value for n, value in self.values.items() if n >= lowest and n not in self._unverified}

    def go_on(self, near: Ahead) -> bool:
        """Go on with the gates of what is nearly right, such as places of maxima; return whether this told more."""
        lowest, guessed = min(self.values), set(near.gates) - set(self.gates)
        for _ in range(GUESSES):
            gates = corrected_gates(self, near, guessed)
            self.gates.update({step: gate for step, gate in gates.items() if step in guessed})
            self.ended, self.open, self._rejected = "", None, None
            self._corrected.clear()
            self.run()
            if min(self.values) < lowest or self._rejected is None:
                break
            # What does not fit yet may be nearer.
            near = self.network.onwards(*self._rejected)
        return min(self.values) < lowest

    def keep_first_step(self) -> None:
        """Forget the images of later local steps: only the first takes the weights that the client received."""
        for found in (self.values, self.signals, self.gates):
            found.update({step: self.network.split(value)[0] for step, value in found.items()})
        self.cuts = [
            replace(cut, values=self.network.split(cut.values)[0], signals=self.network.split(cut.signals)[0])
            for cut in self.cuts
        ]
        self.network = LocalNetworks(self.network.each[:1])

    def _visit(self, number: int) -> int | None:
        """Find a step's value and derivative; return the highest ReLU whose mask the value shows to be wrong."""
        steps = self.network.steps
        readers = [self.layers[reader] for reader in self.readers[number] if reader in self.layers]
        residual = 0.0
        # What was factored is known.
        if readers and not any(layer.step in self.pinned for layer in readers if len(readers) == 1):
            self.values[number], residual = self._solve(number, readers)
        self.signals[number] = self.backward(number)
        if number not in self.values:
            return None
        value = self.gated(number, self.values[number])
        if steps[number].kind == "relu" and not steps[number].slope and number not in self.seen:
            self.gates[number] = active(self.values[number])
        return self._check(number, value, residual)

    def _check(self, number: int, value: Tensor, residual: float) -> int | None:
        """Run the network on from a value; NotApplicable where it does not give what was solved above."""
        ahead = self.network.onwards(number, value)
        unrefined = number < min(self.pinned) - 1 and not self._scale_refined and not self.network.batched
        # Inside a block the forward pass ends where the shortcut comes in.
        if unrefined and max(self.values) in ahead.values:
            self._scale_refined = True
            value = value * self._refine_scale(number, value)
            ahead = self.network.onwards(number, value)
        changed = []
        for relu, gate in ahead.gates.items():
            # Nothing goes back through those above the layer that was factored.
            if relu < max(self.pinned) and relu in self.gates and not torch.equal(gate, self.gates[relu]):
                changed += [relu] if self._corrected[relu] < TWICE else []
                self._corrected[relu] += 1
            self.gates[relu] = gate
            self.seen.add(relu)
        for step, other in self.values.items():
            if step in ahead.values and step != number and not changed:
                # Derivatives of later local steps are often weak, and their values matter as little.
                given, first = (self.network.split(one)[0] for one in (ahead.values[step], other))
                apart = float((given - first).norm() / first.norm().clamp_min(1e-300))
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

    def _solve(self, number: int, readers: list[WeightedLayer]) -> tuple[Tensor, float]:
        """Solve for what convolutions read, and for the derivatives of channels that do not fit it."""
        steps, name = self.network.steps, self.network.steps[number].name
        shape = steps[number].shape
        readers = [one for one in readers if one.weight_name in self.gradients]
        if len(shape) != 3 or not readers or not all(isinstance(one.module, nn.Conv2d) for one in readers):
            raise NotApplicable(f"no convolution of the update reads {name!r}")
        unknowns = len(self.signals[readers[0].step]) * shape[1] * shape[2]
        count = equations([one.module for one in readers])
        if not every_place_is_read(readers, [steps[one.step].shape for one in readers], shape):
            raise NotApplicable(f"no layer reads the last rows or columns of {name!r}")
        normalised = any(self.norm_behind(one.step) is not None for one in readers)
        plain = steps[number].kind == "relu" and not steps[number].slope
        opens = plain and not normalised and len(self.network) == 1
        joined = opens and len(self.signals[readers[0].step]) > 1
        if count < (LEAST_FOR_BATCHES if joined else LEAST_EQUATIONS) * unknowns:
            if opens and (found := self._solve_jointly(number, readers)) is not None:
                return found
            self.open = self._equations(number, readers) if opens else None
            raise NotApplicable(f"{count} equations for {unknowns} unknowns a channel of {name!r}")
        if normalised:
            self._settle_statistics(number, readers)
        doubts = torch.cat([self._doubts(one) for one in readers])
        most, before = SOLVED, self.values.get(number)
        for _ in range(ROUNDS):
            system = self._equations(number, readers)
            rows = system.matrix, system.gradient, system.groups, doubts
            scarce = count < SCARCE * unknowns and plain
            if scarce:
                start = None if before is None else before.permute(0, 2, 3, 1).flatten(0, 2)
                solution, weights, residual = scarce_solve(*rows, start)
                self._unverified.add(number)
                most = SOLVED_SCARCE
                # Scarce equations may fit a wrong value, where channels are dead: what the layers above gave tells it.
                agrees = not opens or self._forward(number).agrees(self._value(solution, number), AGREES)
                if not agrees and (found := self._solve_jointly(number, readers)) is not None:
                    return found
            else:
                solution, weights, residual = robust_solve(*rows)
            for _ in range(DECODINGS if opens and bool((weights < SET_ASIDE).any()) else 0):
                if not correct_masks(self, number, readers, self._value(solution, number)):
                    break
                system = self._equations(number, readers)
                rows = system.matrix, system.gradient, system.groups, doubts
                solution, weights, residual = scarce_solve(*rows, solution) if scarce else robust_solve(*rows)
            value = before = self._value(solution, number)
            # Gains of later local steps follow from what their layers receive.
            moved = max(self.settle(one, self.gated(number, value)) for one in readers)
            if moved < MOVED:
                break
            for one in readers:
                self.signals[one.step] = self.backward(one.step)
        most = max(most, min(AGREES, NOISY * max(self.share(one.weight_name) for one in readers)))
        if not residual < most:
            self._rejected = number, self.gated(number, value)
            self.open = system if opens else None
            raise NotApplicable(f"the equations of {name!r} leave {residual:.1e}")
        for one, part in zip(readers, weights.split([len(one.module.weight) for one in readers]), strict=True):
            self._repair(one, value, (part < SET_ASIDE).nonzero()[:, 0])
            self.settle(one, self.gated(number, value), derived=True)
        return value, residual

    def _solve_jointly(self, number: int, readers: list[WeightedLayer]) -> tuple[Tensor, float] | None:
        """Solve by gradients and by what the layers above gave; None where both are too few."""
        shape, images = self.network.steps[number].shape, len(self.signals[readers[0].step])
        forward = self._forward(number)
        if not determined_jointly(forward, [one.module for one in readers], (images, *shape)):
            return None
        start = self.values.get(number, torch.ones((images, *shape), dtype=torch.float64))
        rows = self._equations(number, readers)
        try:
            value, weights, residual = joint_solve(rows.matrix, rows.gradient, rows.groups, forward, start)
        except NotApplicable:
            return None
        if not residual < SOLVED:
            return None
        self._unverified.add(number)
        for _ in range(DECODINGS):
            if not correct_masks(self, number, readers, value):
                break
        for one, part in zip(readers, weights.split([len(one.module.weight) for one in readers]), strict=True):
            self._repair(one, value, (part < SET_ASIDE).nonzero()[:, 0])
        return value, residual

    def _forward(self, number: int) -> Forward:
        known = {step: value for step, value in self.values.items() if step > number}
        return Forward(network=self.network.each[0], number=number, known=known)

    def _equations(self, number: int, readers: list[WeightedLayer]) -> OpenEquations:
        """Return what the gradients of the convolutions that read a step say of its values."""
        shape = self.network.steps[number].shape
        kernels = [self.gradients[one.weight_name].double() for one in readers]
        rows = torch.tensor([kernel[0, 0].numel() for kernel in kernels for _ in range(len(kernel))])
        places = len(self.signals[readers[0].step]) * shape[1] * shape[2]
        return OpenEquations(
            step=number,
            share=equations([one.module for one in readers]) / places,
            matrix=torch.cat([gradient_rows(one, self.signals[one.step], shape) for one in readers]),
            gradient=torch.cat([kernel.flatten(2).transpose(1, 2).flatten(0, 1) for kernel in kernels]),
            groups=torch.arange(len(rows)).repeat_interleave(rows),
        )

    def _settle_statistics(self, number: int, readers: list[WeightedLayer]) -> None:
        """Find the derivatives at convolutions whose outputs are normalised by the statistics of the batch."""
        name = self.network.steps[number].name
        if any(self.norm_behind(one.step) is None for one in readers):
            raise NotApplicable(f"of the layers that read {name!r} not all have a BatchNorm of their own")
        layers = [self.normalised(one) for one in readers]
        before = self.values.get(number)  # where masks above were corrected
        value, weights = solve_normalised(layers, lambda solution: self._value(solution, number), before)
        odd = [(part < SET_ASIDE).nonzero()[:, 0] for part in weights]
        for one, layer, channels in zip(readers, layers, odd, strict=True):
            self.signals[one.step] = layer.signals(value, scaled=False)
            self._repair(one, value, channels)
        relu = self.network.relu_behind(number)
        told = [] if relu is None else self.bias_gradients(self.network.steps[relu].sources)
        if not told:
            raise NotApplicable(f"no bias in front tells the scale of {name!r}")
        gate = self.gates[number] if number in self.seen else active(value)
        own = {one.step for one in readers}
        others = [reader for reader in self.readers[number] if reader not in own]
        left = told[0].double()
        if others:
            left = left - (self.backward(number, others) * gate).sum((0, 2, 3))
        scale = agreed_ratio((self.backward(number, own) * gate).sum((0, 2, 3)), left)
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
        """List the places on which derivatives that sum to zero do not tell one constant a channel."""
        readers = [self.layers[reader] for reader in self.readers[number] if reader in self.layers]
        if not all(self.norm_behind(one.step) is not None for one in readers):
            return []
        steps = self.network.steps
        return unseen_lattices(readers, [steps[one.step].shape for one in readers], steps[number].shape)

    def _doubts(self, layer: WeightedLayer) -> Tensor:
        """Return for each output channel how near its mask comes to the line between zero and not (one: on it)."""
        count = len(layer.module.weight)
        gate = layer.gate
        if gate is None or gate not in self.values or gate in self.seen:
            return torch.zeros(count, dtype=torch.float64)
        return doubt(self.values[gate], self.gates[gate]).flatten(2).amax((0, 2))

    def _repair(self, layer: WeightedLayer, value: Tensor, odd: Tensor) -> None:
        """Solve for the derivatives of odd channels (a wrong mask), now that what the layer reads is known."""
        patches = layer.patches(value * active(value))
        images, size, places = patches.shape
        if layer.step in self.pinned or not len(odd) or images * places > size:
            return
        matrix = patches.transpose(0, 1).reshape(size, images * places)
        wanted = self.gradients[layer.weight_name].double()[odd].flatten(1).T
        signal = self.signals[layer.step].clone()
        own = signal[:, odd].transpose(0, 1).flatten(1)
        wrong = (matrix @ own.T - wanted).norm(dim=0) > SOLVED * wanted.norm(dim=0)
        if not bool(wrong.any()):
            return
        odd, wanted = odd[wrong], wanted[:, wrong]
        found = torch.linalg.lstsq(matrix, wanted).solution.T
        signal[:, odd] = found.reshape(len(odd), images, *signal.shape[2:]).transpose(0, 1)
        self.signals[layer.step] = signal


def peel(
    network: GatedNetwork,
    gradients: Mapping[str, Tensor],
    images: int,
    *,
    steps: int = 1,
    noise: Mapping[str, float] | None = None,
    adjoint: Tensor | None = None,
) -> Peel:
    """Factor a layer and go down from it as far as equations last; NotApplicable where no layer can be factored.

    Where that ends above other layers that can be factored, in front of a max pooling say, these are tried, too.
    ``steps``: plain local steps on all of the images, whose sum the gradients are. What is found is that of the first.
    ``adjoint``: the derivative at the last step, of one image; a 1x1 convolution at the top is then tried, too.
    """
    refusals, best = [], None
    total = images * steps
    if steps > 1 and network.batched:
        raise NotApplicable("what each local step's own statistics do to derivatives is not known")
    for layer in startable(LocalNetworks([network]), gradients, total):
        step = network.steps[layer.step]
        if best is not None and step.sources[0] >= best.cuts[-1].step:
            continue
        try:
            factors = factor_layer(network, gradients, layer, total, (noise or {}).get(layer.weight_name, 0.0))
            attempt = Peel(LocalNetworks.between(network, gradients, steps), gradients, noise)
            attempt.start(layer, factors)
            attempt.run()
            if not attempt.cuts:
                raise NotApplicable(attempt.ended)
            if best is None or attempt.cuts[-1].step < best.cuts[-1].step:
                best = attempt
        except NotApplicable as error:
            refusals.append(f"{step.name!r}: {error}")
    if best is None and adjoint is not None and steps == 1:
        best = Peel(LocalNetworks([network]), gradients, noise)
        try:
            best.start_at_top(adjoint)
            best.run()
            if not best.cuts:
                raise NotApplicable(best.ended)
        except NotApplicable as error:
            best = None
            refusals.append(str(error))
    if best is None:
        raise NotApplicable("; ".join(refusals[:3]) or f"no convolution has channels for {total} images of its size")
    return best
