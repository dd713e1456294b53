"""Makes the doubles importable, here and in worker processes, which inherit the search path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from leakscope.audit import AuditSpec

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _whole_scenarios(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run all of a scenario unless asked, as tests of rows need; a module with DEFAULT_STOP keeps the default."""
    if not getattr(request.module, "DEFAULT_STOP", False):
        monkeypatch.setattr(AuditSpec, "stops_on_leak", property(lambda spec: bool(spec.stop_on_leak)))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder, which is the current one; what was imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
