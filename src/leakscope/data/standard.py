"""Public data sets: tiles inside the package, MNIST and EMNIST (idx format), CIFAR-10 and CIFAR-100.

An idx file, plain or gzipped, is: two zero bytes, a type byte (8 = bytes), the number of axes, one big-endian 32-bit
size an axis, the data. CIFAR's binary rows are one label byte (CIFAR-100: coarse, then fine) and 3072 pixel bytes,
channel by channel; its Python version is a pickle.
"""

import dataclasses
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
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
    check_labels,
    check_room,
    checked_choice,
    checked_limit,
    data_folder,
    find_file,
)
from leakscope.data.npz import load_npz

CREDITS = (
    "Tiles of photos by NASA (public domain), Stefan van der Walt (CC0), Rachel Michetti (CC0), SpaceX "
    "(public domain), Mikael Häggström (CC0), CMMI (no known copyright restrictions), danielbuechele "
    "(CC BY 2.0) and vultilion (CC BY 2.0), as shipped with scikit-image and scikit-learn; cut and resized."
)


def load_tiles(path: AnyPath | None = None, *, limit: int | None = None) -> Examples:
    """The embedded tiles; classes take turns, so the first nine are of different classes.

    >>> tiles = load_tiles(limit=9)
    >>> tiles.shape, tiles.y.tolist()
    ((3, 32, 32), [0, 1, 2, 3, 4, 5, 6, 7, 8])
    """
    if path is not None:
        raise UserError(f"data 'tiles' is inside the package and takes no path, got {path}. Did you mean 'npz'?")
    tiles = load_npz(Path(__file__).with_name("tiles.npz"), limit=limit, private=False, name="tiles")
    return dataclasses.replace(tiles, credits=CREDITS)


_MERGED = digits + ascii_uppercase + "abdefghnqrt"
#: The names of the classes of each variant. Letters are numbered from 1 in the files, the others from 0.
EMNIST_NAMES = {
    "balanced": _MERGED,
    "byclass": digits + ascii_uppercase + ascii_lowercase,
    "bymerge": _MERGED,
    "digits": digits,
    "letters": ascii_uppercase,
    "mnist": digits,
}


def read_idx(file: Path, axes: int, limit: int | None = None) -> np.ndarray[Any, Any]:
    """The bytes in an idx file of so many ``axes``; with ``limit`` only the first items are read."""
    with Source(file) as source:
        magic = source.read(4)
        expected = bytes((0, 0, 8, axes))
        if magic != expected:
            raise UserError(
                f"{file}: expected an idx file that starts with {expected.hex()} (bytes, {axes} axes), got "
                f"{magic.hex() or 'nothing'}. Are images and labels exchanged, or is it compressed twice?"
            )
        header = source.read(4 * axes)
        if len(header) != 4 * axes:
            raise UserError(f"{file}: truncated within its header. Get it again.")
        shape = struct.unpack(f">{axes}I", header)
        claimed = math.prod(shape)
        if 0 in shape:
            raise UserError(f"{file}: its header claims shape {shape}, expected at least one item")
        if not source.zipped and file.stat().st_size != 4 + 4 * axes + claimed:
            raise UserError(
                f"{file}: its header claims {claimed} bytes of data (shape {shape}), the file holds "
                f"{file.stat().st_size - 4 - 4 * axes}. Get it again."
            )
        count = shape[0] if limit is None else min(limit, shape[0])
        wanted = claimed // shape[0] * count
        check_room(f"{file}: its header claims shape {shape}", wanted)
        content = source.read(wanted)
        if len(content) != wanted:
            raise UserError(f"{file}: truncated: expected {wanted} bytes of data, got {len(content)}. Get it again.")
        # Reading past the end also lets gzip verify its checksum.
        if count == shape[0] and source.read(1):
            raise UserError(f"{file}: more data than its header claims (shape {shape}). Get it again.")
    return np.frombuffer(content, dtype=np.uint8).reshape(count, *shape[1:])


def load_mnist(path: AnyPath | None = None, *, split: str = "train", limit: int | None = None) -> Examples:
    """MNIST from the folder of its files, a folder above it, or an images file with its labels beside it."""
    checked_choice(split, ("train", "test"), "mnist: split")
    prefix = "train" if split == "train" else "t10k"
    images, labels = _pair("mnist", path, prefix, ("MNIST/raw", "mnist/raw", "MNIST", "mnist"))
    credits = "MNIST: Yann LeCun, Corinna Cortes, Christopher Burges."
    return _examples("mnist", images, labels, limit, digits, credits)


def load_emnist(
    path: AnyPath | None = None,
    *,
    split: str = "train",
    limit: int | None = None,
    variant: str = "balanced",
    transposed: bool = True,
) -> Examples:
    """EMNIST, whose files hold images mirrored along the diagonal; ``transposed=False`` if yours do not."""
    checked_choice(split, ("train", "test"), "emnist: split")
    checked_choice(variant, tuple(EMNIST_NAMES), "emnist: variant")
    images, labels = _pair("emnist", path, f"emnist-{variant}-{split}", ("EMNIST/raw", "emnist/raw", "EMNIST", "gzip"))
    credits = "EMNIST: Cohen, Afshar, Tapson, van Schaik, 2017; from NIST Special Database 19."
    first, names = int(variant == "letters"), EMNIST_NAMES[variant]
    return _examples("emnist", images, labels, limit, names, credits, first_label=first, transposed=transposed)


def _pair(reader: str, path: AnyPath | None, prefix: str, folders: Sequence[str]) -> tuple[Path, Path]:
    names = [f"{prefix}-images{dot}idx3-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    images = find_file(reader, path, [f"{folder}/{name}" for folder in folders for name in names])
    stem = images.name.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
    for labels in (images.with_name(stem), images.with_name(stem + ".gz")):
        if labels.is_file() and labels != images:
            return images, labels
    raise UserError(f"{images}: expected its labels in {stem} or {stem}.gz beside it, found neither")


def _examples(
    reader: str,
    images: Path,
    labels: Path,
    limit: int | None,
    names: str,
    credits: str,
    first_label: int = 0,
    transposed: bool = False,
) -> Examples:
    limit, classes = checked_limit(limit, reader), len(names)
    x = read_idx(images, 3, limit)
    y = read_idx(labels, 1, limit).astype(np.int64) - first_label
    if len(x) != len(y):
        raise UserError(f"{images}: {len(x)} images, but {len(y)} labels in {labels}")
    check_labels(labels, y, classes)
    if transposed:
        x = x.transpose(0, 2, 1)
    pixels = torch.from_numpy(x.astype(np.float32)).contiguous().unsqueeze(1).div_(255.0)
    return Examples(pixels, torch.from_numpy(y), classes, ValueRange(), reader, tuple(names), credits, private=False)


PIXELS = 3 * 32 * 32
_CREDITS = "CIFAR: Alex Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009."


@dataclass(frozen=True)
class _Kind:
    """``files`` of each split as the Python version names them; those of the binary version end in .bin besides."""

    name: str
    folders: tuple[str, ...]
    files: dict[str, tuple[str, ...]]
    label_bytes: int
    names_file: str
    meta_file: str


_CIFAR10 = _Kind(
    name="cifar10",
    folders=("cifar-10-batches-bin", "cifar-10-batches-py"),
    files={"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)},
    label_bytes=1,
    names_file="batches.meta.txt",
    meta_file="batches.meta",
)
_CIFAR100 = _Kind(
    name="cifar100",
    folders=("cifar-100-binary", "cifar-100-python"),
    files={"train": ("train",), "test": ("test",)},
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
        binary = file.suffix == ".bin"
        x, y = _binary_rows(file, kind.label_bytes, column, left) if binary else _python_rows(file, key)
        if left is not None:
            x, y = x[:left], y[:left]
            left -= len(x)
        check_labels(file, y, classes)
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
        for ending in (".bin", ""):
            files = [folder / f"{name}{ending}" for name in kind.files[split]]
            if there := [file for file in files if file.is_file()]:
                return there
    first = kind.files[split][0]
    raise UserError(
        f"data {kind.name!r}: {root}: expected {first}.bin or {first} in it, "
        f"or in {' or '.join(kind.folders)} below it, found none. Pass the folder with the standard files."
    )


def _binary_rows(
    file: Path, label_bytes: int, column: int, limit: int | None
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    row, size = label_bytes + PIXELS, file.stat().st_size
    if not size or size % row:
        wanted = f"rows of {row} bytes ({label_bytes} for labels, {PIXELS} for pixels)"
        raise UserError(f"{file}: expected {wanted}, got {size} bytes. The file is truncated, or of another data set.")
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
    content = read_array_pickle(file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a dictionary as in CIFAR's Python version, got {type(content).__name__}")
    # Python 2 wrote text keys as bytes.
    named = {key.decode("latin-1") if isinstance(key, bytes) else key: value for key, value in content.items()}
    return {key: value for key, value in named.items() if isinstance(key, str)}


def _class_names(kind: _Kind, file: Path, key: str, classes: int) -> tuple[str, ...] | None:
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
