"""How ``head-first`` finishes a search: from inputs that are near to the exact ones.

In ReLU networks masks are decoded and what is then linear is solved (:mod:`leakscope.equations.gated_inverse`);
networks without kinks are finished by Gauss-Newton steps. Either ends with a residual and, where that is small, with
the number of free directions: both together are a certificate that needs no truth. See docs/strength.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.observation import Observation
from leakscope.equations.embedding import Embedding
from leakscope.equations.gated_inverse import SILENT, GatedProblem, SolverSettings
from leakscope.matching import GradientMap, LevenbergMarquardt, Victim
from leakscope.matching.determinacy import free_directions
from leakscope.matching.gradient_map import affordable_steps
from leakscope.matching.least_squares import solve
from leakscope.network.read_gates import read_gated

DECODED = "masks decoded"
#: Fewer products with the equations than this lead nowhere.
LEAST_PRODUCTS = 200
#: Features within so many times their expected error of zero may be those of silent units.
SILENT_ERRORS = 4.0
#: Gauss-Newton steps, and the relative residual that is worth going on from.
GAUSS_NEWTON = ((10, 0.1), (20, math.inf))
#: So many products with the Jacobian must be affordable, by the size of the model.
GAUSS_NEWTON_PRODUCTS = 100
#: Where an update that is off by what a certificate allows moves the inputs by more than the first, Gauss-Newton steps
#: are not worth their time. The movement is that of so many conjugate gradients, which is too small where conditions
#: are worst: 4e-6 was seen where images came back at 109 dB, 5e-5 on a transformer with many images for one update.
MOST_MOVEMENT, PROBE_STEPS = 2e-5, 200


@dataclass(frozen=True, eq=False)
class Finished:
    """Inputs in the model's space, what they leave of the update, and how they came about.

    ``free``: the directions of each example that are not determined; None where nothing was counted.
    """

    inputs: Tensor
    residual: float
    free: tuple[int | None, ...]
    way: str


#: From the inputs of a search; None where nothing better was found.
Finish = Callable[[Tensor], Finished | None]


@dataclass(frozen=True, eq=False)
class Finisher:
    """What finishing needs to know; ``notes`` tell why a search is not finished.

    ``targets``: the labels; any will do where the output gradient stands for the loss.
    """

    observation: Observation
    embedding: Embedding
    victim: Victim
    targets: Tensor
    notes: list[str] = field(default_factory=list)

    def for_network(self, smooth: bool) -> Finish | None:
        """How a search is finished on this network; None where it is not, and a note says why."""
        if self.observation.batchnorm == "train" and self.victim.batchnorm_targets:
            self.notes.append("BatchNorm uses the statistics of the batch, so the search is not finished")
            return None
        return self.gauss_newton if smooth else self._by_masks()

    def _by_masks(self) -> Finish | None:
        observation, embedding = self.observation, self.embedding
        try:
            network = read_gated(observation.model, observation.input_shape, embedding.layer)
        except NotApplicable as error:
            self.notes.append(f"masks are not decoded: {error}")
            return None
        inputs = observation.inputs
        problem = GatedProblem(
            network,
            embedding.features,
            embedding.adjoints,
            {name: value.cpu() for name, value in observation.message.update.items()},
            project=inputs.project,
            silence=self.silence(),
        )
        if problem.affordable_products() < LEAST_PRODUCTS:
            self.notes.append(f"masks are not decoded: the network is too large ({network.work:.0e} multiplications)")
            return None

        def decode(near: Tensor) -> Finished:
            solution = problem.solve(near.cpu(), SolverSettings(exact=EXPLAINED))
            explained = solution.certificate < EXPLAINED
            free = problem.free_directions(solution.inputs) if explained else (None,) * len(near)
            return Finished(solution.inputs, solution.certificate, free, DECODED)

        return decode

    def silence(self) -> float:
        """The share of the largest feature below which one may be zero: rounding, or the noise of the update."""
        features = self.embedding.features
        if self.embedding.exact:
            return SILENT
        error = self.embedding.error * float(features.square().mean().sqrt())
        return max(SILENT, SILENT_ERRORS * error / float(features.abs().max().clamp_min(1e-300)))

    def gauss_newton(self, near: Tensor) -> Finished | None:
        """Second-order steps with the output gradient held, for networks without kinks."""
        wide = self.observation.to(dtype=torch.float64)
        mapping = GradientMap.of(wide, self.targets, self.embedding.output_gradients.to(wide.device))
        if affordable_steps(mapping) < GAUSS_NEWTON_PRODUCTS:
            self.notes.append("no Gauss-Newton steps: the network is too large for them")
            return None
        try:
            return self._newton_steps(mapping, mapping.joined(wide.message.update), mapping.flat(near.double()))
        except RuntimeError as error:  # an LSTM has no forward derivative, and some code insists on float32
            self.notes.append(f"no Gauss-Newton steps: {str(error).strip().splitlines()[0]}")
            return None

    def _newton_steps(self, mapping: GradientMap, observed: Tensor, x: Tensor) -> Finished | None:
        size, residual = float(observed.norm().clamp_min(1e-300)), math.inf
        movement = inputs_movement(mapping, x, EXPLAINED * size)
        if movement > MOST_MOVEMENT:
            self.notes.append(f"no Gauss-Newton steps: errors of 1e-6 in the update move the inputs by {movement:.1e}")
            return None
        for steps, enough in GAUSS_NEWTON:
            fit = LevenbergMarquardt(steps=steps, tolerance=EXPLAINED / 3).run(mapping, observed, x)
            x, residual = fit.x, float(fit.residual.norm()) / size
            if fit.at_rest or residual > enough:
                break
        if residual >= EXPLAINED:
            # The gradient alone, without a prior, is explained by inputs that are further away.
            self.notes.append(f"Gauss-Newton steps ended at a relative residual of {residual:.1e} and are left out")
            return None
        return Finished(mapping.pictures(x), residual, free_directions(mapping, x, fit.preconditioner), "Gauss-Newton")


def inputs_movement(mapping: GradientMap, x: Tensor, noise: float) -> float:
    """The root mean square by which the inputs move, at least, with random noise of this length in the update."""
    draws = torch.Generator().manual_seed(0)
    products = mapping.linearise(x)
    image = products.forward(torch.ones_like(x))
    disturbance = torch.randn(image.shape, generator=draws, dtype=torch.float64).to(image)
    right = products.backward(disturbance * (noise / disturbance.norm()))
    moved = solve(products, right, 0.0, tolerance=1e-12, limit=PROBE_STEPS).step
    return float(moved.square().mean().sqrt())
