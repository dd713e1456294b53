from __future__ import annotations

import math
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from leakscope.results import FindingRow, Row, Store, StoreError, StoreMismatch
from leakscope.results.store import check_same_audit, differences, stored_salt

KEY = "ab12"
RESULT = {"examples": [{"index": 0, "psnr": 21.5, "identified": True}], "flags": ["mixture"], "of the future": [1]}


def row(**changes: Any) -> Row:
    facts: dict[str, Any] = {
        "key": KEY,
        "position": 0,
        "status": "done",
        "job": {"protocol": "FedSGD()", "defense": "none", "seed": 0, "control": "noise", "indices": [3]},
        "result": RESULT,
    }
    return Row.read(**{**facts, **changes})


def finding(**changes: Any) -> FindingRow:
    facts: dict[str, Any] = {
        **{"key": "f1", "position": 5, "kind": "floor", "status": "done", "protocol": "FedSGD()", "defense": "none"},
        **{"batch": 2, "seed": 7, "content": {"psnr": 41.5}, "seconds": 0.5, "finished": "now"},
    }
    return FindingRow(**{**facts, **changes})


def test_round_trip(tmp_path: Path) -> None:
    tensors = {"originals": torch.rand(1, 2)}
    with Store.create(tmp_path / "new" / "folder", {"spec": {"x": None}}) as store:
        assert store.rows() == []
        store.record(row(key="zz", position=1, status="failed", result=None, error="E", seconds=1.5))
        store.record(row(), tensors, {"objective": [[1.0, None]]})
        assert store.meta("spec") == {"x": None}
        assert store.meta("absent") is None
    with Store.open(tmp_path / "new" / "folder") as store:
        first, second = store.rows()
        assert first == row()
        assert first.raw == RESULT, "what is stored is not only what this version reads"
        assert (first.job.control, first.counts, first.job.indices) == ("noise", False, (3,))
        assert [example.value("psnr") for example in first.examples] == [21.5]
        assert (second.status, second.error, second.seconds) == ("failed", "E", 1.5)
        found = store.artifact(KEY)
        assert found is not None
        assert torch.equal(found["originals"], tensors["originals"])
        assert store.history(KEY) == {"objective": [[1.0, None]]}
        assert store.artifact("zz") is None
        assert store.history("zz") == {}
        assert store.finished() == {KEY: "done", "zz": "failed"}
        with pytest.raises(StoreError, match="cannot be written"):
            store.record(row())


def test_findings_round_trip(tmp_path: Path) -> None:
    with Store.create(tmp_path, {}) as store:
        assert store.findings() == []
        store.record_finding(finding(key="f2", position=6, kind="cost", status="failed", content={}, error="E: no\nat"))
        store.record_finding(finding(content={"psnr": math.inf, "curve": (1, math.nan)}))
        store.record(row())
    with Store.open(tmp_path) as store:
        first, second = store.findings()
        assert first == finding(content={"psnr": None, "curve": [1, None]}), "JSON has no infinity"
        assert (first.scenario, first.reason) == (("FedSGD()", "none"), "")
        assert (second.kind, second.status, second.reason, second.content) == ("cost", "failed", "E: no", {})
        assert store.finished() == {KEY: "done", "f1": "done", "f2": "failed"}
        assert len(store.rows()) == 1
        with pytest.raises(StoreError, match="cannot be written"):
            store.record_finding(finding())


def test_a_retried_finding_replaces_its_row_and_may_have_only_a_reason(tmp_path: Path) -> None:
    with Store.create(tmp_path, {}) as store:
        store.record_finding(finding(status="failed", content={}, error="E"))
        store.record_finding(finding(content={"reason": "too large"}))
        (found,) = store.findings()
        assert (found.status, found.error, found.reason) == ("done", None, "too large")


def test_nothing_but_the_store_is_left(tmp_path: Path) -> None:
    with Store.create(tmp_path, {}) as store:
        store.record(row(), None, {})
    with Store.open(tmp_path) as store:
        store.rows()
    assert sorted(p.name for p in tmp_path.iterdir()) == [".audit.lock", "artifacts", "audit.sqlite"]


def test_a_retried_job_replaces_its_row(tmp_path: Path) -> None:
    with Store.create(tmp_path, {}) as store:
        store.record(row(status="failed", result=None, error="E"))
        store.record(row())
        assert [r.status for r in store.rows()] == ["done"]


def test_an_error_text_that_is_no_unicode_is_kept_as_far_as_it_goes(tmp_path: Path) -> None:
    with Store.create(tmp_path, {}) as store:
        store.record(row(status="failed", result=None, error="no file caf\udce9, ümlaut"))
        assert [r.error for r in store.rows()] == ["no file caf?, ümlaut"]


def test_files_come_before_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, content: bytes) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("leakscope.results.store.atomic_write", broken)
    with Store.create(tmp_path, {}) as store:
        with pytest.raises(OSError, match="disk full"):
            store.record(row(), {"originals": torch.zeros(1)}, {})
        assert store.rows() == []


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="files cannot be limited here")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(StoreError, match="cannot be written"):
            Store.create(tmp_path / "run", {"salt": "a"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "run" / "audit.sqlite").exists()
    Store.create(tmp_path / "run", {"salt": "a"}).close()


def test_keys_cannot_leave_the_folder(tmp_path: Path) -> None:
    with Store.create(tmp_path, {}) as store, pytest.raises(ValueError, match="letters and digits"):
        store.artifact("../secret")


def test_no_store_here(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no audit here"):
        Store.open(tmp_path)
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="cannot be made a folder"):
        Store.create(tmp_path / "file", {})


@pytest.mark.parametrize("content", [b"", b"hello", b"SQLite format 3\x00garbage" * 100])
def test_a_strangers_file_is_refused_untouched(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "audit.sqlite"
    path.write_bytes(content)
    for write in (False, True):
        with pytest.raises(StoreError, match="not an audit of leakscope"):
            Store.open(tmp_path, write=write)
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["audit.sqlite"]


def test_another_programs_database_is_refused_untouched(tmp_path: Path) -> None:
    path = tmp_path / "audit.sqlite"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE bookmarks(url TEXT)")
    connection.commit()
    connection.close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match="not an audit"):
        Store.open(tmp_path, write=True)
    with pytest.raises(StoreError, match="exists already"):
        Store.create(tmp_path, {})
    assert path.read_bytes() == before


def test_another_format_is_refused(tmp_path: Path) -> None:
    with Store.create(tmp_path, {"format": 1}):
        pass
    with pytest.raises(StoreError, match="format 1, this version of leakscope reads 3"):
        Store.open(tmp_path)


def test_mismatch_names_what_differs(tmp_path: Path) -> None:
    with Store.create(tmp_path, {"identity": {"seeds": [0], "model": {"name": "a"}}}) as store:
        check_same_audit(store, {"seeds": [0], "model": {"name": "a"}})
        with pytest.raises(StoreMismatch, match="another audit") as caught:
            check_same_audit(store, {"seeds": [0, 1], "model": {"name": "b"}})
    assert "seeds: the store has [0], now [0, 1]" in str(caught.value)
    assert "model.name: the store has 'a', now 'b'" in str(caught.value)
    assert differences({"a": 1}, {"b": 2}) == [
        "a: the store has 1, now None",
        "b: the store has None, now 2",
    ]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    with Store.create(tmp_path, {}) as store:
        with pytest.raises(StoreError, match="another audit is writing here"):
            Store.open(tmp_path, write=True)
        with Store.open(tmp_path) as reader:
            store.record(row())
            assert len(reader.rows()) == 1
    Store.open(tmp_path, write=True).close()


def test_half_written_files_are_swept_away(tmp_path: Path) -> None:
    with Store.create(tmp_path, {}):
        pass
    leftovers = [tmp_path / "artifacts" / ".ab.safetensors.1.tmp", tmp_path / ".audit.sqlite.1.tmp-journal"]
    for leftover in leftovers:
        leftover.write_bytes(b"half")
    Store.open(tmp_path).close()
    assert all(leftover.exists() for leftover in leftovers)
    Store.open(tmp_path, write=True).close()
    assert not any(leftover.exists() for leftover in leftovers)


def test_rows_survive_a_kill_right_after_record(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\n"
        "from leakscope.results import Row, Store\n"
        "store = Store.create(sys.argv[1], {})\n"
        "store.record(Row.read('ab12', 0, 'done', {}, {}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, env=environment)
    assert ended.returncode == -9
    with Store.open(tmp_path) as store:
        assert [r.key for r in store.rows()] == ["ab12"]


def damage(folder: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(folder / "audit.sqlite")) as connection:
        connection.execute(statement, values)
        connection.commit()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE jobs SET result = replace(result, '21.5', '11.5')",
        "UPDATE jobs SET result = NULL",
        "UPDATE jobs SET job = '{'",
        "UPDATE jobs SET job = '" + "[" * 5000 + "]" * 5000 + "'",
        "UPDATE jobs SET status = 'refused'",
        "UPDATE jobs SET error = 'something'",
        "UPDATE jobs SET seconds = 'soon'",
        "UPDATE jobs SET checksum = x'00ff'",
        "UPDATE jobs SET files = '{}'",
    ],
)
def test_a_damaged_row_is_named_and_not_done(tmp_path: Path, statement: str) -> None:
    with Store.create(tmp_path, {}) as store:
        store.record(row(), {"originals": torch.rand(1, 2)}, {})
        store.record(row(key="other", position=1))
        store.record_finding(finding())
    damage(tmp_path, statement + " WHERE key = 'ab12'")
    with Store.open(tmp_path, write=True) as store:
        first, second = store.rows()
        assert (first.key, first.status, first.result) == (KEY, "failed", None)
        assert first.reason.startswith("DamagedRow: ")
        assert second == row(key="other", position=1)
        assert store.damage() == {KEY: "its row is damaged"}
        assert store.finished() == {KEY: "damaged", "other": "done", "f1": "done"}
        store.record(row())
        assert store.damage() == {}


def test_a_damaged_finding_is_named(tmp_path: Path) -> None:
    with Store.create(tmp_path, {}) as store:
        store.record_finding(finding())
    damage(tmp_path, "UPDATE findings SET content = replace(content, '41.5', '1.5')")
    with Store.open(tmp_path) as store:
        assert [(f.status, f.content) for f in store.findings()] == [("failed", {})]
        assert store.finished() == {"f1": "damaged"}


def test_a_row_may_move_as_an_audit_grows(tmp_path: Path) -> None:
    with Store.create(tmp_path, {}) as store:
        store.record(row())
    damage(tmp_path, "UPDATE jobs SET position = 7")
    with Store.open(tmp_path) as store:
        assert store.damage() == {}
        assert [r.position for r in store.rows()] == [7]


def test_deleted_and_damaged_files_are_named(tmp_path: Path) -> None:
    with Store.create(tmp_path, {}) as store:
        for number, key in enumerate(("a", "b", "c")):
            store.record(row(key=key, position=number), {"originals": torch.rand(1, 2)}, {"objective": [[1.0]]})
    (tmp_path / "artifacts" / "a.safetensors").unlink()
    (tmp_path / "artifacts" / "b.json").write_bytes(b"{}")
    with Store.open(tmp_path) as store:
        assert store.damage() == {"a": "its pictures are missing", "b": "its curves are damaged"}
        assert store.finished() == {"a": "damaged", "b": "damaged", "c": "done"}
        assert [r.status for r in store.rows()] == ["done"] * 3, "their numbers are whole"


@pytest.mark.parametrize(
    "key, value",
    [
        ("policy", "[1]"),
        ("plan", '"x"'),
        ("data", "7"),
        ("spec", "{"),
        ("model", "[" * 9000),
        ("policy", '{"x": 1}'),
        ("plan", '{"settings": [1]}'),
        ("plan", '{"total": "x"}'),
        ("plan", '{"examples": "x"}'),
        ("plan", '{"settings": [{"protocol": "p", "defense": "d", "jobs": 1, "findings": -1}]}'),
    ],
)
def test_damaged_meta_is_told_in_one_line(tmp_path: Path, key: str, value: str) -> None:
    with Store.create(tmp_path, {key: {}}):
        pass
    damage(tmp_path, "UPDATE meta SET value = ? WHERE key = ?", value, key)
    with pytest.raises(StoreError, match=f"'{key}' in meta is damaged") as caught:
        Store.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_tables_of_another_make_are_refused(tmp_path: Path) -> None:
    with Store.create(tmp_path, {}):
        pass
    damage(tmp_path, "DROP TABLE findings")
    damage(
        tmp_path,
        "CREATE VIEW findings AS WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) "
        "SELECT x AS key, x AS position, x AS kind, x AS status, x AS subject, x AS content, x AS error, x AS seconds, "
        "x AS finished, x AS checksum FROM n",
    )
    with pytest.raises(StoreError, match="its tables are not those of an audit"):
        Store.open(tmp_path)


def test_errors_are_cut_and_name_no_folders(tmp_path: Path) -> None:
    text = "OSError: '/home/ann/scans/7.png'\n" + "x" * 100_000 + '\n  File "/home/ann/lib/leakscope/attacks/dlg.py"'
    with Store.create(tmp_path, {}) as store:
        store.record(row(status="failed", result=None, error=text))
        (kept,) = store.rows()
    assert kept.error is not None
    assert len(kept.error) < 7000
    assert kept.reason == "OSError: '7.png'"
    assert kept.error.endswith('File "leakscope/attacks/dlg.py"')
    assert "characters left out" in kept.error
    assert "ann" not in kept.error


def test_everything_is_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with Store.create(tmp_path / "new" / "audit", {}) as store:
            store.record(row(), {"originals": torch.rand(1, 2)}, {})
            made = [*(tmp_path / "new").rglob("*"), tmp_path / "new"]
            modes = {path.relative_to(tmp_path).as_posix(): oct(path.stat().st_mode & 0o777) for path in made}
    finally:
        os.umask(before)
    assert {name: mode for name, mode in modes.items() if mode not in ("0o700", "0o600")} == {}
    assert modes["new/audit"] == modes["new"] == modes["new/audit/artifacts"] == "0o700"
    assert "new/audit/audit.sqlite-wal" in modes


def test_the_salt_is_that_of_the_store(tmp_path: Path) -> None:
    assert stored_salt(tmp_path) is None
    with Store.create(tmp_path, {"salt": "ab"}):
        pass
    assert stored_salt(tmp_path) == "ab"


def test_numbers_that_json_lacks_are_stored_as_null_wherever_they_come_from(tmp_path: Path) -> None:
    # The condition number of a ReLU net is infinite where a direction leaves no trace.
    infinite = {"condition": math.inf, "curve": (1.0, math.nan), "tensor": torch.tensor([math.inf])}
    with Store.create(tmp_path, {"policy": infinite}) as store:
        store.set_meta("audited", infinite)
        store.record(row(result={**RESULT, "info": infinite}), history={"objective": [math.inf]})
        store.record_finding(finding(content=infinite))
        stored = {"condition": None, "curve": [1.0, None], "tensor": [None]}
        assert store.meta("policy") == store.meta("audited") == stored
        assert store.rows()[0].raw == {**RESULT, "info": stored}
        assert store.history(KEY) == {"objective": [None]}
        assert store.findings()[0].content == stored
