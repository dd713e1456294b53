"""Single features inside their span, by what the units of the layer did to them; float64.

With coordinates y_i of the features in the span and u_j those of the weights, the gradient rows are
H_j = sum_i sum_q a_qj r_iq s'(<u_j, y_i> + b_j) y_i, where a are the known weights behind the units. From directions
that are roughly right the slopes s' follow for most units, then the products r_iq y_i by least squares, then better
directions: exact where every slope is. The residual needs no truth. A ReLU's slope differs for y and -y, so it also
tells the sign; a bias gradient db_j = sum_i (signal of i) tells sign and length of every feature for any activation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.equations.dense import slope

PASSES = 25
#: Passes towards least absolute errors, so that units with a wrong slope lose their say.
ROBUST_PASSES = 4
#: A residual that is rounding.
EXACT = 1e-10


@dataclass(frozen=True, eq=False)
class SpanGradient:
    """A dense layer in the coordinates of the span: gradient rows and weights (m, n), the weights behind it (q, m).

    ``bias`` and ``bias_gradient`` (m,) where the layer has them; ``activation`` acts on a tensor entry by entry.
    """

    rows: Tensor
    weights: Tensor
    loadings: Tensor
    activation: Callable[[Tensor], Tensor]
    bias: Tensor | None = None
    bias_gradient: Tensor | None = None

    @cached_property
    def homogeneous(self) -> bool:
        """Whether slopes do not depend on the features' lengths: s(2 t) = 2 s(t), and no bias."""
        t = torch.linspace(-3, 3, 13, dtype=torch.float64)[None]
        same = torch.allclose(self.activation(2 * t), 2 * self.activation(t.clone()), atol=1e-12)
        return same and (self.bias is None or not bool(self.bias.any()))


@dataclass(frozen=True, eq=False)
class GateFit:
    """Unit rows ``directions`` (n, n) in the span, the relative ``residual`` of the gradient's rows, and ``lengths``
    where they are told."""

    directions: Tensor
    residual: float
    lengths: Tensor | None = None


def least_squares(design: Tensor, rows: Tensor) -> Tensor:
    """What ``design`` (m, k) has to be multiplied with to be nearest to ``rows`` (m, n); least norm where it is open.

    By normal equations, for thousands of rows and a few unknowns; the driver gives the same bits each time, which the
    default one of a tall system does not.

    >>> least_squares(torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [6.0]])).round(decimals=5).tolist()
    [[3.0]]
    """
    solution: Tensor = torch.linalg.lstsq(design.T @ design, design.T @ rows, driver="gelsd").solution
    return solution


def signed_lengths(rows: Tensor, directions: Tensor, bias_gradient: Tensor) -> Tensor:
    """What each unit direction has to be multiplied with to be the feature, sign included.

    The bias gradient is the sum of the signals, the weight gradient their sum with the features.

    >>> features = torch.tensor([[3.0, 0.0], [0.0, -2.0]]).double()
    >>> signals = torch.tensor([[1.0, 2.0], [0.5, -1.0], [0.0, 3.0]]).double()
    >>> signed_lengths(signals @ features, torch.eye(2).double(), signals.sum(1)).round(decimals=6).tolist()
    [3.0, -2.0]
    """
    signals = rows @ torch.linalg.pinv(directions)
    inverse = least_squares(signals, bias_gradient[:, None]).flatten()
    return 1 / torch.where(inverse.abs() > 1e-300, inverse, 1e-300)


def fit_gates(layer: SpanGradient, directions: Tensor) -> GateFit:
    """The directions that explain the gradient's rows best, starting from ``directions``.

    The slopes of a ReLU at y and -y add up to a constant, so with a free constant beside them the fit does not depend
    on signs; the constant then tells which were wrong. Other activations need lengths, which a bias gradient tells.

    >>> draws = torch.Generator().manual_seed(0)
    >>> x = torch.nn.functional.normalize(torch.randn((3, 3), generator=draws).double(), dim=1)
    >>> weights = torch.randn((400, 3), generator=draws).double()
    >>> rows = ((weights @ x.T > 0) * torch.tensor([1.0, -2.0, 1.5])).double() @ x
    >>> layer = SpanGradient(rows, weights, torch.ones((1, 400)).double(), torch.relu)
    >>> rough = torch.nn.functional.normalize(-x + 0.1 * torch.randn((3, 3), generator=draws), dim=1)
    >>> found = fit_gates(layer, rough)
    >>> found.residual < 1e-12, bool((found.directions - x).norm() < 1e-12)
    (True, True)
    """
    if not layer.homogeneous and layer.bias_gradient is None:
        raise UserError("fit_gates: expected a bias gradient, or an activation whose slopes do not depend on lengths")
    best = _fitted(layer, directions)
    for _ in range(PASSES):
        vectors = torch.linalg.svd(_products(layer, best)[0])[2]
        found = _fitted(layer, vectors[:, 0])
        improved = found.residual < best.residual * (1 - 1e-9)
        # Once every slope is right, so are the products, and the directions that they have.
        best = found if found.residual <= best.residual + EXACT else best
        if not improved:
            break
    return _signed(layer, best) if layer.homogeneous else best


def _fitted(layer: SpanGradient, directions: Tensor) -> GateFit:
    """The fit at these directions."""
    fit = GateFit(directions, torch.inf)
    if not layer.homogeneous:
        assert layer.bias_gradient is not None
        lengths = signed_lengths(layer.rows, directions, layer.bias_gradient)
        fit = GateFit(directions * lengths.sign()[:, None], torch.inf, lengths.abs())
    return dataclasses.replace(fit, residual=_residual(layer, _design(layer, fit)))


def _signed(layer: SpanGradient, fit: GateFit) -> GateFit:
    """The fit with signs from its constant part, and lengths where a bias gradient tells them."""
    products, constant = _products(layer, fit)
    both = slope(layer.activation, torch.tensor([[1.0, -1.0]], dtype=torch.float64)).sum()
    wrong = least_squares(products.flatten(1).T, -constant.flatten()[:, None] / both).flatten() > 0.5
    fit = dataclasses.replace(fit, directions=torch.where(wrong[:, None], -fit.directions, fit.directions))
    design = _design(layer, fit)[:, : -len(layer.loadings)]
    fit = dataclasses.replace(fit, residual=_residual(layer, design))
    if layer.bias_gradient is None:
        return fit
    return dataclasses.replace(fit, lengths=signed_lengths(layer.rows, fit.directions, layer.bias_gradient).abs())


def _design(layer: SpanGradient, fit: GateFit) -> Tensor:
    """(m, n q): what the products r_iq y_i are multiplied with; and q constants where signs are free."""
    features = fit.directions if fit.lengths is None else fit.directions * fit.lengths[:, None]
    inner = layer.weights @ features.T
    slopes = slope(layer.activation, inner if layer.bias is None else inner + layer.bias[:, None])
    design = (slopes[:, :, None] * layer.loadings.T[:, None, :]).flatten(1)
    return torch.cat((design, layer.loadings.T), dim=1) if layer.homogeneous else design


def _products(layer: SpanGradient, fit: GateFit) -> tuple[Tensor, Tensor]:
    """The products r_iq y_i (n, q, n), and the constants (q, n), zero where there are none."""
    design, rows = _design(layer, fit), layer.rows
    weights = torch.ones_like(rows[:, :1])
    floor = 1e-9 * rows.norm(dim=1).mean()
    for _ in range(ROBUST_PASSES):
        solved = least_squares(design * weights.sqrt(), rows * weights.sqrt())
        weights = 1 / ((rows - design @ solved).norm(dim=1, keepdim=True) + floor)
    count, loadings = len(fit.directions), len(layer.loadings)
    return solved[: count * loadings].reshape(count, loadings, -1), solved[count * loadings :]


def _residual(layer: SpanGradient, design: Tensor) -> float:
    gap = layer.rows - design @ least_squares(design, layer.rows)
    return float(gap.norm() / layer.rows.norm().clamp_min(1e-300))
