"""Single features inside the span of a dense layer's gradient: by moments, by patterns, or as independent components.

Each estimate is settled by the slopes of the units where those are known (equations/feature_gates.py), and the one that
explains more of the gradient is kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable
from leakscope.equations.feature_gates import SpanGradient, fit_gates, signed_lengths
from leakscope.equations.feature_patterns import frequent_differences
from leakscope.equations.simultaneous import diagonalising_vectors
from leakscope.equations.stein_moments import activation_class, head_loadings, moment_matrices
from leakscope.equations.unmixing import unmix

Method = Literal["svd", "completion", "stein", "unmixing", "refined"]
#: Slopes of the units settle signs where they leave less than this of the gradient's rows unexplained.
SETTLED = 0.2
#: So many units that are not dead, for each number that the slopes are fitted with, tell right from wrong.
UNITS_PER_UNKNOWN = 4


@dataclass(frozen=True, eq=False)
class DenseGradient:
    """What the adversary holds of one dense layer, float64: gradients and present weights.

    ``activation`` and ``head``, the weights (classes, units) of the layer behind it, where they are known;
    ``head_gradient`` where the update holds it.
    """

    name: str
    gradient: Tensor
    bias_gradient: Tensor | None
    weight: Tensor
    bias: Tensor | None
    activation: Callable[[Tensor], Tensor] | None = None
    head: Tensor | None = None
    head_gradient: Tensor | None = None


def no_moments(layer: DenseGradient) -> str | None:
    """Why the layer's gradient has no Stein moments, or None where it has."""
    if layer.activation is None or layer.head is None:
        return "it is not known how the layer's outputs reach the head"
    if not len(head_loadings(layer.head)):
        return "the rows of the head are alike, so nothing comes back to the layer"
    if not {2, 3} & set(activation_class(layer.activation).orders):
        return activation_class(layer.activation).reason or "the moments of its activation vanish"
    return None


@dataclass(frozen=True, eq=False)
class Apart:
    """``directions`` (n, n): unit rows in coordinates of the span; the rest as in RecoveredFeatures."""

    directions: Tensor
    separated: bool
    signed: bool = False
    by_unmixing: bool = False
    quality: float | None = None
    lengths: Tensor | None = None
    notes: tuple[str, ...] = field(default=())


def separated_features(
    layer: DenseGradient,
    span: Tensor,
    rows: Tensor,
    used: Tensor,
    methods: Sequence[Method],
    generator: torch.Generator,
) -> Apart:
    """The best estimate of single features by what can be seen; the span's own directions where none applies.

    ``rows`` (units, n): rows of the gradient in coordinates of the span, of the units ``used``.
    """
    inner = _inside(layer, span, rows, used)
    starts: dict[str, Tensor] = {}
    notes: list[str] = []
    if len(span) == 1:
        starts["the span"] = torch.ones((1, 1), dtype=torch.float64)
    else:
        reason = no_moments(layer) or activation_class(inner.activation).reason
        if reason is None and {"svd", "completion", "stein"} & set(methods):
            starts["moments"] = _by_moments(inner, generator, notes)
        if reason is None and inner.homogeneous and len(inner.loadings) == 1:
            patterns = frequent_differences(rows / inner.loadings.T, generator)
            starts |= {} if patterns is None else {"patterns": patterns}
        if "unmixing" in methods:
            reason = _by_unmixing(rows @ span, span, starts, generator) or reason
        if not starts:
            words = "directions are those of the span, mixtures of features"
            return Apart(torch.eye(len(span), dtype=torch.float64), False, notes=(f"{words}: {reason}",))
    results = {name: _settled(layer, inner, start) for name, start in starts.items()}
    best = max(results, key=lambda name: results[name].quality or 0.0)
    if len(results) > 1:
        shares = ", ".join(f"{name} {1 - (found.quality or 0.0):.1e}" for name, found in results.items())
        notes.append(f"features by {best}: share of the gradient that each leaves unexplained: {shares}")
    found = results[best]
    return dataclasses.replace(found, by_unmixing=best == "unmixing", notes=(*notes, *found.notes))


def _inside(layer: DenseGradient, span: Tensor, rows: Tensor, used: Tensor) -> SpanGradient:
    """The layer in coordinates of the span; a bias gradient of zeros is none."""
    loadings = torch.ones((1, len(rows)), dtype=torch.float64)
    if layer.head is not None and len(found := head_loadings(layer.head[:, used])):
        loadings = found
    sums = layer.bias_gradient
    return SpanGradient(
        rows=rows,
        weights=layer.weight[used] @ span.T,
        loadings=loadings,
        activation=layer.activation or nn.Identity(),
        bias=None if layer.bias is None else layer.bias[used],
        bias_gradient=None if sums is None or not bool(sums.any()) else sums[used],
    )


def _by_moments(inner: SpanGradient, generator: torch.Generator, notes: list[str]) -> Tensor:
    whole = torch.eye(inner.rows.shape[1], dtype=torch.float64)
    behind = activation_class(inner.activation)
    matrices, back = moment_matrices(inner.rows, inner.weights, inner.loadings, whole, behind)
    vectors, gap = diagonalising_vectors(matrices, generator)
    notes.append(f"moments inside the span are diagonal but for {gap:.1e}")
    return nn.functional.normalize(vectors @ back, dim=1)


def _by_unmixing(gradient: Tensor, span: Tensor, starts: dict[str, Tensor], generator: torch.Generator) -> str | None:
    """Independent components added to ``starts``, or why there are none."""
    try:
        unmixed = unmix(gradient, len(span), generator)
    except NotApplicable as refusal:
        return str(refusal)
    starts["unmixing"] = nn.functional.normalize(unmixed.sources @ span.T, dim=1)
    return None


def _slopes_tell(layer: DenseGradient, inner: SpanGradient) -> bool:
    """Whether the slopes of the units tell features from mixtures of them.

    Those of a quadratic or linear activation fit any mixture as well, and so do those of too few units.
    """
    if layer.activation is None or layer.head is None or activation_class(layer.activation).reason is not None:
        return False
    live = int((inner.rows.abs().amax(1) > 0).sum())
    unknowns = inner.rows.shape[1] * (len(inner.loadings) + 1)
    return live >= UNITS_PER_UNKNOWN * unknowns and (inner.homogeneous or inner.bias_gradient is not None)


def _settled(layer: DenseGradient, inner: SpanGradient, start: Tensor) -> Apart:
    """An estimate with what slopes of the units and a bias gradient say of it."""
    if _slopes_tell(layer, inner):
        fit = fit_gates(inner, start)
        quality, signed = max(0.0, 1 - fit.residual**2), fit.residual <= SETTLED
        return Apart(fit.directions, True, signed, quality=quality, lengths=fit.lengths if signed else None)
    if inner.bias_gradient is None:
        return Apart(start, True)
    lengths = signed_lengths(inner.rows, start, inner.bias_gradient)
    # Of several, nothing confirms that these are no mixtures; then their signs mean little.
    return Apart(start * lengths.sign()[:, None], True, len(start) == 1, lengths=lengths.abs())
