"""From a near reconstruction to the exact one: decode the masks of a ReLU network, solve what is then linear.

With the gates of a piecewise-linear network and the derivative at a cut held, the values at the cut and the gradient of
every weight below it are linear in the input: for a small ConvNet a hundred thousand equations for three thousand
unknowns. Two things stand in the way. The masks of the last layers must be right, and they follow from the weight
gradients themselves (:mod:`leakscope.equations.masks`); and the equations are badly conditioned, which whitening by the
known signals mends. Masks and input are found in turn; the residual of the gradients is a certificate that needs no
truth. This is this project's own; docs/strength.md explains it and says how far it carries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.equations.masks import LayerEquations, Masks, decode_masks
from leakscope.network.gates import GatedNetwork, Gates, Pass, WeightedLayer

#: Features below this share of the largest are zero.
SILENT = 1e-6
#: Units whose pre-activation is within so many times its expected error may be on the other side of zero.
NEAR_ZERO = 3.0
#: In the first pass errors are larger than the features say: so many times, for the highest layer and the others.
FIRST_PASS = (6.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class SolverSettings:
    """``passes`` of decoding and solving; ``steps`` of conjugate gradients in each; ``exact``: the certificate at
    which a solution counts as exact.

    ``whitening``: a layer's signals are whitened down to so many times its relative residual; ``damping`` of the linear
    solve, times the squared residual; ``trust``: the power of the ratio of residuals by which lower layers count less.
    """

    passes: int = 30
    steps: int = 60
    most_steps: int = 400
    products: int = 3000
    exact: float = 1e-6
    whitening: float = 10.0
    damping: float = 0.1
    trust: float = 2.0
    slack: float = 1.0


@dataclass(frozen=True, eq=False)
class GatedSolution:
    """The input, its certificate (the largest relative residual of the layers' gradients), and that of each pass."""

    inputs: Tensor
    certificate: float
    history: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class _Layer:
    """One layer at the present input: the signal at its output, the units to count on, its relative residual."""

    layer: WeightedLayer
    signal: Tensor
    gradient: Tensor
    residual: float


@dataclass(frozen=True, eq=False)
class _Block:
    """A layer's equations for the linear solve: a whitened and weighted signal, and what it should give."""

    layer: WeightedLayer
    signal: Tensor
    right: Tensor


@dataclass(frozen=True, eq=False)
class GatedProblem:
    """What is known: the network below the cut, features and adjoints there (examples, n), and the weights' gradients.

    The gradients are those of <adjoints, features>, by the names of the weights. ``project`` moves an input to the
    nearest valid one.
    """

    network: GatedNetwork
    features: Tensor
    adjoints: Tensor
    gradients: Mapping[str, Tensor]
    project: Callable[[Tensor], Tensor] = lambda x: x

    def solve(self, start: Tensor, settings: SolverSettings = SolverSettings()) -> GatedSolution:
        """Decode and solve in turn from ``start``; the input with the smallest certificate."""
        z = best = start.double()
        narrow = self.network.to(torch.float32)
        history: list[float] = []
        stalls, steps, spent, lowest = 0, settings.steps, 0, math.inf
        for number in range(settings.passes):
            now = self.network.run(z)
            gates, layers, errors = self._decode(now, first=number == 0)
            error = max((one.residual for one in layers if not one.layer.first), default=math.inf)
            stalled = error > 0.5 * lowest if error < 2e-3 else error > 0.9 * lowest
            if error < lowest:
                best, lowest = z, error
            history.append(error)
            if not layers or not math.isfinite(error) or spent >= settings.products:
                break
            if error < settings.exact and (stalled or steps > settings.steps):
                break
            if number >= 12 and lowest > max(2e-3, 0.9 * min(history[:-5])):
                break  # it does not come nearer: another start may
            stalls = stalls + 1 if stalled and number > 2 else 0
            if stalls and error < 2e-3:
                # Either the equations are badly conditioned, or masks of lower layers are wrong: one after the other.
                steps = min(2 * steps, settings.most_steps)
            reach = 1.0 if not stalls else 4.0 ** (stalls // 2 + 1) if stalls % 2 == 0 or error > 2e-3 else 0.0
            if error < settings.exact:
                steps, reach = settings.most_steps, 0.0
            blocks = _blocks(layers[:1] if number == 0 else layers, settings)
            widths = _widths(now, errors, reach)
            damping = 1e-9 + settings.damping * layers[0].residual ** 2
            z = self._linear_step(z, gates, blocks, narrow, damping, widths, settings, steps)
            spent += steps
        return GatedSolution(best, lowest, tuple(history))

    def _decode(self, now: Pass, first: bool) -> tuple[Gates, list[_Layer], dict[int, float]]:
        """Gates for the solve, the highest decoded; and every layer but the first, from the cut downwards."""
        steps = self.network.steps
        gates = dict(now.gates)
        shut = self.network.shut_gates(self.features <= SILENT * self.features.max())
        for number, (never, _) in shut.items():
            gates[number] = torch.where(never, steps[number].slope, gates[number])
        wrong = (now.features.flatten(1) - self.features)[self.features.abs() > SILENT * self.features.abs().max()]
        error = 2 * float(wrong.square().mean().sqrt())
        spread: float | None = None
        errors: dict[int, float] = {}
        signal_gates, found = dict(gates), []
        for layer in reversed(self.network.layers):
            if layer.weight_name not in self.gradients:
                continue
            if layer.gate is not None and spread is not None:
                errors[layer.gate] = error * float(now.received[layer.gate].std()) / spread
            if layer.gate is None or layer.first:
                found.append(self._plain(layer, now, signal_gates))
                continue
            received = now.received[layer.gate]
            size = float(received.std())
            highest = spread is None
            spread = size if spread is None else spread
            own = max(error * size / spread, 1e-300) * (FIRST_PASS[0 if highest else 1] if first else 1)
            one, mask = self._gated(layer, now, signal_gates, own, shut.get(layer.gate))
            signal_gates[layer.gate] = mask
            if highest:
                gates[layer.gate] = mask
            found.append(one)
        return gates, found, errors

    def _gated(
        self, layer: WeightedLayer, now: Pass, gates: Gates, error: float, shut: tuple[Tensor, bool] | None
    ) -> tuple[_Layer, Tensor]:
        """The layer with its masks decoded, and what its gate then multiplies by."""
        assert layer.gate is not None
        slope = self.network.steps[layer.gate].slope
        received = now.received[layer.gate]
        full = self.network.signal(layer, gates, self.adjoints, open_gate=True)
        patches = layer.patches(now.inputs[layer.step])
        forward, free = received > 0, received.abs() < NEAR_ZERO * error
        if shut is not None:
            never, single = shut
            forward, free = forward & ~never, free & ~never
            if single:
                forward, free = ~never, torch.zeros_like(free)
        gradient = self._gradient(layer)
        bias = None if layer.bias_name is None else self.gradients.get(layer.bias_name)
        # With a slope below zero a shut gate passes something on, which is known: what is left has masks of 0 and 1.
        passed = slope * full
        equations = LayerEquations(
            signal=full - passed,
            patches=patches,
            gradient=gradient - torch.einsum("ncl,npl->cp", passed, patches) if slope else gradient,
            bias_gradient=None if bias is None else bias.double() - passed.sum((0, 2)),
        )
        doubt = 1 + (received / error) ** 2
        masks = decode_masks(equations, *(_flat(part) for part in (forward, free, doubt)))
        gate = torch.where(masks.active, 1.0, slope).to(full)
        kept = masks.kept.to(full)[:, None]
        one = _Layer(layer, full * gate * kept, gradient * kept, masks.residual if masks.kept.any() else math.inf)
        return one, gate.reshape(received.shape)

    def _plain(self, layer: WeightedLayer, now: Pass, gates: Gates) -> _Layer:
        """A layer without a gate of its own: nothing to decode."""
        signal = self.network.signal(layer, gates, self.adjoints)
        gradient = self._gradient(layer)
        rest = layer.weight_gradient(now.inputs[layer.step], signal) - gradient
        size = float(gradient.norm())
        return _Layer(layer, signal, gradient, float(rest.norm()) / size if size else math.inf)

    def _gradient(self, layer: WeightedLayer) -> Tensor:
        return self.gradients[layer.weight_name].double().flatten(1)

    def _linear_step(
        self,
        z: Tensor,
        gates: Gates,
        blocks: list[_Block],
        narrow: GatedNetwork,
        damping: float,
        widths: dict[int, Tensor],
        settings: SolverSettings,
        steps: int,
    ) -> Tensor:
        """One Gauss-Newton step: the residual in float64, its equations by conjugate gradients in float32."""
        weight = 1 / float(self.features.norm())

        def residuals(x: Tensor, slack, network: GatedNetwork, held: Gates, own: list[_Block], bias: bool) -> Tensor:
            inputs, features = network.held(x, held, bias=bias, slack=slack)
            parts = [weight * (features.flatten(1) - (self.features if bias else 0))]
            for block in own:
                value = block.layer.weight_gradient(inputs[block.layer.step], block.signal)
                parts.append(value - block.right if bias else value)
            return torch.stack([part.square().sum() for part in parts]).sum() / 2

        numbers = list(widths)
        shapes = [widths[n].shape for n in numbers]
        sizes = [z.numel(), *(math.prod(shape) for shape in shapes)]

        def unpack(flat: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
            x, *rest = flat.split(sizes)
            slack = {
                n: part.reshape(shape) * widths[n].to(flat)
                for n, part, shape in zip(numbers, rest, shapes, strict=True)
            }
            return x.reshape(z.shape), slack

        with torch.enable_grad():
            point = torch.cat([z.flatten(), z.new_zeros(sum(sizes[1:]))]).detach().requires_grad_()
            (gradient,) = torch.autograd.grad(residuals(*unpack(point), self.network, gates, blocks, True), point)
            # Inputs that the descent would push out of their bounds stay where they are (projected Newton).
            downhill = z - 1e-6 * gradient[: sizes[0]].reshape(z.shape).sign()
            moves = torch.ones(len(point))
            moves[: sizes[0]] = (self.project(downhill) == downhill).float().flatten()
            narrow_gates = {n: gate.float() if gate.is_floating_point() else gate for n, gate in gates.items()}
            by_step = {layer.step: layer for layer in narrow.layers}
            narrow_blocks = [_Block(by_step[b.layer.step], b.signal.float(), b.right) for b in blocks]
            penalty = torch.full((len(point),), damping * settings.slack)
            penalty[: sizes[0]] = damping

            def product(direction: Tensor) -> Tensor:
                direction = (moves * direction).detach().requires_grad_()
                value = residuals(*unpack(direction), narrow, narrow_gates, narrow_blocks, False)
                return moves * torch.autograd.grad(value, direction)[0] + penalty * direction.detach()

            step = conjugate_gradients(product, -moves * gradient.float(), steps)[: sizes[0]].reshape(z.shape)
        return self.project(z + step.double()).detach()


def _widths(now: Pass, errors: Mapping[int, float], reach: float) -> dict[int, Tensor]:
    widths: dict[int, Tensor] = {}
    if not reach:
        return widths
    for number, error in errors.items():
        width = max(error * reach, 1e-300)
        received = now.received[number]
        width = min(width, 0.2 * float(received.std()))
        widths[number] = torch.where(received.abs() < 3 * width, width, 0.0)
    return widths


def _blocks(layers: list[_Layer], settings: SolverSettings) -> list[_Block]:
    """Equations of norm one, whitened; a layer that is explained worse than the highest counts less."""
    highest = layers[0].residual
    blocks = []
    for one in layers:
        trust = min(1.0, highest / one.residual) ** settings.trust if one.residual else 1.0
        whitening = _whitening(one.signal, min(max(3e-3, settings.whitening * one.residual), 0.3))
        right = whitening @ one.gradient
        weight = trust / float(right.norm().clamp_min(1e-300))
        blocks.append(_Block(one.layer, weight * torch.einsum("dc,ncl->ndl", whitening, one.signal), weight * right))
    return blocks


def _whitening(signal: Tensor, least: float) -> Tensor:
    """(B B' + least^2 lambda_max)^(-1/2) of the signals B (units, examples x places), in the basis of its eigenvectors.

    Directions in which there is next to no signal are left out: they are equations without content.
    """
    rows = signal.transpose(0, 1).flatten(1)
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    largest = values[-1].clamp_min(1e-300)
    seen = values > 1e-12 * largest
    return vectors[:, seen].T * (values[seen] + least**2 * largest).rsqrt()[:, None]


def conjugate_gradients(
    product: Callable[[Tensor], Tensor], right: Tensor, steps: int, tolerance: float = 1e-3
) -> Tensor:
    """The solution of A x = right for a positive definite A, given as a product, from zero.

    >>> conjugate_gradients(lambda x: 2 * x, torch.tensor([2.0, 4.0]), steps=3).tolist()
    [1.0, 2.0]
    """
    solution = torch.zeros_like(right)
    rest, direction = right.clone(), right.clone()
    size = goal = rest.square().sum()
    for _ in range(steps):
        if not size > 0:
            break
        image = product(direction)
        length = size / (direction * image).sum()
        solution = solution + length * direction
        rest = rest - length * image
        before, size = size, rest.square().sum()
        if size < tolerance**2 * goal:
            break
        direction = rest + size / before * direction
    return solution


def _flat(values: Tensor) -> Tensor:
    return values.flatten(2) if values.dim() > 2 else values[:, :, None]
