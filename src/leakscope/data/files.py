"""What the readers share: where files are, how large they may be, and checked options."""

import gzip
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self, cast

import numpy as np

from leakscope.contracts.checks import BYTES, FLOAT, brief, is_whole
from leakscope.contracts.errors import UserError

ENVIRONMENT = "LEAKSCOPE_DATA"

AnyPath = str | os.PathLike[str]


def data_folder(reader: str) -> Path:
    """The folder that LEAKSCOPE_DATA names, or an error saying how to give ``reader`` its files."""
    if not (value := os.environ.get(ENVIRONMENT)):
        fix = f"Pass path=..., or set {ENVIRONMENT} to the folder that holds the data sets."
        raise UserError(f"data {reader!r}: no path given and {ENVIRONMENT} is not set. {fix}")
    if not Path(value).is_dir():
        raise UserError(f"data {reader!r}: {ENVIRONMENT}={value} is not a folder. Correct it or pass path=...")
    return Path(value)


def find_file(reader: str, path: AnyPath | None, candidates: Sequence[str]) -> Path:
    """Find the first of the ``candidates`` in ``path`` (else LEAKSCOPE_DATA): its folder, or the folder above it."""
    root = data_folder(reader) if path is None else Path(path)
    if not root.exists():
        raise UserError(f"data {reader!r}: {root}: no such file or folder")
    if root.is_file():
        return root
    for candidate in candidates:
        for file in (root / candidate, root / Path(candidate).name):
            if file.is_file():
                return file
    usual = candidates[0] if candidates else "a file"
    raise UserError(
        f"data {reader!r}: {root}: expected {usual} in it, or the file under another of its usual names, "
        "found none. Pass the folder that holds the standard files, or the file itself."
    )


class Source:
    """A plain or gzipped file read front to back, where any damage is one ValueError that names the file."""

    def __init__(self, file: Path) -> None:
        self.file, self.zipped = file, file.suffix == ".gz"

    def __enter__(self) -> Self:
        try:
            self.stream = cast(BinaryIO, gzip.open(self.file, "rb") if self.zipped else open(self.file, "rb"))
        except OSError as error:
            raise UserError(f"{self.file}: cannot be opened: {error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.close()

    def read(self, count: int) -> bytes:
        """Up to ``count`` bytes, in pieces: a false length in a header never becomes an allocation."""
        pieces, left = [], count
        try:
            while left > 0 and (piece := self.stream.read(min(left, 1 << 20))):
                pieces.append(piece)
                left -= len(piece)
        except (EOFError, OSError, zlib.error) as error:
            kind = "gzip file" if self.zipped else "file"
            raise UserError(f"{self.file}: damaged or truncated {kind} ({error}). Get it again.") from error
        return b"".join(pieces)


def check_room(where: object, numbers: int) -> None:
    BYTES.check(str(where), FLOAT * numbers, "Pass limit=... to read fewer examples.")


def checked_limit(limit: int | None, reader: str) -> int | None:
    """``limit`` if it is None or a positive number.

    >>> checked_limit(5, "mnist")
    5
    """
    if limit is not None and not is_whole(limit):
        raise UserError(f"data {reader!r}: limit: expected a number of at least 1 or None, got {brief(limit)}")
    return limit


def checked_choice(value: str, choices: Sequence[str], what: str) -> str:
    """``value`` if it is one of the ``choices``.

    >>> checked_choice("test", ("train", "test"), "split")
    'test'
    """
    if value not in choices:
        raise UserError(f"{what}: expected one of {', '.join(choices)}, got {brief(value)}")
    return value


def check_labels(file: Path, labels: np.ndarray[Any, Any], classes: int) -> None:
    smallest, largest = int(labels.min()), int(labels.max())
    if smallest < 0 or largest >= classes:
        wrong = f"expected labels from 0 to {classes - 1}, got {smallest} to {largest}"
        raise UserError(f"{file}: {wrong}. The file is damaged or of another data set.")
