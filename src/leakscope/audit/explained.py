"""What the result of an attack leaves of the update, and the flag where that is more than the truth or noise leaves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from leakscope.contracts.observation import Observation
from leakscope.contracts.reconstruction import Reconstruction
from leakscope.labels import recover_labels
from leakscope.matching.unexplained import is_unexplained, noise_share, unexplained

FLAG = "update not explained"


def left_by(
    observation: Observation, inputs: Tensor, labels: Tensor | None, order: Sequence[Sequence[int]] | None = None
) -> float | None:
    """Return what inputs leave of the update, None where it cannot be computed; see ``matching/unexplained.py``.

    ``order`` is the visiting order of these inputs, where it is known.
    """
    if observation.has_rounds or labels is None or len(labels) != len(inputs) or not bool(torch.isfinite(inputs).all()):
        return None
    moved = inputs.detach().to(device=observation.device, dtype=observation.dtype)
    try:
        left = unexplained(observation, moved, labels.to(observation.device), order=order)
    except Exception:  # noqa: BLE001 - any model and any task may come, and the result stands without it
        return None
    return left if math.isfinite(left) else None


def labels_of(observation: Observation, result: Reconstruction) -> Tensor | None:
    """Return the labels that an attack has, or those that the update tells; None where nothing tells them."""
    if result.labels is not None or observation.has_rounds:
        return result.labels
    try:
        return recover_labels(observation).labels
    except ValueError:  # no head to read, or a number of examples that is not known
        return None


def with_flag(
    result: Reconstruction, observation: Observation, left: float | None, by_truth: float | None = None
) -> Reconstruction:
    """Return the result, flagged where it leaves more of the update than the truth, or than known noise without it."""
    if left is None or FLAG in result.flags:
        return result
    least = noise_share(observation) if by_truth is None else by_truth
    entries = sum(value.numel() for value in observation.message.update.values())
    found = (FLAG,) if is_unexplained(left, least, entries) else ()
    return dataclasses.replace(result, flags=(*result.flags, *found))
