"""The command line as a user types it, for tests of what a spec in a file makes."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest

from leakscope.cli import main


def typed(*words: object) -> subprocess.CompletedProcess[str]:
    """The command line in this process, where the libraries are loaded already."""
    arguments, out, err = [str(word) for word in words], io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["leakscope", *arguments])
        patch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as ended:
            main()
    return subprocess.CompletedProcess(arguments, int(ended.value.code or 0), out.getvalue(), err.getvalue())
