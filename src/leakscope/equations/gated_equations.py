"""The equations of a piecewise-linear network: which units were active, and what is linear with its gates held.

With S the derivative behind the activation and P what each place of the layer reads, unit c of the layer has the
gradient G_c = sum over places l of m_cl S_cl P_l: for each unit a small linear regression with unknowns of 0 or 1. Most
masks are known from an approximate input; only units near zero are free. See docs/strength.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.certificate import EXPLAINED
from leakscope.equations.conjugate_gradients import conjugate_gradients
from leakscope.equations.determinacy import count_free_directions
from leakscope.equations.head_system import EXACT
from leakscope.network.gates import GatedNetwork, Gates, WeightedLayer

#: Whitening never goes further down than the first, nor stays above the second.
WHITENING = (3e-3, 0.3)
#: A unit of the layer whose residual is so many times the median, and more than rounding, is left out of the equations.
TRIM = 2.5
#: A unit with more free masks than this keeps those of the approximate input: too much work.
MOST_FREE = 2000


@dataclass(frozen=True, eq=False)
class LayerEquations:
    """The gradients of one layer, (units, inputs) and (units,), as equations in its masks.

    ``signal`` (examples, units, places): the derivative at the output if every unit were active; ``patches``
    (examples, inputs, places).
    """

    signal: Tensor
    patches: Tensor
    gradient: Tensor
    bias_gradient: Tensor | None

    def system(self) -> tuple[Tensor, Tensor]:
        columns = _flat(self.patches)
        if self.bias_gradient is None:
            return columns, self.gradient
        # As large as the other rows together are on average, so that it counts.
        size = columns.norm() / columns.shape[1] ** 0.5
        columns = torch.cat([columns, size.expand(1, columns.shape[1])])
        return columns, torch.cat([self.gradient, size * self.bias_gradient[:, None]], dim=1)


@dataclass(frozen=True, eq=False)
class Masks:
    """``active`` (examples, units, places) as booleans, ``kept`` units whose equations hold, and what is unexplained.

    ``residual`` is the norm of what the kept units leave of their gradient, relative to it; ``whole`` that of all.
    """

    active: Tensor
    kept: Tensor
    residual: float
    whole: float


def decode_masks(
    equations: LayerEquations, forward: Tensor, free: Tensor, doubt: Tensor, most_free: float = MOST_FREE
) -> Masks:
    """Decode masks that explain the gradient, from the masks ``forward`` of an approximate input.

    ``free``: units that may differ; ``doubt``: 1 + (pre-activation / its error)^2 of each, the cost of a flip in units
    of the noise. A unit of the layer with more than ``most_free`` free masks keeps those of the input.
    """
    columns, right = equations.system()
    signal, masks, free, doubt = (_flat(part) for part in (equations.signal, forward, free, doubt))
    rest = right - (signal * masks) @ columns.T
    correlation = signal * (rest @ columns)
    noise = rest.square().sum(1) / len(columns)
    active = masks.clone()
    for unit in range(len(signal)):
        places = torch.nonzero(free[unit] & (signal[unit] != 0)).flatten()
        if not 0 < len(places) <= most_free or noise[unit] == 0:
            continue
        own = columns[:, places] * signal[unit, places]
        facts = own, masks[unit, places], doubt[unit, places]
        active[unit, places], rest[unit] = _decoded(*facts, rest[unit], correlation[unit, places], noise[unit])
    size = (signal * active).norm(dim=1)
    share = rest.norm(dim=1) / size.clamp_min(torch.finfo(size.dtype).tiny)
    seen = size > 0
    kept = seen & (share <= (TRIM * share[seen].median()).clamp_min(EXACT)) if bool(seen.any()) else seen
    return Masks(
        active.unflatten(1, forward.shape[::2]).transpose(0, 1),
        kept,
        _relative(rest[kept], right[kept]),
        _relative(rest, right),
    )


def _decoded(
    columns: Tensor, before: Tensor, doubt: Tensor, rest: Tensor, correlation: Tensor, noise: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the free masks of one unit, with ``columns`` (equations, free), and the residual that they leave.

    ``before``: the present masks, which leave ``rest``.
    """
    gram = columns.T @ columns
    for _ in range(2):  # the second time with the noise that the first left
        change = torch.linalg.solve_ex(gram + torch.diag(4 * noise * doubt), correlation)[0]
        left = rest - columns @ change
        noise = left.square().sum() / len(left)
    cost, diagonal = noise * (doubt - 1), gram.diagonal()
    rounded = before + change > 0.5
    found = []
    starts = (rounded, rest - columns @ (rounded.to(rest) - before.to(rest))), (before.clone(), rest)
    for masks, remaining in starts:
        pull = columns.T @ remaining
        for _ in range(40):  # flip one mask after another while that pays
            way = 1 - 2 * masks.to(rest)
            gain = 2 * way * pull - diagonal - torch.where(masks == before, cost, -cost)
            best = int(gain.argmax())
            if not gain[best] > 2 * noise:
                break
            remaining = remaining - columns[:, best] * way[best]
            pull = pull - gram[:, best] * way[best]
            masks[best] = ~masks[best]
        found.append((masks, remaining, remaining @ remaining + (cost * (masks != before)).sum()))
    return min(found, key=lambda one: float(one[2]))[:2]


def _flat(values: Tensor) -> Tensor:
    """Reshape (examples, units, places) to (units, examples x places)."""
    return values.transpose(0, 1).flatten(1)


def _relative(rest: Tensor, whole: Tensor) -> float:
    return float(rest.norm()) / size if (size := float(whole.norm())) else 0.0


@dataclass(frozen=True, eq=False)
class LayerState:
    """One layer: the signal at its output and the gradient it should give, both zero for units not counted on.

    ``residual``: what the other units leave, relative; ``whole``: that of all units.
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
    """Return equations of norm one each, whitened down to ``whitening`` times the layer's residual.

    A layer that is explained worse than the highest and ``fair`` counts less, by the ratio to the power of ``trust``.
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
    """Return (B B' + least^2 lambda_max)^(-1/2) of signals B (units, examples x places), in its eigenvectors' basis.

    >>> signal = torch.diag(torch.tensor([3.0, 4.0])).double()[None]
    >>> white = whitening_matrix(signal, 1e-6) @ signal[0]
    >>> torch.allclose(white @ white.T, torch.eye(2).double())
    True
    """
    rows = _flat(signal)
    values, vectors = torch.linalg.eigh(rows @ rows.T)
    largest = values[-1].clamp_min(1e-300)
    seen = values > EXPLAINED**2 * largest  # the others hold equations without content
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
        """Return the next input. ``slack``: how far what each gate lets through may be off; zero where trusted."""
        unknowns = _Unknowns(z, slack)
        with torch.enable_grad():
            point = unknowns.start.requires_grad_()
            value = self._half_square(self.network, unknowns, point, gates, blocks, bias=True)
            (gradient,) = torch.autograd.grad(value, point)
        # Projected Newton: inputs that descent would push out of their bounds stay where they are.
        downhill = z - 1e-6 * gradient[: z.numel()].reshape(z.shape).sign()
        moves = torch.ones(len(point))
        moves[: z.numel()] = (self.project(downhill) == downhill).flatten().float()
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
            changed = (one.layer.weight_gradient(inputs[one.layer.step], one.signal).norm() for one in layers)
            shares = (float(value) / size for value, size in zip(changed, sizes, strict=True))
            return max(self._weight * float(features.norm()), *shares)

        normal = self._normal(_Unknowns(z, {}), gates, blocks)
        return count_free_directions(normal, change, tuple(z.shape), z.float(), limit=limit)

    def _normal(self, unknowns: _Unknowns, gates: Gates, blocks: Sequence[Block]) -> Callable[[Tensor], Tensor]:
        narrow_gates = {n: gate.float() if gate.is_floating_point() else gate for n, gate in gates.items()}
        narrow_blocks = [Block(self._layers[b.layer.step], b.signal.float(), b.right) for b in blocks]

        def product(direction: Tensor) -> Tensor:
            with torch.enable_grad():
                row = direction.detach().requires_grad_()
                square = self._half_square(self.narrow, unknowns, row, narrow_gates, narrow_blocks, bias=False)
                (image,) = torch.autograd.grad(square, row)
            return image

        return product

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
        """Return half of the squared residual; without ``bias`` the quadratic form of the equations alone."""
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
