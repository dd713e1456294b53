"""Separate single features inside the span of a dense layer's gradient; float64.

Estimates come from moments (equations/stein_moments.py), activation patterns (:func:`frequent_differences`) or
independent components (equations/unmixing.py). Known slopes of the units settle each (:func:`fit_gates`), and the one
that explains most of the gradient is kept.

With coordinates y_i of the features in the span and u_j those of the weights, the gradient rows are
H_j = sum_i sum_q a_qj r_iq s'(<u_j, y_i> + b_j) y_i, where a are the known weights behind the units. From directions
that are roughly right the slopes s' follow for most units, then the products r_iq y_i by least squares, then better
directions: exact where every slope is. A ReLU's slope differs for y and -y, so it also tells the sign; a bias gradient
db_j = sum_i (signal of i) tells sign and length of every feature for any activation.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable, UserError
from leakscope.equations.dense import slope
from leakscope.equations.feature_span import EQUATIONS_PER_UNKNOWN, MOST_ROWS
from leakscope.equations.stein_moments import (
    activation_class,
    diagonalising_vectors,
    head_loadings,
    least_squares,
    moment_matrices,
)
from leakscope.equations.unmixing import unmix

Method = Literal["svd", "completion", "stein", "unmixing", "refined"]
#: How near, relative to the largest, rows count as the same.
SAME = 1e-4
#: A difference counts as a feature where it occurs at least so often.
LEAST_OCCURRENCES = 3
#: Slopes of the units settle signs where they leave less than this of the gradient's rows unexplained.
SETTLED = 0.2
#: What normal equations leave of float64's digits.
ROUNDED = torch.finfo(torch.float64).eps ** 0.5


def frequent_differences(rows: Tensor, generator: torch.Generator) -> Tensor | None:
    """Return the n most frequent differences (n, n) between distinct ``rows`` (m, n) as independent unit rows, or None.

    Behind a ReLU and a head of one constant for each unit, a row of the gradient, divided by that constant, is the sum
    of c_i y_i over the examples that make the unit active. Two patterns that differ in one example differ by c_i y_i
    exactly, and no other difference occurs as often. Noise or missing entries leave nothing to count.

    >>> draws = torch.Generator().manual_seed(0)
    >>> features = torch.tensor([[1.0, 0.9], [0.9, 1.0]]).double()
    >>> gates = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]]).double()
    >>> frequent_differences((gates @ features).repeat(3, 1), draws) is None  # two differences for each
    True
    >>> three = torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.1], [0.8, 0.9, 0.3]]).double()
    >>> gates = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * 3)
    >>> found = frequent_differences(gates @ three, draws)
    >>> bool(((torch.nn.functional.normalize(three, dim=1) @ found.T).abs().amax(1) > 1 - 1e-12).all())
    True
    """
    count = rows.shape[1]
    group = _keys(rows, float(rows.abs().max()), generator).unique(return_inverse=True)[1]
    places = torch.full((int(group.max()) + 1,), len(rows)).scatter_reduce_(0, group, torch.arange(len(rows)), "amin")
    distinct = rows[places]
    if len(distinct) > MOST_ROWS:
        distinct = distinct[torch.randperm(len(distinct), generator=generator)[:MOST_ROWS]]
    first, second = torch.triu_indices(len(distinct), len(distinct), offset=1)
    differences = distinct[first] - distinct[second]
    probe = torch.randn(count, generator=generator, dtype=torch.float64)
    differences = differences * torch.where(differences @ probe < 0, -1.0, 1.0)[:, None]
    keys = _keys(differences, float(rows.abs().max()), generator)
    _, group, occurrences = keys.unique(return_inverse=True, return_counts=True)
    chosen: list[Tensor] = []
    for place in torch.argsort(occurrences, descending=True, stable=True):
        if int(occurrences[place]) < LEAST_OCCURRENCES or len(chosen) == count:
            break
        # The mean of all of them has less rounding than any one.
        vector = torch.nn.functional.normalize(differences[group == place].mean(0), dim=0)
        basis = torch.linalg.qr(torch.stack(chosen).T)[0] if chosen else vector[:, None] * 0
        if float((vector - basis @ (basis.T @ vector)).norm()) > SAME:
            chosen.append(vector)
    return torch.stack(chosen) if len(chosen) == count else None


def _keys(rows: Tensor, size: float, generator: torch.Generator) -> Tensor:
    """Return whole numbers that are equal for equal rows, except at a rounding's edge."""
    probe = torch.randn((rows.shape[1], 1), generator=generator, dtype=torch.float64)
    return (rows @ probe / (SAME * max(size, 1e-300))).round().flatten().long()


@dataclass(frozen=True, eq=False)
class SpanGradient:
    """Hold a dense layer in coordinates of the span: gradient rows and weights (m, n), the weights behind it (q, m)."""

    rows: Tensor
    weights: Tensor
    loadings: Tensor
    activation: Callable[[Tensor], Tensor]
    bias: Tensor | None = None
    bias_gradient: Tensor | None = None

    @cached_property
    def homogeneous(self) -> bool:
        """Check that slopes do not depend on the features' lengths: s(2 t) = 2 s(t), and no bias."""
        t = torch.linspace(-3, 3, 13, dtype=torch.float64)[None]
        same = torch.allclose(self.activation(2 * t), 2 * self.activation(t.clone()), atol=1e-12)
        return same and (self.bias is None or not bool(self.bias.any()))


@dataclass(frozen=True, eq=False)
class GateFit:
    """Hold unit rows (n, n) in the span, the relative residual of the gradient's rows, and known lengths."""

    directions: Tensor
    residual: float
    lengths: Tensor | None = None


def signed_lengths(rows: Tensor, directions: Tensor, bias_gradient: Tensor) -> Tensor:
    """Return the signed length of each unit direction; the bias gradient is the sum of the signals.

    >>> features = torch.tensor([[3.0, 0.0], [0.0, -2.0]]).double()
    >>> signals = torch.tensor([[1.0, 2.0], [0.5, -1.0], [0.0, 3.0]]).double()
    >>> signed_lengths(signals @ features, torch.eye(2).double(), signals.sum(1)).round(decimals=6).tolist()
    [3.0, -2.0]
    """
    signals = rows @ torch.linalg.pinv(directions)
    inverse = least_squares(signals, bias_gradient[:, None]).flatten()
    return 1 / torch.where(inverse.abs() > 1e-300, inverse, 1e-300)


def fit_gates(layer: SpanGradient, directions: Tensor) -> GateFit:
    """Find the directions that explain the gradient's rows best, starting from ``directions``.

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
    for _ in range(25):
        vectors = torch.linalg.svd(_products(layer, best)[0])[2]
        found = _fitted(layer, vectors[:, 0])
        improved = found.residual < best.residual * (1 - 1e-9)
        # Once every slope is right, so are the products, and the directions that they have.
        best = found if found.residual <= best.residual + ROUNDED else best
        if not improved:
            break
    return _signed(layer, best) if layer.homogeneous else best


def _fitted(layer: SpanGradient, directions: Tensor) -> GateFit:
    fit = GateFit(directions, torch.inf)
    if not layer.homogeneous and layer.bias_gradient is not None:
        lengths = signed_lengths(layer.rows, directions, layer.bias_gradient)
        fit = GateFit(directions * lengths.sign()[:, None], torch.inf, lengths.abs())
    return dataclasses.replace(fit, residual=_residual(layer, _design(layer, fit)))


def _signed(layer: SpanGradient, fit: GateFit) -> GateFit:
    products, constant = _products(layer, fit)
    both = slope(layer.activation, torch.tensor([[1.0, -1.0]], dtype=torch.float64)).sum()
    wrong = least_squares(products.flatten(1).T, -constant.flatten()[:, None] / both).flatten() > 0.5
    fit = dataclasses.replace(fit, directions=torch.where(wrong[:, None], -fit.directions, fit.directions))
    residual, sums = _residual(layer, _design(layer, fit)[:, : -len(layer.loadings)]), layer.bias_gradient
    lengths = fit.lengths if sums is None else signed_lengths(layer.rows, fit.directions, sums).abs()
    return dataclasses.replace(fit, residual=residual, lengths=lengths)


def _design(layer: SpanGradient, fit: GateFit) -> Tensor:
    """Return what the products r_iq y_i are multiplied with (m, n q), and q constants where signs are free."""
    features = fit.directions if fit.lengths is None else fit.directions * fit.lengths[:, None]
    inner = layer.weights @ features.T
    slopes = slope(layer.activation, inner if layer.bias is None else inner + layer.bias[:, None])
    design = (slopes[:, :, None] * layer.loadings.T[:, None, :]).flatten(1)
    return torch.cat((design, layer.loadings.T), dim=1) if layer.homogeneous else design


def _products(layer: SpanGradient, fit: GateFit) -> tuple[Tensor, Tensor]:
    design, rows = _design(layer, fit), layer.rows
    weights = torch.ones_like(rows[:, :1])
    floor = 1e-9 * rows.norm(dim=1).mean()
    for _ in range(4):  # towards least absolute errors, so that units with a wrong slope lose their say
        solved = least_squares(design * weights.sqrt(), rows * weights.sqrt())
        weights = 1 / ((rows - design @ solved).norm(dim=1, keepdim=True) + floor)
    count, loadings = len(fit.directions), len(layer.loadings)
    return solved[: count * loadings].reshape(count, loadings, -1), solved[count * loadings :]


def _residual(layer: SpanGradient, design: Tensor) -> float:
    gap = layer.rows - design @ least_squares(design, layer.rows)
    return float(gap.norm() / layer.rows.norm().clamp_min(1e-300))


@dataclass(frozen=True, eq=False)
class DenseGradient:
    """Hold gradients and weights of one dense layer, float64; ``head`` (classes, units) is the layer behind it."""

    name: str
    gradient: Tensor
    bias_gradient: Tensor | None
    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor] | None = None
    head: Tensor | None = None
    head_gradient: Tensor | None = None


def no_moments(layer: DenseGradient) -> str | None:
    if layer.activation is None or layer.head is None:
        return "it is not known how the layer's outputs reach the head"
    if not len(head_loadings(layer.head)):
        return "the rows of the head are alike, so nothing comes back to the layer"
    if not {2, 3} & set(activation_class(layer.activation).orders):
        return activation_class(layer.activation).reason or "the moments of its activation vanish"
    return None


@dataclass(frozen=True, eq=False)
class RecoveredFeatures:
    """Hold features in front of ``layer``, in an order of their own.

    ``directions`` (n, d): unit rows, one a feature, up to sign unless ``signed``; mixtures of features unless
    ``separated``; fewer than examples where the gradient's rank is smaller. ``span`` (n, d): orthonormal rows.
    ``method``: how the span was found, or "unmixing" where the directions are independent components. ``residual``: the
    relative size of gradient entries that the span, fitted on others, does not predict. ``quality``: the share of the
    gradient that single features explain with the slopes of the units ("refined": of the head's too), None where slopes
    cannot tell.
    """

    layer: str
    directions: Tensor
    span: Tensor
    method: Method
    signed: bool
    separated: bool
    residual: float
    quality: float | None = None
    lengths: Tensor | None = None
    notes: tuple[str, ...] = ()

    @property
    def features(self) -> Tensor | None:
        return None if self.lengths is None else self.directions * self.lengths[:, None]


def separated_features(
    layer: DenseGradient,
    found: RecoveredFeatures,
    rows: Tensor,
    used: Tensor,
    methods: Sequence[Method],
    generator: torch.Generator,
) -> RecoveredFeatures:
    """Return the best estimate of features in the span ``found``, by ``rows`` (units, n) of the units ``used``."""
    span, sums = found.span, layer.bias_gradient
    loadings = torch.ones((0, len(rows)), dtype=torch.float64)
    if layer.head is not None:
        loadings = head_loadings(layer.head[:, used])
    inner = SpanGradient(
        rows=rows,
        weights=layer.weight[used] @ span.T,
        loadings=loadings if len(loadings) else torch.ones((1, len(rows)), dtype=torch.float64),
        activation=layer.activation or nn.Identity(),
        bias=None if layer.bias is None else layer.bias[used],
        bias_gradient=None if sums is None or not bool(sums.any()) else sums[used],
    )
    starts: dict[str, Tensor] = {}
    notes: list[str] = []
    if len(span) == 1:
        starts["the span"] = torch.ones((1, 1), dtype=torch.float64)
    else:
        behind = activation_class(inner.activation)
        reason = no_moments(layer) or behind.reason
        if reason is None and {"svd", "completion", "stein"} & set(methods):
            matrices, back = moment_matrices(inner.rows, inner.weights, inner.loadings, behind)
            vectors, gap = diagonalising_vectors(matrices, generator)
            notes.append(f"moments inside the span are diagonal but for {gap:.1e}")
            starts["moments"] = nn.functional.normalize(vectors @ back, dim=1)
        if reason is None and inner.homogeneous and len(inner.loadings) == 1:
            patterns = frequent_differences(rows / inner.loadings.T, generator)
            starts |= {} if patterns is None else {"patterns": patterns}
        if "unmixing" in methods:
            try:
                unmixed = unmix(rows @ span, len(span), generator)
                starts["unmixing"] = nn.functional.normalize(unmixed.sources @ span.T, dim=1)
            except NotApplicable as refusal:
                reason = str(refusal)
        if not starts:
            words = "directions are those of the span, mixtures of features"
            return dataclasses.replace(found, notes=(f"{words}: {reason}",))
    results = {name: _settled(layer, inner, found, start) for name, start in starts.items()}
    best = max(results, key=lambda name: results[name].quality or 0.0)
    if len(results) > 1:
        shares = ", ".join(f"{name} {1 - (result.quality or 0.0):.1e}" for name, result in results.items())
        notes.append(f"features by {best}: share of the gradient that each leaves unexplained: {shares}")
    method: Method = "unmixing" if best == "unmixing" else found.method
    return dataclasses.replace(results[best], method=method, notes=tuple(notes))


def _slopes_tell(layer: DenseGradient, inner: SpanGradient) -> bool:
    """Check that slopes tell features from mixtures: not for quadratic or linear activations or with too few units."""
    if layer.activation is None or layer.head is None or activation_class(layer.activation).reason is not None:
        return False
    live = int((inner.rows.abs().amax(1) > 0).sum())
    unknowns = inner.rows.shape[1] * (len(inner.loadings) + 1)
    return live >= EQUATIONS_PER_UNKNOWN * unknowns and (inner.homogeneous or inner.bias_gradient is not None)


def _settled(layer: DenseGradient, inner: SpanGradient, found: RecoveredFeatures, start: Tensor) -> RecoveredFeatures:
    signed, quality, lengths = False, None, None
    if _slopes_tell(layer, inner):
        fit = fit_gates(inner, start)
        start, quality, signed = fit.directions, max(0.0, 1 - fit.residual**2), fit.residual <= SETTLED
        lengths = fit.lengths if signed else None
    elif inner.bias_gradient is not None:
        # Of several, nothing confirms that these are no mixtures; then their signs mean little.
        told, signed = signed_lengths(inner.rows, start, inner.bias_gradient), len(start) == 1
        start, lengths = start * told.sign()[:, None], told.abs()
    directions = nn.functional.normalize(start @ found.span, dim=1)
    return dataclasses.replace(
        found, directions=directions, separated=True, signed=signed, quality=quality, lengths=lengths
    )
