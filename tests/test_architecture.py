"""Data goes one way: a room imports only from the rooms it may, and importing the package costs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import leakscope

SOURCE = Path(leakscope.__file__).parent

# What each room may import from, besides itself. The attacker's rooms (labels, matching, limits, attacks) may
# see neither data nor federation nor metrics: truth is out of their reach.
ALLOWED = {
    "observation": {"observation_files"},  # loaded lazily by save and load
    "observation_files": {"observation"},
    "loss": set(),
    "vertical": set(),
    "data": {"observation"},
    "models": {"observation", "vertical"},
    "federation": {"observation", "loss", "vertical"},
    "defenses": {"observation", "federation"},
    "labels": {"observation"},
    "matching": {"observation", "loss"},
    "limits": {"observation", "matching", "loss", "vertical"},
    "attacks": {"observation", "loss", "vertical", "labels", "matching", "limits"},
    "metrics": {"observation"},
    "audit": {
        *("observation", "loss", "vertical", "data", "models", "federation", "defenses"),
        *("labels", "matching", "limits", "attacks", "metrics"),
    },
    "report": {"observation", "attacks", "metrics", "audit"},
    "papers": {
        *("observation", "vertical", "data", "models", "federation", "defenses", "labels"),
        *("matching", "limits", "attacks", "metrics", "audit"),
    },
}
# An Audit writes its own report; the import is inside the method, so the room does not load the later one.
LAZY_EXCEPTIONS = {("audit/run.py", "report")}


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found |= {name.split(".")[1] for name in names if name.startswith("leakscope.") and name.count(".")}
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_a_room_imports_only_from_rooms_before_it(room: str) -> None:
    files = [SOURCE / f"{room}.py"] if (SOURCE / f"{room}.py").exists() else sorted((SOURCE / room).rglob("*.py"))
    assert files, f"no room {room}"
    for path in files:
        relative = str(path.relative_to(SOURCE))
        rooms = {name for name in imported_rooms(path) if name in ALLOWED and name != room}
        if room not in ("observation", "observation_files"):
            rooms.discard("observation_files")  # the vocabulary's other half: files of observations, atomic writes
        rooms -= {later for where, later in LAZY_EXCEPTIONS if where == relative}
        assert rooms <= ALLOWED[room], f"{relative} imports {rooms - ALLOWED[room]}"


def test_every_room_is_under_the_rule() -> None:
    rooms = {p.name for p in SOURCE.iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert rooms <= set(ALLOWED)


def test_importing_the_package_and_the_command_line_loads_nothing_heavy() -> None:
    code = "import sys, leakscope, leakscope.cli; print([m for m in ('torch', 'numpy', 'scipy') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_public_names_exist() -> None:
    for name in leakscope.__all__:
        assert getattr(leakscope, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = leakscope.nonsense
