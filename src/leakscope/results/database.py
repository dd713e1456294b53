"""How the database of a store is opened, whoever else has it open and whoever owns it."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Literal


def connect(path: Path, mode: Literal["write", "read", "look"]) -> sqlite3.Connection:
    """A connection to write with, to read with, or to look at a file that may be a stranger's."""
    if mode == "write":
        connection = sqlite3.connect(path, isolation_level=None, timeout=30)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        return connection
    uri = path.resolve().as_uri()
    # A reader that could write clears up the files of the log when it closes last; a mere onlooker cannot.
    access = "rw" if mode == "read" else "ro"
    connection = sqlite3.connect(f"{uri}?mode={access}", uri=True, isolation_level=None, timeout=30)
    try:
        connection.execute("PRAGMA query_only=ON")
        connection.execute("SELECT 1 FROM sqlite_master").fetchone()
        return connection
    except sqlite3.OperationalError:
        connection.close()
        log = path.with_name(path.name + "-wal")
        if log.exists() and log.stat().st_size:
            raise
        # A folder that may not be written to, and no pending log: the file itself is complete.
        return sqlite3.connect(f"{uri}?mode=ro&immutable=1", uri=True, isolation_level=None)
