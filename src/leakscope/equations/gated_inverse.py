"""From a near reconstruction to the exact one: decode the masks of a ReLU network, solve what is then linear.

With the gates of a piecewise-linear network and the derivative at a cut held, the values at the cut and the gradient of
every weight below it are linear in the input: for a small ConvNet a hundred thousand equations for three thousand
unknowns. The masks of the last layers must be right, and follow from the weight gradients. Wrong masks of lower layers
must not spoil the equations: units near zero are given slack. Bad conditioning is mended by whitening
(:mod:`leakscope.equations.gated_equations`). Masks and input are found in turn; the residual of the gradients is a
certificate that needs no truth. This is this project's own; docs/strength.md says how far it carries.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.certificate import EXPLAINED
from leakscope.equations.embedding import SILENT
from leakscope.equations.gated_equations import (
    MOST_FREE,
    LayerEquations,
    LayerState,
    LinearStep,
    blocks_of,
    decode_masks,
)
from leakscope.network.gates import GatedNetwork, Gates, Pass, WeightedLayer

#: A unit that is nearer to zero than so many times that share may be active behind such a feature.
UNTOLD = 10.0
#: Units whose pre-activation is within so many times its expected error may be on the other side of zero.
NEAR_ZERO = 3.0
#: In the first pass errors are larger than the features say: so many times, for the highest layer and the others.
FIRST_PASS = (2 * NEAR_ZERO, NEAR_ZERO)
#: Above this certificate masks are still to be found; below it hardly one is in doubt, the decoded masks of all layers
#: are held (of one example), and the conditioning of the equations is what counts.
FAR = 2e-3
#: Where progress stalls, layers explained up to this share count in full (one example far away, and else): the highest
#: alone may not determine the input. The smaller one is also what an exact solution may leave of the features and of
#: layers that read the input.
FAIR = (5 * FAR, FAR / 2)
#: A certificate that falls to more than this share in one pass has stalled (far away, and near).
STALLED = (0.9, 0.5)
#: A layer that reads the input has few equations: units with more free masks for each than this are not decoded.
FREE_OF_FIRST = 0.25
#: Passes after which a solution that does not come nearer is given up, and over how many it must have done so.
PATIENCE, WINDOW = 12, 5
#: Multiplications that all products with the equations may take; half as many again once the end is near.
WORK = 6e10


@dataclass(frozen=True, kw_only=True)
class SolverSettings:
    """``steps`` of conjugate gradients in each pass, ``most_steps`` where progress stalls, ``products`` in all.

    ``whitening``: relative to a layer's residual; ``damping``: to its square; ``trust``: the power of the ratio of
    residuals by which lower layers count less.
    """

    passes: int = 30
    steps: int = 60
    most_steps: int = 400
    products: int = 3000
    whitening: float = 10.0
    damping: float = 0.1
    trust: float = 2.0


SETTINGS = SolverSettings()


@dataclass(frozen=True, eq=False)
class GatedSolution:
    """The input, its certificate, and what each pass left of the units that the solver counted on.

    The certificate is the largest relative residual of the gradients of the layers above the first, all units counted;
    or that of the features or of a first layer where these are not explained. Whether these gradients determine the
    input is another question: :meth:`GatedProblem.free_directions`.
    """

    inputs: Tensor
    certificate: float
    history: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class GatedProblem:
    """What is known: the network below the cut, features and adjoints there (examples, n), and the weights' gradients.

    ``project`` moves an input to the nearest valid one. Features below ``silence``, a share of the largest, may be 0.
    ``work``: multiplications that all products may take.
    """

    network: GatedNetwork
    features: Tensor
    adjoints: Tensor
    gradients: Mapping[str, Tensor]
    project: Callable[[Tensor], Tensor] = lambda x: x
    silence: float = SILENT
    work: float = WORK

    @property
    def quiet(self) -> float:
        return self.silence * float(self.features.abs().max())

    def affordable_products(self) -> int:
        """Return how many products take some ten seconds in all; by counts, so that a run repeats."""
        return int(self.work / (self.network.work * len(self.features)))

    def solve(self, start: Tensor, settings: SolverSettings = SETTINGS) -> GatedSolution:
        """Decode and solve in turn from ``start``; return the input with the smallest certificate."""
        z = best = start.double()
        linear = LinearStep(self.network, self.features, self.project)
        # A batch has as many equations as one example, for many times the masks: its lower layers are not decoded well.
        single = len(start) == 1
        pace = _Pace(settings, min(settings.products, self.affordable_products()), single)
        while True:
            now = self.network.run(z)
            gates, layers, errors = self._decode(now, first=not pace.history, near=single and pace.lowest < FAR)
            if pace.told(max((one.residual for one in _above(layers)), default=math.inf)):
                best = z
            if pace.ended:
                break
            seen = layers if len(pace.history) > 1 else layers[:1]
            blocks = blocks_of(seen, settings.whitening, settings.trust, pace.fair)
            damping = 1e-9 + settings.damping * layers[0].residual ** 2
            slack = _slack(now, errors, pace.reach)
            z = linear(z, gates, blocks, damping=damping, slack=slack, steps=pace.steps)
        return GatedSolution(best, max(pace.lowest, self.certificate(best)), tuple(pace.history))

    def free_directions(self, z: Tensor) -> tuple[int | None, ...]:
        """Count the directions of each example that the equations do not determine, with the masks decoded at ``z``."""
        gates, layers, _ = self._decode(self.network.run(z), near=True)
        linear = LinearStep(self.network, self.features, self.project)
        return linear.free_directions(z, gates, layers, limit=min(SETTINGS.products, self.affordable_products()))

    def certificate(self, z: Tensor) -> float:
        """Return what the input ``z`` leaves unexplained, see :class:`GatedSolution`."""
        now = self.network.run(z)
        _, layers, _ = self._decode(now, near=True)
        features = float((now.features.flatten(1) - self.features).norm() / self.features.norm())
        above = max((one.whole for one in _above(layers)), default=math.inf)
        # A first layer has too few equations for its masks: units that these do not explain say nothing.
        unseen = max([features, *(one.residual for one in layers if one.layer.first)])
        return above if unseen < FAIR[1] else max(above, unseen)

    def _decode(
        self, now: Pass, first: bool = False, near: bool = False
    ) -> tuple[Gates, list[LayerState], dict[int, float]]:
        """Return gates for the solve, the layers from the cut downwards, and the error at each gate.

        ``first``: it is the first pass. ``near``: hardly a unit is in doubt, so that layers that read the input are
        decoded too, and all gates are the decoded ones. Further away only the highest is: with it right the equations
        change continuously when lower masks flip, and wrongly decoded ones would mislead.
        """
        gates = dict(now.gates)
        loud = self.features.abs() > self.quiet
        shut = self.network.shut_gates(~loud)
        for number, (never, single) in shut.items():
            open_gates = torch.ones_like(gates[number]) if single else gates[number]
            gates[number] = torch.where(never, self.network.steps[number].slope, open_gates)
        error = 2 * float((now.features.flatten(1) - self.features)[loud].square().mean().sqrt())
        highest: float | None = None
        errors: dict[int, float] = {}
        signal_gates, found = dict(gates), []
        for layer in reversed(self.network.layers):
            if layer.weight_name not in self.gradients:
                continue
            if layer.gate is not None:
                spread = float(now.received[layer.gate].std())
                own = max(error * spread / (highest or spread), 1e-300)
                if highest is not None:
                    errors[layer.gate] = own
            if layer.gate is None or (layer.first and not near):
                found.append(self._plain(layer, now, signal_gates))
                continue
            factor = FIRST_PASS[highest is not None] if first else 1.0
            state, mask = self._gated(layer, now, signal_gates, factor * own, shut.get(layer.gate))
            signal_gates[layer.gate] = mask
            if highest is None or near:
                gates[layer.gate] = mask
            highest = highest or spread
            found.append(state)
        return gates, found, errors

    def _gated(
        self, layer: WeightedLayer, now: Pass, gates: Gates, error: float, shut: tuple[Tensor, bool] | None
    ) -> tuple[LayerState, Tensor]:
        """Return the layer with its masks decoded, and what its gate then multiplies by."""
        assert layer.gate is not None
        slope = self.network.steps[layer.gate].slope
        received = now.received[layer.gate]
        full = self.network.signal(layer, gates, self.adjoints, open_gate=True)
        patches = layer.patches(now.inputs[layer.step])
        forward, free = received > 0, received.abs() < NEAR_ZERO * error
        if shut is not None:
            never, single = shut
            untold = never & (received.abs() < UNTOLD * self.quiet)
            told = torch.ones_like(never) if single else never
            forward = torch.where(told & ~untold, ~never, forward)
            free = (free & ~told) | untold
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
        most_free = FREE_OF_FIRST * patches.shape[1] if layer.first else MOST_FREE
        masks = decode_masks(equations, _by_places(forward), _by_places(free), _by_places(doubt), most_free)
        gate = torch.where(masks.active, full.new_ones(()), slope)
        kept = masks.kept.to(full)[:, None]
        residual = masks.residual if bool(masks.kept.any()) else math.inf
        state = LayerState(layer, full * gate * kept, gradient * kept, residual, masks.whole)
        return state, gate.reshape(received.shape)

    def _plain(self, layer: WeightedLayer, now: Pass, gates: Gates) -> LayerState:
        signal, gradient = self.network.signal(layer, gates, self.adjoints), self._gradient(layer)
        rest = layer.weight_gradient(now.inputs[layer.step], signal) - gradient
        size = float(gradient.norm())
        residual = float(rest.norm()) / size if size else math.inf
        return LayerState(layer, signal, gradient, residual, residual)

    def _gradient(self, layer: WeightedLayer) -> Tensor:
        return self.gradients[layer.weight_name].double().flatten(1)


def _above(layers: list[LayerState]) -> list[LayerState]:
    """Return the layers that certify an input: those above the first, or the first where there are no others."""
    return [one for one in layers if not one.layer.first] or layers


class _Pace:
    def __init__(self, settings: SolverSettings, products: int, single: bool) -> None:
        self.settings, self.products, self.single = settings, products, single
        self.history: list[float] = []
        self.lowest = math.inf
        self.steps, self.reach, self.fair, self.ended = settings.steps, 1.0, 0.0, False
        self._spent = self._stalls = 0

    def told(self, certificate: float) -> bool:
        """Plan the next pass, or the end; return whether this certificate is the lowest so far."""
        settings, before = self.settings, self.lowest
        far, exact = certificate > FAR, certificate < EXPLAINED
        stalled = certificate > STALLED[not far] * before
        self.history.append(certificate)
        self.lowest = min(before, certificate)
        passes = len(self.history)
        lost = passes > PATIENCE and self.lowest > max(FAR, STALLED[0] * min(self.history[:-WINDOW]))
        # Badly conditioned directions want one pass of many steps without slack, however small the certificate is.
        finished = exact and stalled and before < EXPLAINED
        spent = passes >= settings.passes or self._spent >= self.products * (1.5 if self.lowest < FAR else 1)
        self.ended = finished or lost or spent or not math.isfinite(certificate)
        self._stalls = self._stalls + 1 if stalled and passes > 3 else 0
        if exact:
            self.steps, self.reach = settings.most_steps, 0.0
        elif not self._stalls:
            self.reach = 1.0
        else:
            if self.single or not far:
                # Far away, where masks are still to be found, passes count for more than their precision.
                most = min(settings.most_steps, int(1 / 20 * self.products) if far else self.products)
                self.steps = max(self.steps, min(2 * self.steps, most))
            # Either masks of lower layers are wrong, or the equations are badly conditioned: one after the other.
            self.reach = 4.0 ** (self._stalls + 1) if far or self._stalls % 2 == 0 else 0.0
        self.fair = FAIR[not far or not self.single] if self._stalls else 0.0
        self._spent += self.steps
        return certificate < before


def _slack(now: Pass, errors: Mapping[int, float], reach: float) -> dict[int, Tensor]:
    """Return how far what a gate lets through may be off for units near zero: a fifth of their spread at most."""
    slack = dict[int, Tensor]()
    for number, error in errors.items() if reach else ():
        received = now.received[number]
        width = min(reach * error, 0.2 * float(received.std()))
        slack[number] = torch.where(received.abs() < NEAR_ZERO * width, width, 0.0)
    return slack


def _by_places(values: Tensor) -> Tensor:
    return values.flatten(2) if values.dim() > 2 else values[:, :, None]
