"""Read what real systems send: state dicts, arrays, files, Flower's messages, Opacus' steps."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from leakscope.capture.observe import CapturedKind, CaptureFacts, observe_captured
from leakscope.contracts.observation import Observation

__all__ = ["CaptureFacts", "CapturedKind", "from_arrays", "from_state_dicts", "observe_captured"]


def from_state_dicts(
    before: Mapping[str, Any] | None, after: Mapping[str, Any], *, model: nn.Module, **facts: Any
) -> Observation:
    """Observe a client that received ``before`` (None: the model's own) and returned ``after``, buffers included.

    ``facts`` are the fields of :class:`CaptureFacts`: input_shape and num_classes, and what else is known. Swapped
    arguments are noticed where the update shows it.
    """
    return observe_captured(after, "weights", before, model, {"made_by": "leakscope.capture.from_state_dicts", **facts})


def from_arrays(
    arrays: Any, *, model: nn.Module, before: Any = None, kind: CapturedKind = "weights", **facts: Any
) -> Observation:
    """Observe a list of arrays in the model's order, as Flower sends them, or a mapping of names.

    ``kind`` "weights": the client's weights after training; "gradient", or "weight_delta" = before minus after: an
    update, whose sign is checked. ``before`` and ``facts`` as in :func:`from_state_dicts`.
    """
    return observe_captured(arrays, kind, before, model, {"made_by": "leakscope.capture.from_arrays", **facts})
