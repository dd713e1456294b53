"""MNIST and EMNIST in the idx format, plain or gzipped.

An idx file is: two zero bytes, a type byte (8 = bytes), the number of axes, one big-endian 32-bit size an
axis, the data.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import ValueRange
from leakscope.data.examples import Examples
from leakscope.data.files import AnyPath, Source, check_room, checked_choice, checked_limit, find_file, label_problem

# Variant -> number of classes. Letters are numbered from 1 in the files, the others from 0.
EMNIST_CLASSES = {"balanced": 47, "byclass": 62, "bymerge": 47, "digits": 10, "letters": 26, "mnist": 10}
_DIGITS = "0123456789"
_UPPER = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_EMNIST_NAMES = {
    "balanced": _DIGITS + _UPPER + "abdefghnqrt",
    "byclass": _DIGITS + _UPPER + _UPPER.lower(),
    "bymerge": _DIGITS + _UPPER + "abdefghnqrt",
    "digits": _DIGITS,
    "letters": _UPPER,
    "mnist": _DIGITS,
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
    return _examples("mnist", images, labels, limit, _DIGITS, credits)


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
    checked_choice(variant, tuple(EMNIST_CLASSES), "emnist: variant")
    images, labels = _pair("emnist", path, f"emnist-{variant}-{split}", ("EMNIST/raw", "emnist/raw", "EMNIST", "gzip"))
    credits = "EMNIST: Cohen, Afshar, Tapson, van Schaik, 2017; from NIST Special Database 19."
    first, names = int(variant == "letters"), _EMNIST_NAMES[variant]
    return _examples("emnist", images, labels, limit, names, credits, first_label=first, transposed=transposed)


def _pair(reader: str, path: AnyPath | None, prefix: str, folders: Sequence[str]) -> tuple[Path, Path]:
    names = [f"{prefix}-images{dot}idx3-ubyte{end}" for dot in "-." for end in ("", ".gz")]
    images = find_file(reader, path, [f"{folder}/{name}" for folder in folders for name in names])
    stem = images.name.replace("images", "labels").replace("idx3", "idx1").removesuffix(".gz")
    for name in (stem, stem + ".gz"):
        labels = images.with_name(name)
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
    if int(y.min()) < 0 or int(y.max()) >= classes:
        raise label_problem(labels, int(y.min()), int(y.max()), classes)
    if transposed:
        x = x.transpose(0, 2, 1)
    pixels = torch.from_numpy(x.astype(np.float32)).contiguous().unsqueeze(1).div_(255.0)
    return Examples(pixels, torch.from_numpy(y), classes, ValueRange(), reader, tuple(names), credits, private=False)
