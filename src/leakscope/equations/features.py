"""The features in front of a dense layer, from the gradient of that layer: their span, and single ones up to scale.

The span comes from singular vectors, which is exact for an untouched gradient; from the gradient completed where
entries were set to zero; or from Stein moments, which need random weights (equations/stein_moments.py). Whichever
predicts entries of the gradient that it was not fitted to is kept, and the notes say why. Single features then follow
inside the span (equations/feature_separation.py). An altered gradient leaves the span itself in doubt: then features
are refined on the gradient of the head too (equations/feature_span.py), and the completion is tried where that does not
explain both gradients.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable, UserError
from leakscope.contracts.observation import Observation
from leakscope.equations.feature_separation import (
    DenseGradient,
    Method,
    no_moments,
    read_dense_gradient,
    separated_features,
)
from leakscope.equations.feature_span import (
    TwoGradients,
    completed_span,
    fitted_output_gradients,
    leading_span,
    rank_of,
    refine_features,
    row_coefficients,
    span_residual,
    visible_zeros,
    with_best_signs,
)
from leakscope.equations.stein_moments import activation_class, head_loadings, stein_span

METHODS: tuple[Method, ...] = ("svd", "completion", "stein", "unmixing", "refined")
#: A gradient's zeros count as set to zero by somebody from this share on, where nobody tells.
PRUNED = 0.01
#: Of two estimates whose residuals differ by less than this factor, the simpler one is kept.
CLEARLY = 0.9
#: A span that leaves so little of the gradient is that of an untouched one; nothing is to be refined.
UNTOUCHED = 1e-5
#: Singular values below this share of the largest are rounding.
LEAST_RANK = 1e-7
#: Refined features that leave less than this of both gradients are taken for the right ones.
EXPLAINED = 0.3
#: Of entries that carry no noise they leave less than this, or some feature may be wrong.
CERTAIN = 0.05


@dataclass(frozen=True, eq=False)
class RecoveredFeatures:
    """Features in front of ``layer``, in an order of their own.

    ``directions`` (n, d), fewer than examples where the gradient's rank is smaller: unit rows, one a feature, up to
    sign unless ``signed``; only directions of the span where ``separated`` is false. ``span`` (n, d): orthonormal rows.
    ``lengths`` (n,): what the directions have to be multiplied with, where a bias gradient tells. ``method``: how the
    span was found, or "unmixing" where the directions are independent components. ``residual``: the relative size of
    entries of the gradient that the span does not predict, fitted on other entries. ``quality``: the share of the
    gradient that single features explain with the slopes of the units (where ``method`` is "refined", of that and of
    the head's), None where slopes do not tell features from mixtures. ``notes``: what was compared, and what else to
    know.
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
        """The features themselves, where lengths are told."""
        return None if self.lengths is None else self.directions * self.lengths[:, None]


def recover_features(
    observation: Observation,
    *,
    layer: str | None = None,
    methods: Sequence[Method] = METHODS,
    count: int | None = None,
    neurons: slice | None = None,
    generator: torch.Generator | None = None,
) -> RecoveredFeatures:
    """The features in front of ``layer``, or NotApplicable with what stands in the way.

    ``layer``: by default the widest dense layer with an activation and dense layers behind it. ``methods``: what is
    tried for the span; the strongest by what can be seen is kept. ``count``: how many features, by default the number
    of examples, or where that is not known the rank of the gradient. ``neurons``: units whose weights were drawn at
    random, for Stein moments; by default all. ``generator`` draws starts; without one a fixed seed is used.

    >>> draws = torch.Generator().manual_seed(0)
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(12, 200), nn.ReLU(), nn.Linear(200, 4)).double()
    >>> x, y = torch.randn((3, 3, 2, 2), generator=draws).double(), torch.tensor([2, 0, 1])
    >>> names, values = zip(*net.named_parameters())
    >>> update = dict(zip(names, torch.autograd.grad(nn.functional.cross_entropy(net(x), y), values)))
    >>> seen = Observation.from_update(net, update, input_shape=(3, 2, 2), num_classes=4, num_examples=3)
    >>> found = recover_features(seen)
    >>> flat = x.flatten(1)
    >>> found.layer, found.method, bool((flat - flat @ found.span.T @ found.span).norm() < 1e-10)
    ('1', 'svd', True)
    """
    _check_methods(methods)
    observed = read_dense_gradient(observation, layer)
    return features_of(
        observed, methods=methods, count=count or observation.num_examples, neurons=neurons, generator=generator
    )


def features_of(
    layer: DenseGradient,
    *,
    methods: Sequence[Method] = METHODS,
    count: int | None = None,
    neurons: slice | None = None,
    generator: torch.Generator | None = None,
) -> RecoveredFeatures:
    """:func:`recover_features` of a layer's gradient that was read already."""
    draws = torch.Generator().manual_seed(0) if generator is None else generator
    notes: list[str] = []
    if count is None:
        width = min(32, *layer.gradient.shape)
        count = rank_of(leading_span(layer.gradient, width, draws)[1])
        notes.append(f"the number of examples is not known; the gradient's singular values show {count}")
    if count > min(layer.gradient.shape):
        raise NotApplicable(f"{layer.name!r} is {tuple(layer.gradient.shape)}: its gradient has no {count} directions")
    if not bool(layer.gradient.any()):
        raise NotApplicable(f"the gradient of {layer.name!r} is zero: it holds no features")
    mask, zeros = visible_zeros(layer.gradient)
    leading, sizes = leading_span(layer.gradient, count, draws)
    rank = int((sizes > LEAST_RANK * sizes[0]).sum())
    if rank < count:
        notes.append(
            f"the gradient has rank {rank}: {count - rank} of {count} examples are alike, or left nothing in it"
        )
        leading, count = leading[:rank], rank
    # Entries set to zero break the rank, so what has it is untouched; of one example only whole columns can be missing.
    outside = layer.gradient - layer.gradient @ leading.T @ leading
    whole = count > 1 or bool(mask.any(0).all())
    untouched = whole and float(outside.norm() / layer.gradient.norm()) <= UNTOUCHED
    if untouched and "svd" in methods:
        spans: dict[Method, Tensor] = {"svd": leading}
    else:
        spans = _spans(layer, leading, mask, zeros, methods, neurons, draws, notes)
    residuals = {method: span_residual(layer.gradient, mask, span, _again(draws)) for method, span in spans.items()}
    kept = min(residuals, key=lambda method: residuals[method])
    simplest = next(iter(residuals))
    kept = simplest if residuals[kept] > CLEARLY * residuals[simplest] else kept
    shares = ", ".join(f"{method} {residual:.1e}" for method, residual in residuals.items())
    notes.append(f"{kept} kept: gap of entries that were left out of the fit: {shares}")
    found = _with_directions(layer, spans[kept], mask, kept, residuals[kept], methods, neurons, draws)
    found = dataclasses.replace(found, notes=(*notes, *found.notes))
    if "refined" not in methods or untouched:
        return found
    others = [
        _with_directions(layer, span, mask, method, residuals[method], methods, neurons, draws)
        for method, span in spans.items()
        if method != kept
    ]
    best = _refined(layer, [found, *others], mask, zeros, draws)
    if zeros <= PRUNED or "completion" not in methods or "completion" in spans or _confirmed(best):
        return best
    span = completed_span(layer.gradient, mask, leading, draws)
    residual = span_residual(layer.gradient, mask, span, _again(draws))
    completed = _with_directions(layer, span, mask, "completion", residual, methods, neurons, draws)
    completed = _refined(layer, [completed], mask, zeros, draws)
    chosen = min((best, completed), key=lambda one: (not _confirmed(one), one.residual))
    words = f"gap of entries left out of the fit: {best.method} {best.residual:.1e}, completed {residual:.1e}"
    return dataclasses.replace(chosen, notes=(*best.notes, words, *(completed.notes if chosen is completed else ())))


def _confirmed(found: RecoveredFeatures) -> bool:
    """Whether features explain what is left of the gradients of the layer and of the head."""
    return found.method == "refined" and (found.quality or 0.0) >= 1 - CERTAIN**2


def _with_directions(
    layer: DenseGradient,
    span: Tensor,
    mask: Tensor,
    method: Method,
    residual: float,
    methods: Sequence[Method],
    neurons: slice | None,
    draws: torch.Generator,
) -> RecoveredFeatures:
    rows, used = _rows_inside(layer, span, mask, method, neurons)
    apart = separated_features(layer, span, rows, used, methods, draws)
    return RecoveredFeatures(
        layer=layer.name,
        directions=nn.functional.normalize(apart.directions @ span, dim=1),
        span=span,
        method="unmixing" if apart.by_unmixing else method,
        signed=apart.signed,
        separated=apart.separated,
        residual=residual,
        quality=apart.quality,
        lengths=apart.lengths,
        notes=apart.notes,
    )


def _refined(
    layer: DenseGradient, estimates: Sequence[RecoveredFeatures], mask: Tensor, zeros: float, draws: torch.Generator
) -> RecoveredFeatures:
    """The first estimate, or one refined on the gradients of the layer and the head where these confirm it."""
    first = estimates[0]
    problem = _two_gradients(layer, mask, zeros)
    usable = [one for one in estimates if one.separated] if problem is not None else []
    if problem is None or not usable:
        return first
    homogeneous = problem.bias is None or not bool(problem.bias.any())
    starts = []
    for one in usable:
        known = one.features if one.features is not None and not homogeneous else one.directions
        starts.append(fitted_output_gradients(problem, with_best_signs(problem, known)))
    start = min(starts, key=lambda fit: fit.residual)
    if starts[0].residual <= UNTOUCHED and usable[0] is first:
        return dataclasses.replace(first, notes=(*first.notes, "the head's gradient confirms it"))
    fit = refine_features(problem, start.features)
    span = torch.linalg.qr(fit.features.T)[0].T
    residual = span_residual(layer.gradient, mask, span, _again(draws))
    words = f"refined on the head's gradient too: both leave {fit.residual:.1e}, from {start.residual:.1e}"
    explained, slack = (CERTAIN, 1.0) if zeros > PRUNED else (EXPLAINED, 1.05)
    if not bool(torch.isfinite(fit.features).all()) or (fit.residual > explained and residual > slack * first.residual):
        return dataclasses.replace(first, notes=(*first.notes, f"{words}; not kept, as its span explains less"))
    return dataclasses.replace(
        first,
        directions=nn.functional.normalize(fit.features, dim=1),
        span=span,
        method="refined",
        signed=_tells_signs(layer) and fit.residual <= _certain_residual(problem, first.span, zeros),
        separated=True,
        residual=residual,
        quality=max(0.0, 1 - fit.residual**2),
        lengths=None,
        notes=(*first.notes, words),
    )


def _tells_signs(layer: DenseGradient) -> bool:
    """Whether both gradients differ for a feature and its negative: not behind an odd activation without a bias."""
    assert layer.activation is not None
    biased = layer.bias is not None and bool(layer.bias.any())
    return biased or 2 in activation_class(layer.activation).orders


def _certain_residual(problem: TwoGradients, span: Tensor, zeros: float) -> float:
    """What the right features leave of both gradients: next to nothing, or the noise that lies outside of the span."""
    if zeros > PRUNED:
        return CERTAIN
    units, width = problem.gradient.shape
    outside = (problem.gradient - problem.gradient @ span.T @ span).norm()
    level = float(outside) / max((units - len(span)) * (width - len(span)), 1) ** 0.5
    entries = problem.gradient.numel() + problem.head_gradient.numel()
    return max(CERTAIN, min(EXPLAINED, 1.1 * level * entries**0.5 / problem.size))


def _two_gradients(layer: DenseGradient, mask: Tensor, zeros: float) -> TwoGradients | None:
    """The layer and the head behind it, with the entries that count; None where the head's gradient is not known."""
    if layer.head is None or layer.head_gradient is None or layer.activation is None:
        return None
    head_mask, _ = visible_zeros(layer.head_gradient)
    pruned = zeros > PRUNED or visible_zeros(layer.head_gradient)[1] > PRUNED
    return TwoGradients(
        weight=layer.weight,
        gradient=layer.gradient,
        mask=mask if pruned else torch.ones_like(mask),
        head=layer.head,
        head_gradient=layer.head_gradient,
        head_mask=head_mask if pruned else torch.ones_like(head_mask),
        activation=layer.activation,
        bias=layer.bias,
    )


def _spans(
    layer: DenseGradient,
    leading: Tensor,
    mask: Tensor,
    zeros: float,
    methods: Sequence[Method],
    neurons: slice | None,
    draws: torch.Generator,
    notes: list[str],
) -> dict[Method, Tensor]:
    """The span by each method that applies, the simplest first: that of the ``leading`` singular vectors."""
    spans: dict[Method, Tensor] = {}
    if "svd" in methods or "unmixing" in methods:
        spans["svd"] = leading
    refinable = "refined" in methods and layer.head_gradient is not None and no_moments(layer) is None
    if "completion" in methods and zeros > PRUNED and not refinable:
        notes.append(f"{zeros:.0%} of the entries of its gradient are zero and were left out of the completion")
        spans["completion"] = completed_span(layer.gradient, mask, leading, draws)
    if "stein" in methods:
        reason = no_moments(layer)
        if reason is None:
            chosen = neurons or slice(None)
            assert layer.activation is not None
            assert layer.head is not None
            loadings, behind = head_loadings(layer.head[:, chosen])[:2], activation_class(layer.activation)
            parts = layer.gradient[chosen], layer.weight[chosen]
            spans["stein"] = stein_span(*parts, loadings, len(leading), behind, draws)
        else:
            notes.append(f"no Stein moments: {reason}")
    if not spans:
        raise NotApplicable(f"{layer.name!r}: none of {', '.join(methods)} applies: {'; '.join(notes)}")
    return spans


def _rows_inside(
    layer: DenseGradient, span: Tensor, mask: Tensor, method: Method, neurons: slice | None
) -> tuple[Tensor, Tensor]:
    """The gradient's rows in coordinates of the span, and which were taken: random ones with entries enough."""
    used = torch.zeros(len(mask), dtype=torch.bool)
    used[slice(None) if neurons is None else neurons] = True
    if method != "completion":
        return layer.gradient[used] @ span.T, used
    used &= mask.sum(1) > len(span)
    return row_coefficients(layer.gradient[used], mask[used].double(), span), used


def _check_methods(methods: Sequence[Method]) -> None:
    unknown = [method for method in methods if method not in get_args(Method)]
    if unknown or not methods:
        raise UserError(f"methods: expected some of {', '.join(get_args(Method))}, got {list(methods)}")


def _again(generator: torch.Generator) -> torch.Generator:
    """The same draws for each, so that residuals are of the same entries."""
    return torch.Generator().manual_seed(generator.initial_seed())
