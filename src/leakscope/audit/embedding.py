"""The finding "embedding": what the last linear layers give away by themselves, compared with the true features."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from leakscope.audit.findings import Subject
from leakscope.contracts.errors import NotApplicable
from leakscope.contracts.protocol import client_copy
from leakscope.equations.embedding import Embedding, recover_embedding
from leakscope.equations.feature_separation import read_dense_gradient
from leakscope.equations.features import features_of
from leakscope.metrics.assignment import assign
from leakscope.metrics.features import feature_error, random_span_error
from leakscope.network.recorder import inputs_of

#: Errors and losses of so many examples are kept.
MOST_EXAMPLES = 64
#: Spans of larger gradients are not looked for.
MOST_ENTRIES = 2**22


def describe_embedding(subject: Subject) -> dict[str, Any]:
    """How near the features that follow from the update are to the true ones; or a ``reason`` why none follow.

    The features are solved for from the observation alone; the truth enters the comparison.
    """
    try:
        found = recover_embedding(subject.observation)
    except NotApplicable as refusal:
        return {"reason": str(refusal), **_span(subject)}
    truth = _true_features(subject, found.layer)
    order = assign(truth, found.features)
    errors = (found.features[order] - truth).norm(dim=1) / truth.norm(dim=1).clamp_min(1e-300)
    return {
        "layer": found.layer,
        "peeled": list(found.peeled),
        "reaches_input": found.reaches_input,
        "examples": len(truth),
        "numbers": truth.shape[1],
        "error": _finite(float(errors.max())),
        "errors": [_finite(float(error)) for error in errors[:MOST_EXAMPLES]],
        "expected_error": _finite(found.error),
        "residual": _finite(found.residual),
        "exact": found.exact,
        "labels_right": _labels_right(subject, found, order),
        "losses": [] if found.losses is None else [_finite(float(loss)) for loss in found.losses[:MOST_EXAMPLES]],
        "scale": _finite(found.scale),
        "note": "; ".join(found.notes),
    }


def _span(subject: Subject) -> dict[str, Any]:
    """Where single features do not follow: how near their span in front of the widest dense layer is, if there is one.

    ``span_baseline`` is the error of a random span.
    """
    observation = subject.observation
    try:
        layer = read_dense_gradient(observation)
        count = observation.num_examples or len(subject.x)
        if layer.gradient.numel() > MOST_ENTRIES or count > MOST_EXAMPLES:
            return {}
        found = features_of(layer, count=count, methods=("svd", "stein", "refined"))
    except NotApplicable:
        return {}
    truth = _true_features(subject, found.layer)
    return {
        "layer": found.layer,
        "examples": len(truth),
        "numbers": truth.shape[1],
        "span_error": feature_error(truth, found.span),
        "span_baseline": random_span_error(count, truth.shape[1]),
        "span_method": found.method,
    }


def _true_features(subject: Subject, layer: str) -> Tensor:
    model = client_copy(subject.observation.model, subject.observation.batchnorm)
    with torch.no_grad():
        return inputs_of(model.get_submodule(layer), model, subject.x).flatten(1).double().cpu()


def _labels_right(subject: Subject, found: Embedding, order: Tensor) -> float | None:
    """The share of labels that are right, where the task has any."""
    if found.labels is None or not subject.task.has_classes:
        return None
    return float(subject.task.right(subject.y.cpu(), found.labels[order]).mean())


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
