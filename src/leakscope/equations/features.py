"""Recover the features in front of a dense layer from its gradient: their span, and single ones up to scale.

The span comes from singular vectors (exact for an untouched gradient), from the gradient completed where entries were
set to zero, or from Stein moments, which need random weights (equations/stein_moments.py). The one that best predicts
entries it was not fitted to is kept. Single features follow inside the span (equations/feature_separation.py). An
altered gradient leaves the span in doubt: then features are refined on the head's gradient too
(equations/feature_span.py), and the completion is tried where that does not explain both gradients.
"""

import dataclasses
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor, nn

from leakscope.contracts.errors import NotApplicable, UserError
from leakscope.contracts.observation import Observation
from leakscope.equations.feature_separation import (
    DenseGradient,
    Method,
    RecoveredFeatures,
    no_moments,
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
from leakscope.equations.head_system import EXACT, LEAST_RANK
from leakscope.equations.stein_moments import activation_class, head_loadings, stein_span
from leakscope.network.dense_path import dense_path
from leakscope.network.layers import find_head

METHODS: tuple[Method, ...] = get_args(Method)
#: A gradient's zeros count as set to zero by somebody from this share on, where nobody tells.
PRUNED = 0.01
#: Of two estimates whose residuals differ by less than this factor, the simpler one is kept.
CLEARLY = 0.9
#: Right refined features leave less than this of both gradients, and than the second of entries without noise.
EXPLAINED, CERTAIN = 0.3, 0.05


def recover_features(
    observation: Observation,
    *,
    layer: str | None = None,
    methods: Sequence[Method] = METHODS,
    count: int | None = None,
    neurons: slice | None = None,
    generator: torch.Generator | None = None,
) -> RecoveredFeatures:
    """Recover the features in front of ``layer``, or raise NotApplicable with what stands in the way.

    ``layer``: by default the widest dense layer with an activation and dense layers behind it. ``methods``: what is
    tried for the span. ``count``: by default the number of examples, or where that is not known the rank of the
    gradient. ``neurons``: units whose weights were drawn at random, for Stein moments; by default all.

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
    if not methods or not {*methods} <= {*METHODS}:
        raise UserError(f"methods: expected some of {', '.join(METHODS)}, got {list(methods)}")
    observed = read_dense_gradient(observation, layer)
    return features_of(
        observed, methods=methods, count=count or observation.num_examples, neurons=neurons, generator=generator
    )


def read_dense_gradient(observation: Observation, layer: str | None = None) -> DenseGradient:
    """Read the gradient, weights and surroundings of ``layer``, or of the widest dense layer below the head."""
    if observation.has_rounds:
        raise NotApplicable("the update is that of several rounds, or of batches of the examples")
    try:
        head = find_head(observation.model, observation.input_shape, observation.num_classes)
    except ValueError as error:
        if layer is None:
            raise NotApplicable(str(error)) from error
        head = None
    path = None if head is None else dense_path(observation.model, head.module_name)
    steps = () if path is None else path.steps
    if layer is None:
        if not steps:
            assert path is not None
            raise NotApplicable(
                f"no dense layer with an activation lies below the head: {path.reason}. Name a layer, or use "
                "recover_embedding, which reads the features in front of the head itself"
            )
        layer = max(steps, key=lambda step: step.module.out_features).name
    module = dict(observation.model.named_modules()).get(layer)
    if not isinstance(module, nn.Linear):
        raise NotApplicable(f"layer: expected the name of a dense layer (nn.Linear), got {layer!r}")
    step = next((step for step in steps if step.name == layer), None)
    update = observation.message.update
    names = {id(value): name for name, value in observation.model.named_parameters()}
    head_weight = head_gradient = None
    if step is not None and step is steps[0] and head is not None:  # right below the head
        head_weight, head_gradient = observation.model.get_parameter(head.weight_name), update.get(head.weight_name)
    gradient = update.get(names.get(id(module.weight), ""))
    if gradient is None:
        raise NotApplicable(f"{layer!r} is frozen: the update says nothing of it")
    sums = None if module.bias is None else update.get(names.get(id(module.bias), ""))
    return DenseGradient(
        name=layer,
        gradient=_wide(gradient),
        bias_gradient=None if sums is None else _wide(sums),
        weight=_wide(module.weight),
        bias=None if module.bias is None else _wide(module.bias),
        activation=None if step is None else step.activation,
        head=None if head_weight is None else _wide(head_weight),
        head_gradient=None if head_gradient is None else _wide(head_gradient),
    )


def _wide(value: Tensor) -> Tensor:
    return value.detach().to(device="cpu", dtype=torch.float64)


def features_of(
    layer: DenseGradient,
    *,
    methods: Sequence[Method] = METHODS,
    count: int | None = None,
    neurons: slice | None = None,
    generator: torch.Generator | None = None,
) -> RecoveredFeatures:
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
    untouched = whole and float(outside.norm() / layer.gradient.norm()) <= EXACT
    if untouched and "svd" in methods:
        spans: dict[Method, Tensor] = {"svd": leading}
    else:
        spans = _spans(layer, leading, methods, neurons, draws, notes)

    def estimate(method: Method, span: Tensor) -> RecoveredFeatures:
        residual = span_residual(layer.gradient, mask, span, _again(draws))
        found = RecoveredFeatures(layer.name, span, span, method, signed=False, separated=False, residual=residual)
        used = torch.zeros(len(mask), dtype=torch.bool)
        used[slice(None) if neurons is None else neurons] = True
        if method == "completion":
            used &= mask.sum(1) > len(span)
            rows = row_coefficients(layer.gradient[used], mask[used].double(), span)
        else:
            rows = layer.gradient[used] @ span.T
        return separated_features(layer, found, rows, used, methods, draws)

    def refined(estimates: Sequence[RecoveredFeatures]) -> RecoveredFeatures:
        wanted = "refined" in methods and not untouched
        return _refined(layer, estimates, mask, zeros, draws) if wanted else estimates[0]

    estimates = [estimate(method, span) for method, span in spans.items()]
    kept = min(estimates, key=lambda one: one.residual)
    kept = estimates[0] if kept.residual > CLEARLY * estimates[0].residual else kept
    shares = ", ".join(f"{method} {one.residual:.1e}" for method, one in zip(spans, estimates, strict=True))
    simple = [*spans][estimates.index(kept)]
    notes.append(f"{simple} kept: gap of entries that were left out of the fit: {shares}")
    kept = dataclasses.replace(kept, notes=(*notes, *kept.notes))
    best = refined([kept, *(one for one in estimates if one.span is not kept.span)])
    if zeros <= PRUNED or untouched or "completion" not in methods or _confirmed(best):
        return best
    completed = estimate("completion", completed_span(layer.gradient, mask, leading, draws))
    words = f"gap of entries left out of the fit: {best.method} {best.residual:.1e}, completed {completed.residual:.1e}"
    completed = refined([completed])
    chosen = min((best, completed), key=lambda one: (not _confirmed(one), one.residual))
    return dataclasses.replace(chosen, notes=(*best.notes, words, *(completed.notes if chosen is completed else ())))


def _confirmed(found: RecoveredFeatures) -> bool:
    return found.method == "refined" and (found.quality or 0.0) >= 1 - CERTAIN**2


def _refined(
    layer: DenseGradient, estimates: Sequence[RecoveredFeatures], mask: Tensor, zeros: float, draws: torch.Generator
) -> RecoveredFeatures:
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
    if starts[0].residual <= EXACT and usable[0] is first:
        return dataclasses.replace(first, notes=(*first.notes, "the head's gradient confirms it"))
    fit = refine_features(problem, start.features)
    span = torch.linalg.qr(fit.features.T)[0].T
    residual = span_residual(layer.gradient, mask, span, _again(draws))
    words = f"refined on the head's gradient too: both leave {fit.residual:.1e}, from {start.residual:.1e}"
    explained, slack = (CERTAIN, 1.0) if zeros > PRUNED else (EXPLAINED, 1.05)
    if not bool(torch.isfinite(fit.features).all()) or (fit.residual > explained and residual > slack * first.residual):
        return dataclasses.replace(first, notes=(*first.notes, f"{words}; not kept, as its span explains less"))
    # Both gradients differ for a feature and its negative, but behind an odd activation without a bias.
    biased = layer.bias is not None and bool(layer.bias.any())
    tells_signs = biased or 2 in activation_class(problem.activation).orders
    return dataclasses.replace(
        first,
        directions=nn.functional.normalize(fit.features, dim=1),
        span=span,
        method="refined",
        signed=tells_signs and fit.residual <= _certain_residual(problem, first.span, zeros),
        separated=True,
        residual=residual,
        quality=max(0.0, 1 - fit.residual**2),
        lengths=None,
        notes=(*first.notes, words),
    )


def _certain_residual(problem: TwoGradients, span: Tensor, zeros: float) -> float:
    """Return what the right features leave of both gradients: next to nothing, or the noise outside of the span."""
    if zeros > PRUNED:
        return CERTAIN
    units, width = problem.gradient.shape
    outside = (problem.gradient - problem.gradient @ span.T @ span).norm()
    level = float(outside) / max((units - len(span)) * (width - len(span)), 1) ** 0.5
    entries = problem.gradient.numel() + problem.head_gradient.numel()
    return max(CERTAIN, min(EXPLAINED, 1.1 * level * entries**0.5 / problem.size))


def _two_gradients(layer: DenseGradient, mask: Tensor, zeros: float) -> TwoGradients | None:
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
    methods: Sequence[Method],
    neurons: slice | None,
    draws: torch.Generator,
    notes: list[str],
) -> dict[Method, Tensor]:
    spans: dict[Method, Tensor] = {}
    if {"svd", "completion", "unmixing"} & set(methods):
        spans["svd"] = leading
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


def _again(generator: torch.Generator) -> torch.Generator:
    """Repeat the same draws for each, so that residuals are of the same entries."""
    return torch.Generator().manual_seed(generator.initial_seed())
