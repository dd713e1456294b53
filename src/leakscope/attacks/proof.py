"""Certify solved inputs only where the whole update follows from them, by the client's own loss.

A layer's equations may be met by inputs that are not the client's: one unit alone explains any gradient, and a layer
that is used twice, a mixture of examples or a defence change the update in ways that its own equations do not show. The
gradient of the solved inputs, taken through the whole model, does. What no adversary can see stays open: a client that
altered its input before the model read it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leakscope.contracts.certificate import EXPLAINED, Certificate
from leakscope.contracts.observation import Observation
from leakscope.labels import recover_labels
from leakscope.matching import GradientMap
from leakscope.matching.determinacy import free_directions
from leakscope.matching.unexplained import unexplained

#: What the solved inputs may leave of the whole update, each tensor relative to its size. Rounding leaves 1e-7 to 1e-5;
#: an update that is off by more says less than 80 dB of an input that one unit alone determines.
REPLAYED = 1e-4
#: Products that counting behind a first dense layer may take: its own equations are well conditioned.
DENSE_PROBES = 200


def certify(
    observation: Observation,
    inputs: Tensor,
    labels: Tensor | None,
    share: float,
    free: Sequence[int | None] | None,
    method: str,
    tolerance: float = EXPLAINED,
) -> tuple[Certificate, ...]:
    """Certify each of the ``inputs``, which leave this ``share`` of the equations that were solved.

    There are none where the equations are not explained, or where the inputs do not give the whole update. ``free``
    directions that the equations do not tell (None) are those of the whole update.
    """
    if not share <= tolerance or len(inputs) != observation.num_examples:
        return ()
    targets = _targets(observation, labels)
    if targets is None or not gives_update(observation, inputs, targets):
        return ()
    if free is None:
        wide = observation.to(dtype=torch.float64)
        mapping = GradientMap.of(wide, targets.to(wide.device))
        free = free_directions(mapping, mapping.flat(inputs.detach().to(wide.device).double()), limit=DENSE_PROBES)
    return tuple(Certificate.of_share(share, count, method, tolerance) for count in free)


def gives_update(observation: Observation, inputs: Tensor, labels: Tensor | None) -> bool:
    """Whether the update of these inputs, computed in float64, is the observed one but for rounding."""
    targets = _targets(observation, labels)
    if targets is None:
        return False
    try:
        wide = observation.to(dtype=torch.float64)
        left = unexplained(wide, inputs.detach().to(wide.device).double(), targets.to(wide.device))
    except RuntimeError:  # a model that insists on float32
        return False
    return left <= REPLAYED


def _targets(observation: Observation, labels: Tensor | None) -> Tensor | None:
    """The labels that are known, those that an attack found, or those that the update tells; None without any."""
    if observation.labels is not None or labels is not None:
        return labels if observation.labels is None else observation.labels
    try:
        return recover_labels(observation).labels
    except ValueError:
        return None
