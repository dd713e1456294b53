"""CIFAR-10 and CIFAR-100 in their binary and in their Python version.

Binary rows are one label byte (CIFAR-100: coarse, then fine) and 3072 pixel bytes, channel by channel. The Python
version is a pickle; see :mod:`leakscope.data.array_pickle` for how it is read without running anything.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leakscope.contracts.checks import brief
from leakscope.contracts.disk import read_whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import ValueRange
from leakscope.data.array_pickle import read_array_pickle
from leakscope.data.examples import Examples
from leakscope.data.files import (
    AnyPath,
    Source,
    check_room,
    checked_choice,
    checked_limit,
    data_folder,
    label_problem,
)

PIXELS = 3 * 32 * 32
_CREDITS = "CIFAR: Alex Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009."


@dataclass(frozen=True)
class _Kind:
    """What is different between the two data sets."""

    name: str
    folders: tuple[str, ...]
    binary: dict[str, tuple[str, ...]]
    python: dict[str, tuple[str, ...]]
    label_bytes: int
    names_file: str
    meta_file: str


def _five(pattern: str) -> tuple[str, ...]:
    return tuple(pattern.format(number) for number in range(1, 6))


_CIFAR10 = _Kind(
    name="cifar10",
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    binary={"train": _five("data_batch_{}.bin"), "test": ("test_batch.bin",)},
    python={"train": _five("data_batch_{}"), "test": ("test_batch",)},
    label_bytes=1,
    names_file="batches.meta.txt",
    meta_file="batches.meta",
)
_CIFAR100 = _Kind(
    name="cifar100",
    folders=("cifar-100-binary", "cifar-100-python"),
    binary={"train": ("train.bin",), "test": ("test.bin",)},
    python={"train": ("train",), "test": ("test",)},
    label_bytes=2,
    names_file="{}_label_names.txt",
    meta_file="meta",
)


def load_cifar10(path: AnyPath | None = None, *, split: str = "train", limit: int | None = None) -> Examples:
    """CIFAR-10 from its folder, the folder above it, or one of its files."""
    return _load(_CIFAR10, path, split, limit, key="labels", column=0, classes=10)


def load_cifar100(
    path: AnyPath | None = None, *, split: str = "train", limit: int | None = None, labels: str = "fine"
) -> Examples:
    """CIFAR-100 with its 100 ``fine`` or its 20 ``coarse`` labels."""
    checked_choice(labels, ("fine", "coarse"), "cifar100: labels")
    fine = labels == "fine"
    return _load(_CIFAR100, path, split, limit, key=f"{labels}_labels", column=int(fine), classes=100 if fine else 20)


def _load(
    kind: _Kind, path: AnyPath | None, split: str, limit: int | None, *, key: str, column: int, classes: int
) -> Examples:
    checked_choice(split, ("train", "test"), f"{kind.name}: split")
    limit = checked_limit(limit, kind.name)
    files = _files(kind, path, split)
    pixels: list[np.ndarray[Any, Any]] = []
    labels: list[np.ndarray[Any, Any]] = []
    left = limit
    for file in files:
        if file.suffix == ".bin":
            x, y = _binary_rows(file, kind.label_bytes, column, left)
        else:
            x, y = _python_rows(file, key)
        if left is not None:
            x, y = x[:left], y[:left]
            left -= len(x)
        if int(y.min()) < 0 or int(y.max()) >= classes:
            raise label_problem(file, int(y.min()), int(y.max()), classes)
        check_room(file, sum(map(len, pixels), len(x)) * PIXELS)
        pixels.append(x)
        labels.append(y)
        if left == 0:
            break
    images = torch.from_numpy(np.concatenate(pixels).reshape(-1, 3, 32, 32).astype(np.float32)).div_(255.0)
    classes_of_all = torch.from_numpy(np.concatenate(labels).astype(np.int64))
    names = _class_names(kind, files[0], key, classes)
    return Examples(images, classes_of_all, classes, ValueRange(), kind.name, names, _CREDITS, private=False)


def _files(kind: _Kind, path: AnyPath | None, split: str) -> list[Path]:
    root = data_folder(kind.name) if path is None else Path(path)
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise UserError(f"data {kind.name!r}: {root}: no such file or folder")
    for folder in (root, *(root / name for name in kind.folders)):
        for names in (kind.binary[split], kind.python[split]):
            files = [folder / name for name in names if (folder / name).is_file()]
            if files:
                return files
    raise UserError(
        f"data {kind.name!r}: {root}: expected {kind.binary[split][0]} or {kind.python[split][0]} in it, "
        f"or in {' or '.join(kind.folders)} below it, found none. Pass the folder with the standard files."
    )


def _binary_rows(
    file: Path, label_bytes: int, column: int, limit: int | None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    row, size = label_bytes + PIXELS, file.stat().st_size
    if not size or size % row:
        raise UserError(
            f"{file}: expected rows of {row} bytes ({label_bytes} for labels, {PIXELS} for pixels), got "
            f"{size} bytes. The file is truncated, or of another data set."
        )
    count = size // row if limit is None else min(limit, size // row)
    check_room(file, count * PIXELS)
    with Source(file) as source:
        content = source.read(count * row)
    rows = np.frombuffer(content, dtype=np.uint8).reshape(-1, row)
    return rows[:, label_bytes:], rows[:, column]


def _python_rows(file: Path, key: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    content = _dictionary(file)
    x, y = content.get("data"), content.get(key)
    if not isinstance(x, np.ndarray) or x.dtype != np.uint8 or x.ndim != 2 or x.shape[1] != PIXELS or not len(x):
        got = f"{x.dtype} {x.shape}" if isinstance(x, np.ndarray) else type(x).__name__
        raise UserError(f"{file}: 'data': expected bytes of shape (N, {PIXELS}), got {got}")
    if isinstance(y, list) and all(type(label) is int for label in y):
        try:
            y = np.array(y, dtype=np.int64)
        except OverflowError as error:
            raise UserError(f"{file}: {key!r}: a label does not fit in 64 bits") from error
    if not isinstance(y, np.ndarray) or y.dtype.kind not in "ui" or y.shape != (len(x),):
        raise UserError(f"{file}: {key!r}: expected {len(x)} integer labels; the file has {brief(sorted(content))}")
    return x, y.astype(np.int64)


def _dictionary(file: Path) -> dict[str, Any]:
    """The dictionary in ``file``, with text keys also where Python 2 wrote them as bytes."""
    content = read_array_pickle(file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a dictionary as in CIFAR's Python version, got {type(content).__name__}")
    named = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in content.items()}
    return {key: value for key, value in named.items() if isinstance(key, str)}


def _class_names(kind: _Kind, file: Path, key: str, classes: int) -> tuple[str, ...] | None:
    """Names from the text or pickled file beside the data, if one has the right number of them."""
    text = file.with_name(kind.names_file.format(key.removesuffix("_labels")))
    if text.is_file():
        names = read_whole(text).decode("utf-8", errors="replace").split()
    elif file.suffix != ".bin" and file.with_name(kind.meta_file).is_file():
        wanted = "label_names" if kind is _CIFAR10 else key.removesuffix("s") + "_names"
        stored = _dictionary(file.with_name(kind.meta_file)).get(wanted)
        if not isinstance(stored, list):
            return None
        names = [n.decode("latin-1") if isinstance(n, bytes) else n for n in stored if isinstance(n, bytes | str)]
    else:
        return None
    return tuple(names) if len(names) == classes else None
