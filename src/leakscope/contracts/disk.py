"""Files and folders: what is read is bounded, what is written is whole and for its owner only."""

import json
import os
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from leakscope.contracts.checks import BYTES, DEPTH, Cap
from leakscope.contracts.errors import UserError


def check_file(file: Path) -> None:
    """Raise UserError unless it is a regular file: a pipe or a device may never end."""
    if not file.is_file():
        got = "a folder" if file.is_dir() else "a pipe or a device" if file.exists() else "none"
        raise UserError(f"{file}: expected a file, got {got}")


def read_whole(file: Path, cap: Cap = BYTES) -> bytes:
    """The content of ``file``; what is larger than the cap, or is no regular file and may never end, is not read."""
    try:
        check_file(file)
        cap.check(str(file), file.stat().st_size, "Is it the right file?")
        return file.read_bytes()
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error}") from error


def read_json(text: str | bytes) -> Any:
    """What a JSON text says; ValueError where it is none, or is nested deeper than anything honest."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise UserError(f"nested more than {DEPTH} deep") from None
    level = [value]
    for _ in range(DEPTH):
        nested = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = list(chain.from_iterable(nested))
        if not level:
            return value
    raise UserError(f"nested more than {DEPTH} deep")


def private_folder(path: Path) -> Path:
    """The folder ``path``; what of it does not exist yet is made for its owner only. Others are left as they are."""
    for folder in (*reversed(path.parents), path):
        if not folder.is_dir():
            folder.mkdir(mode=0o700, exist_ok=True)
    return path


def cache_home() -> Path:
    """Where what can be made again is kept: $LEAKSCOPE_CACHE, else leakscope in the user's cache."""
    if chosen := os.environ.get("LEAKSCOPE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leakscope"


def atomic_write(path: Path, content: bytes) -> None:
    """Write ``content`` for its owner only; ``path`` holds the old or the whole new file whenever the process dies."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=0o600)) as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
