"""Find inputs from what ReLUs deep in a network gave: a decoded start, descent, then Levenberg-Marquardt.

What is known (:mod:`leakscope.equations.peeling`) is put in wherever the forward pass meets it, so that each known ReLU
is compared with what the layers below it alone say. The derivative is one pass backward, not two as for gradients.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from leakscope.contracts.certificate import EXPLAINED
from leakscope.contracts.inputs import InputSpace
from leakscope.equations.determinacy import count_free_directions
from leakscope.equations.open_equations import OpenEquations
from leakscope.equations.peeling import AGREES, SOLVED_SCARCE
from leakscope.matching.decoder import decode
from leakscope.matching.determinacy import ACCURATE, movement
from leakscope.matching.gradient_map import Linearisation, Sketch, make_jacobian
from leakscope.matching.least_squares import LevenbergMarquardt, Preconditioner
from leakscope.matching.optimisers import schedule_factor
from leakscope.matching.priors import total_variation
from leakscope.matching.victim import pull_back
from leakscope.network.gates import GatedNetwork

#: First step of the descent in units of the value range. From a decoded start .01 is slower, and .1 throws it away.
PACE = 0.02
#: The same below a max pooling, where values are whitened: 53 dB after 1000 steps, with .02 35 dB (one image, VGG-11).
PACE_WHITENED = 0.1
#: Directions of the channels are whitened down to this share of the loudest one's mean square.
LOUD = 1e-2
#: Random images, and how far they are moved, from which the loudness of channels is read.
PROBES, MOVED = 8, 0.02
#: Share of the largest value above which a unit was surely active: values of scarce equations are in doubt by 1e-3, and
#: in front of the ReLU a unit that was shut may be far below zero.
ACTIVE = 1e-2
#: Weight of total variation at the start, relative to the features' share; it falls to zero.
SMOOTHNESS = 3e-3
#: What the right bytes may leave, relative to the image that was found: both leave the errors of the values alone.
SAME = 2.0
#: Where BatchNorm removes the scale of an image: the standard deviation in bytes below which bytes do not tell it, the
#: mean square that they may be apart from whole ones (at random: 1/12), and where a scale is clear.
CONTRAST, WHOLE, CLEAR = 4.0, 0.02, 2e-3
#: A step that changes the square of what is left by less than this share is the last: the values' own errors are left.
GAIN = 1e-2
#: What inputs may leave of the values to tell the places of maxima.
PLACED = 0.1
#: Damping of the first Levenberg-Marquardt step: masks are still wrong, and long steps lead astray.
DAMPING = 0.1


@dataclass(frozen=True, eq=False)
class KnownValues:
    """Map flat rows in [0, 1] to the values of ReLUs, or their maxima, that are ``known`` (examples, ...) by step."""

    network: GatedNetwork
    known: Mapping[int, Tensor]
    inputs: InputSpace
    #: For the values of one more step of all examples, of which they are too few.
    equations: OpenEquations | None = None
    #: By step, a matrix that is applied to its channels before values are compared.
    metrics: Mapping[int, Tensor] = field(default_factory=dict)
    #: Goes on below a max pooling, whose places inputs that are nearly right tell: the values that are known then.
    deeper: Callable[[Tensor], Mapping[int, Tensor] | None] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.known.values())))

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self.inputs.shape)

    @property
    def unknowns(self) -> int:
        return math.prod(self.shape)

    @property
    def entries(self) -> int:
        return self.wanted.numel()

    def to(self, dtype: torch.dtype) -> KnownValues:
        known = {step: value.to(dtype) for step, value in self.known.items()}
        metrics = {step: value.to(dtype) for step, value in self.metrics.items()}
        return dataclasses.replace(self, network=self.network.to(dtype), known=known, metrics=metrics)

    @property
    def parts(self) -> list[KnownValues]:
        """List what can be solved by itself: each example, unless the statistics of the batch join them."""
        if self.network.batched:
            return [self]
        if len(self) == 1:
            return [self]
        single = ({step: value[k : k + 1] for step, value in self.known.items()} for k in range(len(self)))
        return [dataclasses.replace(self, known=known, equations=None) for known in single]

    @property
    def above(self) -> KnownValues:
        """Leave out the lowest values: they have the errors of all that was solved above them."""
        lowest = min(self.known)
        known = {step: value for step, value in self.known.items() if step > lowest}
        return dataclasses.replace(self, known=known)

    @property
    def pooled(self) -> bool:
        """Return whether a max pooling lies between the inputs and what is known of them."""
        return any(step.kind == "max" for step in self.network.steps[: 1 + min(self.known)])

    @cached_property
    def work(self) -> int:
        """Multiplications of one forward pass of all examples up to what is compared."""
        last = max(self.network.received(0, self._zeros(), self.known))
        layers = (layer for layer in self.network.layers if layer.step < last)
        sizes = (one.module.weight.numel() * math.prod(self.network.steps[one.step].shape[1:]) for one in layers)
        return self.shape[0] * sum(sizes)

    @cached_property
    def wanted(self) -> Tensor:
        seen = self.network.received(0, self._zeros(), self.known)
        return torch.cat([self._measured(step, self.known[step]) for step in seen])

    def __call__(self, flat: Tensor) -> Tensor:
        return self._seen(flat)[0]

    def _seen(self, flat: Tensor, watched: int | None = None) -> tuple[Tensor, Tensor | None]:
        """Return what is compared with the known values, and the value of a further step that is ``watched``."""
        seen = self.network.received(0, self.inputs.from_unit(flat.reshape(self.shape)), self.known, watched)
        inner = None if watched is None else seen.pop(watched)
        return torch.cat([self._measured(step, self._passed(step, value)) for step, value in seen.items()]), inner

    def whitened(self) -> KnownValues:
        """Compare channels by how far random pixels move them: else brightness outweighs all that tells details."""
        middle, draws = 0.5 if self.inputs.bounded else 0.0, torch.Generator().manual_seed(0)
        first = middle + 0.2 * torch.randn((PROBES, *self.inputs.shape), generator=draws)
        moved = first + MOVED * torch.randn(first.shape, generator=draws)
        known = {step: value[:1].expand(PROBES, *value.shape[1:]) for step, value in self.known.items()}
        like = next(iter(known.values()))
        pair = (self.network.received(0, self.inputs.from_unit(x.to(like)), known) for x in (first, moved))
        before, after = pair
        metrics = {step: _whitening((after[step] - before[step]).transpose(0, 1).flatten(1)) for step in before}
        return dataclasses.replace(self, metrics=metrics)

    def _measured(self, step: int, value: Tensor) -> Tensor:
        if step in self.metrics:
            value = torch.einsum("dc,bcl->bdl", self.metrics[step], value.flatten(2))
        return value.flatten()

    def _passed(self, step: int, received: Tensor) -> Tensor:
        """Pass on what active units received, even below zero: a unit that is shut by mistake would not move."""
        known, behind = self.known[step], self.network.relu_behind(step)
        if behind is None:
            return received
        slope = self.network.steps[behind].slope
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

    def crude_jacobian(self, flat: Tensor, columns: int) -> Tensor:
        """Return a Jacobian in float32 with so many columns at most, for preconditioners."""
        narrow, near = self.to(torch.float32), flat.float()
        return make_jacobian(narrow, near, Sketch(self.entries, columns, near) if self.entries > columns else None)

    def start(self) -> Tensor:
        """Guess the examples from the lowest values that are known; grey where these are no maps of images."""
        lowest = min(self.known)
        guess = decode(self.network, lowest, self.known[lowest], self.inputs)
        return self._zeros().flatten(1) + (0.5 if self.inputs.bounded else 0.0) if guess is None else guess

    def descend(self, start: Tensor, steps: int) -> Tensor:
        """Descend with Adam; total variation decides what values and equations do not say yet."""
        point = start.detach().flatten().clone().requires_grad_()
        adam = torch.optim.Adam([point], PACE_WHITENED if self.metrics else PACE)
        plan = torch.optim.lr_scheduler.LambdaLR(adam, lambda step: schedule_factor("cosine", step, steps))
        left_by_equations = self._equations_loss()
        for step in range(steps):
            weight = SMOOTHNESS * (1 - step / steps) ** 2 if self.inputs.smooth else 0.0
            adam.zero_grad()
            with torch.enable_grad():
                value, inner = self._seen(point, None if self.equations is None else self.equations.step)
                loss = _share(value, self.wanted)
                if inner is not None:
                    loss = loss + left_by_equations(inner)
                if weight:
                    loss = loss + weight * total_variation(point.reshape(self.shape))
                loss.backward()
            adam.step()
            plan.step()
            with torch.no_grad():
                point.copy_(self.inputs.project_unit(point))
        return point.detach()

    def _equations_loss(self) -> Callable[[Tensor], Tensor]:
        if self.equations is None:
            return lambda values: values.new_zeros(())
        matrix, gradient = (value.to(self.wanted) for value in self.equations.balanced())
        return lambda values: _share(matrix @ values.permute(0, 2, 3, 1).flatten(0, 2), gradient)

    def solve_equations(self, near: Tensor) -> KnownValues | None:
        """Solve the further equations from examples near to the right ones; None where that does not fit the values."""
        if self.equations is None:
            return None
        step, (_, inner) = self.equations.step, self._seen(near, self.equations.step)
        assert inner is not None
        values, left = self.equations.solve(inner)
        values = values.to(inner)
        # Inside of a block no known value follows from these alone.
        ahead = self.network.received(step, values, self.known)
        apart = [_share(self._passed(number, value), self.known[number]) ** 0.5 for number, value in ahead.items()]
        if not left < SOLVED_SCARCE or max(map(float, apart), default=0.0) > AGREES:
            return None
        return dataclasses.replace(self, known={step: values, **self.known}, equations=None)

    def go_on(self, near: Tensor) -> KnownValues | None:
        """Return what is known with the places of maxima that examples near to the right ones have; None if no more."""
        inputs = self.inputs.from_unit(near.reshape(self.shape)).double()
        if self.deeper is None or not self.leaves(near.to(self.wanted)) < PLACED:
            return None
        known = self.deeper(inputs)
        return None if known is None else dataclasses.replace(self, known=known)

    def leaves(self, flat: Tensor) -> float:
        return float((self(flat) - self.wanted).norm() / self.wanted.norm().clamp_min(1e-300))

    def finish(
        self, start: Tensor, *, steps: int, tolerance: float, damping: float = DAMPING
    ) -> tuple[Tensor, float, Preconditioner | None]:
        """Take Levenberg-Marquardt steps; return the row, what it leaves, and a preconditioner if one was made."""
        fit = LevenbergMarquardt(steps=steps, damping=damping, tolerance=tolerance, gain=GAIN)
        found = fit.run(self, self.wanted, start)
        return found.x, self.leaves(found.x), found.preconditioner

    def whole_bytes(self, flat: Tensor, left: float) -> Tensor:
        """Round images to whole bytes where the values do not speak against it: most images were stored so.

        BatchNorm in train mode removes the scale of its input: it is the smallest at which bytes are whole.
        """
        if not (self.inputs.bounded and self.inputs.smooth):
            return flat
        scales = self._byte_scales(flat)
        rounded = _round(self._scaled(flat, scales[0]) if scales else flat)
        return rounded if self.leaves(rounded) < SAME * left else flat

    def _scaled(self, flat: Tensor, scale: float) -> Tensor:
        return self.inputs.to_unit(scale * self.inputs.from_unit(flat.reshape(self.shape))).flatten()

    def _byte_scales(self, flat: Tensor) -> list[float]:
        """List the scales that make whole bytes of images whose scale is not known, the smallest first.

        There are several for dark images, and for those of few shades: multiples of bytes are bytes.
        """
        if not (self.network.batched and self.inputs.bounded and self.inputs.smooth):
            return []
        wide = flat.double()
        least = 255 * self._scaled(wide, 0.0)
        slope = 255 * self._scaled(wide, 1.0) - least
        # Where the first pixel leaves the bytes, at either end.
        ends = torch.where(slope > 0, 256 - least, -1 - least) / slope
        most = float(ends[slope != 0].min()) if bool((slope != 0).any()) else 0.0
        first = CONTRAST / float(slope.std().clamp_min(1e-300))
        if not first < most:
            return []  # too flat an image at any scale
        # Far enough apart that no pixel moves by more than an eighth of a byte from one to the next.
        step = 0.125 / float(slope.abs().max().clamp_min(1e-300))
        scales = torch.arange(first, most, step, dtype=torch.float64)
        found = dict[float, float]()
        for some in scales.split(256):
            pixels = least + some[:, None] * slope
            apart = torch.where((pixels > -1).all(1), (pixels - pixels.round()).square().mean(1), torch.inf)
            for scale in some[apart < WHOLE].tolist():
                # Least squares on the bytes, which are then clear.
                whole = (least + scale * slope).round()
                better = float(((whole - least) @ slope) / (slope @ slope))
                if not found or better > max(found) + 4 * step:
                    found[better] = float((least + better * slope - whole).square().mean())
        return [scale for scale, apart in found.items() if apart <= max(CLEAR, min(found.values()))]

    def free_directions(
        self, flat: Tensor, limit: int, preconditioner: Preconditioner | None = None
    ) -> tuple[int | None, ...]:
        """Count the directions of each example that the values do not determine; None where products run out.

        The scale that BatchNorm in train mode removes is determined where bytes are whole at one scale alone.
        """
        products, size = self.linearise(flat), float(self.wanted.norm().clamp_min(1e-300))
        along = torch.zeros_like(flat)
        if torch.equal(flat, _round(flat)) and len(self._byte_scales(flat)) == 1:
            along = torch.nn.functional.normalize(self._scaled(flat, 1.0) - self._scaled(flat, 0.0), dim=0)
        counts = count_free_directions(
            lambda row: products.backward(products.forward(row)) + size**2 * along * (along @ row),
            lambda row: math.hypot(float(products.forward(row).norm()) / size, float(along @ row)),
            self.shape,
            flat,
            limit=limit,
            precondition=preconditioner,
        )
        if preconditioner is None:
            return counts
        # A preconditioner makes weak directions as quick as strong ones, so that their weakness must be looked for.
        moved = movement(products, EXPLAINED * size, self.shape, preconditioner)
        return tuple(
            None if count == 0 and move > ACCURATE else count for count, move in zip(counts, moved, strict=True)
        )


def _share(given: Tensor, wanted: Tensor) -> Tensor:
    return (given - wanted).square().sum() / wanted.square().sum().clamp_min(1e-300)


def _round(flat: Tensor) -> Tensor:
    return (255 * flat).round().clamp(0, 255) / 255


def _whitening(moves: Tensor) -> Tensor:
    """Return the matrix that makes moves (channels, samples) equally loud in all directions, but for the quietest."""
    sizes, directions = torch.linalg.eigh(moves.double() @ moves.T.double())
    loudest = sizes[-1].clamp_min(1e-300)
    return ((sizes.clamp_min(0) + LOUD * loudest) / loudest).rsqrt()[:, None].to(moves) * directions.T.to(moves)
