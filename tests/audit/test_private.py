"""What results tell of private data: numbers, and neither names nor anything that a guess could be checked against."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from leakscope.audit.run import run_spec
from leakscope.audit.setup import build_setup
from leakscope.audit.spec import AuditSpec, SpecError
from leakscope.results import Store

SECRETS = ("ann-miller", "carcinoma", "benign-naevus")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pictures of two classes, below a folder that is named after a person."""
    home = tmp_path / "ann-miller" / "scans-of-ann-miller"
    for number, name in enumerate(SECRETS[1:]):
        (home / name).mkdir(parents=True)
        for picture in range(2):
            pixels = np.random.default_rng(10 * number + picture).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(home / name / f"{picture}.png")
    return home


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    data = {"name": "folder", "path": str(folder)}
    base = {"model": "logistic", "data": data, "examples": 2, "attacks": "linear-layer", "findings": False}
    return {**base, "controls": False, **changes}


def everything(directory: Path) -> bytes:
    """All bytes of all files of an audit, the log of the database included."""
    return b"".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())


def test_neither_page_nor_store_name_private_data(folder: Path, tmp_path: Path) -> None:
    finished = run_spec(settings(folder), tmp_path / "out")
    page = finished.report()
    told = everything(tmp_path / "out")
    assert [secret for secret in SECRETS if secret.encode() in told] == []
    assert str(tmp_path).encode() not in told
    assert b"(private)" in page.read_bytes()
    assert oct(page.stat().st_mode & 0o777) == "0o600"


def test_names_are_told_if_asked_for(folder: Path, tmp_path: Path) -> None:
    run_spec(settings(folder), tmp_path / "out")
    finished = run_spec(settings(folder, show_names=True), tmp_path / "out")
    page = finished.report().read_text(encoding="utf-8")
    assert all(secret in page for secret in SECRETS)
    with Store.open(tmp_path / "out") as store:
        assert store.meta("data")["class_names"] == ["benign-naevus", "carcinoma"]


def keys_of(value: Any) -> set[str]:
    """Every key in nested mappings and lists."""
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in keys_of(item)}
    return {key for item in value for key in keys_of(item)} if isinstance(value, list) else set()


def test_labels_of_private_examples_are_stored_only_with_their_names(folder: Path, tmp_path: Path) -> None:
    labels = {"label", "label_guess"}
    hidden = run_spec(settings(folder, attacks="idlg"), tmp_path / "hidden")
    assert {row.status for row in hidden.rows} == {"done"}
    stored = [dict(row.raw or {}) for row in hidden.rows]
    assert all("label_correct" in example for one in stored for example in one["examples"])
    assert not labels & {key for one in stored for key in keys_of(one)}
    assert all(example.label is None for row in hidden.rows for example in row.examples)
    shown = run_spec(settings(folder, attacks="idlg", show_names=True), tmp_path / "shown")
    assert all(labels <= keys_of(dict(row.raw or {})) for row in shown.rows)
    tiles = {"model": "logistic", "data": "tiles", "examples": 1, "attacks": "linear-layer", "findings": False}
    assert all(labels <= keys_of(dict(row.raw or {})) for row in run_spec(tiles, tmp_path / "public").rows)


def test_what_a_user_calls_model_data_and_themselves_is_kept_and_changes_no_job(folder: Path, tmp_path: Path) -> None:
    first = run_spec(settings(folder), tmp_path / "out")
    about = {"model": "Chest net", "by": "Ann Lee"}
    again = run_spec(settings(folder, about=about), tmp_path / "out")
    assert [row.key for row in again.rows] == [row.key for row in first.rows]
    page = again.report().read_text(encoding="utf-8")
    assert "Chest net on folder" in page
    assert "by Ann Lee" in page
    with pytest.raises(SpecError, match="about"):
        run_spec(settings(folder, about={"owner": "me"}), tmp_path / "wrong")


def test_tracebacks_of_failed_jobs_name_no_folders(folder: Path, tmp_path: Path) -> None:
    finished = run_spec(settings(folder, attacks="audit_doubles:Trouble"), tmp_path / "out")
    errors = [row.error or "" for row in finished.rows]
    assert all("Traceback" in error or "File" in error for error in errors)
    assert not any(os.getcwd() in error or "site-packages" in error or str(Path.home()) in error for error in errors)


def test_fingerprints_of_private_data_are_salted_and_resume_finds_them(folder: Path, tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    keys = [{row.key for row in run_spec(settings(folder), tmp_path / out).rows} for out in ("a", "b")]
    assert keys[0].isdisjoint(keys[1]), "whoever guesses the data cannot tell from the keys that the guess is right"
    prints = []
    for out in ("a", "b"):
        with Store.open(tmp_path / out) as store:
            prints += [store.meta("data")["fingerprint"], store.meta("identity")["candidates for identification"]]
    plain = build_setup(AuditSpec.parse(settings(folder)))
    assert len({*prints, plain.data_fingerprint, plain.candidates_fingerprint}) == 6
    again = run_spec(settings(folder), tmp_path / "a", events.append)
    assert {row.key for row in again.rows} == keys[0]
    assert [event["event"] for event in events] == ["planned"], "nothing is done twice"


def test_fingerprints_of_public_data_are_the_same_anywhere(tmp_path: Path) -> None:
    small = {"model": "logistic", "data": "tiles", "examples": 2, "attacks": "linear-layer", "findings": False}
    keys = [{row.key for row in run_spec(small, tmp_path / out).rows} for out in ("a", "b")]
    assert keys[0] == keys[1]


@pytest.mark.slow
def test_workers_get_the_salt(folder: Path, tmp_path: Path) -> None:
    finished = run_spec(settings(folder, executor="processes", workers=1), tmp_path / "out")
    assert {row.status for row in finished.rows} == {"done"}


def test_deleted_pictures_and_damaged_rows_are_made_again(tmp_path: Path) -> None:
    small = {"model": "logistic", "data": "tiles", "examples": 3, "attacks": "linear-layer", "findings": False}
    small["controls"] = False
    out = tmp_path / "out"
    before = run_spec(small, out)
    first, second, third = (row.key for row in before.rows)
    (out / "artifacts" / f"{first}.safetensors").unlink()
    with closing(sqlite3.connect(out / "audit.sqlite")) as connection:
        connection.execute("UPDATE jobs SET result = replace(result, 'psnr', 'qsnr') WHERE key = ?", (second,))
        connection.commit()
    page = before.report().read_text(encoding="utf-8")
    assert f"Job {first[:12]}: its pictures are missing" in page
    assert f"Job {second[:12]}: its row is damaged" in page
    assert "The same audit in the same folder makes it again." in page
    events: list[dict[str, Any]] = []
    after = run_spec(small, out, events.append)
    assert {event["key"] for event in events if event["event"] == "finished"} == {first, second}
    assert [row.examples for row in after.rows] == [row.examples for row in before.rows]
    assert after.store.damage() == {}
    assert after.store.artifact(first) is not None
    assert third in {row.key for row in after.rows}
    after.store.close()
