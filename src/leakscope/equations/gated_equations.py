"""The linear equations of a piecewise-linear network with its gates held, and one damped least-squares step on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.equations.determinacy import count_free_directions
from leakscope.network.gates import GatedNetwork, Gates, WeightedLayer

#: Directions of a layer's signals below this share of the largest hold equations without content.
NO_SIGNAL = 1e-6
#: Whitening never goes further down than the first, nor stays above the second.
WHITENING = (3e-3, 0.3)


@dataclass(frozen=True, eq=False)
class LayerState:
    """One layer at the present input: the signal at its output, the gradient it should give, the relative residual.

    Both are zero for units that are not counted on; ``whole`` is the residual of all units.
    """

    layer: WeightedLayer
    signal: Tensor
    gradient: Tensor
    residual: float
    whole: float


@dataclass(frozen=True, eq=False)
class Block:
    """A layer's equations: a whitened and weighted signal (examples, rows, places), and what it should give."""

    layer: WeightedLayer
    signal: Tensor
    right: Tensor


def blocks_of(layers: Sequence[LayerState], whitening: float, trust: float, fair: float = 0.0) -> list[Block]:
    """Equations of norm one each, whitened down to ``whitening`` times the layer's residual.

    A layer that is explained worse than the highest counts less, by the ratio of residuals to the power of ``trust``;
    not so with residuals up to ``fair``.
    """
    highest = max(layers[0].residual, fair)
    blocks = []
    for one in layers:
        weight = min(1.0, highest / one.residual) ** trust if one.residual else 1.0
        matrix = whitening_matrix(one.signal, min(max(WHITENING[0], whitening * one.residual), WHITENING[1]))
        right = matrix @ one.gradient
        weight /= float(right.norm().clamp_min(1e-300))
        blocks.append(Block(one.layer, weight * torch.einsum("dc,ncl->ndl", matrix, one.signal), weight * right))
    return blocks


def whitening_matrix(signal: Tensor, least: float) -> Tensor:
    """(B B' + least^2 lambda_max)^(-1/2) of the signals B (units, examples x places), in the basis of its eigenvectors.

    >>> signal = torch.diag(torch.tensor([3.0, 4.0])).double()[None]
    >>> white = whitening_matrix(signal, 1e-6) @ signal[0]
    >>> torch.allclose(white @ white.T, torch.eye(2).double())
    True
    """
    rows = signal.transpose(0, 1).flatten(1)
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    largest = values[-1].clamp_min(1e-300)
    seen = values > NO_SIGNAL**2 * largest
    return vectors[:, seen].T * (values[seen] + least**2 * largest).rsqrt()[:, None]


class LinearStep:
    """Damped least squares on the features and the layers' gradients, with gates held and slack for doubtful units.

    The residual is taken in float64, its equations are solved by conjugate gradients in float32: passes repeat.
    """

    def __init__(self, network: GatedNetwork, features: Tensor, project: Callable[[Tensor], Tensor]) -> None:
        self.network, self.features, self.project = network, features, project
        self.narrow = network.to(torch.float32)
        self._layers = {layer.step: layer for layer in self.narrow.layers}
        self._weight = 1 / float(features.norm())

    def __call__(
        self,
        z: Tensor,
        gates: Gates,
        blocks: Sequence[Block],
        *,
        damping: float,
        slack: Mapping[int, Tensor],
        steps: int,
    ) -> Tensor:
        """The next input. ``slack``: how far what each gate lets through may be off; zero where it is trusted."""
        unknowns = _Unknowns(z, slack)
        with torch.enable_grad():
            point = unknowns.start.requires_grad_()
            value = self._half_square(self.network, unknowns, point, gates, blocks, bias=True)
            (gradient,) = torch.autograd.grad(value, point)
        free = self._free(z, gradient[: z.numel()])
        moves = torch.ones(len(point))
        moves[: z.numel()] = free.flatten().float()

        normal = self._normal(unknowns, gates, blocks)
        step = conjugate_gradients(
            lambda row: moves * normal(moves * row) + damping * moves * row, -moves * gradient.float(), steps
        )
        return self.project(z + step[: z.numel()].reshape(z.shape).double())

    def free_directions(
        self, z: Tensor, gates: Gates, layers: Sequence[LayerState], *, limit: int
    ) -> tuple[int | None, ...]:
        """Count the directions of each example that the equations at ``z`` do not determine, its gates held."""
        blocks = blocks_of(layers, whitening=0.0, trust=0.0)
        sizes = [float(one.gradient.norm().clamp_min(1e-300)) for one in layers]

        def change(row: Tensor) -> float:
            inputs, features = self.network.held(row.double().reshape(z.shape), gates, bias=False)
            parts = [self._weight * float(features.norm())]
            for one, size in zip(layers, sizes, strict=True):
                parts.append(float(one.layer.weight_gradient(inputs[one.layer.step], one.signal).norm()) / size)
            return max(parts)

        normal = self._normal(_Unknowns(z, {}), gates, blocks)
        return count_free_directions(normal, change, tuple(z.shape), z.float(), limit=limit)

    def _normal(self, unknowns: _Unknowns, gates: Gates, blocks: Sequence[Block]) -> Callable[[Tensor], Tensor]:
        """Multiply by A'A, with A the equations in float32."""
        narrow_gates = {n: gate.float() if gate.is_floating_point() else gate for n, gate in gates.items()}
        narrow_blocks = [Block(self._layers[b.layer.step], b.signal.float(), b.right) for b in blocks]

        def product(direction: Tensor) -> Tensor:
            with torch.enable_grad():
                row = direction.detach().requires_grad_()
                square = self._half_square(self.narrow, unknowns, row, narrow_gates, narrow_blocks, bias=False)
                (image,) = torch.autograd.grad(square, row)
            return image

        return product

    def _free(self, z: Tensor, gradient: Tensor) -> Tensor:
        """Inputs that descent does not push out of their bounds (projected Newton: the others stay where they are)."""
        downhill = z - 1e-6 * gradient.reshape(z.shape).sign()
        return self.project(downhill) == downhill

    def _half_square(
        self,
        network: GatedNetwork,
        unknowns: _Unknowns,
        point: Tensor,
        gates: Gates,
        blocks: Sequence[Block],
        *,
        bias: bool,
    ) -> Tensor:
        """Half of the squared residual; without ``bias`` the quadratic form of the equations alone."""
        x, slack = unknowns.split(point)
        inputs, features = network.held(x, gates, bias=bias, slack=slack)
        parts = [self._weight * (features.flatten(1) - (self.features if bias else 0))]
        for block in blocks:
            value = block.layer.weight_gradient(inputs[block.layer.step], block.signal)
            parts.append(value - block.right if bias else value)
        return torch.stack([part.square().sum() for part in parts]).sum() / 2


class _Unknowns:
    """The input and the slack of gates in one row; slack in units of its width."""

    def __init__(self, z: Tensor, slack: Mapping[int, Tensor]) -> None:
        self.shape, self.slack = z.shape, dict(slack)
        self.sizes = [z.numel(), *(width.numel() for width in self.slack.values())]
        self.start = torch.cat([z.flatten(), z.new_zeros(sum(self.sizes[1:]))]).detach()

    def split(self, row: Tensor) -> tuple[Tensor, dict[int, Tensor]]:
        x, *rest = row.split(self.sizes)
        pairs = zip(self.slack.items(), rest, strict=True)
        return x.reshape(self.shape), {n: part.reshape(width.shape) * width.to(row) for (n, width), part in pairs}


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
        if not math.isfinite(float(size)) or size < tolerance**2 * goal:
            break
        direction = rest + size / before * direction
    return solution
