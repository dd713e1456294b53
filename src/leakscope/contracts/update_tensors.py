"""The tensors of an update: copies that nobody changes, and whether they fit the model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.contracts.spool import StoredTensors


def layout_of(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Shapes and precision of tensors; what is on disk is not read for them."""
    return tensors.layout() if isinstance(tensors, StoredTensors) else tensors


def frozen_tensors(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A copy that nobody can change; what is on disk stays there."""
    if isinstance(tensors, StoredTensors):
        return tensors
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise UserError(f"{name}: expected a tensor, got {type(value).__name__}")
    return MappingProxyType({name: value.detach().clone() for name, value in tensors.items()})


def update_problems(update: Mapping[str, Tensor], parameters: Mapping[str, Tensor], partial: bool) -> list[str]:
    """What of an update does not fit the parameters; a ``partial`` one may lack some."""
    problems = []
    # A frozen parameter (requires_grad=False) is not trained, so the client sends nothing for it.
    expected_names = [] if partial else [name for name, value in parameters.items() if value.requires_grad]
    missing = [name for name in expected_names if name not in update]
    if not update:
        problems.append("update: expected at least one tensor, got none")
    extra = [name for name in update if name not in parameters]
    if missing:
        problems.append(f"update lacks {', '.join(missing)}; it must have one tensor for each trainable parameter")
    if extra:
        problems.append(f"update has {', '.join(extra)}, which the model has no parameter for")
    for name, value in layout_of(update).items():
        expected = parameters.get(name)
        if expected is not None and expected.dtype != value.dtype:
            problems.append(f"update[{name!r}]: expected {expected.dtype} as in the model, got {value.dtype}")
        if expected is not None and expected.shape != value.shape:
            problems.append(f"update[{name!r}]: expected shape {tuple(expected.shape)}, got {tuple(value.shape)}")
    return problems
