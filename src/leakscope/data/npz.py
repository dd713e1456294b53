"""Packs in NumPy's .npz format: x, y, and optionally class_names, writer or record (-> group), split, scale.

Read without ``numpy.load``: the sizes that each header claims are compared with a cap and with the archive's own
directory before anything is decompressed, and arrays of Python objects (pickles) are refused.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Literal

import numpy as np
import torch
from torch import Tensor

from leakscope.contracts.checks import BYTES, FLOAT, brief, is_whole
from leakscope.contracts.disk import check_file
from leakscope.contracts.errors import UserError
from leakscope.contracts.inputs import ValueRange
from leakscope.data.examples import Examples, classes_of, natural_range
from leakscope.data.files import AnyPath, check_room, checked_choice, checked_limit, find_file

LAYOUTS = ("auto", "hwc", "chw", "hw", "signal", "table")
_GROUPS = ("group", "writer", "record")
_TEXT_BYTES = 1 << 22
#: No honest header is longer; NumPy would read as much as the file says before it looks.
_HEADER_BYTES = 1 << 14


class Pack:
    """An .npz archive, whose directory is read once: of thousands of arrays each would cost as much as all."""

    def __init__(self, file: Path) -> None:
        self.file = file
        check_file(file)
        try:
            self._archive = zipfile.ZipFile(file)
            self.names = {n.removesuffix(".npy") for n in self._archive.namelist() if n.endswith(".npy")}
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, MemoryError, RuntimeError) as error:
            wrong = f"{file}: expected an .npz archive, got something else ({error})"
            raise UserError(f"{wrong}. Write it with numpy.savez_compressed.") from error

    def shape(self, name: str) -> tuple[int, ...]:
        with self._member(name) as member:
            return member.shape

    def array(self, name: str, kinds: str, rows: int | None = None, most: int | None = None) -> np.ndarray[Any, Any]:
        """Read the array ``name``, or its first ``rows``; ``kinds`` are NumPy's letters, ``most`` a number of bytes."""
        with self._member(name, kinds) as member:
            shape = member.shape
            if rows is not None and shape and rows < shape[0] and not member.fortran:
                shape = (rows, *shape[1:])
            size = math.prod(shape) * member.dtype.itemsize
            if most is not None and size > most:
                raise UserError(f"expected at most {most} bytes, got {size}")
            check_room("its content", max(math.prod(shape), size // FLOAT))
            content = b"".join(member.pieces(size))
        order: Literal["F", "C"] = "F" if member.fortran else "C"
        return np.frombuffer(content, dtype=member.dtype).reshape(shape, order=order)

    def extent(self, name: str, kinds: str) -> tuple[float, float]:
        """The smallest and the largest value of the array ``name``, of which little is in memory at a time."""
        with self._member(name, kinds) as member:
            BYTES.check("its content, all of which its range needs", member.size)
            bounds = [(p.min(), p.max()) for p in (np.frombuffer(p, member.dtype) for p in member.pieces(member.size))]
        return float(min(low for low, _ in bounds)), float(max(high for _, high in bounds))

    @contextmanager
    def _member(self, name: str, kinds: str = "uifbU") -> Iterator[_Member]:
        """The array ``name`` with its checked header, open for reading; all that is wrong with it is one ValueError."""
        if not isinstance(name, str) or name not in self.names:
            names = ", ".join(sorted(self.names)[:20]) or "none"
            fix = "Name the right one with x_key or y_key."
            raise UserError(f"{self.file}: no array {brief(name)}; it has {names}. {fix}")
        try:
            with self._archive.open(f"{name}.npy") as stream:
                shape, fortran, dtype = self._header(_Bounded(stream, _HEADER_BYTES))
                if dtype.hasobject or dtype.kind not in kinds:
                    raise UserError(f"expected numbers or text, got dtype {str(dtype)[:80]}")
                member = _Member(stream, shape, fortran, dtype)
                stored = self._archive.getinfo(f"{name}.npy").file_size
                if member.size > stored:
                    raise UserError(f"the header claims {member.size} bytes, the archive holds {stored}")
                yield member
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            remedy = "" if "LEAKSCOPE" in str(error) else ". Write the file again with numpy.savez_compressed."
            raise UserError(f"{self.file}: array {name!r}: {error}{remedy}") from error
        except (RuntimeError, MemoryError, LookupError, ArithmeticError, TypeError) as error:
            # RuntimeError is how zipfile reports an encrypted member, the others how it stumbles over a damaged one.
            raise UserError(f"{self.file}: array {name!r} cannot be read: {error}") from error

    @staticmethod
    def _header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        version = np.lib.format.read_magic(stream)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise UserError(f"unknown version {version} of the .npy format")
        try:
            shape, fortran, dtype = readers[version](stream)
        except (SyntaxError, TokenError, TypeError, KeyError, IndexError, RecursionError, MemoryError) as error:
            # A header is Python source, and NumPy lets through what its parser makes of a broken one.
            raise UserError(f"unreadable header ({type(error).__name__}: {error})") from error
        if any(n < 0 for n in shape):
            raise UserError(f"negative size in shape {shape}")
        return shape, fortran, dtype

    def text(self, name: str) -> tuple[str, ...] | None:
        """The strings of array ``name``, or None if there is no such array."""
        if not isinstance(name, str) or name not in self.names:
            return None
        return tuple(str(value) for value in self.array(name, "U", most=_TEXT_BYTES).ravel())


class _Bounded:
    """A stream that ends after so many bytes, whatever a length in it claims."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._left = stream, most

    def read(self, count: int) -> bytes:
        piece = self._stream.read(max(0, min(count, self._left)))
        self._left -= len(piece)
        return piece


@dataclass(frozen=True)
class _Member:
    stream: IO[bytes]
    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def pieces(self, size: int) -> Iterator[bytes]:
        """The next ``size`` bytes, each piece whole items."""
        step, place = self.dtype.itemsize << 20, 0
        while place < size:
            piece = self.stream.read(min(step, size - place))
            place += len(piece)
            if not piece or len(piece) % self.dtype.itemsize:
                raise UserError(f"the header claims {self.size} bytes, got {place}")
            yield piece


def load_npz(
    path: AnyPath | None = None,
    *,
    split: str | None = None,
    limit: int | None = None,
    x_key: str = "x",
    y_key: str | None = "y",
    names_key: str = "class_names",
    layout: str = "auto",
    num_classes: int | None = None,
    private: bool = True,
    name: str = "npz",
    file_name: str | None = None,
) -> Examples:
    """Read a pack. Bytes become [0, 1]; integers become integer x ``scale``, with the range of all values in the pack.

    ``layout="auto"`` takes (N, H, W, C) and (N, C, H, W) with up to four channels and (N, H, W) for images, and (N, L)
    for signals if there is a ``scale``, for tables if there is none. ``split`` needs an array ``split`` (0 train,
    1 test). ``y_key=None`` gives every example its own class.
    """
    if path is None and file_name is None:
        raise UserError("data 'npz': expected path=... to a .npz file, got none")
    checked_layout = checked_choice(layout, LAYOUTS, "npz: layout")
    limit, file = checked_limit(limit, name), find_file(name, path, (file_name,) if file_name else ())
    pack = Pack(file)
    count = next(iter(pack.shape(x_key)), 0)
    check_room(file, count)
    chosen = torch.arange(count)
    if split is not None:
        wanted = ("train", "test").index(checked_choice(split, ("train", "test"), "npz: split"))
        chosen = chosen[_integers(pack, "split", count) == wanted]
    chosen = chosen[:limit]
    if count and len(chosen) == 0:
        raise UserError(f"{file}: no examples{f' in split {split!r}' if split else ''}")
    x, value_range = _to_float(pack, x_key, int(chosen[-1]) + 1 if count else 0)
    x = _arrange(file, x, checked_layout, scaled="scale" in pack.names)
    y = torch.arange(count) if y_key is None else _targets(pack, y_key, count)
    group_key = next((key for key in _GROUPS if key in pack.names), None)
    group = None if group_key is None else _integers(pack, group_key, count)
    class_names = pack.text(names_key)
    classes = len(class_names) if class_names else classes_of(y)
    if num_classes is not None and not is_whole(num_classes):
        raise UserError(f"{name}: num_classes: expected a number of at least 1, got {brief(num_classes)}")
    return Examples(
        x=x[chosen].contiguous(),
        y=y[chosen],
        num_classes=num_classes or classes,
        value_range=value_range,
        name=name if name != "npz" else file.stem,
        class_names=class_names,
        credits=" ".join(t for key in ("source", "licence") for t in pack.text(key) or ()),
        private=private,
        group=None if group is None else group[chosen],
    )


def _targets(pack: Pack, key: str, count: int) -> Tensor:
    values = pack.array(key, "uif")
    if values.ndim < 1 or values.shape[0] != count:
        raise UserError(f"{pack.file}: array {key!r}: expected {count} targets, got shape {values.shape}")
    return torch.from_numpy(values.astype(np.float32 if values.dtype.kind == "f" else np.int64))


def _integers(pack: Pack, key: str, count: int) -> Tensor:
    values = pack.array(key, "ui")
    if values.shape != (count,):
        raise UserError(f"{pack.file}: array {key!r}: expected {count} integers, got shape {values.shape}")
    return torch.from_numpy(values.astype(np.int64))


def _to_float(pack: Pack, key: str, rows: int) -> tuple[Tensor, ValueRange]:
    """The first ``rows`` of the examples, and the range of all of them."""
    raw = pack.array(key, "uifb", rows)
    if raw.ndim < 2 or 0 in raw.shape:
        raise UserError(f"{pack.file}: expected examples of shape (N, ...), got {raw.shape}")
    x = torch.from_numpy(raw.astype(np.float32))
    if raw.dtype == np.uint8:
        return x.div_(255.0), ValueRange()
    ends = x if rows >= pack.shape(key)[0] else torch.tensor(pack.extent(key, "uifb"), dtype=torch.float32)
    if "scale" in pack.names:
        scale = pack.array("scale", "uif", most=_TEXT_BYTES)
        if scale.size != 1 or not np.isfinite(scale).all() or float(scale.reshape(())) <= 0:
            raise UserError(f"{pack.file}: array 'scale': expected one positive number, got {brief(scale.tolist())}")
        x, ends = x * float(scale.reshape(())), ends * float(scale.reshape(()))
    return x, natural_range(ends)


def _arrange(file: Path, x: Tensor, layout: str, *, scaled: bool) -> Tensor:
    if layout == "auto":
        if x.dim() == 4:
            layout = "hwc" if x.shape[3] <= 4 else "chw" if x.shape[1] <= 4 else "unknown"
        else:
            layout = {2: "signal" if scaled else "table", 3: "hw"}.get(x.dim(), "unknown")
    match layout, x.dim():
        case "hwc", 4:
            return x.permute(0, 3, 1, 2)
        case ("chw", 4) | ("signal", 3) | ("table", 2):
            return x
        case ("hw", 3) | ("signal", 2):
            return x.unsqueeze(1)
    raise UserError(
        f"{file}: cannot tell images, signals or a table from shape {tuple(x.shape)} with layout={layout!r}. "
        f"Choose layout from {', '.join(LAYOUTS[1:])}."
    )
