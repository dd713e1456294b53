"""Load the examples that a section of a spec names; read bytes of tensors and the precision of models."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from leakscope.audit.sections import DataSpec
from leakscope.contracts.errors import UserError
from leakscope.data import DATA, Examples, load_data


def load_examples(asked: DataSpec) -> Examples:
    """Load the examples that ``asked`` names, cut and normalised as it says."""
    last = None if asked.limit is None else asked.skip + asked.limit
    if asked.instance is not None:
        data: Examples = asked.instance
    else:
        options = dict(asked.options)
        # A reader that knows how to stop early need not read the rest.
        early = last if asked.name in DATA and "limit" in DATA[asked.name].options() else None
        options |= {k: v for k, v in (("split", asked.split), ("limit", early)) if v is not None}
        data = load_data(asked.name, asked.path, **options)
    if len(data) <= asked.skip:
        raise UserError(f"expected more than skip = {asked.skip} examples, got {len(data)}")
    if asked.skip or last is not None:
        data = data.subset(torch.arange(asked.skip, len(data) if last is None else min(last, len(data))))
    if asked.mean is not None and asked.std is not None:
        data = data.normalised(asked.mean, asked.std)
    return data


def tensor_bytes(value: Tensor) -> bytes:
    """Return the content of a tensor, the same on every device and for every memory layout."""
    return bytes(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())


def tensors_hash(prefix: str, *tensors: Tensor) -> str:
    digest = hashlib.sha256(prefix.encode())
    for value in tensors:
        digest.update(tensor_bytes(value))
    return digest.hexdigest()


def precision(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
