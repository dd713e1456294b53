"""Keep an audit's rows in SQLite, and tensors and curves in files beside it, readable by the owner only.

A job's files are written before its row is committed, each atomically, so a row never lacks its evidence. A row carries
a checksum and the hashes of its files; a damaged row counts as failed and is done again when the audit is resumed.
"""

import hashlib
import json
import math
import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from filelock import FileLock, Timeout
from torch import Tensor

from leakscope.contracts.checks import brief, is_whole
from leakscope.contracts.disk import atomic_write, private_folder, read_json, read_whole
from leakscope.contracts.errors import UserError
from leakscope.contracts.files import read_tensors
from leakscope.results.policy import Policy
from leakscope.results.records import FindingRow, Row, job_facts, mapping, number, plain, storable_error

STORE_FORMAT = 3
DATABASE = "audit.sqlite"
ARTIFACTS = "artifacts"
TENSORS, CURVES = ".safetensors", ".json"

SCHEMA = """
CREATE TABLE meta(key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE jobs(
  key TEXT PRIMARY KEY, position INTEGER NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('done', 'failed', 'refused')),
  job TEXT NOT NULL, result TEXT, error TEXT, seconds REAL, finished TEXT,
  files TEXT NOT NULL, checksum TEXT NOT NULL
);
CREATE TABLE findings(
  key TEXT PRIMARY KEY, position INTEGER NOT NULL, kind TEXT NOT NULL,
  status TEXT NOT NULL CHECK (status IN ('done', 'failed', 'refused')),
  subject TEXT NOT NULL, content TEXT, error TEXT, seconds REAL, finished TEXT, checksum TEXT NOT NULL
);
"""
_FATE = "error, seconds, finished, "
_PLACE = "SELECT ifnull(CAST(position AS INTEGER), -1), key, "
_JOBS = f"{_PLACE} status, job, result, {_FATE} files, checksum FROM jobs"
_FINDINGS = f"{_PLACE} kind, status, subject, content, {_FATE} checksum FROM findings"
_IN_ORDER = " ORDER BY position, key"
#: The kind of what meta holds under a key, where it holds it at all.
_KINDS: Mapping[str, type] = {
    **dict.fromkeys(("spec", "identity", "versions", "plan", "planned", "model", "data", "policy", "source"), dict),
    **{"threat_model": list, "salt": str},
}
DAMAGED = "DamagedRow: what the store holds of it is not what was written; the same audit does it again"
_BROKEN = "broken"
_Fate = tuple[str | None, float | None, str | None]


class StoreError(UserError):
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
    def create(cls, directory: str | os.PathLike[str], meta: Mapping[str, Any]) -> Self:
        """Create a store in ``directory``, which must not hold one yet; it appears whole or not at all."""
        folder = Path(directory)
        target = folder / DATABASE
        try:
            private_folder(folder / ARTIFACTS)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be made a folder for the audit: {error}") from error
        lock = _take_lock(folder)
        temporary = folder / f".{DATABASE}.{os.getpid()}.tmp"
        try:
            if target.exists():
                raise StoreError(f"{target}: exists already; open it, or choose another folder")
            _sweep(folder)
            os.close(os.open(temporary, os.O_CREAT | os.O_WRONLY, 0o600))  # SQLite gives its own files the same mode
            with closing(sqlite3.connect(temporary, isolation_level=None)) as connection:
                connection.executescript(SCHEMA)
                for key, value in {"format": STORE_FORMAT, **meta}.items():
                    connection.execute("INSERT INTO meta VALUES (?, ?)", (key, _dump(value)))
                connection.execute("PRAGMA journal_mode=WAL")
            os.replace(temporary, target)
            return cls(folder, _connect(target, "write"), lock)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            _release_lock(lock)
            if isinstance(error, sqlite3.Error):
                full = "Is the disk full, or the size of files limited (ulimit -f)?"
                raise StoreError(f"{target}: cannot be written: {error}. {full}") from error
            raise

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, write: bool = False) -> Self:
        """Open the store in ``directory``; StoreError if there is none, or a stranger's file."""
        folder = Path(directory)
        target = folder / DATABASE
        if not target.is_file():
            raise StoreError(f"{folder}: no audit here ({DATABASE} is missing)")
        _check(target)
        lock = _take_lock(folder) if write else None
        try:
            store = cls(folder, _connect(target, "write" if write else "read"), lock)
        except BaseException as error:
            _release_lock(lock)
            if isinstance(error, sqlite3.Error):
                raise StoreError(f"{target}: cannot be opened: {error}. Restore it from a copy.") from error
            raise
        if write:
            private_folder(folder / ARTIFACTS)
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
        found = self._ask("SELECT value FROM meta WHERE key = ?", key)
        try:
            return read_json(found[0][0]) if found else None
        except (ValueError, TypeError) as error:
            raise StoreError(f"{self.directory / DATABASE}: {key!r} in meta is damaged: {error}") from error

    def rows(self) -> list[Row]:
        """Return every finished job in the order of the plan; one that was damaged since has failed."""
        return [Row.read(key, position, *rest) for key, position, _, *rest in self._entries(_JOBS)]

    def findings(self) -> list[FindingRow]:
        """Return every finding in the order of the plan; one that was damaged since has failed."""
        return [FindingRow.read(*entry) for entry in self._entries(_FINDINGS)]

    def finished(self) -> dict[str, str]:
        """Return key and status of each job and finding that has a row; "damaged" where it, or a file of it, is."""
        statuses = {key: status for table in (_JOBS, _FINDINGS) for key, _, _, status, *_ in self._entries(table)}
        return statuses | dict.fromkeys(self.damage(), "damaged")

    def damage(self) -> dict[str, str]:
        """Return what was damaged or deleted since it was written, by the key of the job."""
        entries = [*self._entries(_JOBS), *self._entries(_FINDINGS)]
        found = {key: "its row is damaged" for key, *_, error, _, _ in entries if error == DAMAGED}
        for key, files in self._ask("SELECT key, files FROM jobs" + _IN_ORDER):
            hashes = _parsed(files)
            if key in found or not isinstance(hashes, dict):
                continue
            for suffix, expected in hashes.items():
                what = "pictures" if suffix == TENSORS else "curves"
                try:
                    if hashlib.sha256(read_whole(self._path(key, suffix))).hexdigest() != expected:
                        found[key] = f"its {what} are damaged"
                except ValueError:
                    found[key] = f"its {what} are missing"
        return found

    def artifact(self, key: str) -> dict[str, Tensor] | None:
        """Read originals and reconstructions of a job, None where none were written; ValueError if they are damaged."""
        path = self._path(key, TENSORS)
        return read_tensors(path) if path.is_file() else None

    def history(self, key: str) -> dict[str, Any]:
        """Read the curves of a job, empty where there are none; ValueError if they are damaged."""
        path = self._path(key, CURVES)
        content = read_json(read_whole(path)) if path.is_file() else {}
        history = content.get("history") if isinstance(content, dict) else None
        return history if isinstance(history, dict) else {}

    # -- writing --

    def set_meta(self, key: str, value: Any) -> None:
        self._ask("INSERT OR REPLACE INTO meta VALUES (?, ?)", key, _dump(value))

    def update(self, meta: Mapping[str, Any], positions: Mapping[str, int]) -> None:
        """Change values and positions for a grown plan, and drop findings no longer planned: all or nothing."""
        with self._connection:
            self._ask("BEGIN IMMEDIATE")
            for key, value in meta.items():
                self.set_meta(key, value)
            for key, position in positions.items():
                for table in ("jobs", "findings"):
                    self._ask(f"UPDATE {table} SET position = ? WHERE key = ?", position, key)
            for (key,) in self._ask("SELECT key FROM findings"):
                if key not in positions:
                    self._ask("DELETE FROM findings WHERE key = ?", key)

    def record(
        self, row: Row, tensors: Mapping[str, Tensor] | None = None, history: Mapping[str, Any] | None = None
    ) -> None:
        """Keep a finished job: its files first, then the row, which replaces that of an earlier failure."""
        from safetensors.torch import save

        files: dict[str, bytes] = {}
        if tensors:
            files[TENSORS] = save({name: value.contiguous() for name, value in tensors.items()})
        if history is not None:
            files[CURVES] = _dump({"history": history}).encode()
        for suffix, content in files.items():
            atomic_write(self._path(row.key, suffix), content)
        hashes = {suffix: hashlib.sha256(content).hexdigest() for suffix, content in files.items()}
        result = None if row.raw is None else _dump(row.raw)
        values = (row.key, row.status, _dump(job_facts(row.job)), result, *_fate(row), _dump(hashes))
        self._insert("jobs", row.position, values)

    def record_finding(self, row: FindingRow) -> None:
        values = (row.key, row.kind, row.status, _dump(row.subject()), _dump(row.content), *_fate(row))
        self._insert("findings", row.position, values)

    def _insert(self, table: str, position: int, values: tuple[Any, ...]) -> None:
        row = (values[0], position, *values[1:], seal(values))
        self._ask(f"INSERT OR REPLACE INTO {table} VALUES ({', '.join('?' * len(row))})", *row)

    def _entries(self, select: str) -> Iterator[tuple[Any, ...]]:
        """Yield key, position, kind, status, subject, content, error, seconds and end of each row of a table."""
        for position, *values, checksum in self._ask(select + _IN_ORDER):
            columns = values if select == _FINDINGS else [values[0], "", *values[1:-1]]
            key, kind, status, subject, content, *fate = columns
            facts, told = _parsed(subject), _parsed(content)
            if seal(values) != checksum or _BROKEN in (facts, told):
                status, facts, told, fate = "failed", mapping(facts), None, [DAMAGED, None, None]
            yield str(key), int(position), str(kind), status, facts, told, *fate

    def _ask(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(statement, values).fetchall()
        except sqlite3.Error as error:
            raise StoreError(
                f"{self.directory / DATABASE}: cannot be {'read' if statement.startswith('SELECT') else 'written'}: "
                f"{error}. Restore it from a copy, or choose another folder."
            ) from error

    def _path(self, key: str, suffix: str) -> Path:
        if not key.isalnum():
            raise UserError(f"key: expected letters and digits only, got {key!r}")
        return self.directory / ARTIFACTS / f"{key}{suffix}"


def differences(stored: Any, wanted: Any, where: str = "") -> list[str]:
    """List what differs between two JSON values.

    >>> differences({"seeds": [0], "batch": 1}, {"seeds": [0, 1], "batch": 1})
    ['seeds: the store has [0], now [0, 1]']
    """
    if isinstance(stored, dict) and isinstance(wanted, dict):
        places = {key: f"{where}.{key}" if where else key for key in (*stored, *wanted)}
        return [line for key in places for line in differences(stored.get(key), wanted.get(key), places[key])]
    return [] if stored == wanted else [f"{where}: the store has {brief(stored)}, now {brief(wanted)}"]


def check_same_audit(store: Store, identity: Mapping[str, Any], may_be_new: Sequence[str] = ()) -> None:
    """Raise StoreMismatch unless ``store`` has this ``identity``; it may lack what ``may_be_new`` names."""
    stored, wanted = store.meta("identity"), json.loads(_dump(identity))
    new = {key: wanted[key] for key in may_be_new if key in wanted and key not in mapping(stored)}
    lines = differences({**stored, **new} if isinstance(stored, dict) else stored, wanted)
    if lines:
        raise StoreMismatch(
            f"{store.directory}: holds another audit; choose another folder or delete this folder.\n"
            + "\n".join(f"  - {line}" for line in lines)
        )


def seal(values: Sequence[Any]) -> str:
    """Return the checksum of a row: of all but its position, which may change as an audit grows."""
    return hashlib.sha256(repr(tuple(values)).encode("utf-8", "replace")).hexdigest()


def stored_salt(directory: str | os.PathLike[str]) -> str | None:
    """Return the salt of the fingerprints of the store in ``directory``; None if there is no store yet."""
    if not (Path(directory) / DATABASE).exists():
        return None
    with Store.open(directory) as store:
        return str(store.meta("salt") or "")


def _fate(row: Row | FindingRow) -> _Fate:
    seconds = number(row.seconds)  # NaN would come back as nothing, and the row as damaged
    return storable_error(row.error), None if math.isnan(seconds) else seconds, row.finished


def _dump(value: Any) -> str:
    return json.dumps(plain(value), allow_nan=False)


def _parsed(text: Any) -> Any:
    try:
        return None if text is None else read_json(text)
    except (ValueError, TypeError):
        return _BROKEN


def _check(path: Path) -> None:
    """Raise StoreError unless ``path`` is a store of this format; a stranger's file stays untouched."""
    stranger = f"{path}: not an audit of leakscope; choose another folder or move this file away"
    with open(path, "rb") as stream:
        if stream.read(16) != b"SQLite format 3\x00":
            raise StoreError(stranger)
    try:
        with closing(_connect(path, "look")) as connection:
            schema = set(connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"))
            if not {("table", "meta"), ("table", "jobs")} <= {entry[:2] for entry in schema}:
                raise StoreError(stranger)
            meta = dict(connection.execute("SELECT key, value FROM meta WHERE typeof(value) = 'text'"))
    except StoreError:
        raise
    except (sqlite3.Error, ValueError) as error:
        raise StoreError(f"{stranger} ({error})") from error
    version = _parsed(meta.get("format"))
    if version != STORE_FORMAT:
        raise StoreError(f"{path}: store format {version}, this version of leakscope reads {STORE_FORMAT}")
    if schema != _own_schema():
        raise StoreError(f"{path}: its tables are not those of an audit; choose another folder")
    for key in _KINDS.keys() & meta.keys():
        value = _parsed(meta[key])
        if not isinstance(value, _KINDS[key]) and value is not None:
            raise StoreError(f"{path}: {key!r} in meta is damaged: expected a {_KINDS[key].__name__}. Restore a copy.")
    if not _is_plan(_parsed(meta.get("plan")) or {}):
        raise StoreError(f"{path}: 'plan' in meta is damaged: expected how many jobs each setting has. Restore a copy.")
    try:
        Policy.build(_parsed(meta.get("policy")) or {})
    except ValueError as error:
        raise StoreError(f"{path}: 'policy' in meta is damaged: {'; '.join(str(error).splitlines())}") from error


def _is_plan(plan: Mapping[str, Any]) -> bool:
    settings, counts = plan.get("settings", []), (plan.get("total", 0), plan.get("examples", 0))
    return all(is_whole(n, 0) for n in counts) and isinstance(settings, list) and all(map(_is_setting, settings))


def _is_setting(entry: Any) -> bool:
    facts = mapping(entry)
    named = isinstance(facts.get("protocol"), str) and isinstance(facts.get("defense"), str)
    return named and is_whole(facts.get("jobs"), 0) and is_whole(facts.get("findings", 0), 0)


@cache
def _own_schema() -> set[tuple[str, str, str]]:
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(SCHEMA)
        return set(connection.execute("SELECT type, name, sql FROM sqlite_master WHERE sql IS NOT NULL"))


def _connect(path: Path, mode: Literal["write", "read", "look"]) -> sqlite3.Connection:
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
    for leftover in [*folder.glob(f".{DATABASE}.*.tmp*"), *(folder / ARTIFACTS).glob(".*.tmp")]:
        leftover.unlink(missing_ok=True)


def _take_lock(folder: Path) -> FileLock:
    lock = FileLock(folder / ".audit.lock", timeout=0, mode=0o600)
    try:
        lock.acquire()
    except Timeout as error:
        raise StoreError(f"{folder}: another audit is writing here; wait for it or choose another folder") from error
    return lock


def _release_lock(lock: FileLock | None) -> None:
    if lock is not None:
        lock.release()
