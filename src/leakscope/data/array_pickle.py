"""Pickles of dictionaries, lists, text, numbers and NumPy arrays, and of nothing else.

A pickle is a program: loading one can run anything. Here every instruction is checked against a list before the first
is carried out. Nothing is imported: the names with which NumPy writes an array lead to stand-ins, which check sizes and
which no instruction can change. A tuple is used once: tuples within tuples, each twice, are endless to hash.
"""

import io
import math
import pickle
import pickletools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from leakscope.contracts.checks import brief
from leakscope.contracts.disk import read_whole
from leakscope.contracts.errors import UserError

_OPCODE_NAMES = (
    "PROTO FRAME STOP MARK NONE NEWTRUE NEWFALSE INT LONG BININT BININT1 BININT2 LONG1 LONG4 "
    "FLOAT BINFLOAT STRING BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 EMPTY_LIST LIST APPEND APPENDS EMPTY_DICT DICT SETITEM "
    "SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 PUT BINPUT LONG_BINPUT MEMOIZE GET BINGET LONG_BINGET "
    "GLOBAL STACK_GLOBAL REDUCE BUILD"
)
_OPCODES = frozenset(_OPCODE_NAMES.split())
_PUTS = frozenset(("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"))
_GETS = frozenset(("GET", "BINGET", "LONG_BINGET"))
_TUPLES = frozenset(("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"))
# The unpickler keeps its memo in a list as long as the largest number in it; real files count from 0.
_LARGEST_MEMO = 1 << 22
_DTYPES = frozenset(f"{kind}{size}" for kind in "iu" for size in (1, 2, 4, 8)) | {"f4", "f8"}


class _Type:
    """Stands for numpy.dtype: a number type with its byte order."""

    def __init__(self, code: Any, *_: Any) -> None:
        text = code.decode("latin-1") if isinstance(code, bytes) else code
        if not isinstance(text, str) or text.lstrip("<>|=") not in _DTYPES:
            raise UserError(f"arrays of type {brief(text)} are refused, expected numbers")
        self.dtype = np.dtype(text)

    def __setstate__(self, state: Any) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) > 1 else None
        order = order.decode("latin-1") if isinstance(order, bytes) else order
        if not isinstance(order, str) or order not in ("<", ">", "|", "="):
            raise UserError(f"unknown byte order {brief(order)}")
        self.dtype = np.dtype(order + self.dtype.str[1:])


class _Function:
    """Stands for a function of NumPy: it can be called, and not be changed."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *arguments: Any) -> Any:
        return self._call(*arguments)

    def __setstate__(self, state: Any) -> None:
        raise UserError("a function changed")


class _Array:
    """Stands for an array under construction; ``array`` is None until its content came."""

    array: np.ndarray[Any, Any] | None = None

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5:
            raise UserError("array content expected as (version, shape, type, order, bytes)")
        _, shape, kind, fortran, content = state
        self.array = _build(content, kind, shape, "F" if fortran else "C")


def _build(content: Any, kind: Any, shape: Any, order: Any) -> np.ndarray[Any, Any]:
    sizes_fit = isinstance(shape, tuple) and all(type(n) is int and n >= 0 for n in shape)
    if not isinstance(kind, _Type) or not sizes_fit or not isinstance(content, bytes | bytearray):
        raise UserError("array content expected as bytes with a type and a shape")
    expected = math.prod(shape) * kind.dtype.itemsize
    if expected != len(content):
        raise UserError(f"an array of shape {shape} needs {expected} bytes, got {len(content)}")
    return np.frombuffer(bytes(content), dtype=kind.dtype).reshape(shape, order="F" if order in ("F", b"F") else "C")


def _frombuffer(content: Any, kind: Any, shape: Any, order: Any, *_: Any) -> _Array:
    result = _Array()
    result.array = _build(content, kind, shape, order)
    return result


def _array_type(*_: Any) -> None:
    """Stand for numpy.ndarray, which is only ever named, never called."""
    raise UserError("numpy.ndarray called directly")


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How Python 3 writes bytes in old protocols; this one encoding only, others may expand."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1", b"latin1"):
        raise UserError(f"encoding {brief(encoding)} refused")
    return text.encode("latin-1")


_NAMES: Mapping[tuple[str, str], Callable[..., Any]] = MappingProxyType(
    {
        **{(f"numpy.{core}.multiarray", "_reconstruct"): _Function(lambda *_: _Array()) for core in ("core", "_core")},
        **{(f"numpy.{core}.numeric", "_frombuffer"): _Function(_frombuffer) for core in ("core", "_core")},
        ("numpy", "ndarray"): _Function(_array_type),
        ("numpy", "dtype"): _Type,
        ("_codecs", "encode"): _Function(_encode),
    }
)


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler that knows the pieces of NumPy arrays and imports nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _NAMES:
            raise UserError(f"it asks for {module}.{name}, which is refused: only NumPy arrays are read")
        return _NAMES[module, name]

    def persistent_load(self, _: Any) -> Any:
        raise UserError("persistent references are refused")


def read_array_pickle(file: Path) -> Any:
    """The content of ``file``; whatever is wrong with it is one ValueError that names it."""
    content = read_whole(file)
    try:
        _check_opcodes(content)
        return _plain(ArrayUnpickler(io.BytesIO(content), encoding="bytes").load())
    except (
        ValueError, TypeError, KeyError, IndexError, AttributeError, EOFError, OverflowError, RecursionError,
        MemoryError, NotImplementedError, pickle.UnpicklingError,
    ) as error:  # fmt: skip
        fix = "Get the file from its publisher, or use the binary version."
        raise UserError(f"{file}: expected a pickle of NumPy arrays, lists and text; {error}. {fix}") from error


def _check_opcodes(content: bytes) -> None:
    tuples: set[int] = set()  # memo numbers of tuples; without POP the latest instruction says what is on the stack
    memos, latest = 0, ""
    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name not in _OPCODES:
            raise UserError(f"its instruction {name} is refused")
        if name in _PUTS:
            place = memos if name == "MEMOIZE" else int(argument or 0)
            if place > _LARGEST_MEMO:
                raise UserError("its memo is larger than any real file's")
            memos += 1
            (tuples.add if latest in _TUPLES else tuples.discard)(place)
            continue
        if name in _GETS and int(argument or 0) in tuples:
            raise UserError("a tuple used twice is refused")
        latest = name


def _plain(value: Any) -> Any:
    if isinstance(value, _Array):
        if value.array is None:
            raise UserError("an array without content")
        return value.array
    if isinstance(value, dict):
        return {key: _plain(item) if isinstance(item, _Array) else item for key, item in value.items()}
    return value
