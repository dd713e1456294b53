"""Files that hold captured weights or updates: safetensors, what torch wrote, NumPy's archives; no code is ever run.

Beside the tensors some systems send the number of the client's examples, FedML as a pair of number and state dict.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from leakscope.contracts.checks import brief, is_whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.files import read_tensors
from leakscope.data.npz import Pack
from leakscope.models.weights import read_torch_file

#: Where the tensors, and the number of examples, are in what systems send.
_STATES = ("state_dict", "model_state_dict", "model_params", "model", "net", "weights", "parameters", "update", "grads")
_COUNTS = ("num_samples", "sample_num", "num_examples", "n_samples", "local_sample_number")
_PLACE = re.compile(r"(?:arr_)?(\d+)")
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz")


@dataclass(frozen=True, eq=False)
class CapturedFile:
    """Tensors by name, or a list of them in their order, and the number of examples where the file says it."""

    content: dict[str, Any] | list[Any]
    num_samples: int | None = None


def read_captured(path: Path) -> CapturedFile:
    """What is in a file of captured weights or of an update; one ValueError whatever is wrong with it."""
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: expected a file that ends in {', '.join(SUFFIXES)}, got {path.suffix or 'no ending'}")
    if not path.is_file():
        raise UserError(f"{path}: no such file")
    if path.suffix == ".safetensors":
        return CapturedFile(in_places(read_tensors(path)))
    if path.suffix == ".npz":
        pack = Pack(path)
        arrays = {name: pack.array(name, "uifb") for name in sorted(pack.names)}
        count = next((name for name in _COUNTS if name in arrays and arrays[name].size == 1), None)
        samples = None if count is None else int(arrays.pop(count).reshape(()))
        return CapturedFile(in_places(arrays), samples)
    content, samples = unwrapped(read_torch_file(path))
    return CapturedFile(_tensors_of(path, content), samples)


def in_places(named: Mapping[str, Any]) -> dict[str, Any] | list[Any]:
    """Tensors called arr_0, arr_1 ... (or 0, 1 ...) as a list in that order; others by name.

    >>> in_places({"arr_10": "c", "arr_0": "a", "arr_2": "b"}), in_places({"fc.weight": "a"})
    (['a', 'b', 'c'], {'fc.weight': 'a'})
    """
    places = {name: match for name in named if (match := _PLACE.fullmatch(name))}
    if not named or len(places) < len(named):
        return dict(named)
    return [named[name] for name in sorted(places, key=lambda name: int(places[name][1]))]


def unwrapped(content: Any) -> tuple[Any, int | None]:
    """The tensors and the number of examples in what a system sends together.

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
    samples = next((content[name] for name in _COUNTS if is_whole(content.get(name))), None)
    return (content, None) if inner is None else (inner, samples)


def _tensors_of(path: Path, content: Any) -> dict[str, Any] | list[Any]:
    if isinstance(content, Mapping) and content:
        odd = [str(name) for name, value in content.items() if not isinstance(value, Tensor)]
        if not odd:
            return in_places({str(name): value for name, value in content.items()})
        raise UserError(f"{path}: expected names with tensors, got others in {', '.join(odd[:5])}")
    if isinstance(content, list | tuple) and content and all(isinstance(value, Tensor) for value in content):
        return list(content)
    raise UserError(
        f"{path}: expected a state dict, a list of tensors, or a pair of a number of examples and a state dict, got "
        f"{brief(type(content).__name__)}"
    )
