"""Read captured weights, updates, or the truth: safetensors, what torch wrote, NumPy's archives; no code is run.

Some systems also send the number of the client's examples, FedML as a pair of number and state dict.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakscope.contracts.checks import brief, is_whole
from leakscope.contracts.disk import check_file
from leakscope.contracts.errors import UserError
from leakscope.contracts.files import read_tensors
from leakscope.contracts.observation import Observation
from leakscope.data.folder import SUFFIXES as PICTURES
from leakscope.data.folder import read_picture
from leakscope.data.npz import Pack
from leakscope.models.weights import read_torch_file

#: Where the tensors, and the number of examples, are in what systems send.
_STATES = ("state_dict", "model_state_dict", "model_params", "model", "net", "weights", "parameters", "update", "grads")
_COUNTS = ("num_samples", "sample_num", "num_examples", "n_samples", "local_sample_number")
#: How far a value of the truth may lie outside [0, 1] by rounding.
OUTSIDE = 1e-3
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz")


def read_captured(path: Path) -> tuple[Any, int | None]:
    """Read captured weights or an update, by name or in order, and the number of examples where the file tells it."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}, got {path.suffix or 'no ending'}")
    check_file(path)
    if path.suffix == ".safetensors":
        return read_tensors(path), None
    if path.suffix == ".npz":
        pack = Pack(path)
        arrays = {name: pack.array(name, "uifb") for name in sorted(pack.names)}
        count = next((name for name in _COUNTS if name in arrays and arrays[name].size == 1), None)
        return arrays, None if count is None else _count(path, count, arrays.pop(count).item())
    try:
        content, samples = unwrapped(read_torch_file(path))
    except UserError as error:
        raise error if str(path) in str(error) else UserError(f"{path}: {error}") from error
    return _tensors_of(path, content), samples


def _count(where: object, name: str, value: Any) -> int:
    """Return a number of examples; systems also send it as a float without a fraction."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if not is_whole(number):
        wrong = f"{where}: {name}: expected how many examples are behind the update, at least 1, got {brief(value)}"
        raise UserError(f"{wrong}. Take it out of the file and pass --examples.")
    return number


def unwrapped(content: Any) -> tuple[Any, int | None]:
    """Separate the tensors and the number of examples in what a system sends together.

    >>> unwrapped((12, {"fc.weight": 1.0})), unwrapped({"model_params": [1.0], "num_samples": 3})
    (({'fc.weight': 1.0}, 12), ([1.0], 3))
    """
    if isinstance(content, tuple | list) and len(content) == 2:
        for number, state in (content, content[::-1]):
            if is_whole(number) and isinstance(state, Mapping | list):
                return unwrapped(state)[0], number
    if not isinstance(content, Mapping) or any(isinstance(value, Tensor) for value in content.values()):
        return content, None
    inner = next((content[name] for name in _STATES if isinstance(content.get(name), Mapping | list)), None)
    if inner is None:
        return content, None
    told = next((name for name in _COUNTS if isinstance(content.get(name), int | float)), None)
    return inner, None if told is None else _count("the update", told, content[told])


def _tensors_of(path: Path, content: Any) -> dict[str, Any] | list[Any]:
    if isinstance(content, Mapping) and content:
        odd = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
        if not odd:
            return {str(name): value for name, value in content.items()}
        raise UserError(f"{path}: expected names with tensors, got others in {', '.join(odd[:5])}")
    if isinstance(content, list | tuple) and content and all(isinstance(value, Tensor) for value in content):
        return list(content)
    kinds = "a state dict, a list of tensors, or a number of examples with one of them"
    raise UserError(f"{path}: expected {kinds}, got {type(content).__name__}")


def read_truth(path: Path, observation: Observation) -> tuple[Tensor, Tensor | None]:
    """Read inputs as the model reads them, and labels where the file has them.

    A .npz, .safetensors or .pt file holds ``x``, as the model reads it or as bytes, and perhaps ``y``; a picture, or a
    folder of pictures in the order of their names, holds inputs only.
    """
    shape = tuple(observation.input_shape)
    if path.is_dir() or path.suffix.lower() in PICTURES:
        files = sorted(f for f in path.iterdir() if f.suffix.lower() in PICTURES) if path.is_dir() else [path]
        if not files or len(shape) != 3 or shape[0] not in (1, 3):
            raise UserError(f"--truth: {path}: expected pictures for inputs of shape {shape}, got {len(files)} of them")
        pixels = [read_picture(file, "L" if shape[0] == 1 else "RGB") for file in files]
        wrong = [
            f"{file.name} {tuple(one.shape)}" for file, one in zip(files, pixels, strict=True) if one.shape != shape
        ]
        if wrong:
            raise UserError(f"--truth: expected pictures of shape {shape}, got {', '.join(wrong)}")
        return observation.inputs.from_unit(torch.stack(pixels).float() / 255), None
    named = _arrays(path)
    x, y = named.get("x"), named.get("y")
    if x is None or tuple(x.shape[1:]) != shape or len(x) < 1:
        got = "none" if x is None else str(tuple(x.shape))
        raise UserError(f"--truth: {path}: expected an array x of shape (examples, *{shape}), got {got}")
    if y is not None and len(y) != len(x):
        raise UserError(f"--truth: {path}: expected {len(x)} labels in y, got {len(y)}")
    x = observation.inputs.from_unit(x.float() / 255) if x.dtype == torch.uint8 else x.float()
    if not bool(torch.isfinite(x).all()):
        raise UserError(f"--truth: {path}: x has NaN or infinite values")
    unit = observation.inputs.to_unit(x)
    low, high = float(unit.min()), float(unit.max())
    if low < -OUTSIDE or high > 1 + OUTSIDE:
        known = "the value range that is known" if observation.inputs.bounded else "[0, 1], for no range is known"
        raise UserError(
            f"--truth: {path}: expected x within {known}, got values from {low:.3g} to {high:.3g} of it. "
            "Pass --range, or --mean and --std, as the client's inputs have them."
        )
    return x, y


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
