"""Find inputs from what ReLUs deep in a network gave: descent from grey first, then Levenberg-Marquardt.

What is known (:mod:`leakscope.equations.peeling`) is put in wherever the forward pass meets it, so that each known ReLU
is compared with what the layers below it alone say. The derivative is one pass backward, not two as for gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.inputs import InputSpace
from leakscope.equations.determinacy import count_free_directions
from leakscope.matching.gradient_map import Linearisation
from leakscope.matching.least_squares import LevenbergMarquardt
from leakscope.matching.optimisers import schedule_factor
from leakscope.matching.priors import total_variation
from leakscope.matching.victim import pull_back
from leakscope.network.gates import GatedNetwork

#: First step of the descent in units of the value range: with .1 images are 7 to 10 dB worse after 400 steps (tuning
#: images, ResNet-18), for each pixel is thrown to its bounds at first.
PACE = 0.03
#: Share of the largest value above which a unit was active: peeled values are exact to 1e-5 of it.
ACTIVE = 1e-4
#: Weight of total variation at the start, relative to the features' share; it falls to zero.
SMOOTHNESS = 3e-3
#: What the right bytes may leave, relative to the image that was found: both leave the errors of the values alone.
SAME = 2.0
#: Damping of the first Levenberg-Marquardt step: masks are still wrong, and long steps lead astray.
DAMPING = 0.1


@dataclass(frozen=True, eq=False)
class KnownValues:
    """Map flat rows in [0, 1] to the values of ReLUs that are ``known`` (examples, ...) by step."""

    network: GatedNetwork
    known: Mapping[int, Tensor]
    inputs: InputSpace

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(next(iter(self.known.values()))), *self.inputs.shape)

    @property
    def unknowns(self) -> int:
        return math.prod(self.shape)

    @property
    def entries(self) -> int:
        return sum(value.numel() for value in self.known.values())

    def to(self, dtype: torch.dtype) -> KnownValues:
        known = {step: value.to(dtype) for step, value in self.known.items()}
        return dataclasses.replace(self, network=self.network.to(dtype), known=known)

    def example(self, number: int) -> KnownValues:
        return dataclasses.replace(self, known={n: value[number : number + 1] for n, value in self.known.items()})

    @property
    def wanted(self) -> Tensor:
        seen = self.network.received(0, self._zeros(), self.known)
        return torch.cat([self.known[relu].flatten() for relu in seen])

    def __call__(self, flat: Tensor) -> Tensor:
        seen = self.network.received(0, self.inputs.from_unit(flat.reshape(self.shape)), self.known)
        return torch.cat([self._passed(relu, value).flatten() for relu, value in seen.items()])

    def _passed(self, relu: int, received: Tensor) -> Tensor:
        """Pass on what active units received, even below zero: a unit that is shut by mistake would not move."""
        known, slope = self.known[relu], self.network.steps[relu].slope
        return torch.where(known > ACTIVE * known.max(), received, torch.nn.functional.leaky_relu(received, slope))

    def _zeros(self) -> Tensor:
        return next(iter(self.known.values())).new_zeros(self.shape)

    def linearise(self, flat: Tensor) -> Linearisation:
        with torch.enable_grad():
            point = flat.detach().requires_grad_()
            value = self(point)
            weights = torch.zeros_like(value).requires_grad_()
            pulled = pull_back(value, point, weights, again=True)
        return Linearisation(
            value.detach(), lambda v: pull_back(pulled, weights, v), lambda w: pull_back(value, point, w)
        )

    def descend(self, steps: int) -> Tensor:
        """Descend from grey with Adam; total variation decides what the features do not say yet."""
        wanted = self.wanted
        middle = 0.5 if self.inputs.bounded else 0.0
        point = torch.full((self.unknowns,), middle, dtype=wanted.dtype).requires_grad_()
        adam = torch.optim.Adam([point], PACE)
        plan = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: schedule_factor("cosine", step, steps))
        size = wanted.square().sum().clamp_min(1e-300)
        for step in range(steps):
            weight = SMOOTHNESS * (1 - step / steps) ** 2 if self.inputs.smooth else 0.0
            adam.zero_grad()
            with torch.enable_grad():
                loss = (self(point) - wanted).square().sum() / size
                if weight:
                    loss = loss + weight * total_variation(point.reshape(self.shape))
                loss.backward()
            adam.step()
            plan.step()
            with torch.no_grad():
                point.copy_(self.inputs.project_unit(point))
        return point.detach()

    def finish(self, start: Tensor, *, steps: int, tolerance: float, damping: float = DAMPING) -> tuple[Tensor, float]:
        """Take Levenberg-Marquardt steps; return the row and what it leaves of the values."""
        wanted = self.wanted
        fit = LevenbergMarquardt(steps=steps, damping=damping, dense=0, tolerance=tolerance).run(self, wanted, start)
        return fit.x, math.sqrt(fit.objective) / float(wanted.norm().clamp_min(1e-300))

    def whole_bytes(self, flat: Tensor, left: float) -> Tensor:
        """Round one image to whole bytes where the values do not speak against it: most images were stored so."""
        if not (self.inputs.bounded and self.inputs.smooth):
            return flat
        rounded, wanted = (255 * flat).round().clamp(0, 255) / 255, self.wanted
        apart = float((self(rounded) - wanted).norm() / wanted.norm().clamp_min(1e-300))
        return rounded if apart < SAME * left else flat

    def free_directions(self, flat: Tensor, limit: int) -> int | None:
        """Count the directions of one example that the values do not determine; None where products run out."""
        products, size = self.linearise(flat), float(self.wanted.norm().clamp_min(1e-300))
        (count,) = count_free_directions(
            lambda row: products.backward(products.forward(row)),
            lambda row: float(products.forward(row).norm()) / size,
            self.shape,
            flat,
            limit=limit,
        )
        return count
