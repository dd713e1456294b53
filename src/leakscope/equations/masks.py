"""Which units of a layer were active, read from the layer's own weight gradient.

With S the derivative behind the activation and P what each place of the layer reads, unit c of the layer has the
gradient G_c = sum over places l of m_cl S_cl P_l: for each unit a small linear regression with unknowns of 0 or 1. Most
masks are known from an approximate input; only units near zero are free. See docs/strength.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: A unit of the layer whose residual is so many times the median is left out of the equations.
TRIM = 2.5
#: ... unless it is so small that no mask can be wrong.
NEVER_TRIMMED = 1e-5
#: Flips tried one by one after the regression was rounded.
MOST_FLIPS = 40
#: A unit with more free masks than this keeps those of the approximate input: too much work.
MOST_FREE = 2000


@dataclass(frozen=True, eq=False)
class LayerEquations:
    """The weight gradient of one layer as equations in its masks.

    ``signal`` (examples, units, places): the derivative at the output if every unit were active; ``patches``
    (examples, inputs, places); ``gradient`` (units, inputs); ``bias_gradient`` (units,) is one more equation.
    """

    signal: Tensor
    patches: Tensor
    gradient: Tensor
    bias_gradient: Tensor | None

    def flat(self, values: Tensor) -> Tensor:
        """(examples, units, places) as (units, examples x places)."""
        return values.transpose(0, 1).flatten(1)

    def system(self) -> tuple[Tensor, Tensor]:
        """Columns (inputs, examples x places) and right-hand sides (units, inputs)."""
        columns = self.patches.transpose(0, 1).flatten(1)
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
    """Masks that explain the gradient, from those of an approximate input.

    ``forward``: the masks of that input; ``free``: units that may differ; ``doubt``: 1 + (pre-activation / its
    error)^2 of each, the cost of a flip in units of the noise. A unit of the layer with more than ``most_free`` free
    masks keeps those of the input.
    """
    shape = forward.shape
    columns, right = equations.system()
    signal, masks, free, doubt = (equations.flat(part) for part in (equations.signal, forward, free, doubt))
    rest = right - (signal * masks) @ columns.T
    correlation = signal * (rest @ columns)
    rows = len(columns)
    noise = rest.square().sum(1) / rows
    active = masks.clone()
    for unit in range(len(signal)):
        places = torch.nonzero(free[unit] & (signal[unit] != 0)).flatten()
        if not 0 < len(places) <= most_free or noise[unit] == 0:
            continue
        own = columns[:, places] * signal[unit, places]
        problem = _UnitProblem(own, own.T @ own, masks[unit, places], doubt[unit, places])
        active[unit, places], rest[unit] = problem.solve(rest[unit], correlation[unit, places], noise[unit])
    size = (signal * active).norm(dim=1)
    share = rest.norm(dim=1) / size.clamp_min(torch.finfo(size.dtype).tiny)
    seen = size > 0
    kept = seen & (share <= (TRIM * share[seen].median()).clamp_min(NEVER_TRIMMED)) if bool(seen.any()) else seen
    return Masks(
        active.reshape(shape[1], shape[0], shape[2]).transpose(0, 1),
        kept,
        _relative(rest[kept], right[kept]),
        _relative(rest, right),
    )


@dataclass(frozen=True, eq=False)
class _UnitProblem:
    """One unit: free masks with their columns (equations, free), Gram matrix, present values and doubts."""

    columns: Tensor
    gram: Tensor
    before: Tensor
    doubt: Tensor

    def solve(self, rest: Tensor, correlation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The masks and the residual that they leave; ``rest`` is that of the present masks."""
        change = torch.zeros_like(self.doubt)
        left = rest
        for _ in range(2):  # the second time with the noise that the first left
            ridge = self.gram + torch.diag(4 * noise * self.doubt)
            change = torch.linalg.solve_ex(ridge, correlation)[0]
            left = rest - self.columns @ change
            noise = left.square().sum() / len(left)
        rounded = self.before + change > 0.5
        step = rounded.to(rest) - self.before.to(rest)
        first = self._descend(rounded, rest - self.columns @ step, noise)
        second = self._descend(self.before.clone(), rest, noise)
        masks, left, _ = min(first, second, key=lambda found: float(found[2]))
        return masks, left

    def _descend(self, masks: Tensor, rest: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Flip one mask after another while that pays; masks, residual and its cost."""
        cost = noise * (self.doubt - 1)
        diagonal = self.gram.diagonal()
        pull = self.columns.T @ rest
        for _ in range(MOST_FLIPS):
            way = 1 - 2 * masks.to(rest)
            gain = 2 * way * pull - diagonal - torch.where(masks == self.before, cost, -cost)
            best = int(gain.argmax())
            if not gain[best] > 2 * noise:
                break
            rest = rest - self.columns[:, best] * way[best]
            pull = pull - self.gram[:, best] * way[best]
            masks[best] = ~masks[best]
        return masks, rest, rest @ rest + (cost * (masks != self.before)).sum()


def _relative(rest: Tensor, whole: Tensor) -> float:
    size = float(whole.norm())
    return float(rest.norm()) / size if size else 0.0
