"""Data goes one way: a room imports only from the rooms before it, and importing the package costs nothing."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import leakscope

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture(scope="module")
def rooms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rooms", TOOLS / "rooms.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_no_room_imports_a_later_one_nor_the_adversary_the_truth(rooms: ModuleType) -> None:
    assert rooms.problems() == []


def test_every_folder_is_a_room_and_every_module_is_in_one(rooms: ModuleType) -> None:
    folders = {path.name for path in rooms.SOURCE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == set(rooms.ROOMS)
    assert sorted(path.name for path in rooms.SOURCE.glob("*.py")) == ["__init__.py", "__main__.py"]


@pytest.mark.parametrize(
    "text",
    [
        "from leakscope.report import write_report",
        "import leakscope.report.page",
        "def late():\n    from leakscope.report import page",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from leakscope.report import page",
        "import importlib\nimportlib.import_module('leakscope.report')",
    ],
)
def test_late_and_type_checking_imports_are_seen(rooms: ModuleType, tmp_path: Path, text: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(text)
    assert set(rooms.imports_of(file)) == {"report"}


def test_a_cycle_would_be_noticed(rooms: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "leakscope"
    for room, other in (("contracts", "cli"), ("attacks", "metrics")):
        (source / room).mkdir(parents=True)
        (source / room / "thing.py").write_text(f"from leakscope.{other} import thing")
    monkeypatch.setattr(rooms, "SOURCE", source)
    text = "\n".join(rooms.problems())
    assert "contracts/thing.py: imports cli, which comes after contracts" in text
    assert "attacks must not see metrics" in text


def test_hooks_are_set_in_one_place(rooms: ModuleType) -> None:
    users = [p for p in rooms.SOURCE.rglob("*.py") if "register_forward" in p.read_text(encoding="utf-8")]
    assert [str(path.relative_to(rooms.SOURCE)) for path in users] == ["network/recorder.py"]


def test_what_is_raised_on_purpose_is_an_error_of_our_own(rooms: ModuleType) -> None:
    """The command line takes any other for a defect."""
    plain = re.compile(r"\b(?:raise|return) (?:Value|Type)Error\(")
    assert not [p for p in rooms.SOURCE.rglob("*.py") if plain.search(p.read_text(encoding="utf-8"))]


def test_nobody_asks_whether_learning_is_vertical_but_its_own_files(rooms: ModuleType) -> None:
    own = {"federation/vertical.py", "audit/findings.py"}
    askers = [p for p in rooms.SOURCE.rglob("*.py") if ", Vertical)" in p.read_text(encoding="utf-8")]
    assert {str(path.relative_to(rooms.SOURCE)) for path in askers} <= own


def test_importing_the_package_and_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, leakscope, leakscope.cli; print([m for m in ('torch', 'numpy', 'scipy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    for name in leakscope.__all__:
        assert getattr(leakscope, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = leakscope.nonsense
