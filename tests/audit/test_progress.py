"""What ls.audit shows by itself."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import audit_doubles as doubles
import pytest
from audit_doubles import run

QUICK: dict[str, Any] = {"attacks": [doubles.Quotient()], "defenses": None, "findings": False, "controls": False}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "progress, terminal, shown",
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False)],
)
def test_a_bar_where_somebody_looks(
    progress: bool | None, terminal: bool, shown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    run(tmp_path, **QUICK, progress=progress)
    assert bool(stream.getvalue()) == shown
    assert ("for 3 jobs" in stream.getvalue()) == shown, "the estimate"
    if shown and terminal:
        assert "3/3" in stream.getvalue()


def test_a_terminal_that_is_gone_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    assert len(run(tmp_path, **QUICK).rows) == 3
