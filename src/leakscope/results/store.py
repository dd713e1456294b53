"""Rows of an audit in SQLite, tensors and curves in files beside it; whenever it dies, nothing is torn.

A job's files are written before its row is committed, each atomically, so a row never lacks its evidence.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal, Self

from filelock import FileLock, Timeout
from torch import Tensor

from leakscope.contracts.disk import atomic_write
from leakscope.results.records import FindingRow, Row, job_facts, plain

STORE_FORMAT = 2
DATABASE = "audit.sqlite"
ARTIFACTS = "artifacts"

_SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs(
  key TEXT PRIMARY KEY, position INTEGER NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('done', 'failed', 'refused')),
  job TEXT NOT NULL, result TEXT, error TEXT, seconds REAL, finished TEXT
);
CREATE TABLE findings(
  key TEXT PRIMARY KEY, position INTEGER NOT NULL, kind TEXT NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('done', 'failed', 'refused')),
  subject TEXT NOT NULL, content TEXT, error TEXT, seconds REAL, finished TEXT
);
"""


class StoreError(ValueError):
    """The folder holds no store, or none that this version can read."""


class StoreMismatch(StoreError):
    """The folder holds the store of another audit."""


class Store:
    """An audit's folder. Only one process may write to it at a time; reading is always possible."""

    def __init__(self, directory: Path, connection: sqlite3.Connection, lock: FileLock | None) -> None:
        self.directory = directory
        self._connection = connection
        self._lock = lock

    # -- opening and closing --

    @classmethod
    def create(cls, directory: str | os.PathLike[str], meta: Mapping[str, Any]) -> Store:
        """A new store in ``directory``, which must not hold one yet; it appears whole or not at all."""
        folder = Path(directory)
        target = folder / DATABASE
        try:
            (folder / ARTIFACTS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be made a folder for the audit: {error}") from error
        lock = _take_lock(folder)
        temporary = folder / f".{DATABASE}.{os.getpid()}.tmp"
        try:
            if target.exists():
                raise StoreError(f"{target}: exists already; open it, or choose another --out")
            _sweep(folder)
            with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                connection.executescript(_SCHEMA)
                for key, value in {"format": STORE_FORMAT, **meta}.items():
                    connection.execute("INSERT INTO meta VALUES (?, ?)", (key, _dump(value)))
                connection.execute("PRAGMA journal_mode=WAL")
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            _release_lock(lock)
            raise
        return cls(folder, _connect(target, "write"), lock)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, write: bool = False) -> Store:
        """The store in ``directory``; StoreError (a ValueError) if there is none, or a stranger's file."""
        folder = Path(directory)
        target = folder / DATABASE
        if not target.is_file():
            raise StoreError(f"{folder}: no audit here ({DATABASE} is missing)")
        _check(target)
        lock = _take_lock(folder) if write else None
        try:
            store = cls(folder, _connect(target, "write" if write else "read"), lock)
        except BaseException:
            _release_lock(lock)
            raise
        if write:
            (folder / ARTIFACTS).mkdir(exist_ok=True)
            _sweep(folder)
        return store

    def close(self) -> None:
        self._connection.close()
        _release_lock(self._lock)
        self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    # -- reading --

    def meta(self, key: str) -> Any:
        """The value of ``key``, or None if the store has none."""
        return _meta(self._connection, key)

    def rows(self) -> list[Row]:
        """Every finished job in the order of the plan."""
        rows = self._connection.execute(
            "SELECT key, position, status, job, result, error, seconds, finished FROM jobs ORDER BY position, key"
        )
        return [
            Row.read(key, position, status, json.loads(job), json.loads(result or "null"), *rest)
            for key, position, status, job, result, *rest in rows
        ]

    def findings(self) -> list[FindingRow]:
        """Every finding in the order of the plan."""
        rows = self._connection.execute(
            "SELECT key, position, kind, status, subject, content, error, seconds, finished FROM findings "
            "ORDER BY position, key"
        )
        return [
            FindingRow.read(key, position, kind, status, json.loads(subject), json.loads(content or "null"), *rest)
            for key, position, kind, status, subject, content, *rest in rows
        ]

    def finished(self) -> dict[str, str]:
        """Key and status of each job and finding that has a row."""
        return dict(self._connection.execute("SELECT key, status FROM jobs UNION SELECT key, status FROM findings"))

    def artifact(self, key: str) -> dict[str, Tensor] | None:
        """Originals and reconstructions of a job, or None where none were written."""
        from safetensors.torch import load

        path = self._path(key, ".safetensors")
        return load(path.read_bytes()) if path.is_file() else None

    def history(self, key: str) -> dict[str, Any]:
        """The curves of a job, empty where there are none."""
        path = self._path(key, ".json")
        return dict(json.loads(path.read_text(encoding="utf-8"))["history"]) if path.is_file() else {}

    # -- writing --

    def set_meta(self, key: str, value: Any) -> None:
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, _dump(value)))

    def record(
        self, row: Row, tensors: Mapping[str, Tensor] | None = None, history: Mapping[str, Any] | None = None
    ) -> None:
        """Keep a finished job: its files first, then the row, which replaces that of an earlier failure."""
        from safetensors.torch import save

        if tensors:
            content = save({name: value.contiguous() for name, value in tensors.items()})
            atomic_write(self._path(row.key, ".safetensors"), content)
        if history is not None:
            atomic_write(self._path(row.key, ".json"), _dump({"history": history}).encode())
        result = None if row.raw is None else _dump(row.raw)
        fate = (_storable(row.error), row.seconds, row.finished)
        values = (row.key, row.position, row.status, _dump(job_facts(row.job)), result, *fate)
        self._connection.execute("INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?, ?, ?, ?, ?)", values)

    def record_finding(self, row: FindingRow) -> None:
        """Keep a finding; it replaces an earlier failure."""
        fate = (_storable(row.error), row.seconds, row.finished)
        texts = (_dump(row.subject()), _dump(plain(row.content)))
        values = (row.key, row.position, row.kind, row.status, *texts, *fate)
        self._connection.execute("INSERT OR REPLACE INTO findings VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", values)

    def _path(self, key: str, suffix: str) -> Path:
        if not key.isalnum():
            raise ValueError(f"key: expected letters and digits only, got {key!r}")
        return self.directory / ARTIFACTS / f"{key}{suffix}"


def differences(stored: Any, wanted: Any, where: str = "") -> list[str]:
    """What differs between two JSON values, a line each.

    >>> differences({"seeds": [0], "batch": 1}, {"seeds": [0, 1], "batch": 1})
    ['seeds: the store has [0], now [0, 1]']
    """
    if isinstance(stored, dict) and isinstance(wanted, dict):
        places = {key: f"{where}.{key}" if where else key for key in (*stored, *wanted)}
        return [line for key in places for line in differences(stored.get(key), wanted.get(key), places[key])]
    return [] if stored == wanted else [f"{where}: the store has {_brief(stored)}, now {_brief(wanted)}"]


def check_same_audit(store: Store, identity: Mapping[str, Any]) -> None:
    """StoreMismatch that names what differs, unless ``store`` belongs to the audit of this ``identity``."""
    lines = differences(store.meta("identity"), json.loads(_dump(identity)))
    if lines:
        raise StoreMismatch(
            f"{store.directory}: holds another audit; choose another --out or delete this folder.\n"
            + "\n".join(f"  - {line}" for line in lines)
        )


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _storable(text: str | None) -> str | None:
    """A lone surrogate, of a file name in a message say, cannot be stored; the failure itself must be."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _dump(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


def _meta(connection: sqlite3.Connection, key: str) -> Any:
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return None if row is None else json.loads(row[0])


def _check(path: Path) -> None:
    """StoreError unless ``path`` is a store of this format. It is only read, so a stranger's is untouched."""
    stranger = f"{path}: not an audit of leakscope; choose another folder or move this file away"
    with open(path, "rb") as stream:
        if stream.read(16) != b"SQLite format 3\x00":
            raise StoreError(stranger)
    try:
        with closing(_connect(path, "look")) as connection:
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if not {"meta", "jobs"} <= tables:
                raise StoreError(stranger)
            version = _meta(connection, "format")
    except StoreError:
        raise
    except (sqlite3.DatabaseError, ValueError) as error:
        raise StoreError(f"{stranger} ({error})") from error
    if version != STORE_FORMAT:
        raise StoreError(f"{path}: store format {version}, this version of leakscope reads {STORE_FORMAT}")


def _connect(path: Path, mode: Literal["write", "read", "look"]) -> sqlite3.Connection:
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


def _sweep(folder: Path) -> None:
    """Remove what a killed process left half-written; the lock makes sure that nobody else is writing."""
    for leftover in [*folder.glob(f".{DATABASE}.*.tmp*"), *(folder / ARTIFACTS).glob(".*.tmp")]:
        leftover.unlink(missing_ok=True)


def _take_lock(folder: Path) -> FileLock:
    """A lock that the system drops when the process dies in whatever way."""
    lock = FileLock(folder / ".audit.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise StoreError(f"{folder}: another audit is writing here; wait for it or choose another --out") from error
    return lock


def _release_lock(lock: FileLock | None) -> None:
    if lock is not None:
        lock.release()
