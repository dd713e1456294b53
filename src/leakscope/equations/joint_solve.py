"""Solve for what convolutions read by their weight gradients and by what they gave, where neither is enough alone.

A gradient gives the same equations for each input channel; a stride or few outputs leave them short. The layers above
are known, and each unit that was active there says one thing more: what the forward pass gives. A shortcut, with zeros
for its further channels or not, says half of its input at once. Nothing behind a ReLU is negative: about half as many
equations as unknowns can do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.conjugate_gradients import iterate
from leakscope.equations.convolution_equations import told_share
from leakscope.equations.robust_solve import AGREEING, DEAD, DOUBTFUL, SETTLED
from leakscope.network.gates import GatedNetwork

#: Share of the largest known value above which a unit was surely active.
ACTIVE = 1e-3
#: Exchanges of zeros, and those in which no fewer may be wrong than before.
EXCHANGES, SETBACKS = 40, 4
#: Rounds of weights: the first ones need no more than half of the digits.
ROUNDS = {torch.float32: 3, torch.float64: 6}
#: Iterations of each solve (of a crude one half as many), and the squared share that one may leave, at first and at
#: the end.
ITERATIONS, CRUDE, EXACT = 300, 1e-4, 1e-10
#: Share of the unknowns that may be on the wrong side until solves are exact.
FEW = 0.02
#: Share of the channels, those with the least errors, whose errors are the measure for the weights of the others.
LEAST = 0.25
#: Share of what a channel of gradients or known values gives below which all it leaves is rounding.
ROUNDED = 1e-6
#: Shares of the largest below which a negative unknown, or a negative slope of a zero one, is rounding.
WRONG_SIDE = {torch.float32: 1e-4, torch.float64: 1e-8}
#: Equations for each unknown, and how many of them must be of the forward pass: nearly half of the unknowns are zero.
ENOUGH, LEAST_AHEAD = 1.0, 0.1
#: Places squared times channels above which a solve takes longer than what it saves the search for images.
MOST_WORK = 3e7
#: Random values from which the sizes of forward equations are estimated, and the share below which a row says nothing.
PROBES, FAINT = 4, 1e-6


@dataclass(frozen=True, eq=False, kw_only=True)
class Forward:
    """What a ``network`` gives for the value of its step ``number``, compared with ``known`` values above by step."""

    network: GatedNetwork
    number: int
    known: Mapping[int, Tensor]

    def to(self, dtype: torch.dtype) -> Forward:
        known = {step: value.to(dtype) for step, value in self.known.items()}
        return replace(self, network=self.network.to(dtype), known=known)

    def run(self, value: Tensor) -> dict[int, Tensor]:
        return self.network.received(self.number, value, self.known)

    def agrees(self, value: Tensor, most: float) -> bool:
        """Return whether units that are surely active are off by no more than this share."""
        left, whole = 0.0, 0.0
        for step, given in self.run(value).items():
            known = self.known[step]
            active = known > ACTIVE * known.max()
            left += float((given - known)[active].square().sum())
            whole += float(known[active].square().sum())
        return left <= most**2 * whole

    @property
    def affine(self) -> bool:
        """Return whether nothing but affine steps lies between."""
        reached = {self.number}
        for number in range(self.number + 1, 1 + max(self.known, default=self.number)):
            step = self.network.steps[number]
            if number not in self.known and any(source in reached for source in step.sources):
                if step.kind in ("relu", "max"):
                    return False
                reached.add(number)
        return not any(
            self.network.steps[number].kind != "relu" and any(s in reached for s in self.network.steps[number].sources)
            for number in self.known
        )


def joint_solve(
    matrix: Tensor, wanted: Tensor, groups: Tensor, forward: Forward, start: Tensor
) -> tuple[Tensor, Tensor, float]:
    """Solve matrix x = wanted (places, channels) and the equations of ``forward`` for x that is not negative.

    ``start`` (images, channels, height, width) is positive where x may be. Return x in this shape, the weights of the
    groups of rows, and what they leave. NotApplicable where the zeros of x are not found.
    """
    count = int(groups.max()) + 1
    sizes = matrix.new_zeros(count).index_add(0, groups, matrix.square().sum(1)).sqrt()
    alive = (sizes > DEAD * sizes.max()).to(matrix)
    sizes = sizes.clamp_min(1e-300)[groups, None]
    matrix, wanted = matrix / sizes, wanted / sizes
    value, weights = start, alive
    for dtype in (torch.float32, torch.float64):
        system = _System(matrix.to(dtype), wanted.to(dtype), groups, forward.to(dtype), value.to(dtype))
        for number in range(ROUNDS[dtype]):
            value = system.solve(value.to(dtype), weights.to(dtype))
            left = system.left_by_groups(value).double()
            quantile = AGREEING if dtype == torch.float32 and number < 2 else LEAST
            measure = left[alive > 0].quantile(quantile).clamp_min(ROUNDED * float(system.wanted.norm()) / count**0.5)
            before, weights = weights, alive / (1 + (left / measure) ** 2) ** (2 if quantile == AGREEING else 1)
            system.weigh(value)
            if float((weights - before).abs().max()) < SETTLED:
                break
    kept = left < DOUBTFUL * left[alive > 0].quantile(AGREEING)
    return value.clamp_min(0), alive * kept, system.share(value, kept)


def determined_jointly(forward: Forward, modules: Sequence[Any], shape: tuple[int, ...]) -> bool:
    """Return whether gradients of ``modules`` and ``forward`` have equations enough for a value of this shape."""
    places = shape[0] * shape[2] * shape[3]
    if places**2 * shape[1] > MOST_WORK or not forward.affine:
        return False
    told = forward.run(next(iter(forward.known.values())).new_zeros(shape))
    active = sum(int((forward.known[step] > ACTIVE * forward.known[step].max()).sum()) for step in told)
    ahead = active / math.prod(shape)
    return ahead > LEAST_AHEAD and told_share(modules, places) + ahead > ENOUGH


class _System:
    """Rows of gradients, and of known values above, each about as long as any other."""

    def __init__(self, matrix: Tensor, wanted: Tensor, groups: Tensor, forward: Forward, start: Tensor) -> None:
        self.matrix, self.wanted, self.groups, self.shape = matrix, wanted, groups, start.shape
        with torch.enable_grad():
            point = torch.zeros_like(start).requires_grad_()
            given = forward.run(point)
            flat = torch.cat([value.flatten() for value in given.values()])
            weights = torch.zeros_like(flat).requires_grad_()
            (back,) = torch.autograd.grad(flat, point, weights, create_graph=True)
        self._flat, self._point, self._weights, self._back = flat, point, weights, back
        known = [forward.known[step] for step in given]
        self.active = torch.cat([(one > ACTIVE * one.max()).flatten() for one in known])
        self.offset = flat.detach()
        self.right = torch.cat([one.flatten() for one in known]) - self.offset
        self.channels = _channels(known)
        draws = torch.Generator().manual_seed(0)
        squares = torch.zeros_like(self.offset)
        for _ in range(PROBES):
            squares += self.push(torch.randn(start.shape, generator=draws).to(start)).square() / PROBES
        mean = self._by_channel(squares, torch.ones_like(self.active))
        self.scale = torch.where(mean > FAINT**2 * mean.max(), mean.clamp_min(1e-30).rsqrt(), 0.0)
        self.weights = torch.ones_like(self.scale)

    def push(self, value: Tensor) -> Tensor:
        return torch.autograd.grad(self._back, self._weights, value.reshape(self.shape), retain_graph=True)[0]

    def pull(self, rows: Tensor) -> Tensor:
        return torch.autograd.grad(self._flat, self._point, rows, retain_graph=True)[0]

    def _by_channel(self, numbers: Tensor, counted: Tensor) -> Tensor:
        """Return for each row the mean of what is counted in its channel."""
        total = numbers.new_zeros(int(self.channels.max()) + 1)
        count = total.index_add(0, self.channels, counted.to(numbers))
        return (total.index_add(0, self.channels, numbers * counted) / count.clamp_min(1))[self.channels]

    def _rows(self, value: Tensor) -> Tensor:
        """Mark the rows that count: active units, and others that would be active by mistake."""
        return self.active | (self.push(value) + self.offset > 0)

    def left_by_groups(self, value: Tensor) -> Tensor:
        left = (self.matrix @ _columns(value) - self.wanted).square().sum(1)
        return left.new_zeros(int(self.groups.max()) + 1).index_add(0, self.groups, left).sqrt()

    def _apart(self, value: Tensor) -> Tensor:
        return self.scale * (self.push(value) - self.right)

    def weigh(self, value: Tensor) -> None:
        """Weigh channels of known values by what they leave."""
        left = self._by_channel(self._apart(value).square(), self.active)
        own = left[self.active & (self.scale > 0)]
        if len(own):
            least = ROUNDED**2 * (self.scale * self.right)[self.active].square().mean()
            self.weights = 1 / (1 + left / torch.maximum(own.quantile(LEAST), least).clamp_min(1e-30))

    def share(self, value: Tensor, kept: Tensor) -> float:
        """Return what is left of the groups that are kept, or of the known values where this is more."""
        rows = kept[self.groups]
        left = float((self.matrix @ _columns(value) - self.wanted)[rows].norm() / self.wanted[rows].norm())
        ahead, whole = self._apart(value)[self.active].norm(), (self.scale * self.right)[self.active].norm()
        return max(left, float(ahead / whole.clamp_min(1e-30)))

    def solve(self, start: Tensor, weights: Tensor) -> Tensor:
        """Minimise over what is not negative: block principal pivoting, with conjugate gradients inside."""
        weighted = self.matrix * weights[self.groups, None]
        normal, right = weighted.T @ self.matrix, self._value(weighted.T @ self.wanted)
        positive, rows, solution = start > 0, self._rows(start.clamp_min(0)), start
        fewest, patience, enough, rounding = start.numel() + 1, SETBACKS, CRUDE, WRONG_SIDE[start.dtype]
        exact = max(EXACT, torch.finfo(start.dtype).eps)
        for _ in range(EXCHANGES):
            squares = self.scale.square() * self.weights * rows
            aim = right + self.pull(squares * torch.where(self.active, self.right, -self.offset))
            ridge = (self.weights * rows).sum() / start.numel() * torch.eye(len(normal)).to(normal)
            root, failed = torch.linalg.cholesky_ex(normal + ridge)
            if int(failed):
                raise NotApplicable("the equations do not have full rank")
            given = (normal, root, squares, positive)
            solution = solution * positive
            step, met = self._restricted(aim - self._product(solution, *given[::2]), *given, enough)
            if not met and enough == CRUDE:
                raise NotApplicable("gradients and known values do not determine it")
            solution = solution + step
            slope = self._product(solution, normal, squares) - aim
            wrong = positive & (solution < -rounding * solution.abs().max())
            wrong |= ~positive & (slope < -rounding * aim.abs().max())
            count, before = int(wrong.sum()), rows
            rows = self._rows(solution)
            moved = count + int((rows ^ before).sum())
            if not moved and enough <= exact:
                rest = aim - self._product(solution, *given[::2])
                solution = solution + self._restricted(rest, *given, enough)[0]
                break
            patience = SETBACKS if moved < fewest else patience - 1
            fewest = min(moved, fewest)
            if patience < 0:
                if start.dtype == torch.float32 and moved < FEW * positive.numel():
                    break  # as far as rounding lets it come
                raise NotApplicable(f"{moved} zeros are in doubt")
            enough = exact if moved < FEW * positive.numel() else enough
            positive = positive ^ wrong
        return solution

    def _value(self, columns: Tensor) -> Tensor:
        images, channels, *size = self.shape
        return columns.reshape(images, *size, channels).permute(0, 3, 1, 2)

    def _product(self, value: Tensor, normal: Tensor, squares: Tensor) -> Tensor:
        return self._value(normal @ _columns(value)) + self.pull(squares * self.push(value))

    def _restricted(
        self, right: Tensor, normal: Tensor, root: Tensor, squares: Tensor, positive: Tensor, enough: float
    ) -> tuple[Tensor, bool]:
        """Solve for what is positive, the rest being zero; return also whether no more than ``enough`` is left."""

        def product(value: Tensor) -> Tensor:
            return positive * self._product(value, normal, squares)

        def precondition(value: Tensor) -> Tensor:
            return positive * self._value(torch.cholesky_solve(_columns(value), root))

        solution, left = torch.zeros_like(right), 0.0
        for found, left in islice(
            iterate(product, positive * right, precondition), ITERATIONS // (1 + (enough == CRUDE))
        ):
            solution = found
            if left <= enough:
                break
        return solution, left <= enough


def _columns(value: Tensor) -> Tensor:
    return value.permute(0, 2, 3, 1).flatten(0, 2)


def _channels(values: list[Tensor]) -> Tensor:
    """Number the channels of several values (images, channels, ...), for each of their entries."""
    found, first = list[Tensor](), 0
    for value in values:
        own = first + torch.arange(value.shape[1]).reshape(1, -1, *[1] * (value.dim() - 2))
        found.append(own.expand_as(value).flatten())
        first += value.shape[1]
    return torch.cat(found)
