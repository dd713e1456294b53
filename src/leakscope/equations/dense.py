"""One dense layer further down: from what it gave and what came back to it, each example's inputs; float64.

With outputs f_i = act(z_i), z_i = W x_i + b, and what came back to them g_i, the layer's signals are d_i = g_i
act'(z_i), and its weight gradient G = D'X is linear in the inputs X. A unit whose slope is guessed wrongly (a ReLU near
its kink) spoils its own row only: such rows are left out until the inputs that the others give settle them.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.head_system import EXACT, LEAST_RANK

#: Largest relative gap (L1) between the outputs that the inputs give and those that were known.
TOLERANCE = 10 * EXACT
#: The slopes are settled after a few passes, or never; the rows that fit after half as many.
PASSES = 12


@dataclass(frozen=True, eq=False)
class DenseSolution:
    """``inputs`` (n, d) of the layer; ``adjoints`` (n, d) came back to them, ``signals`` (n, units) to its outputs.

    ``residual`` is the certificate: the relative gap (L1) between the known outputs and those that the inputs give.
    """

    inputs: Tensor
    adjoints: Tensor
    signals: Tensor
    residual: float


def peel_dense(
    weight: Tensor,
    bias: Tensor | None,
    weight_gradient: Tensor,
    bias_gradient: Tensor | None,
    activation: Callable[[Tensor], Tensor],
    outputs: Tensor,
    adjoints: Tensor,
    *,
    tolerance: float = TOLERANCE,
    seen: Tensor | None = None,
) -> DenseSolution:
    """Solve for the layer's inputs from its ``outputs`` behind the activation and their ``adjoints``, both (n, units).

    ``seen``: ones where outputs are known; elsewhere their adjoints are zero.

    >>> draws = torch.Generator().manual_seed(0)
    >>> weight, x = torch.randn((8, 3), generator=draws).double(), torch.rand((2, 3), generator=draws).double()
    >>> back = torch.randn((2, 8), generator=draws).double()
    >>> signals = back * (x @ weight.T > 0)
    >>> found = peel_dense(weight, None, signals.T @ x, None, torch.relu, torch.relu(x @ weight.T), back)
    >>> bool((found.inputs - x).norm() < 1e-12)
    True
    """
    weight, observed = weight.detach().double().cpu(), weight_gradient.detach().double().cpu()
    shift = 0.0 if bias is None else bias.detach().double().cpu()
    sums = None if bias_gradient is None else bias_gradient.detach().double().cpu()
    inner, certain = undo(activation, outputs)
    usable = certain.all(0)
    best: DenseSolution | None = None
    for _ in range(PASSES):
        signals = adjoints * slope(activation, inner)
        rows = _fitting(signals, observed, sums, usable)
        inputs = _solved(signals[:, rows], observed[rows])
        reached = inputs @ weight.T + shift
        apart = (activation(reached) - outputs) * (1 if seen is None else seen)
        gap = float(apart.abs().sum() / outputs.abs().sum().clamp_min(1e-300))
        if not (best is None or gap < best.residual):  # NaN is no improvement either
            break
        settled = adjoints * slope(activation, reached)
        best = DenseSolution(inputs, settled @ weight, settled, gap)
        inner, usable = reached, torch.ones_like(usable)
    assert best is not None
    if not best.residual <= tolerance:
        raise NotApplicable(
            f"the inputs found give other outputs than the known ones, off by {best.residual:.1e} of them"
        )
    return best


def undo(activation: Callable[[Tensor], Tensor], outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the activation received, by bisection where it rises, and whether this is certain.

    What a ReLU set to zero stays unknown, but has the slope zero. An activation that falls before it rises (GELU, SiLU)
    is taken on the rising side; below what it tends to on the left, the other side would do as well.

    >>> inner, certain = undo(torch.tanh, torch.tensor([[0.5, -0.9]], dtype=torch.float64))
    >>> [round(float(value), 4) for value in inner[0]], certain.tolist()
    ([0.5493, -1.4722], [[True, True]])
    """
    grid = torch.linspace(-30, 30, 1201, dtype=torch.float64)
    curve = activation(grid[:, None].expand(-1, outputs.shape[1]).contiguous())
    falls = curve[0] > curve.min(0).values + 1e-9
    low = torch.where(falls, grid[curve.argmin(0)], -1e3).expand_as(outputs).clone()
    high = torch.full_like(outputs, 1e3)
    # Next to the value of a flat piece rounding decides; it is taken for flat.
    goal = torch.where((outputs - curve[0]).abs() <= EXACT * outputs.abs().max(), curve[0].expand_as(outputs), outputs)
    for _ in range(80):
        middle = (low + high) / 2
        above = activation(middle) >= goal
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return (low + high) / 2, ~falls | (outputs > curve[0])


def slope(activation: Callable[[Tensor], Tensor], inner: Tensor) -> Tensor:
    with torch.enable_grad():
        z = inner.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(activation(z).sum(), z)
    return gradient


def _fitting(signals: Tensor, observed: Tensor, sums: Tensor | None, usable: Tensor) -> Tensor:
    seen = (signals.abs().sum(0) > 0) & (observed.abs().sum(1) > 0)
    rows = usable & seen
    if sums is not None:
        rows = rows & ((signals.sum(0) - sums).abs() <= 1e-3 * signals.abs().sum(0))
    if int(rows.sum()) < 2 * len(signals):
        rows = seen
    sizes = observed.norm(dim=1).clamp_min(1e-300)
    weights = rows / sizes
    for _ in range(PASSES // 2):  # towards least absolute errors, so that rows that do not fit lose their say
        inputs = _solved(signals * weights, observed * weights[:, None])
        gap = (signals.T @ inputs - observed).norm(dim=1) / sizes
        weights = rows / sizes / (gap + 1e-8)
    fits = rows & (gap <= 5 * gap[rows].median() + 1e-12)
    return fits if int(fits.sum()) >= 2 * len(signals) else rows


def _solved(signals: Tensor, observed: Tensor) -> Tensor:
    sizes = torch.linalg.svdvals(signals)
    if signals.shape[1] < len(signals) or float(sizes[-1]) <= LEAST_RANK * float(sizes[0]):
        raise NotApplicable("the signals of the examples are alike, so the layer's gradient does not tell them apart")
    inputs: Tensor = torch.linalg.lstsq(signals.T, observed, driver="gelsd").solution
    return inputs
