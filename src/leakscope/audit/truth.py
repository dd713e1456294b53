"""The truth behind a captured update, where somebody has it: for measuring only, no attack is given it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakscope.contracts.errors import UserError
from leakscope.contracts.files import read_tensors
from leakscope.contracts.observation import Observation
from leakscope.data.folder import SUFFIXES, read_picture
from leakscope.data.npz import Pack
from leakscope.models.weights import read_torch_file

#: How far a value may lie outside [0, 1] by rounding.
OUTSIDE = 1e-3


def read_truth(path: Path, observation: Observation) -> tuple[Tensor, Tensor | None]:
    """Inputs in unit space, and labels where the file has them.

    A .npz, .safetensors or .pt file holds ``x``, as the model reads it or as bytes, and perhaps ``y``; a picture, or a
    folder of pictures in the order of their names, holds inputs only.
    """
    shape = tuple(observation.input_shape)
    if path.is_dir() or path.suffix.lower() in SUFFIXES:
        files = sorted(f for f in path.iterdir() if f.suffix.lower() in SUFFIXES) if path.is_dir() else [path]
        if not files or len(shape) != 3 or shape[0] not in (1, 3):
            raise UserError(f"--truth: {path}: expected pictures for inputs of shape {shape}, got {len(files)} of them")
        pixels = [read_picture(file, "L" if shape[0] == 1 else "RGB") for file in files]
        wrong = [
            f"{file.name} {tuple(one.shape)}" for file, one in zip(files, pixels, strict=True) if one.shape != shape
        ]
        if wrong:
            raise UserError(f"--truth: expected pictures of shape {shape}, got {', '.join(wrong)}")
        return torch.stack(pixels).float() / 255, None
    named = _arrays(path)
    x, y = named.get("x"), named.get("y")
    if x is None or tuple(x.shape[1:]) != shape or len(x) < 1:
        got = "none" if x is None else str(tuple(x.shape))
        raise UserError(f"--truth: {path}: expected an array x of shape (examples, *{shape}), got {got}")
    if y is not None and len(y) != len(x):
        raise UserError(f"--truth: {path}: expected {len(x)} labels in y, got {len(y)}")
    unit = x.float() / 255 if x.dtype == torch.uint8 else observation.inputs.to_unit(x.float())
    if not bool(torch.isfinite(unit).all()):
        raise UserError(f"--truth: {path}: x has NaN or infinite values")
    low, high = float(unit.min()), float(unit.max())
    if low < -OUTSIDE or high > 1 + OUTSIDE:
        known = "the value range that is known" if observation.inputs.bounded else "[0, 1], for no range is known"
        raise UserError(
            f"--truth: {path}: expected x within {known}, got values from {low:.3g} to {high:.3g} of it. "
            "Pass --range, or --mean and --std, as the client's inputs have them."
        )
    return unit.clamp(0, 1), y


def _arrays(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".npz":
        pack = Pack(path)
        return {name: torch.from_numpy(np.array(pack.array(name, "uif"))) for name in ("x", "y") if name in pack.names}
    content: Any = read_tensors(path) if path.suffix == ".safetensors" else None
    if path.suffix in (".pt", ".pth"):
        content = read_torch_file(path)
    if isinstance(content, tuple | list) and len(content) == 2:
        content = dict(zip(("x", "y"), content, strict=True))
    if not isinstance(content, Mapping):
        kinds = ".npz, .safetensors or .pt with x and y, a picture, or a folder of pictures"
        raise UserError(f"--truth: {path}: expected {kinds}")
    return {name: content[name] for name in ("x", "y") if isinstance(content.get(name), Tensor)}
