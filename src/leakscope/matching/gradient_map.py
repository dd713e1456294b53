"""Map a batch of inputs to the update it causes, with derivatives.

Pictures are flat rows in [0, 1] where the valid box is known, so that a step of one is the whole range. ``linearise``
gives products with the Jacobian without making it; ``jacobian`` makes it, without loss in far fewer columns than the
update has entries: the gradient of a linear layer on B examples has rank B at most, so its changes lie in the tangent
space of the matrices of that rank.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.func import jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from leakscope.contracts.inputs import InputSpace
from leakscope.contracts.observation import Observation
from leakscope.matching.simulations import UnrolledSteps
from leakscope.matching.victim import Tensors, Victim, VictimTensors, pull_back

#: Directions differentiated together: more do not fit the cache, fewer leave it idle.
CHUNK = 64
#: ... and so many entries of the update at most, for the memory.
CHUNK_ENTRIES = 2**24

#: Entries times examples that all products with a Jacobian may go through in a minute or two of one processor.
_WORK = 3e7
MAX_PRODUCTS = 300

Progress = Callable[[int, int], None]
#: From a tensor of the update to a flat row of its coordinates.
Coordinates = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Linearisation:
    """Hold the map near one point: its value, and products with the Jacobian (entries x unknowns) and its transpose."""

    value: Tensor
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class GradientMap:
    """Map inputs of the space ``inputs`` with labels ``targets`` to the update.

    ``output_gradient`` (classes) takes the place of the loss: the update of <output_gradient, logits>. For one example
    it is what the head's bias gradient shows, and with it held the update depends on the inputs far more simply.
    ``scales`` divide each tensor, for noise that differs between them. ``steps`` are a client's, replayed.
    """

    victim: Victim
    targets: Tensor
    inputs: InputSpace
    output_gradient: Tensor | None = None
    scales: Mapping[str, float] | None = None
    steps: UnrolledSteps | None = None

    @classmethod
    def of(
        cls,
        observation: Observation,
        targets: Tensor,
        output_gradient: Tensor | None = None,
        *,
        steps: UnrolledSteps | None = None,
    ) -> Self:
        victim = Victim.of(observation)
        # Least squares average what rounding did; moved to what was seen, everything within its bounds would be alike.
        victim = dataclasses.replace(victim, tensors=victim.tensors._replace(rounded={}))
        return cls(victim, targets, observation.inputs, output_gradient, steps=steps)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.targets), *self.inputs.shape)

    @property
    def unknowns(self) -> int:
        return math.prod(self.shape)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.victim.tensors.weights)

    @property
    def entries(self) -> int:
        return sum(value.numel() for value in self.victim.tensors.weights.values())

    @property
    def visits(self) -> float:
        return 1.0 if self.steps is None else sum(map(len, self.steps.order)) / len(self.targets)

    def narrow(self) -> Self:
        """The same map in float32, several times faster where digits do not matter."""
        victim = self.victim
        tensors = VictimTensors(
            *(
                {name: value.float() if value.is_floating_point() else value for name, value in part.items()}
                for part in victim.tensors
            )
        )
        signal = None if self.output_gradient is None else self.output_gradient.float()
        return dataclasses.replace(self, victim=dataclasses.replace(victim, tensors=tensors), output_gradient=signal)

    def pictures(self, flat: Tensor) -> Tensor:
        return self.inputs.from_unit(flat.reshape(self.shape))

    def flat(self, pictures: Tensor) -> Tensor:
        return self.inputs.to_unit(pictures).flatten()

    def update(self, flat: Tensor) -> Tensors:
        victim, tensors = self.victim, self.victim.tensors
        if self.steps is not None:
            return self._scaled(self.steps(victim, tensors, self.pictures(flat), self.targets, {})[0])
        gradient, _ = victim.gradient(tensors, self.pictures(flat), self.targets, self.output_gradient)
        return self._scaled(victim.sent_update(gradient, tensors))

    def joined(self, update: Mapping[str, Tensor]) -> Tensor:
        return _joined(self._scaled(dict(update)))

    def _scaled(self, update: Tensors) -> Tensors:
        scales = self.scales
        return update if scales is None else {name: value / scales[name] for name, value in update.items()}

    def __call__(self, flat: Tensor) -> Tensor:
        # The fused kernels of attention have no second derivative; the plain one has.
        with sdpa_kernel(SDPBackend.MATH):
            return _joined(self.update(flat))

    def linearise(self, flat: Tensor) -> Linearisation:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            point = flat.detach().requires_grad_()
            value = self(point)
            weights = torch.zeros_like(value).requires_grad_()
            pulled = pull_back(value, point, weights, again=True)

        def forward(direction: Tensor) -> Tensor:
            # The transpose of a transpose: two passes backward are faster on small convolutions than one forward.
            return pull_back(pulled, weights, direction)

        return Linearisation(value.detach(), forward, lambda w: pull_back(value, point, w))

    def jacobian(
        self,
        flat: Tensor,
        *,
        exact: bool = False,
        columns: int | None = None,
        through: Coordinates | None = None,
        progress: Progress | None = None,
    ) -> Tensor:
        """Return one row an unknown, one column a coordinate of the update; J J' is that of all entries.

        ``exact`` keeps one column an entry, in the update's order, as pruning and dropout need. More coordinates than
        ``columns`` are added up at random into that many: J J' is kept on average only. ``through`` is applied to some
        rows at a time before they are kept, so that what a defence sets to zero never fills the memory.
        """
        coordinates = [torch.flatten] * len(self.names) if exact else self._tangents(flat)

        def observed(point: Tensor) -> Tensor:
            values = self.update(point).values()
            return torch.cat([place(value) for place, value in zip(coordinates, values, strict=True)])

        def column(direction: Tensor) -> Tensor:
            return jvp(observed, (flat,), (direction,))[1]

        count = self.unknowns
        with sdpa_kernel(SDPBackend.MATH):
            width = observed(flat).numel()

            def sketched(block: Tensor) -> Tensor:
                """Add each column, with a random sign, to one of fewer columns; always the same ones."""
                if columns is None or width <= columns:
                    return block
                draws = torch.Generator().manual_seed(0)
                place = torch.randint(columns, (width,), generator=draws).to(flat.device)
                sign = (2 * torch.randint(2, (width,), generator=draws) - 1).to(flat)
                return block.new_zeros(len(block), columns).index_add_(1, place, block * sign)

            matrix: Tensor | None = None
            chunk = max(1, min(CHUNK, CHUNK_ENTRIES // self.entries))
            for start in range(0, count, chunk):
                places = torch.arange(start, min(start + chunk, count), device=flat.device)
                directions = torch.nn.functional.one_hot(places, count).to(flat)
                block = vmap(column)(directions).detach()
                rows = sketched(block) if through is None else through(block)
                if matrix is None:  # one block for all: thousands of pieces would leave the memory in shreds
                    matrix = flat.new_empty(count, rows.shape[1])
                matrix[places] = rows
                if progress is not None:
                    progress(int(places[-1]) + 1, count)
        assert matrix is not None  # there is an unknown at least
        return matrix

    def columns(self, flat: Tensor) -> int:
        pairs = zip(self._tangents(flat), self.update(flat).values(), strict=True)
        return sum(place(value).numel() for place, value in pairs)

    def _tangents(self, flat: Tensor) -> list[Coordinates]:
        # Examples that are zero or alike have a lower rank than their neighbours, whose changes leave its space.
        draws = torch.Generator().manual_seed(0)
        near = flat + 1e-2 * torch.randn(flat.shape, generator=draws).to(flat)
        pairs = zip(self.update(flat).values(), self.update(near).values(), strict=True)
        return [_coordinates(value.detach(), other.detach()) for value, other in pairs]


def affordable_steps(mapping: GradientMap) -> int:
    """Products with the Jacobian that take a minute or two in all; by size and not by the clock, so that it repeats."""
    return int(min(MAX_PRODUCTS, max(2, _WORK / (mapping.entries * mapping.shape[0] * mapping.visits))))


def _joined(update: Tensors) -> Tensor:
    return torch.cat([value.flatten() for value in update.values()])


def _coordinates(value: Tensor, near: Tensor) -> Coordinates:
    """Return tangent coordinates U'G and (I - UU')G V of one rank where fewer than half of the entries, else all."""
    if value.dim() != 2 or min(value.shape) < 4:
        return torch.flatten
    left, sizes, right = torch.linalg.svd(value, full_matrices=False)
    rank = _rank(sizes, max(value.shape))
    if 2 * rank * sum(value.shape) > value.numel() or rank != _rank(torch.linalg.svdvals(near), max(value.shape)):
        return torch.flatten
    left, right = left[:, :rank], right[:rank].T

    def tangent(matrix: Tensor) -> Tensor:
        rows = left.T @ matrix
        rest = matrix @ right - left @ (rows @ right)
        return torch.cat([rows.flatten(), rest.flatten()])

    return tangent


def _rank(sizes: Tensor, side: int) -> int:
    return int((sizes > sizes[0] * side * torch.finfo(sizes.dtype).eps).sum())
