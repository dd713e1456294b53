"""Packs in NumPy's .npz format: x, y, and optionally class_names, writer or record (-> group), split, scale.

Read without ``numpy.load``: the sizes that each header claims are compared with a cap and with the archive's
own directory before anything is decompressed, and arrays of Python objects (pickles) are refused.
"""

from __future__ import annotations

import math
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from torch import Tensor

from leakscope.contracts.checks import is_whole
from leakscope.contracts.inputs import ValueRange
from leakscope.data.examples import Examples, classes_of, natural_range
from leakscope.data.files import MAX_BYTES, AnyPath, checked_choice, checked_limit, find_file

LAYOUTS = ("auto", "hwc", "chw", "hw", "signal", "table")
_GROUPS = ("group", "writer", "record")
_TEXT_BYTES = 1 << 22


class Pack:
    """An .npz archive from which single arrays are read after their headers were checked.

    The file is opened for each array, so a pack holds nothing open.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            with zipfile.ZipFile(file) as archive:
                self.names = {n.removesuffix(".npy") for n in archive.namelist() if n.endswith(".npy")}
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise ValueError(
                f"{file}: expected an .npz archive, got something else ({error}). Write it with numpy.savez_compressed."
            ) from error

    def array(self, name: str, kinds: str, limit: int | None = None) -> np.ndarray[Any, Any]:
        """The array ``name``, whose dtype must be of one of the ``kinds`` (NumPy's letters, as 'uif')."""
        limit = MAX_BYTES if limit is None else limit
        if name not in self.names:
            raise ValueError(
                f"{self.file}: no array {name!r}; it has {', '.join(sorted(self.names)) or 'none'}. "
                "Name the right one with x_key or y_key."
            )
        try:
            with zipfile.ZipFile(self.file) as archive, archive.open(f"{name}.npy") as stream:
                shape, fortran, dtype = self._header(name, stream)
                if dtype.hasobject or dtype.kind not in kinds:
                    raise ValueError(f"expected numbers or text, got dtype {dtype}")
                claimed = math.prod(shape) * dtype.itemsize
                stored = archive.getinfo(f"{name}.npy").file_size
                if claimed > limit or stored > limit + (1 << 16):
                    raise ValueError(f"expected at most {limit} bytes, got {max(claimed, stored)}")
                if claimed > stored:
                    raise ValueError(f"the header claims {claimed} bytes, the archive holds {stored}")
                content = stream.read(claimed)
                if len(content) != claimed:
                    raise ValueError(f"the header claims {claimed} bytes, got {len(content)}")
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error, NotImplementedError) as error:
            raise ValueError(
                f"{self.file}: array {name!r}: {error}. Write the file again with numpy.savez_compressed."
            ) from error
        except RuntimeError as error:  # how zipfile reports an encrypted member
            raise ValueError(f"{self.file}: array {name!r} cannot be read: {error}") from error
        flat = np.frombuffer(content, dtype=dtype)
        return flat.reshape(shape, order="F" if fortran else "C")

    @staticmethod
    def _header(name: str, stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
        version = np.lib.format.read_magic(stream)
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        if version not in readers:
            raise ValueError(f"unknown version {version} of the .npy format")
        try:
            shape, fortran, dtype = readers[version](stream)
        except (SyntaxError, TokenError, TypeError, KeyError, IndexError, RecursionError, MemoryError) as error:
            # A header is Python source, and NumPy lets through what its parser makes of a broken one.
            raise ValueError(f"unreadable header ({type(error).__name__}: {error})") from error
        if any(n < 0 for n in shape):
            raise ValueError(f"negative size in shape {shape}")
        return shape, fortran, dtype

    def text(self, name: str) -> tuple[str, ...] | None:
        """The strings of array ``name``, or None if there is no such array."""
        if name not in self.names:
            return None
        return tuple(str(value) for value in self.array(name, "U", _TEXT_BYTES).ravel())


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
    """Read a pack.

    Bytes become [0, 1]. Integers with ``scale`` become integer x scale, with the range of all values in the
    pack. ``layout="auto"`` takes (N, H, W, C) and (N, C, H, W) with up to four channels and (N, H, W) for
    images, and (N, L) for signals if there is a ``scale``, for tables if there is none. ``split`` needs an
    array ``split`` (0 train, 1 test). ``y_key=None`` gives every example its own class.
    """
    if path is None and file_name is None:
        raise ValueError("data 'npz': expected path=... to a .npz file, got none")
    checked_layout = checked_choice(layout, LAYOUTS, "npz: layout")
    limit = checked_limit(limit, name)
    pack = Pack(find_file(name, path, (file_name,) if file_name else ()))
    file = pack.file
    raw = pack.array(x_key, "uifb")
    x, value_range = _to_float(pack, raw)
    x = _arrange(file, x, checked_layout, scaled="scale" in pack.names)
    count = x.shape[0]
    y = torch.arange(count) if y_key is None else _targets(pack, y_key, count)
    group_key = next((key for key in _GROUPS if key in pack.names), None)
    group = None if group_key is None else _integers(pack, group_key, count)
    class_names = pack.text(names_key)
    classes = len(class_names) if class_names else classes_of(y)
    if num_classes is not None:
        if not is_whole(num_classes):
            raise ValueError(f"{name}: num_classes: expected a number of at least 1, got {num_classes!r}")
        classes = num_classes
    chosen = torch.arange(count)
    if split is not None:
        wanted = ("train", "test").index(checked_choice(split, ("train", "test"), "npz: split"))
        chosen = torch.nonzero(_integers(pack, "split", count) == wanted).flatten()
    chosen = chosen[:limit]
    if len(chosen) == 0:
        raise ValueError(f"{file}: no examples{f' in split {split!r}' if split else ''}")
    return Examples(
        x=x[chosen].contiguous(),
        y=y[chosen],
        num_classes=classes,
        value_range=value_range,
        name=name if name != "npz" else file.stem,
        class_names=class_names,
        credits=" ".join(t for key in ("source", "licence") for t in pack.text(key) or ()),
        private=private,
        group=None if group is None else group[chosen],
    )


def _targets(pack: Pack, key: str, count: int) -> Tensor:
    """Class numbers, or other targets: one row of numbers an example."""
    values = pack.array(key, "uif")
    if values.ndim < 1 or values.shape[0] != count:
        raise ValueError(f"{pack.file}: array {key!r}: expected {count} targets, got shape {values.shape}")
    return torch.from_numpy(values.astype(np.float32 if values.dtype.kind == "f" else np.int64))


def _integers(pack: Pack, key: str, count: int) -> Tensor:
    values = pack.array(key, "ui")
    if values.shape != (count,):
        raise ValueError(f"{pack.file}: array {key!r}: expected {count} integers, got shape {values.shape}")
    return torch.from_numpy(values.astype(np.int64))


def _to_float(pack: Pack, raw: np.ndarray[Any, Any]) -> tuple[Tensor, ValueRange]:
    if raw.ndim < 2 or 0 in raw.shape:
        raise ValueError(f"{pack.file}: expected examples of shape (N, ...), got {raw.shape}")
    if raw.dtype == np.uint8:
        return torch.from_numpy(raw.astype(np.float32)) / 255.0, ValueRange()
    x = torch.from_numpy(raw.astype(np.float32))
    if "scale" in pack.names:
        scale = pack.array("scale", "uif", _TEXT_BYTES)
        if scale.size != 1 or not np.isfinite(scale).all() or float(scale.reshape(())) <= 0:
            raise ValueError(f"{pack.file}: array 'scale': expected one positive number, got {scale.tolist()!r}")
        x = x * float(scale.reshape(()))
    return x, natural_range(x)


def _arrange(file: Path, x: Tensor, layout: str, *, scaled: bool) -> Tensor:
    """To (N, C, H, W), (N, C, L) or (N, D)."""
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
    raise ValueError(
        f"{file}: cannot tell images, signals or a table from shape {tuple(x.shape)} with layout={layout!r}. "
        f"Choose layout from {', '.join(LAYOUTS[1:])}."
    )
