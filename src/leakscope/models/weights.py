"""Weights from a file: safetensors, or what ``torch.save(model.state_dict())`` wrote, of which no code is run."""

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from leakscope.contracts.checks import BYTES, DEPTH
from leakscope.contracts.disk import check_file
from leakscope.contracts.errors import UserError
from leakscope.contracts.files import dense, read_tensors

#: What is put before every name of a state dictionary, and by what.
WRAPPERS = {"module.": "DataParallel", "_module.": "Opacus", "_orig_mod.": "torch.compile"}
#: Where training scripts put a state dictionary in a checkpoint.
_ENTRIES = ("state_dict", "model_state_dict", "model", "net", "weights")


def load_weights(model: nn.Module, path: Path) -> None:
    """Load the state dictionary in ``path`` over the model's own; one ValueError whatever is wrong with it."""
    weights = read_weights(path)
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise UserError(f"weights: {path}: do not fit the model: {error}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The state dictionary in a ``.safetensors`` file, or in one that torch wrote (``.pt``, ``.pth``)."""
    if path.suffix != ".safetensors":
        return _plain_names(_state(path, read_torch_file(path)))
    try:
        content = read_tensors(path)
    except ValueError as error:
        raise UserError(f"weights: {error}") from error
    return _plain_names(_state(path, content))


def read_torch_file(path: Path) -> Any:
    """Read what ``torch.save`` wrote, as far as it is tensors and plain values; nothing that runs code when read."""
    check_file(path)
    size = path.stat().st_size
    BYTES.check(f"weights: {path}", size)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        # torch packs nothing, so a file that grows was made to fill the memory.
        if unpacked > 2 * size + 2**20:
            raise UserError(f"weights: {path}: {size} bytes that say they hold {unpacked}; torch writes no such file")
    try:
        return _dense(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, UserError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
        raise UserError(
            f"weights: {path}: expected tensors only, in a file by torch.save(model.state_dict(), ...) or safetensors; "
            f"a whole model, or anything else that runs code when it is read, is refused ({why[:200]})"
        ) from error


def _dense(content: Any, name: str = "tensor", depth: int = DEPTH) -> Any:
    """Make every tensor within dense; a checkpoint may also hold plain values."""
    if isinstance(content, Tensor):
        return dense(name, content)
    if isinstance(content, Mapping) and depth:
        return {key: _dense(value, str(key), depth - 1) for key, value in content.items()}
    if type(content) in (list, tuple) and depth:
        return type(content)(_dense(value, name, depth - 1) for value in content)
    return content


def _state(path: Path, content: Any) -> dict[str, Tensor]:
    if isinstance(content, Mapping) and not any(isinstance(value, Tensor) for value in content.values()):
        inner = next((content[name] for name in _ENTRIES if isinstance(content.get(name), Mapping)), None)
        content = content if inner is None else inner
    if not isinstance(content, Mapping) or not content:
        raise UserError(f"weights: {path}: expected a state dictionary, got {type(content).__name__}")
    odd = [str(name) for name, value in content.items() if not (isinstance(name, str) and isinstance(value, Tensor))]
    if odd:
        raise UserError(
            f"weights: {path}: expected names with tensors, got others in {', '.join(odd[:5])}; "
            "save model.state_dict() alone"
        )
    return dict(content)


def _plain_names(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop what wrappers of a model put before names.

    >>> list(_plain_names({"module.fc.weight": torch.zeros(1), "module.fc.bias": torch.zeros(1)}))
    ['fc.weight', 'fc.bias']
    """
    for prefix in WRAPPERS:
        if all(name.startswith(prefix) for name in weights):
            return _plain_names({name.removeprefix(prefix): value for name, value in weights.items()})
    return weights
